"""The boards of one notebook: those that the user asked for, and those that a long cell shows automatically."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from IPython.display import display

from ..session.session import Session

if TYPE_CHECKING:
    from ..widgets.board_view import BoardView
    from .render import LiveCell

_DRAWN_S = 2.0
LONG_S = 2.0  # a shorter cell shows no board automatically


class Boards:
    """The boards; with ``%distributed config board=auto`` each session gets one above its first long cell."""

    def __init__(self, ipython: Any, is_auto: Callable[[], bool]) -> None:
        self._has_kernel = getattr(ipython, "kernel", None) is not None
        self._is_auto = is_auto
        self._lock = threading.Lock()
        self._shown: list[tuple[Session, BoardView]] = []

    def show(self, session: Session) -> None:
        """Display a board below the running cell; in a terminal, its plain text."""
        view = self._make(session)
        if self._has_kernel:
            display(view)
        else:
            print(view.settled().text)

    @contextmanager
    def above(self, session: Session, live: LiveCell) -> Iterator[None]:
        """Show a board above ``live`` when that runs for long, if the session should have one and has none."""
        if not (self._is_auto() and self._has_kernel) or self._has_one(session):
            yield
            return
        putting = _PutAbove(live, partial(self._make, session))
        try:
            yield
        finally:
            putting.end()

    def settle_ended(self) -> None:
        """Replace the boards of sessions that have ended, or were left, by plain HTML."""
        with self._lock:
            ended = [(session, view) for session, view in self._shown if not session.is_alive]
            self._shown = [each for each in self._shown if each not in ended]
        for _, view in ended:
            view.settle()

    def _has_one(self, session: Session) -> bool:
        return any(shown is session for shown, _ in self._shown)

    def _make(self, session: Session) -> BoardView:
        from ..widgets import board  # slow to import

        view = board(session)
        with self._lock:
            self._shown.append((session, view))
        return view


class _PutAbove:
    """A thread that puts a board above a cell that runs for long."""

    def __init__(self, live: LiveCell, make: Callable[[], BoardView]) -> None:
        self._live = live
        self._make = make
        self._has_ended = threading.Event()
        self._view: BoardView | None = None
        self._thread = threading.Thread(target=self._run, name="detrain_nb board", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if self._has_ended.wait(LONG_S) or not self._live.can_have_head:
            return
        view = self._make()
        view.settled()  # builds the first board here, as the screen would wait for it
        if not self._has_ended.is_set():
            self._live.set_head(view.new_display())
            self._view = view

    def end(self) -> None:
        """End the thread, and wait up to 2 s until the page has drawn the board, before the ended cell is redrawn.

        JupyterLab fails when the cell is redrawn while its board is being drawn.
        """
        self._has_ended.set()
        self._thread.join()
        if self._view is not None:
            self._view.wait_for_page(_DRAWN_S)
