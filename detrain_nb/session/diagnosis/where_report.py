"""A table of where every rank is: its line, its stack, and the collective that it waits in."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass

from ...text import html_cells, html_table, table_lines
from ..output.safe_output import one_line
from .diagnosis import Verdict, describe_wait

_COLUMNS = ("rank", "host", "state", "cell", "runs for", "line", "collective", "since", "known")
_SHOWN_FRAMES = 12
_NOW_S = 0.5  # a report of this age counts as current


@dataclass(frozen=True)
class Whereabouts:
    """The result of ``session.ranks.where()``. ``verdicts`` has one per rank; ``mismatch`` names differing collectives.

    ``over`` says why the session has ended, and what to do; it is empty while the session is running.
    """

    name: str
    verdicts: tuple[Verdict, ...]
    hosts: Mapping[int, str]
    mismatch: str
    over: str = ""

    @property
    def summary(self) -> str:
        """One line: which ranks wait in what, and where the others are, or why there are none."""
        if self.over:
            return self.over
        if not any(verdict.evidence.state == "running" for verdict in self.verdicts):
            return "no cell is running"
        return describe_wait(self.verdicts) + (f"; {self.mismatch}" if self.mismatch else "")

    def __repr__(self) -> str:
        lines = table_lines([_COLUMNS, *map(self._cells, self.verdicts)])
        for verdict in self.verdicts:
            if frames := frames_of(verdict):
                lines += [f"rank {verdict.rank}:", *(f"  {frame}" for frame in frames)]
        return "\n".join([f"session {self.name}: {self.summary}", *lines])

    def _repr_html_(self) -> str:
        head = html_cells((*_COLUMNS, "stack"), tag="th")
        rows = "".join(map(self._row, self.verdicts))
        return html_table(head, rows, caption=[f"session {self.name}: {self.summary}"])

    def _row(self, verdict: Verdict) -> str:
        stack = html.escape("\n".join(frames_of(verdict)))
        return f"<tr>{html_cells(self._cells(verdict))}<td style='text-align:left'><pre>{stack}</pre></td></tr>"

    def _cells(self, verdict: Verdict) -> tuple[str, ...]:
        evidence = verdict.evidence
        host = one_line(self.hosts.get(verdict.rank, ""))
        if evidence.state != "running":
            return (str(verdict.rank), host, verdict.kind, *[""] * (len(_COLUMNS) - 3))
        collective = verdict.collective or next(iter(evidence.last_pending), None)
        return (
            str(verdict.rank),
            host,
            verdict.kind,
            str(evidence.cell),
            f"{evidence.seconds:.1f} s",
            str(evidence.line) if evidence.line else "",
            str(collective) if collective else verdict.waits_in,
            f"{collective.seconds:.1f} s" if collective else "",
            _known(evidence.age_s),
        )


def _known(age_s: float) -> str:
    """Return the age of a rank's report on collectives: it cannot report while C code holds the GIL."""
    if age_s < 0:
        return "not yet"
    return "now" if age_s < _NOW_S else f"{age_s:.1f} s ago"


def frames_of(verdict: Verdict) -> list[str]:
    """Return the stack of the user's code, innermost first, down to the cell, without our own frames; safe to show."""
    stack = verdict.evidence.stack
    if verdict.evidence.state != "running" or not stack:
        return []
    last = max((index for index, frame in enumerate(stack) if frame.startswith("<cell ")), default=len(stack) - 1)
    shown = list(stack[: last + 1])
    if verdict.evidence.call:
        shown[0] += f": {verdict.evidence.call}"
    if len(shown) > _SHOWN_FRAMES:
        half = _SHOWN_FRAMES // 2
        shown = [*shown[:half], f"... {len(shown) - 2 * half} more", *shown[-half:]]
    return shown
