"""KeyboardInterrupt on a rank: raised in the cell that it was sent for, in no other, and not lost in a destructor.

A SIGINT that a cell sends itself raises one too, as in IPython's kernel. As there, a handler set by the user lasts as
long as its cell. Handlers for alarms or SIGUSR1 last longer, and are called only in cells.
"""

from __future__ import annotations

import contextlib
import mmap
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

_STRIKES_AGAIN_S = 0.01
_LETTING_GO_LIMIT_S = 10.0
_LETTING_GO_GAP_S = 1.0
_HELD_SIGNALS = (signal.SIGALRM, signal.SIGVTALRM, signal.SIGPROF, signal.SIGUSR1, signal.SIGUSR2)


class Interrupts:
    """The interrupts of one interpreter. ``sent_for``, shared with its worker, holds the cell to interrupt."""

    def __init__(self, sent_for: mmap.mmap) -> None:
        self.is_in_cell = False
        self._is_letting_go = self._has_struck = self._is_held_back = self._has_come = False
        self._cell = self._strikes = 0
        self._again_for = 0  # the cell that our own signal is for
        self._sent_for = sent_for
        self._next_strike = threading.Timer(0.0, lambda: None)

    def install(self) -> None:
        signal.signal(signal.SIGINT, self._on_signal)
        sys.unraisablehook = self._on_unraisable

    def begin(self, cell: int) -> None:
        """Raise interrupts for ``cell`` until ``is_in_cell`` is unset, also one that has already arrived."""
        self._cell = cell
        self.install()
        self.is_in_cell = True
        self._strike()

    @property
    def is_due(self) -> bool:
        """Whether the cell that runs, or ran last, was to be interrupted."""
        return int.from_bytes(self._sent_for[:], "little") == self._cell

    def raised_after(self, call: Callable[..., None]) -> Callable[..., None]:
        """Wrap ``call``, which swallows interrupts: one that arrives within it is raised again right after it."""

        def call_and_raise(*args: Any, **options: Any) -> None:
            strikes = self._strikes
            call(*args, **options)
            if self._strikes > strikes and self.is_in_cell:
                raise KeyboardInterrupt

        return call_and_raise

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """Delay interrupts of the main thread until the end of the block: a message must be sent completely."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        self._is_held_back = True
        try:
            yield
        finally:
            self._is_held_back = False
            if self._has_come:
                self._has_come = False
                self._strike(is_meant=True)

    def let_go_by(self, act: Callable[[], None]) -> None:
        """Call ``act``, which frees what a failed cell held.

        A destructor may wait for ever for a lock that an interrupt has left locked. So in here every interrupt is
        raised, one at a time, and one is sent after ``_LETTING_GO_LIMIT_S``. None leaves this function, as no caller
        would catch it.
        """
        self.install()  # the cell may have set its own handler
        self._strike_in(_LETTING_GO_LIMIT_S)
        try:
            self._is_letting_go = True
            act()
            self._is_letting_go = False
        except KeyboardInterrupt:
            self._is_letting_go = False
        self._has_struck = False
        self._next_strike.cancel()

    def _on_signal(self, *signal_and_frame: object) -> None:
        """Handle SIGINT, from the worker, from the cell itself, or from ``_strike_again``.

        Only the last may arrive in a later cell: the worker sends its signal before it forwards the next cell.
        """
        again_for, self._again_for = self._again_for, 0
        self._strike(is_meant=again_for in (0, self._cell))

    def _strike(self, *, is_meant: bool = False) -> None:
        """Raise an interrupt, unless it was not meant for the present cell."""
        if self._is_held_back:
            self._has_come |= is_meant or self.is_due
        elif self._is_letting_go:
            self._is_letting_go = False  # until a destructor has swallowed it
            self._has_struck = True
            raise KeyboardInterrupt
        elif self.is_in_cell and (is_meant or self.is_due):
            self._strikes += 1
            raise KeyboardInterrupt

    def _on_unraisable(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Raise again an interrupt that arrived in a destructor or a fork() hook, where exceptions are swallowed."""
        if issubclass(unraisable.exc_type, KeyboardInterrupt) and (self.is_in_cell or self._has_struck):
            self._is_letting_go, self._has_struck = self._has_struck, False
            self._strike_in(_STRIKES_AGAIN_S if self.is_in_cell else _LETTING_GO_GAP_S)  # raised now, it would be lost
        else:
            sys.__unraisablehook__(unraisable)

    def _strike_in(self, seconds: float) -> None:
        """Send a signal to the main thread: unlike ``interrupt_main``, it ends a wait for a lock."""
        self._next_strike.cancel()
        self._next_strike = threading.Timer(seconds, self._strike_again, (self._cell,))
        self._next_strike.daemon = True
        with contextlib.suppress(RuntimeError):  # no thread can be started: the cell may have failed because of that
            self._next_strike.start()

    def _strike_again(self, cell: int) -> None:
        self._again_for = cell
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


class HeldSignals:
    """Timers and user signals with a handler set by a cell: between cells, nothing would catch what it raises.

    A signal mask of the main thread does not help: another thread takes the signal, and Python still calls the handler
    in the main thread.
    """

    def __init__(self) -> None:
        self._handlers: dict[int, Callable[[int, FrameType | None], object]] = {}
        self._have_come: set[int] = set()

    def hold(self) -> None:
        """Hold signals back until the next cell; several of one kind become one."""
        for number in _HELD_SIGNALS:
            handler = signal.getsignal(number)
            if handler == self._note:
                continue
            self._handlers.pop(number, None)
            if callable(handler):
                self._handlers[number] = handler
                signal.signal(number, self._note)

    def release(self) -> None:
        """Call the handlers of held signals. Raises: what a handler raises; the others stay held."""
        for number, handler in self._handlers.items():
            if signal.getsignal(number) == self._note:
                signal.signal(number, handler)
        while self._have_come:
            number = self._have_come.pop()
            self._handlers[number](number, sys._getframe())

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._have_come.add(number)
