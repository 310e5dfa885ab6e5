"""Facts about a node for the submitter of a job."""

from __future__ import annotations

import shutil
from importlib import metadata, util
from typing import Any

from ...copying.json_lines import Talk
from ...launch import usable_cpus
from ..system.gpus import count_gpus
from ..system.memory_room import free_memory_bytes
from .folders import jobs_folder


def tell_facts(talk: Talk, said: dict[str, Any]) -> None:
    """Send the numbers of GPUs and CPUs, free memory, the torch version, and free disk space in the jobs folder."""
    talk.say(
        "facts",
        gpus=count_gpus(),
        cpus=usable_cpus(),
        memory_bytes=free_memory_bytes() or 0,
        free_bytes=shutil.disk_usage(jobs_folder()).free,
        torch=_version("torch"),
    )


def _version(name: str) -> str:
    """Return the version of a package; empty if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown" if util.find_spec(name) else ""
