"""The GPUs of a node, listed without CUDA: a process that has called CUDA cannot fork ranks that use it."""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
from collections.abc import Sequence


def count_gpus() -> int:
    """Count the GPUs that a process started here may use."""
    return len(list_gpus())


@functools.cache
def list_gpus() -> tuple[str, ...]:
    """List the GPUs that a process started here may use, as CUDA_VISIBLE_DEVICES names them, without a CUDA call.

    NVML counts them; without NVML, nvidia-smi does. The result is cached: a driver may be slow, and a notebook that
    attaches again waits for the answer.
    """
    return read_visible(os.environ.get("CUDA_VISIBLE_DEVICES"), _count_with_nvml())


def read_visible(variable: str | None, there: int) -> tuple[str, ...]:
    """List which of ``there`` GPUs the variable selects; like CUDA, stop at the first invalid name."""
    if variable is None:
        return tuple(map(str, range(there)))
    names: list[str] = []
    for name in map(str.strip, variable.split(",")):
        if not name or name.startswith("-") or name.isdecimal() and int(name) >= there:
            break
        names.append(name)
    return tuple(names[:there])


def name_gpus(positions: str, visible: Sequence[str]) -> str:
    """Return the CUDA_VISIBLE_DEVICES that selects ``positions`` ("0,2") of ``visible``."""
    indices = [int(position) for position in positions.split(",")]
    return ",".join(visible[index] if index < len(visible) else str(index) for index in indices)


def _count_with_nvml() -> int:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return _count_with_nvidia_smi()
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0:
        return 0
    failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    return 0 if failed else count.value


def _count_with_nvidia_smi() -> int:
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=10, check=True)
    except (subprocess.SubprocessError, OSError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
