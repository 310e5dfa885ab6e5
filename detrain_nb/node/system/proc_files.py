"""Reading Linux's files about processes and cgroups; like cgroups.py, part of the text of node/ssh/probe.py."""

from __future__ import annotations

import os
import re


def read(path: str) -> str | None:
    """Return the content of a file; None if it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return os.fsdecode(file.read())
    except (OSError, ValueError):  # ValueError: a path with a NUL in it
        return None


def read_number(path: str, name: str = "") -> int | None:
    """Return the number after ``name`` (a regex) at the start of a line; None if there is none."""
    match = re.search(rf"^{name}(\d{{1,20}})", read(path) or "", re.MULTILINE)
    return int(match[1]) if match else None
