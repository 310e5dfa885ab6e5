"""A cell shown again from the log, with notices between its messages."""

from __future__ import annotations

import time
from dataclasses import replace

from ...errors import WireError, format_ranks
from ...wire import CellDone, CellFailed
from ..output.log import Logged
from ..output.logbook import SAID_BEFORE_NEW, SAID_BEFORE_PERHAPS, LoggedCell
from ..state.cell import Cell
from ..state.cell_observer import CellObserver

_SHOW_LIMIT_S = 10.0


class ShownAgain:
    """A cell whose observer is given what was logged of it."""

    def __init__(self, cell: Cell, logged: LoggedCell) -> None:
        self.cell = cell
        self._logged = logged
        self._count = 0
        self._words: list[str] = []  # notices to be shown before the next message

    def give(self, message: Logged) -> None:
        """Give the observer the next message of the log, after the notices that belong before it."""
        self._words += self._logged.words_before(self._count)
        self._count += 1
        if not isinstance(message, (CellDone, CellFailed)):
            self._say()
        elif message.rank in self.cell.outcomes:  # its end was already taken
            return
        if message.rank in self.cell.ranks:
            try:
                self.cell.take(message)
            except WireError:  # a body is parsed only when it is shown, and a node may send anything
                self._words.append(f"an output of {format_ranks([message.rank])} is malformed and cannot be shown")
                if isinstance(message, CellDone):
                    self.cell.take(replace(message, body=b""))

    def end(self, *, is_running: bool) -> None:
        """Show the last notices: all messages of the log have been given."""
        self._words += self._logged.words_before(self._count)
        self._say(is_more_to_come=is_running)
        if not is_running:
            self.cell.close()

    def _say(self, *, is_more_to_come: bool = True) -> None:
        marks = {SAID_BEFORE_PERHAPS, SAID_BEFORE_NEW}
        is_nothing_between = marks <= {*self._words} or not is_more_to_come
        for words in self._words:
            if words not in marks or not is_nothing_between:
                self.cell.observers.notice(words)
        self._words.clear()


def wait_until_shown(observer: CellObserver) -> None:
    """Wait until the observer has shown what it was given, so memory does not fill up; at most ``_SHOW_LIMIT_S``."""
    is_shown, deadline = observer.shown_so_far(), time.monotonic() + _SHOW_LIMIT_S
    while not is_shown() and time.monotonic() < deadline:
        time.sleep(0.005)
