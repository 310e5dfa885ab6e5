"""Live views of a session: callbacks that are called on a change, and watches that receive a fresh `Board`.

One thread serves all of them while there are any, and ends with the session. While no rank runs a cell, it sends the
ranks no requests.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

from ...errors import SpecError
from ..output.safe_output import one_line
from .asked import check_seconds
from .board import Board
from .board_maker import make_board
from .core import Core
from .looks import Looks
from .measuring import Measuring
from .settings import SlotsOnly

__all__ = ["Views", "Watch"]

_GAP_S = 0.1  # between two rounds: faster changes are reported together
_LEAST_S, _MOST_S = 0.1, 60.0
_END_LIMIT_S = 1.0  # for a callback that does not return: its thread ends with the process
_LONGEST_ERROR = 1000
_log = logging.getLogger(__name__)

OnChange = Callable[[], object]
OnBoard = Callable[[Board], object]


class Watch(SlotsOnly):
    """A subscription to boards: one every ``every_s``, and one as soon as something has changed, until it is closed.

    A context manager. A closed watch keeps its ``latest``.
    """

    __slots__ = {
        **dict.fromkeys(("_close", "callback", "due_at", "every_s")),
        "latest": "The last board; None before there is one.",
    }

    def __init__(self, callback: OnBoard | None, every_s: float, close: Callable[[Watch], None]) -> None:
        self.callback = callback
        self.every_s = every_s
        self.due_at = 0.0
        self.latest: Board | None = None
        self._close = close

    def close(self) -> None:
        """Stop receiving boards; a call of ``callback`` that has begun runs to its end."""
        self._close(self)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Views:
    """The live views of one session."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._changes = core.state.changes
        self._looks = Looks(core)
        self._measuring = Measuring(core)
        self._lock = threading.Lock()
        self._listeners: tuple[OnChange, ...] = ()
        self._watches: tuple[Watch, ...] = ()
        self._thread: threading.Thread | None = None
        self._shown: object = None  # the key of the board when listeners were last called
        self._round_at = 0.0
        self._is_ending = False  # the session is being stopped: losses are part of that
        self._ended = threading.Event()

    # ---- subscriptions

    def on_change(self, callback: OnChange) -> Callable[[], None]:
        """Call ``callback`` on changes: see ``Session.on_change``."""
        if not callable(callback):
            raise SpecError(f"callback {callback!r}: give a function that takes no arguments")

        def listen() -> None:  # wrapped: the same function may be given twice
            callback()

        def stop() -> None:
            self._remove(listen)
            self._changes.note()  # wakes the thread, which ends if no one is left to call

        with self._lock:
            if not self._is_over:
                self._listeners += (listen,)
                self._start()
        return stop

    def watch(self, callback: OnBoard | None, *, every_s: float) -> Watch:
        """Open a watch: see ``Session.watch``."""
        if callback is not None and not callable(callback):
            raise SpecError(f"callback {callback!r}: give a function that takes a board, or None")
        check_seconds("every_s", every_s, is_more_than_0=True)
        if not _LEAST_S <= every_s <= _MOST_S:
            raise SpecError(f"every_s {every_s}: give a number of seconds from {_LEAST_S:g} to {_MOST_S:g}")
        watch = Watch(callback, float(every_s), self._end_watch)
        with self._lock:
            if not self._is_over:
                self._watches += (watch,)
                self._start()
                return watch
        watch.latest = make_board(self._core, self._looks.last)
        return watch

    def _end_watch(self, watch: Watch) -> None:
        with self._lock:
            self._watches = tuple(each for each in self._watches if each is not watch)
        self._changes.note()

    @property
    def _is_over(self) -> bool:
        return self._ended.is_set() or self._core.why_over is not None

    def _start(self) -> None:
        """Start the thread if there is none, and have it look at once; ``_lock`` is held."""
        if self._thread is None:
            self._shown = self._key(make_board(self._core, self._looks.last))  # changes from here on are reported
            self._thread = threading.Thread(target=self._run, name="detrain_nb live view", daemon=True)
            self._thread.start()
        self._changes.note()

    # ---- the end

    def begin_end(self) -> None:
        """Stop reporting changes while the session is being stopped: its losses are expected."""
        self._is_ending = True

    def end(self, *, has_ended: bool = True) -> None:
        """Report the end of the session as the last change; not ``has_ended``: the stop failed, go on reporting."""
        self._is_ending = False
        if has_ended:
            self._ended.set()
        self._changes.note()
        thread = self._thread
        if has_ended and thread is not None and thread is not threading.current_thread():
            thread.join(_END_LIMIT_S)

    # ---- the thread

    def _run(self) -> None:
        try:
            while self._has_somebody_to_tell():
                self._wait()
                if self._is_ending:
                    self._ended.wait(_GAP_S)
                    continue
                is_last = self._is_over
                self._changes.forget()
                self._round()
                if is_last:
                    break
        except Exception as exc:
            self._tell_failure("live views have stopped: building the board failed with", exc)
            raise
        finally:
            self._measuring.go_on(0.0)
            with self._lock:
                if self._thread is threading.current_thread():
                    self._thread, self._listeners, self._watches = None, (), ()

    def _has_somebody_to_tell(self) -> bool:
        with self._lock:
            if not self._listeners and not self._watches:
                self._thread = None
                return False
            return True

    def _wait(self) -> None:
        """Wait until there is something to do, and at least ``_GAP_S`` has passed since the last round."""
        moments = [watch.due_at for watch in self._watches]
        moments += filter(None, [self._looks.due_at(), self._measuring.due_at()])
        self._changes.wait(max(0.0, min(moments) - time.monotonic()) if moments else None)
        self._ended.wait(max(0.0, self._round_at + _GAP_S - time.monotonic()))

    def _round(self) -> None:
        """Look at the session, and call the callbacks that are due."""
        self._measuring.go_on(min((watch.every_s for watch in self._watches), default=0.0))
        self._looks.refresh()
        board = make_board(self._core, self._looks.last)
        self._round_at = now = time.monotonic()
        before, self._shown = self._shown, self._key(board)
        has_changed = before != self._shown
        for watch in self._watches:
            if has_changed or now >= watch.due_at:
                self._give(watch, board, now)
        for listener in self._listeners if has_changed else ():
            try:
                listener()
            except Exception as exc:  # noqa: BLE001  the user's code: the user is told
                self._remove(listener)
                self._tell_failure("the callback of session.on_change was removed because it raised", exc)

    def _give(self, watch: Watch, board: Board, now: float) -> None:
        watch.due_at = now + watch.every_s
        watch.latest = board
        if watch.callback is None:
            return
        try:
            watch.callback(board)
        except Exception as exc:  # noqa: BLE001  the user's code: the user is told
            watch.callback = None
            self._tell_failure("the callback of session.watch was removed because it raised", exc)

    def _remove(self, listener: OnChange) -> None:
        with self._lock:
            self._listeners = tuple(each for each in self._listeners if each is not listener)

    def _tell_failure(self, words: str, exc: Exception) -> None:
        _log.warning("%s %r", words, exc, exc_info=exc)
        self._core.state.notice(f"{words} {one_line(repr(exc), most_chars=_LONGEST_ERROR)}")

    def _key(self, board: Board) -> Any:
        """Return what must change before listeners are called: without numbers that change all the time."""
        ranks = [(of.state, of.exit, of.collective, of.waits_for, of.pid) for of in board.ranks]
        nodes = [(of.name, of.ranks, bool(of.fault)) for of in board.nodes]
        notes = [(of.kind, of.ranks) for of in board.notes]
        last_cell = max(list(self._core.state.cells), default=0)
        return ranks, nodes, notes, board.cell and board.cell.number, last_cell, board.over
