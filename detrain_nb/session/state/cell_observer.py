"""Observers: the objects that show a cell while it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from ...errors import SpecError
from ..output.safe_output import Bundle, clean_text

_METHODS = ("output", "display", "clear", "waiting", "notice", "shown_so_far")
_log = logging.getLogger(__name__)


class CellObserver(Protocol):
    """An object that shows a cell.

    Its methods are called while the cell runs, most of them in a background thread; none may block. A subclass that
    omits some of them shows nothing of that kind.
    """

    draws: bool = False  # it follows the cursor: ``output`` also receives sequences that move the cursor or erase

    def begin(self, number: int) -> None:
        """Prepare to show cell ``number``, which is about to be sent to its ranks; it may have waited for them."""

    def output(self, rank: int, stream: str, text: str) -> None:
        """Show text that a rank wrote to ``stream`` ("stdout" or "stderr"); its only control sequences are colours."""

    def display(self, rank: int, bundle: Bundle, display_id: str, is_update: bool) -> None:
        """Show a rich output, which is safe to show."""

    def clear(self, rank: int, wait: bool) -> None:
        """Clear the earlier output of the cell on this rank."""

    def waiting(self, text: str) -> None:
        """Show which ranks the cell still waits for, and where they are; an empty ``text`` means none."""

    def notice(self, text: str) -> None:
        """Show something that the user should know."""

    def shown_so_far(self) -> Callable[[], bool]:
        """Return a function that returns True once everything given so far has been shown."""
        return lambda: True


def check_observer(observer: Any) -> None:
    """Check that ``observer`` can show a cell. Raises: SpecError."""
    lacking = [name for name in _METHODS if not callable(getattr(observer, name, None))]
    if isinstance(observer, type) or lacking:
        why = "this is a class" if isinstance(observer, type) else f"this one lacks {', '.join(lacking)}"
        raise SpecError(f"observer {observer!r}: give an instance of a subclass of CellObserver; {why}")


class Observers:
    """The observers of one cell; false when there are none.

    An observer may lack ``begin``; one without a true ``draws`` receives no cursor movements. One that raises receives
    nothing more: ``failure`` is what the cell's own observer raised; the errors of others are logged.
    """

    draws = True  # some of them may

    def __init__(self, *observers: CellObserver) -> None:
        self._own = self._observers = observers
        self._failure: Exception | None = None

    def __bool__(self) -> bool:
        return bool(self._observers)

    @property
    def failure(self) -> Exception | None:
        return self._failure

    def add(self, observer: CellObserver) -> None:
        """Add an observer, which receives everything from now on."""
        self._observers += (observer,)

    def remove(self, observer: CellObserver) -> None:
        """Remove an observer that was added."""
        self._observers = tuple(each for each in self._observers if each is not observer)

    def call(self, observer: CellObserver, do: Callable[..., Any], *args: Any) -> Any:
        """Call ``do``, the observer's code: its errors must not be blamed on the node whose output is shown."""
        try:
            return do(*args)
        except Exception as exc:  # noqa: BLE001  it is raised at the cell's end
            self.remove(observer)
            if observer not in self._own:
                _log.warning("%r, which follows a cell, has failed and receives nothing more", observer, exc_info=exc)
            elif self._failure is None:
                self._failure = exc

    def begin(self, number: int) -> None:
        for observer in self._observers:
            if begin := getattr(observer, "begin", None):
                begin(number)

    def output(self, rank: int, stream: str, text: str) -> None:
        for observer in self._observers:
            shown = text if getattr(observer, "draws", False) else clean_text(text)
            self.call(observer, observer.output, rank, stream, shown)

    def display(self, rank: int, bundle: Bundle, display_id: str, is_update: bool) -> None:
        for observer in self._observers:
            self.call(observer, observer.display, rank, bundle, display_id, is_update)

    def clear(self, rank: int, wait: bool) -> None:
        for observer in self._observers:
            self.call(observer, observer.clear, rank, wait)

    def waiting(self, text: str) -> None:
        for observer in self._observers:
            self.call(observer, observer.waiting, text)

    def notice(self, text: str) -> None:
        for observer in self._observers:
            self.call(observer, observer.notice, text)

    def shown_so_far(self) -> Callable[[], bool]:
        asked = [(observer, self.call(observer, observer.shown_so_far)) for observer in self._observers]
        return lambda: all(question is None or self.call(of, question) in (True, None) for of, question in asked)
