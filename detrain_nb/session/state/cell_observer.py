"""Who shows a cell while it runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ..output.safe_output import Bundle, clean_text


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


class Observers:
    """Those of one cell: none, one or several; it is false where there are none.

    An observer need have no ``begin``, and one that does not say that it draws has never heard of cursors.
    """

    draws = True  # or some of them

    def __init__(self, *observers: CellObserver) -> None:
        self._observers = observers

    def __bool__(self) -> bool:
        return bool(self._observers)

    def add(self, observer: CellObserver) -> None:
        """Somebody else wants to see what comes from now on, too."""
        self._observers += (observer,)

    def remove(self, observer: CellObserver) -> None:
        """One that was added wants to see no more."""
        self._observers = tuple(each for each in self._observers if each is not observer)

    def begin(self, number: int) -> None:
        for observer in self._observers:
            if begin := getattr(observer, "begin", None):
                begin(number)

    def output(self, rank: int, stream: str, text: str) -> None:
        for observer in self._observers:
            observer.output(rank, stream, text if getattr(observer, "draws", False) else clean_text(text))

    def display(self, rank: int, bundle: Bundle, display_id: str, is_update: bool) -> None:
        for observer in self._observers:
            observer.display(rank, bundle, display_id, is_update)

    def clear(self, rank: int, wait: bool) -> None:
        for observer in self._observers:
            observer.clear(rank, wait)

    def waiting(self, text: str) -> None:
        for observer in self._observers:
            observer.waiting(text)

    def notice(self, text: str) -> None:
        for observer in self._observers:
            observer.notice(text)

    def shown_so_far(self) -> Callable[[], bool]:
        questions = [observer.shown_so_far() for observer in self._observers]
        return lambda: all(question() for question in questions)
