"""A cell from the log, shown again, with what is to be said between its messages."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace

from ..errors import WireError, format_ranks
from ..wire import CellDone, CellFailed
from .cells import CellObserver, CellRun
from .log import NEW, SHOWN_PERHAPS, Logged

_SHOW_LIMIT_S = 10.0
_PERHAPS = "--- from here on perhaps shown before:"
_NEW = "--- from here on new:"


@dataclass
class LoggedCell:
    """What the log has of a cell, counted in messages: where something is to be said when it is shown again.

    Its parts are those of the log: beginnings of lines, cut where an earlier notebook was gone; what that one may have
    shown; all else.
    """

    counts: list[int] = field(default_factory=lambda: [0, 0, 0])  # by part
    is_missed: bool = False  # no earlier notebook had shown everything
    gaps: list[tuple[int, int, str]] = field(default_factory=list)  # by part and index there, of the next message
    era: int = 0  # how often ranks had got other numbers when it began

    @property
    def shown_perhaps(self) -> int:
        return self.counts[SHOWN_PERHAPS]

    def words_before(self, index: int) -> list[str]:
        """What is to be said before the message of that index."""
        begins_at = [sum(self.counts[:part]) for part in range(len(self.counts))]
        words = [text for part, at, text in self.gaps if begins_at[part] + at == index]
        if self.shown_perhaps and index == begins_at[SHOWN_PERHAPS]:
            words.insert(0, _PERHAPS)
        elif self.shown_perhaps and index == begins_at[NEW]:
            words.insert(0, _NEW)
        return words


class ShownAgain:
    """Gives the observer of ``run`` what was logged of its cell."""

    def __init__(self, run: CellRun, logged: LoggedCell) -> None:
        self.run = run
        self.run.is_from_log = True
        self._logged = logged
        self._count = 0
        self._words: list[str] = []  # to be said before what is shown next

    def give(self, message: Logged) -> None:
        """The next message of the log."""
        self._words += self._logged.words_before(self._count)
        self._count += 1
        if not isinstance(message, (CellDone, CellFailed)):
            self._say()
        elif self.run.has_ended(message):
            return
        if message.rank in self.run.ranks:
            try:
                self.run.take(message)
            except WireError:  # a body is read when it is shown, and a node may write anything there
                self._words.append(f"something that {format_ranks([message.rank])} showed here cannot be read")
                if isinstance(message, CellDone):
                    self.run.take(replace(message, body=b""))

    def end(self, *, is_running: bool) -> None:
        """All that was logged has been given."""
        self._words += self._logged.words_before(self._count)
        if not is_running:
            self._words = [words for words in self._words if words not in (_PERHAPS, _NEW)]
        self._say()
        self.run.is_over = not is_running

    def _say(self) -> None:
        if _PERHAPS in self._words and _NEW in self._words:  # there was nothing to show between them
            self._words = [words for words in self._words if words not in (_PERHAPS, _NEW)]
        for words in self._words:
            if self.run.observer:
                self.run.observer.notice(words)
        self._words.clear()


def wait_until_shown(observer: CellObserver) -> None:
    """Do not fill the memory with what is to be shown. One that shows nothing before the end is not waited for long."""
    is_shown, deadline = observer.checkpoint(), time.monotonic() + _SHOW_LIMIT_S
    while not is_shown() and time.monotonic() < deadline:
        time.sleep(0.005)
