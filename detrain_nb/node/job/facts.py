"""What a node says of itself to who wants to run a job there."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib import metadata, util
from typing import Any

from ...copying.json_lines import Talk
from ...launch import usable_cpus
from ..system.gpus import count_gpus
from .folders import jobs_folder, machine_id


def tell_facts(talk: Talk, said: dict[str, Any]) -> None:
    """GPUs, processors, versions, and the room where jobs are."""
    folder = jobs_folder()
    talk.say(
        "facts",
        gpus=count_gpus(),
        cpus=usable_cpus(),
        host=platform.node(),
        machine=machine_id(),
        home=os.path.expanduser("~"),
        jobs_folder=str(folder),
        free_bytes=shutil.disk_usage(folder).free,
        python=sys.executable,
        python_version=list(sys.version_info[:3]),
        torch=_version("torch"),
    )


def _version(name: str) -> str:
    """Empty where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "unknown" if util.find_spec(name) else ""
