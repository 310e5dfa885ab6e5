"""The boards of one notebook: those that were asked for, and those that a long cell shows by itself."""

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
LONG_S = 2.0  # a cell that runs for less shows no board by itself


class Boards:
    """With ``%distributed config board=auto`` each session has one, above the output of its first long cell."""

    def __init__(self, ipython: Any, is_auto: Callable[[], bool]) -> None:
        self._has_kernel = getattr(ipython, "kernel", None) is not None
        self._is_auto = is_auto
        self._lock = threading.Lock()
        self._shown: list[tuple[Session, BoardView]] = []

    def show(self, session: Session) -> None:
        """Display one below the cell that runs now; in a terminal its plain form."""
        view = self._make(session)
        if self._has_kernel:
            display(view)
        else:
            print(view.settled().text)

    @contextmanager
    def above(self, session: Session, live: LiveCell) -> Iterator[None]:
        """While ``live`` runs for long, show a board above it, if the session is to have one and has none."""
        if not (self._is_auto() and self._has_kernel) or self._has_one(session):
            yield
            return
        putting = _PutAbove(live, partial(self._make, session))
        try:
            yield
        finally:
            putting.end()

    def settle_ended(self) -> None:
        """Let plain HTML take the place of the boards of sessions that have ended, or were left."""
        with self._lock:
            ended = [(session, view) for session, view in self._shown if not session.is_alive]
            self._shown = [each for each in self._shown if each not in ended]
        for _, view in ended:
            view.settle()

    def _has_one(self, session: Session) -> bool:
        return any(shown is session for shown, _ in self._shown)

    def _make(self, session: Session) -> BoardView:
        from ..widgets import board  # it takes its time to import

        view = board(session)
        with self._lock:
            self._shown.append((session, view))
        return view


class _PutAbove:
    """Puts a board above a cell that runs for long."""

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
        view.settled()  # has it take a first board, here and not where the screen waits for it
        if not self._has_ended.is_set():
            self._live.set_head(view.new_display())
            self._view = view

    def end(self) -> None:
        """The cell has ended, and is drawn anew with its board: JupyterLab fails where that is being drawn already."""
        self._has_ended.set()
        self._thread.join()
        if self._view is not None:
            self._view.wait_for_page(_DRAWN_S)
