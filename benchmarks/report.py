"""Samples become rows: one table for people, and one file with everything for later."""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

US = "detrain_nb"
ITSELF = "itself"  # as a floor: another figure of the same toolkit and kernel
NEVER = math.inf  # as a sample: not within the measure's time limit
NO_SUCH_THING = math.nan  # as a sample: the toolkit lacks the measured feature
_PACKAGES = (
    "torch",
    "ipykernel",
    "ipython",
    "jupyter_client",
    "pyzmq",
    "numpy",
    "ipyparallel",
    "nbdistributed",
    "detrain",
)


class Samples:
    """The measurements: ``samples[who][what]`` in the order in which they were taken."""

    def __init__(self) -> None:
        self.by_name: dict[str, dict[str, list[float]]] = {}

    def add(self, who: str, what: str, *values: float) -> None:
        self.by_name.setdefault(who, {}).setdefault(what, []).extend(values)

    def get(self, who: str, what: str) -> list[float]:
        return self.by_name.get(who, {}).get(what, [])


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def p95(values: Sequence[float]) -> float:
    """Return the smallest value that at least 95 in 100 values do not exceed."""
    return sorted(values)[math.ceil(0.95 * len(values)) - 1]


def worst(values: Sequence[float]) -> float:
    return max(values)


def always(values: Sequence[float]) -> float:
    """Return 1 if all claims (1 true, 0 false) hold."""
    return min(values)


@dataclass(frozen=True)
class Goal:
    """A limit for our figure, or for its comparison with the floor."""

    limit: float
    is_of_comparison: bool = False
    is_more_better: bool = False

    def is_met(self, figure: float) -> bool:
        return figure >= self.limit if self.is_more_better else figure <= self.limit


@dataclass(frozen=True)
class Measure:
    """A row: its samples, their statistic, and the floor that they are compared with (``compare``: difference, ratio).

    ``limit_s`` is when a sample becomes NEVER; a claim's figure is 1, yes, or 0, no.
    """

    key: str
    title: str
    what: str
    statistic: Callable[[Sequence[float]], float] = median
    floor: tuple[str, str] | None = None  # toolkit, and key of its samples
    compare: str = ""
    goal: Goal | None = None
    limit_s: float = 0.0

    @property
    def is_claim(self) -> bool:
        return self.statistic is always


@dataclass(frozen=True)
class Row:
    """A measure with its figures; None if nothing was measured. A peer's figure is a difference if ours is."""

    measure: Measure
    ours: float | None
    floor: float | None
    against_floor: float | None
    peers: dict[str, float | None]

    @property
    def is_met(self) -> bool | None:
        goal = self.measure.goal
        if goal is None:
            return None
        figure = self.against_floor if goal.is_of_comparison else self.ours
        return None if figure is None else goal.is_met(figure)

    @property
    def goal_text(self) -> str:
        goal = self.measure.goal
        if goal is None:
            return ""
        limit = _compared(self.measure, goal.limit) if goal.is_of_comparison else _figure(self.measure, goal.limit)
        return limit if self.measure.is_claim else f"{'>=' if goal.is_more_better else '<='} {limit}"


def fill_rows(measures: Sequence[Measure], samples: Samples, peers: Sequence[str]) -> list[Row]:
    """Return the rows of the table."""
    rows = []
    for measure in measures:
        of_peers = {}
        for name in peers:
            value, _, against_floor = _figures(measure, samples, name)
            of_peers[name] = against_floor if measure.compare == "difference" else value
        rows.append(Row(measure, *_figures(measure, samples, US), of_peers))
    return rows


def _figures(measure: Measure, samples: Samples, who: str) -> tuple[float | None, float | None, float | None]:
    """Return the figure of a toolkit, that of its floor, and their comparison."""
    values = samples.get(who, measure.what)
    value = measure.statistic(values) if values else None
    if measure.floor is None:
        return value, None, None
    floor_who, floor_what = measure.floor
    floor_values = samples.get(who if floor_who == ITSELF else floor_who, floor_what)
    floor = measure.statistic(floor_values) if floor_values else None
    if value is None or floor is None or not measure.compare:
        return value, floor, None
    if measure.compare == "difference":
        return value, floor, value - floor
    return value, floor, value / floor if floor else None


