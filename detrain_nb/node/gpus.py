"""How many GPUs a node has, asked without CUDA: a process that has called CUDA cannot fork ranks that use it."""

from __future__ import annotations

import ctypes
import functools
import os
import shutil
import subprocess


@functools.cache
def count_gpus() -> int:
    """The GPUs that a process started here may use, without a CUDA call: NVML counts, nvidia-smi does without it.

    Once in a process: a driver may take long, and a notebook that attaches again waits for the answer.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        chosen = [device for device in visible.split(",") if device.strip() not in ("", "-1")]
        return min(len(chosen), _count_with_nvml())
    return _count_with_nvml()


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
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=10, check=True)
    except (subprocess.SubprocessError, OSError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())
