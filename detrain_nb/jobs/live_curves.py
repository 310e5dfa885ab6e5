"""Metrics of a running job, kept as curves with a bounded number of points however long it runs."""

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
_MOST_CURVES = 64  # the first names logged, and as many more of those that users look at first
_LOOKED_AT_FIRST = re.compile(r"loss|learning_rate|(?:^|/)lr$|_per_s$", re.IGNORECASE)
_MOST_NAME_CHARS = 200
_PACE_STEPS = 50  # the last ones, over which the pace is measured
_LEAST_PACE_S = 0.5  # between two points of the pace curve: steps logged in one burst have no pace

Point = tuple[int, float | None]  # the step, and the mean value there; None if no value was finite
_Kept = tuple[int, float | None, int]  # a point, and how many of its values were not finite


class Curve:
    """Values of one name: all of them, or means of equally many, to stay within ``MOST_POINTS`` points.

    ``rank`` logged them. A step that is repeated after a restart replaces all values from that step on.
    ``first_bad`` is the first step whose value was not finite; since step ``bad_since`` no value was finite.
    """

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.last: float | None = None  # as logged; may be nan or inf
        self.first_bad: int | None = None
        self.bad_since: int | None = None
        self._points: list[_Kept] = []
        self._stride = 1  # values per point
        self._open: list[_Kept] = []  # values of the next point

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
        """The number of values that were not finite."""
        return sum(bad for _, _, bad in (*self._points, *self._open))

    def points(self, most: int = MOST_POINTS) -> list[Point]:
        """Return at most ``most`` points, by step; they are means if there are more values."""
        found = [*self._points, *([_mean(self._open)] if self._open else [])]
        width = -(-len(found) // most)
        kept = found if width <= 1 else [_mean(found[at : at + width]) for at in range(0, len(found), width)]
        return [(step, value) for step, value, _ in kept]


def _mean(points: list[_Kept]) -> _Kept:
    """Return the mean of the finite values."""
    values = [value for _, value, _ in points if value is not None]
    return (
        points[-1][0],
        sum(value / len(values) for value in values) if values else None,
        sum(bad for _, _, bad in points),
    )


class LiveCurves:
    """All curves of a job, by name. If several ranks log a name, the curve is that of the lowest rank."""

    def __init__(self) -> None:
        self._curves: dict[str, Curve] = {}
        self._pace: deque[tuple[int, float]] = deque(maxlen=_PACE_STEPS)  # steps of the lowest rank, and their times
        self._pace_rank: int | None = None
        self._pace_from: tuple[int, float] | None = None  # where the next point of the pace curve begins
        self._num_paced, self._paced_s = 0, 0.0
        self.num_steps: int | None = None  # of the whole job, if it logs ``total_steps``
        self.steps_per_s = Curve(0)
        self.last_step: int | None = None  # of the lowest rank that logs
        self._lead: int | None = None

    def add(self, line: Mapping[str, Any]) -> None:
        """Add a line from `read_metrics_line`."""
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
        """Return whether a line counts in epochs or the like: an earlier step, new for its names, no restart."""
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
            self._pace.clear()  # it resumed from a checkpoint
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
        """Steps per second, over all steps."""
        return self._num_paced / self._paced_s if self._paced_s > 0 else None

    @property
    def pace(self) -> float | None:
        """Steps per second, over the last steps."""
        if len(self._pace) < 2 or self._pace[-1][1] <= self._pace[0][1]:
            return None
        return (self._pace[-1][0] - self._pace[0][0]) / (self._pace[-1][1] - self._pace[0][1])


def _as_float(value: float) -> float:
    try:
        return float(value)
    except OverflowError:  # an integer of hundreds of digits
        return math.inf if value > 0 else -math.inf
