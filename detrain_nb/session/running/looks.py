"""Looks at the ranks that run a cell, at most one a second, for live views.

The answer of a rank that prints without a pause is queued behind seconds of output: later rounds wait for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import DetrainError
from ...wire import Position
from ..diagnosis.diagnosis import HangWatch, Verdict, describe_mismatch, judge
from ..diagnosis.stuck import StuckWatch
from ..link.rank_link import positions_in
from ..state.requests import Request
from .core import Core

_GAP_S = 1.0
_FIRST_S = 0.3  # no rank is asked about a cell that ends within this time
_LATE_S = 15.0  # timeout of an answer


@dataclass(frozen=True)
class Look:
    """What the ranks were doing when they were asked at ``clock_s``.

    ``waited_s`` is how long each waiting rank has waited, ``report`` the cell's text about a hang, ``mismatch``
    describes collectives that differ between ranks. ``is_stuck``: no rank is left that could end the wait.
    """

    verdicts: Mapping[int, Verdict] = field(default_factory=dict)
    waited_s: Mapping[int, float] = field(default_factory=dict)
    report: str = ""
    mismatch: str = ""
    is_stuck: bool = False
    clock_s: float = 0.0


class Looks:
    """The looks of one session."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._looked_at = -_GAP_S
        self._question = contextlib.ExitStack()  # while it is open, answers are accepted
        self._request: Request | None = None
        self._asked: list[int] = []
        self._asked_at = 0.0
        self._silent: set[int] = set()  # did not answer the last request: the next one does not wait for them
        self._forget(frozenset())

    def _forget(self, cells: frozenset[int]) -> None:
        """Forget the last look, which was at other cells than ``cells``."""
        self._cells = cells
        self._end_question()
        self._began_at = time.monotonic()
        self._positions: dict[int, Position] = {}
        self._hang = HangWatch(self._core.settings.hang_s, message_s=self._core.link.limits.message_s)
        self._stuck = StuckWatch()
        self.last = Look()

    def due_at(self) -> float | None:
        """Return when the ranks are to be asked next; None while none runs a cell."""
        cells = frozenset(cell.number for cell in self._core.state.busy.values())
        if cells != self._cells:
            self._forget(cells)
        return max(self._looked_at + _GAP_S, self._began_at + _FIRST_S) if cells else None

    def refresh(self) -> None:
        """Ask the ranks if it is time, or check whether they have answered the last request."""
        due_at, now = self.due_at(), time.monotonic()
        if due_at is None or now < due_at:
            return
        self._looked_at = now
        with contextlib.suppress(DetrainError):  # the session has ended, which views show as well
            request = self._request or self._ask(now)
            missing = {rank for rank in self._asked if request.waits_for(rank)}
            if missing <= self._silent or now >= self._asked_at + _LATE_S:
                self._end_question()
                self._silent = missing
                self.last = self._judge(request)

    def _ask(self, now: float) -> Request:
        """Send a request, and wait as long as answers take that are not queued behind output."""
        state, link = self._core.state, self._core.link
        self._asked, self._asked_at = [rank for rank in state.ranks if rank in state.node_of], now
        self._request = request = self._question.enter_context(link.locating(self._asked))
        if request.is_open:
            request.wait_quietly(link.limits.locate_s)
        return request

    def _end_question(self) -> None:
        self._question.close()
        self._request = None

    def _judge(self, request: Request) -> Look:
        state, link, now = self._core.state, self._core.link, self._asked_at
        before = self._positions
        self._positions, evidence = link.gather_evidence(self._asked, positions_in(request), before=before)
        verdicts = judge(evidence)
        self._hang.hang_s = self._core.settings.hang_s
        self._hang.note(verdicts, now=now)
        self._stuck.note(verdicts, now=now)
        report = self._hang.report(running=list(state.busy), now=now, hosts=link.hosts)
        waited_s = {rank: self._hang.waited_s(each, now) for rank, each in verdicts.items() if each.waits}
        is_stuck = self._stuck.is_certain(now=now)
        return Look(verdicts, waited_s, report, describe_mismatch(evidence), is_stuck, now)
