"""Table of the jobs of this user: the last known state of each, and how old that is."""

from __future__ import annotations

import html
import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..metrics import NO_VALUES
from ..text import RED, describe_seconds, html_cells, html_table, printable, short_number, table_lines
from .job_status import OVER, describe_age, has_failed, sign_and_word
from .record import JobSummary

__all__ = ["MOST_SHOWN", "JobList"]

_COLUMNS = ("job", "state", "exit", "ranks", "submitted", "took", "last metrics", "known")
MOST_SHOWN = 200  # the newest ones
_MOST_METRICS, _MOST_NAME_CHARS = 4, 40
_MOST_METRICS_CHARS = 1 << 16
_LEFT = "text-align:left;white-space:nowrap"  # else an id would wrap at its dashes
_FAILED = f"{_LEFT};{RED}"


@dataclass(frozen=True)
class JobList:
    """Jobs, the newest first; it is shown as a table, and iterating yields a `JobSummary` for each.

    ``at``: the time from which their ages count, in seconds since the epoch.
    """

    rows: Sequence[JobSummary]
    at: float = field(default_factory=time.time)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[JobSummary]:
        return iter(self.rows)

    def __repr__(self) -> str:
        if not self.rows:
            return self._title
        table = [_COLUMNS, *(_cells(row, self.at) for row in self.rows[:MOST_SHOWN])]
        return "\n".join([self._title, *table_lines(table), *self._left_out])

    def _repr_html_(self) -> str:
        if not self.rows:
            return html.escape(self._title)
        rows = self.rows[:MOST_SHOWN]
        body = "".join(f"<tr>{html_cells(_cells(row, self.at), style=_style(row))}</tr>" for row in rows)
        return html_table(html_cells(_COLUMNS, tag="th", style=_LEFT), body, caption=[self._title, *self._left_out])

    @property
    def _title(self) -> str:
        if not self.rows:
            return "no jobs were submitted from here"
        going = sum(row.state not in OVER for row in self.rows)
        failed = sum(has_failed(row.state, row.exit_code) for row in self.rows)
        told = [f"{len(self.rows)} job{'s' if len(self.rows) > 1 else ''}"]
        return ", ".join([*told, *[f"{going} not over"] * (going > 0), *[f"{failed} failed"] * (failed > 0)])

    @property
    def _left_out(self) -> list[str]:
        more = len(self.rows) - MOST_SHOWN
        return [f"... {more} older ones"] if more > 0 else []


def _style(row: JobSummary) -> str:
    return _FAILED if has_failed(row.state, row.exit_code) else _LEFT


def _cells(row: JobSummary, now: float) -> tuple[str, ...]:
    is_over = row.state in OVER
    until = row.ended_at or (row.updated_at if is_over else now)
    cells = (
        row.id,
        sign_and_word(row.state, row.exit_code)[1],
        "" if row.exit_code is None else str(row.exit_code),
        "" if row.world_size is None else str(row.world_size),
        describe_age(row.submitted_at, now=now),
        "" if row.started_at is None else describe_seconds(until - row.started_at),
        ", ".join(_metrics_of(row)),
        "" if is_over else describe_age(row.updated_at, now=now),
    )
    return tuple(map(printable, cells))


def _metrics_of(row: JobSummary) -> list[str]:
    """Return the step and a few values, as ``step 120``, ``loss 0.031``. They came from a node, so they are checked."""
    if not row.metrics or len(row.metrics) > _MOST_METRICS_CHARS:
        return []
    try:
        said = json.loads(row.metrics)
    except (ValueError, RecursionError):
        return []
    values = [(name, value) for name, value in said.items() if _is_shown(name, value)] if isinstance(said, dict) else []
    values.sort(key=lambda item: item[0] != "step")
    shown = [f"{name[:_MOST_NAME_CHARS]} {_short(value)}" for name, value in values[:_MOST_METRICS]]
    return [*shown, "..."] if len(values) > _MOST_METRICS else shown


def _is_shown(name: str, value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and name not in NO_VALUES - {"step"}


def _short(value: float) -> str:
    return short_number(value) if isinstance(value, float) else str(value)[:20]
