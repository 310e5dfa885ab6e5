"""Panes below a board's tiles: the last lines or the stack of a rank, read repeatedly while a page shows the pane."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from ..errors import DetrainError
from ..session.diagnosis.diagnosis import Verdict
from ..session.diagnosis.where_report import frames_of
from ..session.output.safe_output import one_line, show_hidden
from ..session.output.tail import Tail
from ..session.session import Session
from .actions import Refused, describe_failure

PANES = ("output", "stack")
_LEASE_S = 10.0  # a page that shows a pane renews it every few seconds
_GAPS_S = {"output": 0.5, "stack": 2.0}
_MOST_OPEN = 8
_MOST_LINES, _LINE_CHARS = 200, 500


class Panes:
    """The panes of one board. One thread reads all of them as long as a page shows one."""

    def __init__(self, session: Session, publish: Callable[[str, Any], None]) -> None:
        self._session = session
        self._publish = publish
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._until: dict[tuple[str, int], float] = {}  # when the lease of each pane ends
        self._due: dict[tuple[str, int], float] = {}
        self._tails: dict[int, tuple[int, Tail]] = {}  # by rank, with the cell
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def look(self, what: str, rank: int) -> None:
        """Open a pane, or renew it for 10 seconds. Raises: Refused when 8 other panes are open."""
        with self._lock:
            if self._is_closed:
                return
            if (what, rank) not in self._until and len(self._until) >= _MOST_OPEN:
                raise Refused(f"{_MOST_OPEN} ranks are already open: close one")
            if (what, rank) not in self._until:
                self._due[what, rank] = 0.0
            self._until[what, rank] = time.monotonic() + _LEASE_S
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="detrain_nb board pane", daemon=True)
                self._thread.start()
        self._wake.set()

    def close(self) -> None:
        """Close all panes."""
        with self._lock:
            self._is_closed = True
            self._until.clear()
        self._wake.set()

    def open(self) -> None:
        """Allow panes again: pages show the board."""
        with self._lock:
            self._is_closed = False

    def _run(self) -> None:
        while wanted := self._wanted():
            now = time.monotonic()
            for what, rank in wanted:
                if now >= self._due.get((what, rank), 0.0):
                    self._publish(f"{what}{rank}", self.read(what, rank))
                    self._due[what, rank] = time.monotonic() + _GAPS_S[what]
            self._wake.wait(min(_GAPS_S.values()))
            self._wake.clear()

    def _wanted(self) -> list[tuple[str, int]]:
        with self._lock:
            now = time.monotonic()
            self._until = {pane: until for pane, until in self._until.items() if until > now}
            open_now = {rank for what, rank in self._until if what == "output"}
            self._tails = {rank: tail for rank, tail in self._tails.items() if rank in open_now}
            if not self._until:
                self._thread = None
            return list(self._until)

    def read(self, what: str, rank: int) -> dict[str, Any]:
        """Return the content of the pane; a failure becomes an error text."""
        try:
            return self._read_output(rank) if what == "output" else self._read_stack(rank)
        except Exception as exc:  # noqa: BLE001  nothing else would show it: the pane does
            return {"error": one_line(describe_failure(exc), most_chars=1000)}

    def _read_output(self, rank: int) -> dict[str, Any]:
        number = self._cell_of(rank)
        if number is None:
            return {"cell": None, "lines": [], "more": False}
        cell, tail = self._tails.get(rank, (None, None))
        if cell != number or tail is None:
            tail = self._session.log.tail(number, rank, most_lines=_MOST_LINES, most_chars=_LINE_CHARS)
            self._tails[rank] = (number, tail)
        lines, is_cut = tail.read()
        return {"cell": number, "lines": [show_hidden(line).replace("\n", " ") for line in lines], "more": is_cut}

    def _cell_of(self, rank: int) -> int | None:
        """Return the cell that the rank is running, or else the last one that it ran."""
        log = self._session.log
        running = [number for number, ranks in log.running_cells.items() if rank in ranks]
        ran = [cell.cell for cell in log.cells if rank in cell.ranks]
        return max(running or ran[-1:], default=None)

    def _read_stack(self, rank: int) -> dict[str, Any]:
        where = self._session.ranks.where()
        verdict = next((verdict for verdict in where.verdicts if verdict.rank == rank), None)
        if verdict is None:
            raise DetrainError(f"rank {rank} no longer exists")
        return {
            "cell": verdict.evidence.cell if verdict.evidence.state == "running" else None,
            "state": one_line(str(verdict)),
            "at": time.time(),
            "lines": _outermost_first(verdict),
            "wait": _describe_wait(verdict),
        }


def _outermost_first(verdict: Verdict) -> list[str]:
    return [one_line(frame) for frame in reversed(frames_of(verdict))]


def _describe_wait(verdict: Verdict) -> str:
    collective = verdict.collective
    if collective is None:
        return one_line(verdict.waits_in)
    return one_line(f"{collective} {collective.tensors}, started {collective.seconds:.0f} s ago")
