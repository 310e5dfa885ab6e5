"""Steps per second of each rank in its running cell, from the step numbers passed to ``log_metrics``.

A rank writes its last step and the time of it to its own slot in one file of the session's folder
(``metrics.note_step``): no message is sent, and no process is woken. The times are those of the rank's own calls, so a
step that takes longer than the time between two reads is measured correctly. When a rank stops making steps, its rate
falls and soon becomes 0.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...metrics import STEP_RECORD
from ...wire import RankUp

STEPS_NAME = "steps"
_WINDOW_S = 10.0
_MOST_PLACES = 1 << 12
_LATE_S, _LATE_GAPS = 2.0, 3  # the rate falls without a step for longer than both, in seconds and in usual gaps
_NONE_S, _NONE_GAPS = 5.0, 8  # and then becomes 0


class _Point(NamedTuple):
    calls: int
    step: int
    clock_s: float


class StepRates:
    """The rates of one session, whose folder is the current folder."""

    def __init__(self) -> None:
        self._points: dict[tuple[int, int], deque[_Point]] = {}  # by rank and process

    def forget(self) -> None:
        """Discard all readings."""
        self._points.clear()

    def read(self, ranks: Sequence[RankUp], *, began_s: Mapping[int, float], now: float) -> dict[int, float]:
        """Return steps per second by rank, without the ranks that have made fewer than two steps in their cell.

        ``began_s``: when each rank's running cell began; steps of a rank that runs no cell do not count.
        """
        records = _read_records(most=max((up.local_rank for up in ranks), default=-1) + 1)
        points, rates = {}, {}
        for up in ranks:
            known = self._points.get((up.rank, up.pid), deque())
            begins_s = began_s.get(up.rank, math.inf)
            if 0 <= up.local_rank < len(records):
                pid, calls, step, clock_ns = records[up.local_rank]
                if pid == up.pid:  # else a child process of the rank has written the slot
                    _add(known, _Point(calls, step, clock_ns / 1e9), now=now)
            while known and known[0].clock_s < begins_s:
                known.popleft()
            points[up.rank, up.pid] = known
            if (rate := _rate_of(known, now=now)) is not None:
                rates[up.rank] = rate
        self._points = points
        return rates


def make_places(count: int) -> str:
    """Create the file with a slot for each rank of the node; returns its path, empty if it cannot be created."""
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileNotFoundError):
            os.unlink(STEPS_NAME)
        with open(os.open(STEPS_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(bytes(STEP_RECORD.size * min(count, _MOST_PLACES)))
        return os.path.abspath(STEPS_NAME)
    return ""


def _read_records(*, most: int) -> list[tuple[int, int, int, int]]:
    """Read the slots; empty if there is no file."""
    if not most:
        return []
    try:
        with open(STEPS_NAME, "rb", buffering=0) as file:
            data = file.read(STEP_RECORD.size * min(most, _MOST_PLACES))
    except OSError:
        return []
    return list(STEP_RECORD.iter_unpack(data[: len(data) // STEP_RECORD.size * STEP_RECORD.size]))


def _add(points: deque[_Point], point: _Point, *, now: float) -> None:
    """Append a reading; a step number that falls starts over, as a new training run does."""
    if points and point.step < points[-1].step:
        points.clear()
    if point.clock_s <= now and (not points or point.step > points[-1].step and point.clock_s > points[-1].clock_s):
        points.append(point)
    while len(points) > 2 and points[1].clock_s < now - _WINDOW_S:
        points.popleft()


def _rate_of(points: deque[_Point], *, now: float) -> float | None:
    if len(points) < 2:
        return None
    first, last = points[0], points[-1]
    passed_s, since_s = last.clock_s - first.clock_s, now - last.clock_s
    gap_s = passed_s / max(1, last.calls - first.calls)
    if since_s > max(_NONE_S, _NONE_GAPS * gap_s):
        return 0.0
    if since_s > max(_LATE_S, _LATE_GAPS * gap_s):
        passed_s = now - first.clock_s
    return (last.step - first.step) / passed_s
