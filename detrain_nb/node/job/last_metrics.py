"""The last metrics of a job for a list: those of the first rank that logs."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ...metrics import read_metrics_line
from .folders import METRICS_NAME
from .terms import OUTPUT_NAME

_TAIL_BYTES = 1 << 13


def last_metrics(folder: Path) -> dict[str, object] | None:
    """Return the last metrics; None if there are none, or the last lines are too long for a list."""
    names: list[str] = []
    with contextlib.suppress(OSError):
        names = [name for name in os.listdir(folder / METRICS_NAME) if OUTPUT_NAME.fullmatch(f"{METRICS_NAME}/{name}")]
    if not names:
        return None
    first = min(names, key=lambda name: (len(name), name))
    with contextlib.suppress(OSError), open(folder / METRICS_NAME / first, "rb", opener=_open) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        lines = file.read(_TAIL_BYTES).decode("utf-8", errors="replace").split("\n")[:-1]  # the last line is incomplete
        return next((found for line in reversed(lines) if (found := read_metrics_line(line))), None)
    return None


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
