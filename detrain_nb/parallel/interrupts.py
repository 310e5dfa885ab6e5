"""Interrupts raised at safe moments only: not while a model is restored, nor where torch would abort the process."""

from __future__ import annotations

import _thread
import contextlib
import inspect
import signal
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

_SOON_S = 0.001
_CALLED_BY_OPERATORS = {"__torch_dispatch__", "find_torch_dispatch_rule", "pack"}
_CALLED_AT_AN_END = {"__del__", "remove", "_leave"}  # when an object is deleted; `remove` is that of weak dictionaries
# Files of decorators around these. The middle one also wraps code that a model marks as not to be compiled.
_AROUND_THESE = ("torch/utils/_stats.py", "torch/_dynamo/eval_frame.py", "torch/_compile.py")
_ENTERS_OR_LEAVES = {"__enter__", "__exit__"}
_WAITED_FOR = {*_CALLED_BY_OPERATORS, *_CALLED_AT_AN_END, *_ENTERS_OR_LEAVES}


class HeldInterrupts:
    """Context that holds SIGINT back until its end or until ``let_through``.

    Even then a signal waits for the end of Python code that an operator calls, such as a mode's `__torch_dispatch__`:
    there torch cannot handle an exception and aborts the process. It also waits for the end of each `__enter__` and
    `__exit__`: an interrupted one would leave, for example, a torch mode active, with no owner to leave it. In
    callbacks of deleted objects, Python would only print the exception.
    """

    def __init__(self) -> None:
        self._is_held = True
        self._is_due = False
        self._before: Callable[[int, types.FrameType | None], Any] | None = None
        self._user: types.FrameType | None = None

    def __enter__(self) -> HeldInterrupts:
        before = signal.getsignal(signal.SIGINT)
        if callable(before) and threading.current_thread() is threading.main_thread():
            self._before = before
            self._user = _user_of(sys._getframe())
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
        self._user = None
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)
            self._deliver()

    def hold(self) -> None:
        self._is_held = True

    def let_through(self) -> None:
        self._is_held = False
        if self._is_due:
            self._deliver_soon()

    def _on_signal(self, number: int, frame: types.FrameType | None) -> None:
        if self._is_held:
            self._is_due = True
        elif _is_to_wait(frame, self._user):
            self._is_due = True
            self._deliver_soon()
        elif self._before is not None:
            self._before(number, frame)

    def _deliver_soon(self) -> None:
        # Not by `threading`: the interrupted code may hold its lock.
        _thread.start_new_thread(self._deliver_later, ())

    def _deliver_later(self) -> None:
        time.sleep(_SOON_S)
        self._deliver()

    def _deliver(self) -> None:
        is_due, self._is_due = self._is_due, False
        if is_due:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _user_of(frame: types.FrameType | None) -> types.FrameType | None:
    """Return the frame of the function that contains the `with` statement."""
    while frame is not None and (
        frame.f_code.co_name in _ENTERS_OR_LEAVES
        or frame.f_code.co_flags & inspect.CO_GENERATOR
        or frame.f_code.co_filename == contextlib.__file__
    ):
        frame = frame.f_back
    return frame


def _is_to_wait(frame: types.FrameType | None, user: types.FrameType | None) -> bool:
    """Return whether the code in ``frame``, called by ``user``, must not be interrupted."""
    is_of_torch = True  # all frames so far are torch's
    while frame is not None and frame is not user:
        code = frame.f_code
        if code.co_name in _WAITED_FOR:
            return True
        is_of_torch = is_of_torch and "/torch/" in code.co_filename and "/torch/nn/" not in code.co_filename
        if is_of_torch and code.co_filename.endswith(_AROUND_THESE):
            return True
        frame = frame.f_back
    return False
