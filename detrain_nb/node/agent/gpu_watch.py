"""Utilization and memory of a node's GPUs, printed once a second by one nvidia-smi while a notebook watches.

Its output is read on request, without waiting, and CUDA is never used. Unreadable values are left out.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from ..system.processes import die_with_parent

_COMMAND = (
    *("nvidia-smi", "--query-gpu=index,uuid,name,utilization.gpu,memory.used,memory.total"),
    *("--format=csv,noheader,nounits", "-l", "1"),
)
_FIELDS = 6
_MOST_STARTS = 3
_MOST_GPUS = 256
_MOST_BYTES = 1 << 16  # of an unfinished line, and of one read
_MOST_READS = 16  # per call: 256 GPUs print less in a minute
_NAME_CHARS = 80
_END_LIMIT_S = 0.5
_MB = 1 << 20
_UNKNOWN = -1


@dataclass(frozen=True)
class Gpu:
    """The latest reading of one GPU; -1 for values that the driver does not report."""

    index: int
    uuid: str
    name: str
    percent: float
    used_bytes: int
    total_bytes: int


class GpuWatch:
    """Owner of the nvidia-smi process, which is started again when it exits, up to three starts in all."""

    def __init__(self) -> None:
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._unfinished = b""
        self._gpus: dict[int, Gpu] = {}
        self._start()

    def read(self) -> list[Gpu]:
        """Return the latest readings, about a second old, sorted by index; empty if there are none."""
        if self._process is not None and not self._take_lines():
            self.end()
            self._start()
        return [gpu for _, gpu in sorted(self._gpus.items())]

    def end(self) -> None:
        """Stop nvidia-smi."""
        process, self._process = self._process, None
        self._unfinished, self._gpus = b"", {}
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # the driver hangs; it is reaped when the agent exits
                process.wait(_END_LIMIT_S)
            if process.stdout:
                process.stdout.close()

    def _start(self) -> None:
        if self._starts >= _MOST_STARTS:
            return
        self._starts += 1
        agent_pid = os.getpid()
        with contextlib.suppress(OSError):  # nvidia-smi is not installed
            self._process = subprocess.Popen(
                _COMMAND,
                env={**os.environ, "LC_ALL": "C"},
                cwd="/",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                preexec_fn=lambda: die_with_parent(agent_pid),  # noqa: PLW1509  the agent has one thread
            )
            assert self._process.stdout
            os.set_blocking(self._process.stdout.fileno(), False)

    def _take_lines(self) -> bool:
        """Read what was printed since the last call; returns False if it has exited or prints without pause."""
        assert self._process and self._process.stdout
        try:
            for _ in range(_MOST_READS):
                if not (data := os.read(self._process.stdout.fileno(), _MOST_BYTES)):
                    break
                *lines, self._unfinished = (self._unfinished + data).split(b"\n")
                self._unfinished = self._unfinished[:_MOST_BYTES]
                for gpu in filter(None, map(_read_gpu, lines)):
                    if gpu.index in self._gpus or len(self._gpus) < _MOST_GPUS:
                        self._gpus[gpu.index] = gpu
        except BlockingIOError:
            return True
        return False


def _read_gpu(line: bytes) -> Gpu | None:
    """Parse ``0, GPU-c5a1..., NVIDIA H100 80GB HBM3, 37, 1024, 81559``; returns None for anything else."""
    fields = [field.strip() for field in line.decode("utf-8", "replace").split(",")]
    if len(fields) < _FIELDS or not fields[0].isdecimal() or len(fields[0]) > 4:
        return None
    index, uuid, *name, percent, used, total = fields
    measured = min(_number(percent), 100.0)
    return Gpu(int(index), uuid, ",".join(name)[:_NAME_CHARS], measured, _bytes(used), _bytes(total))


def _number(text: str) -> float:
    """Parse a whole number; returns -1 for anything else, such as ``[N/A]``."""
    return float(text) if text.isdecimal() and len(text) < 12 else _UNKNOWN


def _bytes(mebibytes: str) -> int:
    number = int(_number(mebibytes))
    return number * _MB if number >= 0 else _UNKNOWN


class VisibleGpus:
    """The GPUs that ranks can see, from the CUDA_VISIBLE_DEVICES that their launcher was given."""

    def __init__(self, variable: str | None = None, *, order: str = "") -> None:
        self._names = None if variable is None else [name.strip() for name in variable.split(",")]
        self._is_by_bus = order == "PCI_BUS_ID"

    def find(self, device: str, gpus: Sequence[Gpu]) -> int:
        """Return the position in ``gpus`` of ``device``; -1 if unknown. ``cuda:1`` is the second visible GPU.

        By default CUDA numbers the fastest GPU first, while nvidia-smi numbers GPUs by bus position. With GPUs of
        several models and the default order, a number is therefore ambiguous.
        """
        kind, _, number = device.partition(":")
        if kind != "cuda" or not number.isdecimal():
            return _UNKNOWN
        names = self._names
        if names is not None and int(number) >= len(names):
            return _UNKNOWN
        name = str(int(number)) if names is None else names[int(number)]
        if not name.isdecimal():
            found = [at for at, gpu in enumerate(gpus) if name.startswith("GPU-") and gpu.uuid.startswith(name)]
            return found[0] if len(found) == 1 else _UNKNOWN
        if not self._is_by_bus and len({gpu.name for gpu in gpus}) > 1:
            return _UNKNOWN
        return next((at for at, gpu in enumerate(gpus) if gpu.index == int(name)), _UNKNOWN)
