"""A job as the notebook shows it: output and state live, then a final form that is equal for equal runs."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ..jobs.job_report import describe_metrics
from ..session.output.safe_output import PieceCleaner
from ..text import describe_seconds
from .render import LiveCell, RenderOptions
from .screen import Screen
from .transcript import FURTHER, counted_more

if TYPE_CHECKING:
    from ..jobs import Job, JobStatus, LogLine
    from ..jobs.report_checks import NodeReport

__all__ = ["JobCell"]

_REDRAW_S = 0.5
_MOST_ASIDE, _MOST_ASIDE_CHARS = 1000, 1 << 20  # lines that come from no rank


class JobCell:
    """A view fed by ``Job.attach`` and ``Job.logs``. Ranks are shown like those of a cell, with the same limits.

    The final form begins with lines from no rank, those of ``setup`` before those of torchrun, by node; lines about
    broken links are dropped.
    """

    def __init__(
        self, screen: Screen, job: Job, options: RenderOptions, *, rank: int | None = None, node: str | None = None
    ) -> None:
        self._job = job
        self._ranks = range(job.world_size or 1) if rank is None else range(rank, rank + 1)
        self._nodes: dict[int, str] = {}  # whose lines are shown, by number in the cell; empty for a job of one node
        of_node = "" if node is None else f" --node {node}"
        self._read = f"%job logs {job.id}{of_node}"
        self._cell = LiveCell(screen, tuple(self._ranks), 0, options, nodes=self._nodes, how_to_read=self._read)
        self._cleaners: dict[int, PieceCleaner] = {}
        self._is_live = options.is_live  # False: show no lines now that the final form would move
        self._titles: list[str] = []
        self._aside: list[LogLine] = []
        self._room_aside_chars, self._num_left_out = _MOST_ASIDE_CHARS, 0
        self._metrics = ""
        self._drawn_at = 0.0

    def say(self, title: str) -> None:
        """Show a line of detrain_nb above all others."""
        self._titles.append(title)
        self._say_aside(title)

    def take(self, line: LogLine) -> None:
        """Show a line of output below the earlier ones."""
        rank = int(line.source) if line.source.isdecimal() else -1
        if rank in self._ranks:
            self._cell.output(self._speaker(line.node, rank), "stdout", f"{line.text}\n")
        elif len(self._aside) < _MOST_ASIDE and self._room_aside_chars > 0:
            self._room_aside_chars -= len(line.text)
            self._aside.append(line)
            self._say_aside(str(line))
        else:
            self._num_left_out += 1

    def take_piece(self, node: str, rank: int, piece: bytes) -> None:
        """Show what a rank wrote as a cell does: a bar is drawn while it moves, and colours stay."""
        if rank in self._ranks:
            speaker = self._speaker(node, rank)
            cleaner = self._cleaners.setdefault(speaker, PieceCleaner())
            self._cell.output(speaker, "stdout", cleaner.clean(piece))

    def _speaker(self, node: str, rank: int) -> int:
        """Return the cell's number for a rank of ``node``: ``rank`` on the first node that has it, higher on others.

        Ranks of an elastic job move between nodes, and a node that is not trusted may claim any rank.
        """
        speaker = rank
        while self._nodes.setdefault(speaker, node) != node:
            speaker += FURTHER
        self._cell.admit(speaker)
        return speaker

    def take_metrics(self, values: Mapping[str, Any]) -> None:
        """Keep the last metrics of a rank for the status line."""
        self._metrics = f"; {describe_metrics(values)}"

    def take_reports(self, reports: Mapping[str, NodeReport | None]) -> None:
        """Redraw the status line, at most twice a second."""
        now = time.monotonic()
        if now - self._drawn_at >= _REDRAW_S:
            self._drawn_at = now
            self._cell.waiting(f"job {self._job.id} {_describe(reports)}{self._metrics}")

    def finish(self, status: JobStatus | None = None) -> None:
        """Bring the view into its final form; without ``status`` the state of the job is unknown."""
        told = [line for line in self._aside if line.source or status is None]
        if status is not None:
            told.sort(key=lambda line: (line.source != "setup", line.node))
        if status is not None or not self._is_live:
            more = counted_more(self._num_left_out, "line")
            left_out = [f"... {more}, read them with {self._read} ..."] if more else []
            self._cell.retell([*self._titles, *map(str, told), *left_out])
        self._cell.waiting("")
        self._cell.finish({})

    def _say_aside(self, text: str) -> None:
        if self._is_live:
            self._cell.notice(text, stream="stdout")


def _describe(reports: Mapping[str, NodeReport | None]) -> str:
    """Describe the common state, as in ``running for 12 s``, and which nodes are in another one."""
    known = [each for each in reports.values() if each is not None]
    if not known:
        return "is waiting for its nodes"
    states = {node: "silent" if each is None else each.state for node, each in reports.items()}
    common = max(set(states.values()), key=[*states.values()].count)
    others = [f"{node} {state}" for node, state in states.items() if state != common]
    since = min((each.started_at for each in known if each.started_at is not None), default=None)
    lasted = "" if since is None else f" for {describe_seconds(time.time() - since)}"
    return f"{', '.join([common + lasted, *others[:3]])}"
