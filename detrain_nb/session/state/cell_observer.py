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

    def begin(self, cell: int) -> None:
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


def tell_begin(observer: CellObserver | None, cell: int) -> None:
    """To one that wants to know: an observer need have no more methods than it uses."""
    if begin := getattr(observer, "begin", None):
        begin(cell)


def give_output(observer: CellObserver, rank: int, stream: str, text: str) -> None:
    """Who does not say that it draws has never heard of cursors."""
    observer.output(rank, stream, text if getattr(observer, "draws", False) else clean_text(text))


class BothObservers:
    """Two observers of one cell."""

    draws = True  # or one of them

    def __init__(self, first: CellObserver, second: CellObserver) -> None:
        self._observers = (first, second)

    def without(self, observer: CellObserver) -> CellObserver:
        first, second = self._observers
        if observer in self._observers:
            return second if observer is first else first
        return BothObservers(first.without(observer), second) if isinstance(first, BothObservers) else self

    def begin(self, cell: int) -> None:
        for observer in self._observers:
            tell_begin(observer, cell)

    def output(self, rank: int, stream: str, text: str) -> None:
        for observer in self._observers:
            give_output(observer, rank, stream, text)

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
