"""Asks the ranks that run a cell what they do, at most once a second, for live views."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import DetrainError
from ...wire import Position
from ..diagnosis.diagnosis import HangWatch, Verdict, describe_mismatch, judge
from ..diagnosis.stuck import StuckWatch
from .core import Core

_GAP_S = 1.0
_FIRST_S = 0.3  # a cell that ends within that asks nobody


@dataclass(frozen=True)
class Look:
    """What was seen at ``clock_s``. ``waited_s``: how long a rank has waited, of those that wait.

    ``report`` is what the cell says of a hang, ``mismatch`` which collectives are not the same. ``is_stuck``: nobody is
    left who could come.
    """

    verdicts: Mapping[int, Verdict] = field(default_factory=dict)
    waited_s: Mapping[int, float] = field(default_factory=dict)
    report: str = ""
    mismatch: str = ""
    is_stuck: bool = False
    clock_s: float = 0.0


class Looks:
    """Those of one session."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._asked_at = -_GAP_S
        self._forget(frozenset())

    def _forget(self, cells: frozenset[int]) -> None:
        """What was seen was of other cells than ``cells``."""
        self._cells = cells
        self._began_at = time.monotonic()
        self._positions: dict[int, Position] = {}
        self._hang = HangWatch(self._core.settings.hang_s, message_s=self._core.link.limits.message_s)
        self._stuck = StuckWatch()
        self.last = Look()

    def due_at(self) -> float | None:
        """When the ranks are to be asked next; None while none runs a cell."""
        cells = frozenset(cell.number for cell in self._core.state.busy.values())
        if cells != self._cells:
            self._forget(cells)
        return max(self._asked_at + _GAP_S, self._began_at + _FIRST_S) if cells else None

    def refresh(self) -> None:
        """Ask, if it is time."""
        due_at, now = self.due_at(), time.monotonic()
        if due_at is None or now < due_at:
            return
        self._asked_at = now
        with contextlib.suppress(DetrainError):  # the session is over, which is shown too
            self.last = self._look(now)

    def _look(self, now: float) -> Look:
        state, link = self._core.state, self._core.link
        ranks = [rank for rank in state.ranks if rank in state.node_of]
        self._positions, evidence = link.look(ranks, before=self._positions, stack=True)
        verdicts = judge(evidence)
        self._hang.hang_s = self._core.settings.hang_s
        self._hang.note(verdicts, now=now)
        self._stuck.note(verdicts, now=now)
        report = self._hang.report(running=list(state.busy), now=now, hosts=link.hosts)
        waited_s = {rank: self._hang.waited_s(each, now) for rank, each in verdicts.items() if each.waits}
        is_stuck = self._stuck.is_certain(now=now)
        return Look(verdicts, waited_s, report, describe_mismatch(evidence), is_stuck, now)
