"""What Linux says in files, of processes and of cgroups; in the text of node/ssh/probe.py as cgroups.py is."""

from __future__ import annotations

import os
import re


def read(path: str) -> str | None:
    """All of it; None where it cannot be read."""
    try:
        with open(path, "rb", buffering=0) as file:
            return os.fsdecode(file.read())
    except (OSError, ValueError):  # ValueError: a path with a NUL in it
        return None


def read_number(path: str, name: str = "") -> int | None:
    """The number behind ``name`` at the start of a line; None where there is none."""
    match = re.search(rf"^{name}(\d{{1,20}})", read(path) or "", re.MULTILINE)
    return int(match[1]) if match else None
