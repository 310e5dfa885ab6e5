"""Interrupts at moments when they can be raised: not while a model is put back, nor where torch ends the process."""

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
_CALLED_AT_AN_END = {"__del__", "remove", "_leave"}  # of an object; `remove` is what weak dictionaries have
# Decorators of these. The middle one is also around what a model has told torch not to compile.
_AROUND_THESE = ("torch/utils/_stats.py", "torch/_dynamo/eval_frame.py", "torch/_compile.py")
_ENTERS_OR_LEAVES = {"__enter__", "__exit__"}
_WAITED_FOR = {*_CALLED_BY_OPERATORS, *_CALLED_AT_AN_END, *_ENTERS_OR_LEAVES}


class HeldInterrupts:
    """Holds SIGINT back in a ``with``, until its end or until ``let_through``.

    Then too it waits for the end of what an operator calls in Python, as the `__torch_dispatch__` of a mode: operators
    do so in places where torch takes no exception, but ends the process. And for the end of each `__enter__` and
    `__exit__`: what is begun there would stay, as a mode of torch, for nobody has it yet to end it. Where Python calls
    what is to be told of an object's end it takes no exception either, and only prints it.
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
        # Not by `threading`, whose lock the code may have that was interrupted.
        _thread.start_new_thread(self._deliver_later, ())

    def _deliver_later(self) -> None:
        time.sleep(_SOON_S)
        self._deliver()

    def _deliver(self) -> None:
        is_due, self._is_due = self._is_due, False
        if is_due:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


def _user_of(frame: types.FrameType | None) -> types.FrameType | None:
    """The function that has the `with`, which context managers are called by."""
    while frame is not None and (
        frame.f_code.co_name in _ENTERS_OR_LEAVES
        or frame.f_code.co_flags & inspect.CO_GENERATOR
        or frame.f_code.co_filename == contextlib.__file__
    ):
        frame = frame.f_back
    return frame


def _is_to_wait(frame: types.FrameType | None, user: types.FrameType | None) -> bool:
    """Whether what runs in ``frame``, within what ``user`` calls, may not be interrupted."""
    is_of_torch = True  # what runs, as far as to here
    while frame is not None and frame is not user:
        code = frame.f_code
        if code.co_name in _WAITED_FOR:
            return True
        is_of_torch = is_of_torch and "/torch/" in code.co_filename and "/torch/nn/" not in code.co_filename
        if is_of_torch and code.co_filename.endswith(_AROUND_THESE):
            return True
        frame = frame.f_back
    return False
