"""Who shows a cell while it runs."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Protocol

from ...errors import SpecError
from ..output.safe_output import Bundle, clean_text

_METHODS = ("output", "display", "clear", "waiting", "notice", "shown_so_far")
_log = logging.getLogger(__name__)


class CellObserver(Protocol):
    """Who shows a cell. All methods are called while it runs, most of them in a background thread; none may block.

    A subclass that leaves some of them out shows nothing of that kind.
    """

    draws: bool = False  # it follows the cursor: its ``output`` is given what moves that and what erases, too

    def begin(self, number: int) -> None:
        """The cell is about to be sent to its ranks, under this number; before, it may have waited for them."""

    def output(self, rank: int, stream: str, text: str) -> None:
        """Text that a rank wrote to ``stream`` ("stdout" or "stderr"), free of control sequences but colours."""

    def display(self, rank: int, bundle: Bundle, display_id: str, is_update: bool) -> None:
        """A rich output, safe to show."""

    def clear(self, rank: int, wait: bool) -> None:
        """The cell wants its earlier output on this rank gone."""

    def waiting(self, text: str) -> None:
        """Which ranks the cell still waits for, and where they are; empty when it waits for none."""

    def notice(self, text: str) -> None:
        """Something the user should know."""

    def shown_so_far(self) -> Callable[[], bool]:
        """A question: has all that was given so far been shown?"""
        return lambda: True


def check_observer(observer: Any) -> None:
    """Raises: SpecError for what cannot show a cell."""
    lacking = [name for name in _METHODS if not callable(getattr(observer, name, None))]
    if isinstance(observer, type) or lacking:
        why = "a class" if isinstance(observer, type) else f"it lacks {', '.join(lacking)}"
        raise SpecError(f"observer {observer!r}: give an object of a subclass of CellObserver, this is no such: {why}")


class Observers:
    """Those of one cell: none, one or several; it is false where there are none.

    An observer need have no ``begin``, and one that does not say that it draws has never heard of cursors. One that
    raises gets no more: ``failure`` is what the cell's own has raised; what another has raised is logged.
    """

    draws = True  # or some of them

    def __init__(self, *observers: CellObserver) -> None:
        self._own = self._observers = observers
        self._failure: Exception | None = None

    def __bool__(self) -> bool:
        return bool(self._observers)

    @property
    def failure(self) -> Exception | None:
        return self._failure

    def add(self, observer: CellObserver) -> None:
        """Somebody else wants to see what comes from now on, too."""
        self._observers += (observer,)

    def remove(self, observer: CellObserver) -> None:
        """One that was added wants to see no more."""
        self._observers = tuple(each for each in self._observers if each is not observer)

    def call(self, observer: CellObserver, do: Callable[..., Any], *args: Any) -> Any:
        """Call ``do``, which is the observer's code: what that raises is no fault of the node whose words are shown."""
        try:
            return do(*args)
        except Exception as exc:  # noqa: BLE001  it is raised at the cell's end
            self.remove(observer)
            if observer not in self._own:
                _log.warning("%r, which follows a cell, has failed and gets no more of it", observer, exc_info=exc)
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