def format_table(rows: Sequence[Row], absent: dict[str, str]) -> str:
    """Return the table, followed by the peers that are missing from it and why."""
    peers = list(rows[0].peers)
    lines = [["", US, "held against", "", "compared", "goal", "met", *peers]]
    for row in rows:
        floor_who, floor_what = row.measure.floor or ("", "")
        floor_name = "plain cell" if floor_who == ITSELF else floor_who
        lines.append(
            [
                row.measure.title,
                _figure(row.measure, row.ours),
                _figure(row.measure, row.floor) if floor_what else "",
                floor_name,
                _compared(row.measure, row.against_floor) if row.measure.compare else "",
                row.goal_text,
                {True: "yes", False: "NO", None: ""}[row.is_met],
                *(_of_peer(row, name) for name in peers),
            ]
        )
    # omit empty columns
    filled = [column for column in range(len(lines[0])) if any(line[column] for line in lines[1:])]
    lines = [[line[column] for column in filled] for line in lines]
    widths = [max(len(line[column]) for line in lines) for column in range(len(filled))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
    table.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*table, *(f"{name}: {reason}" for name, reason in absent.items())])


def _of_peer(row: Row, name: str) -> str:
    figure = row.peers[name]
    return _compared(row.measure, figure) if row.measure.compare == "difference" else _figure(row.measure, figure)


def _figure(measure: Measure, figure: float | None) -> str:
    if figure is None:
        return "-"
    if math.isnan(figure):
        return "no"
    if figure == NEVER:
        return f"never ({measure.limit_s:g} s)"
    if measure.is_claim:
        return "yes" if figure else "no"
    return _number(figure)


def _compared(measure: Measure, figure: float | None) -> str:
    if figure is None:
        return "-"
    if measure.compare == "difference":
        return f"{'+' if figure >= 0 else ''}{_number(figure)}"
    return f"{_number(figure)} x" if measure.compare == "ratio" else _number(figure)


def _number(figure: float | None) -> str:
    if figure is None:
        return "-"
    if figure == int(figure) or abs(figure) >= 100:
        return f"{figure:,.0f}"
    return f"{figure:.3g}"


def describe_machine() -> dict[str, Any]:
    """Describe what may differ between two runs: processors, memory, system, versions."""
    versions = {}
    for name in (US, *_PACKAGES):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "versions": versions,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def write_results(
    path: Path, *, started_at: float, about: dict[str, Any], rows: Sequence[Row], samples: Samples
) -> Path:
    """Write the rows and every sample to ``path``; returns it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started_at)),
        **about,
        "rows": [
            {
                "key": row.measure.key,
                "title": row.measure.title,
                "statistic": row.measure.statistic.__name__,
                US: _for_file(row.ours),
                "floor": row.floor,
                "floor_is": " ".join(row.measure.floor or ()),
                "compared_by": row.measure.compare,
                "against_floor": row.against_floor,
                "goal": row.goal_text,
                "is_met": row.is_met,
                "peers": {name: _for_file(figure) for name, figure in row.peers.items()},
            }
            for row in rows
        ],
        "samples": {
            who: {what: [_for_file(figure) for figure in figures] for what, figures in by.items()}
            for who, by in samples.by_name.items()
        },
    }
    text = json.dumps(result, indent=1, allow_nan=False)
    text = re.sub(r"\[[^][{}]*\]", lambda match: " ".join(match[0].split()), text)  # put each list on one line
    path.write_text(text + "\n", encoding="utf-8")
    return path


def _for_file(figure: float | None) -> float | str | None:
    if figure is None:
        return None
    if figure == NEVER:
        return "never"
    return "no" if math.isnan(figure) else round(figure, 6)
