"""The variables of a session's ranks: whether the ranks agree, and previews of a variable, rank by rank."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ..errors import format_ranks
from ..session.output.safe_output import one_line
from ..session.running.agreement import describe_layout
from ..session.running.variable_facts import Preview
from ..session.running.variable_table import Variable, Variables
from ..session.session import Session
from ..text import name_some
from .actions import action, describe_failure, text, whole
from .displays import Settled
from .live_view import LiveView

_MOST_RANKS = 1 << 20
_ASKED_LIMIT_S, _UNASKED_LIMIT_S = 5.0, 2.0  # a cell that begins meanwhile may wait as long
_QUIET_S = 0.7  # without another cell, before the table is read again
_SHOWN_DIGITS = 4  # of a checksum
_MOST_SUMS = 64  # ranks with checksums in a preview


class VarsView(LiveView):
    """The table of `session.variables(names, ranks=ranks)`, with a refresh button and previews of each variable."""

    name = "vars_view"

    def __init__(self, session: Session, names: Sequence[str], ranks: Any, *, first: Variables) -> None:
        """``first``: the table already read, so that an error shows before a widget exists."""
        self._session, self._names, self._ranks = session, names, ranks
        self._asking = threading.Condition()
        self._wants_table = False
        self._quiet_at: float | None = None  # when it is read after a cell, on time.monotonic's clock
        self._wants_preview: tuple[str, int] | None = None
        self._reader: threading.Thread | None = None
        self._running: dict[int, tuple[int, ...]] = {}  # cells, and their ranks
        self._next_cell = session.log.next_cell()
        self._stop_listening: Callable[[], None] | None = None
        self._count = 0  # of previews: an equal one is sent again
        self._error = ""
        self._newest = self._shown = first
        super().__init__()

    # ---- what a view gives

    def state(self) -> dict[str, Any]:
        return {"table": self._table(), "running": self._words_of_running(), "preview": None, "reading": False}

    def settled(self) -> Settled:
        return Settled(repr(self._shown), self._shown._repr_html_())

    def on_pages(self, *, are_there: bool) -> None:
        """Read the table after each cell, as long as a page shows it."""
        if are_there and self._stop_listening is None:
            self._stop_listening = self._session.on_change(self._note_cells)
            self._note_cells()
        elif not are_there and self._stop_listening is not None:
            stop, self._stop_listening = self._stop_listening, None
            stop()
            with self._asking:
                self._quiet_at = None
                self._asking.notify_all()

    def _note_cells(self) -> None:
        """Note which cells run. The table is read shortly after a cell, so that the next cell does not wait for it."""
        running, next_cell = self._session.log.running_cells, self._session.log.next_cell()
        with self._asking:
            before, self._running = self._running, running
            is_new, self._next_cell = next_cell != self._next_cell, next_cell
            if is_new or before.keys() - running.keys() or not self._session.is_alive:
                self._quiet_at = time.monotonic() + _QUIET_S
            if running.keys() - before.keys():
                self._quiet_at = None
            if self._quiet_at is not None:
                self._start_reader()
        self.publish("running", self._words_of_running())

    def _words_of_running(self) -> str:
        cells = sorted(self._running.items())
        runs = (f"{format_ranks(of)} {'runs' if len(of) == 1 else 'run'} cell [{number}]" for number, of in cells)
        return "; ".join(runs)

    # ---- what a page asks

    @action()
    def refresh(self) -> None:
        """Read the table again."""
        with self._asking:
            self._wants_table = True
            self._start_reader()

    @action(name=text(most=200), rank=whole(0, _MOST_RANKS))
    def preview(self, name: str, rank: int) -> None:
        """Preview one variable of one rank; of several requests the last one counts."""
        with self._asking:
            self._wants_preview = name, rank
            self._start_reader()

    # ---- reading, in a thread that lives as long as something is wanted

    def _start_reader(self) -> None:
        """Start or wake the reader. The caller holds the lock."""
        self._asking.notify_all()
        if self._reader is None and not self._closing.is_set():
            self._reader = threading.Thread(target=self._read, name="detrain_nb variables", daemon=True)
            self._reader.start()

    def _read(self) -> None:
        while (wanted := self._next()) is not None:
            if isinstance(wanted, tuple):
                self.publish("preview", self._look_into(*wanted))
                continue
            self.publish("reading", True)
            self._read_table(limit_s=wanted)
            self.publish("table", self._table())
            self.publish("reading", False)

    def _next(self) -> float | tuple[str, int] | None:
        """Return the preview to read now, or the time limit to read the table in; None to end the thread."""
        with self._asking:
            while not self._closing.is_set():
                if wanted := self._wants_preview:
                    self._wants_preview = None
                    return wanted
                left_s = 0.0 if self._wants_table else self._quiet_at and self._quiet_at - time.monotonic()
                if left_s is None:
                    break
                if left_s <= 0:
                    limit_s = _ASKED_LIMIT_S if self._wants_table else _UNASKED_LIMIT_S
                    self._wants_table, self._quiet_at = False, None
                    return limit_s
                self._asking.wait(left_s)
            self._reader = None
            return None

    def close(self) -> None:
        super().close()
        with self._asking:
            self._asking.notify_all()

    def _read_table(self, *, limit_s: float) -> None:
        try:
            self._newest = self._session.variables(self._names, ranks=self._ranks, limit_s=limit_s)
            self._error = ""
        except Exception as exc:  # noqa: BLE001  nothing else would show it: the page does
            self._error = one_line(describe_failure(exc))
            return
        if self._newest.ranks:  # else the last known table stays
            self._shown = self._newest

    def _look_into(self, name: str, rank: int) -> dict[str, Any]:
        self._count += 1
        told: dict[str, Any] = {"count": self._count, "name": name, "rank": rank}
        try:
            return {**told, **_describe(self._session.preview(name, rank), self._row(name))}
        except Exception as exc:  # noqa: BLE001  nothing else would show it: the page does
            return {**told, "error": one_line(describe_failure(exc))}

    def _row(self, name: str) -> Variable | None:
        return next((row for row in self._shown.rows if row.name == name), None)

    # ---- in plain JSON

    def _table(self) -> dict[str, Any]:
        shown, newest = self._shown, self._newest
        is_old = newest is not shown
        return {
            "title": shown.title,
            "as_of": time.strftime("%H:%M:%S", time.localtime(shown.read_at)) if is_old or self._error else "",
            "notes": newest.notes,
            "error": self._error,
            "counts": shown.counts(),
            "rows": [_cells(row) for row in shown.rows],
        }


def _cells(row: Variable) -> dict[str, Any]:
    """Return a row of the table, its bytes as a number to sort by."""
    return {
        "name": row.name,
        "type": row.type,
        "value": row.value,
        "dtype": row.dtype,
        "device": row.device,
        "bytes": row.bytes,
        "state": row.state,
        "words": row.words,
        "why": name_some([*dict.fromkeys(each.why for each in row.on.values() if each.why)], separator="; "),
        "ranks": list(row.on),
    }


def _describe(found: Preview, row: Variable | None) -> dict[str, Any]:
    """Return the preview of a variable, with the checksums that the table compares."""
    about = found.about
    sums = {rank: each.digest[:_SHOWN_DIGITS] for rank, each in row.on.items() if each.digest} if row else {}
    common = max(set(sums.values()), key=list(sums.values()).count, default="")
    is_told = row is not None and row.state == "differ"
    part = f"part of this rank {list(about.local)}" if about.local is not None else ""
    layout = f"{', '.join(about.layout.placements)}: {describe_layout(about.layout)}" if about.layout else ""
    return {
        "columns": list(found.columns),
        "rows": [list(cells) for cells in found.rows],
        "text": found.text,
        "note": found.note,
        "facts": dict(found.facts),
        "nans": found.nans,
        "infinite": found.infinite,
        "bins": list(found.bins),
        "sampled": found.sampled,
        "travels": found.travels,
        "layout": ", ".join(filter(None, [layout, part])),
        "why": about.why,
        "sums": [[rank, digest, is_told and digest != common] for rank, digest in list(sums.items())[:_MOST_SUMS]],
        "read_at": time.strftime("%H:%M:%S"),
    }
