"""What the GPUs of a node do, as one nvidia-smi says it once a second, as long as somebody watches.

It is read when it is asked for, never waited for, and no CUDA is touched. What cannot be read is left out.
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
_MOST_BYTES = 1 << 16  # of what has not ended, and of one read
_MOST_READS = 16  # at a time: 256 GPUs print less in a minute
_NAME_CHARS = 80
_END_LIMIT_S = 0.5
_MB = 1 << 20
_UNKNOWN = -1


@dataclass(frozen=True)
class Gpu:
    """One GPU as it was last; -1 where the driver does not say."""

    index: int
    uuid: str
    name: str
    percent: float
    used_bytes: int
    total_bytes: int


class GpuWatch:
    """Owns the nvidia-smi. One that ends is started again, a few times."""

    def __init__(self) -> None:
        self._starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._unfinished = b""
        self._gpus: dict[int, Gpu] = {}
        self._start()

    def read(self) -> list[Gpu]:
        """The GPUs by their index, as they were a second ago at most; none where that is not known."""
        if self._process is not None and not self._take_lines():
            self.end()
            self._start()
        return [gpu for _, gpu in sorted(self._gpus.items())]

    def end(self) -> None:
        """End the nvidia-smi."""
        process, self._process = self._process, None
        self._unfinished, self._gpus = b"", {}
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # in a driver that hangs; it is reaped at our end
                process.wait(_END_LIMIT_S)
            if process.stdout:
                process.stdout.close()

    def _start(self) -> None:
        if self._starts >= _MOST_STARTS:
            return
        self._starts += 1
        agent_pid = os.getpid()
        with contextlib.suppress(OSError):  # there is none
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
        """Read what has been printed since the last time; False when it has ended, or prints without an end."""
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
    """``0, GPU-c5a1..., NVIDIA H100 80GB HBM3, 37, 1024, 81559``; None for anything else."""
    fields = [field.strip() for field in line.decode("utf-8", "replace").split(",")]
    if len(fields) < _FIELDS or not fields[0].isdecimal() or len(fields[0]) > 4:
        return None
    index, uuid, *name, percent, used, total = fields
    measured = min(_number(percent), 100.0)
    return Gpu(int(index), uuid, ",".join(name)[:_NAME_CHARS], measured, _bytes(used), _bytes(total))


def _number(text: str) -> float:
    """-1 for ``[N/A]``."""
    return float(text) if text.isdecimal() and len(text) < 12 else _UNKNOWN


def _bytes(mebibytes: str) -> int:
    number = int(_number(mebibytes))
    return number * _MB if number >= 0 else _UNKNOWN


class VisibleGpus:
    """Which GPU a rank has, by the CUDA_VISIBLE_DEVICES that its launcher was given."""

    def __init__(self, variable: str | None = None, *, order: str = "") -> None:
        self._names = None if variable is None else [name.strip() for name in variable.split(",")]
        self._is_by_bus = order == "PCI_BUS_ID"

    def find(self, device: str, gpus: Sequence[Gpu]) -> int:
        """The position in ``gpus`` of ``cuda:1``, the second that is visible; -1 where that is not known.

        By default CUDA counts the fastest first, nvidia-smi by their place on the bus: where GPUs of several kinds are
        numbered so, nobody knows which is meant.
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
