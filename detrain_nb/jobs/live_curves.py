"""What a job logs, kept as curves of a bounded number of points while it runs, however long that is."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from ..metrics import NO_VALUES
from ..text import printable

__all__ = ["MOST_POINTS", "Curve", "LiveCurves"]

MOST_POINTS = 2000  # of a curve
_MOST_CURVES = 64  # the first that are logged, and as many more of those that are looked at first
_LOOKED_AT_FIRST = re.compile(r"loss|learning_rate|(?:^|/)lr$|_per_s$", re.IGNORECASE)
_MOST_NAME_CHARS = 200
_PACE_STEPS = 50  # over the last of them it is told how fast a job is
_LEAST_PACE_S = 0.5  # of a point of its curve: what is logged at once says nothing of that

Point = tuple[int, float | None]  # the step, and the mean there; None where no value was a finite number
_Kept = tuple[int, float | None, int]  # a point, and how many of its values were no finite numbers


class Curve:
    """The values of one name: all of them, or means of equally many, so that ``MOST_POINTS`` are not exceeded.

    ``rank`` is whose they are. A step that comes again, after a restart, takes the place of all from there on.
    ``first_bad`` is the first step whose value was no finite number; ``bad_since``: none has come from there on.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.last: float | None = None  # as it was logged; nan and inf, too
        self.first_bad: int | None = None
        self.bad_since: int | None = None
        self._points: list[_Kept] = []
        self._stride = 1  # values of a point
        self._open: list[_Kept] = []  # values of the next one

    def add(self, step: int, value: float) -> None:
        self._take_back(step)
        self.last = value
        self._note(step, is_bad=not math.isfinite(value))
        self._open.append((step, value, 0) if math.isfinite(value) else (step, None, 1))
        if len(self._open) < self._stride:
            return
        self._points.append(_mean(self._open))
        self._open = []
        if len(self._points) >= MOST_POINTS:
            self._points = [_mean(self._points[at : at + 2]) for at in range(0, len(self._points), 2)]
            self._stride *= 2

    def _take_back(self, step: int) -> None:
        while self._open and self._open[-1][0] >= step:
            self._open.pop()
        while not self._open and self._points and self._points[-1][0] >= step:
            self._points.pop()

    def _note(self, step: int, *, is_bad: bool) -> None:
        if self.first_bad is not None and self.first_bad >= step:
            self.first_bad = None
        if not is_bad or (self.bad_since is not None and self.bad_since >= step):
            self.bad_since = None
        if is_bad:
            self.first_bad = step if self.first_bad is None else self.first_bad
            self.bad_since = step if self.bad_since is None else self.bad_since

    @property
    def last_step(self) -> int | None:
        kept = self._open or self._points
        return kept[-1][0] if kept else None

    @property
    def num_bad(self) -> int:
        """How many values were no finite numbers."""
        return sum(bad for _, _, bad in (*self._points, *self._open))

    def points(self, most: int = MOST_POINTS) -> list[Point]:
        """At most ``most`` of them, by step: means where there are more."""
        found = [*self._points, *([_mean(self._open)] if self._open else [])]
        width = -(-len(found) // most)
        kept = found if width <= 1 else [_mean(found[at : at + width]) for at in range(0, len(found), width)]
        return [(step, value) for step, value, _ in kept]


def _mean(points: list[_Kept]) -> _Kept:
    """Of those that are finite."""
    values = [value for _, value, _ in points if value is not None]
    return (
        points[-1][0],
        sum(value / len(values) for value in values) if values else None,
        sum(bad for _, _, bad in points),
    )


class LiveCurves:
    """All curves of a job, by name. Where several ranks log a name, it is that of the first of them."""

    def __init__(self) -> None:
        self._curves: dict[str, Curve] = {}
        self._pace: deque[tuple[int, float]] = deque(maxlen=_PACE_STEPS)  # steps of the first rank, and when
        self._pace_rank: int | None = None
        self._pace_from: tuple[int, float] | None = None  # where the next point of its curve begins
        self._num_paced, self._paced_s = 0, 0.0
        self.num_steps: int | None = None  # that the job has in all, where it logs that as ``total_steps``
        self.steps_per_s = Curve(0)
        self.last_step: int | None = None  # of the first rank that logs
        self._lead: int | None = None

    def add(self, line: Mapping[str, Any]) -> None:
        """Take a line of `read_metrics_line`."""
        step, rank = line["step"], line["rank"]
        total = line.get("total_steps")
        if type(total) is int and 0 < total < 1 << 53:
            self.num_steps = total
        numbers = {
            printable(name)[:_MOST_NAME_CHARS]: value
            for name, value in line.items()
            if name not in NO_VALUES and isinstance(value, (int, float)) and not isinstance(value, bool)
        }
        if not self._counts_otherwise(step, rank, numbers):
            if self._lead is None or rank <= self._lead:
                self._lead, self.last_step = rank, step
            self._note_pace(step, rank, line.get("time"))
        for name, value in numbers.items():
            curve = self._curves.get(name)
            if curve is None and len(self._curves) >= _MOST_CURVES * (2 if _LOOKED_AT_FIRST.search(name) else 1):
                continue
            if curve is None or rank < curve.rank:
                curve = self._curves[name] = Curve(rank)
            if rank == curve.rank:
                curve.add(step, _as_float(value))

    def _counts_otherwise(self, step: int, rank: int, names: Iterable[str]) -> bool:
        """The step is an earlier one, and new to all that is logged there: an epoch, say. A restart repeats steps."""
        if rank != self._lead or self.last_step is None or step >= self.last_step:
            return False
        lasts = [curve.last_step for name in names if (curve := self._curves.get(name))]
        return all(last is None or last < step for last in lasts)

    def _note_pace(self, step: int, rank: int, at: object) -> None:
        if isinstance(at, bool) or not isinstance(at, (int, float)) or not 0 < at < 1e11:
            return
        if self._pace_rank is None or rank < self._pace_rank:
            self._pace_rank, self.steps_per_s = rank, Curve(rank)
            self._num_paced, self._paced_s = 0, 0.0
            self._pace.clear()
        if rank != self._pace_rank or (self._pace and step == self._pace[-1][0]):
            return
        if self._pace and (step < self._pace[-1][0] or at < self._pace[-1][1]):
            self._pace.clear()  # it goes on from a checkpoint
        if self._pace:
            self._num_paced += step - self._pace[-1][0]
            self._paced_s += at - self._pace[-1][1]
        else:
            self._pace_from = step, float(at)
        self._pace.append((step, float(at)))
        first_step, first_at = self._pace_from or (step, float(at))
        if at - first_at >= _LEAST_PACE_S:
            self.steps_per_s.add(step, (step - first_step) / (at - first_at))
            self._pace_from = step, float(at)

    @property
    def names(self) -> Iterable[str]:
        return self._curves.keys()

    def get(self, name: str) -> Curve | None:
        return self._curves.get(name)

    @property
    def mean_pace(self) -> float | None:
        """Steps per second, over all of them."""
        return self._num_paced / self._paced_s if self._paced_s > 0 else None

    @property
    def pace(self) -> float | None:
        """Steps per second, over the last ones."""
        if len(self._pace) < 2 or self._pace[-1][1] <= self._pace[0][1]:
            return None
        return (self._pace[-1][0] - self._pace[0][0]) / (self._pace[-1][1] - self._pace[0][1])


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf if value > 0 else -math.inf
