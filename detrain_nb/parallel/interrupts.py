"""Interrupts at moments when they can be raised: not while a model is put back, nor where torch ends the process."""

from __future__ import annotations

import contextlib
import signal
import threading
import types
from collections.abc import Callable
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HeldInterrupts", "OperatorMode"]

_SOON_S = 0.001
_CALLED_BY_OPERATORS = {"__torch_dispatch__", "find_torch_dispatch_rule", "pack"}
_AROUND_THESE = "torch/utils/_stats.py"  # a decorator


class HeldInterrupts:
    """Holds SIGINT back in a ``with``, until its end or until ``let_through``.

    Then too it waits for the end of what an operator calls in Python, as the `__torch_dispatch__` of a mode: operators
    do so in places where torch takes no exception, but ends the process.
    """

    def __init__(self) -> None:
        self._is_held = True
        self._is_due = False
        self._before: Callable[[int, types.FrameType | None], Any] | None = None

    def __enter__(self) -> HeldInterrupts:
        before = signal.getsignal(signal.SIGINT)
        if callable(before) and threading.current_thread() is threading.main_thread():
            self._before = before
            signal.signal(signal.SIGINT, self._on_signal)
        return self

    def __exit__(self, *exc: object) -> None:
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
        elif _is_called_by_operator(frame):
            self._is_due = True
            self._deliver_soon()
        elif self._before is not None:
            self._before(number, frame)

    def _deliver_soon(self) -> None:
        threading.Timer(_SOON_S, self._deliver).start()

    def _deliver(self) -> None:
        is_due, self._is_due = self._is_due, False
        if is_due:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)


class OperatorMode(TorchDispatchMode):
    """A mode that can be interrupted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._entered: list[HeldInterrupts] = []

    def __enter__(self) -> Any:
        with contextlib.ExitStack() as undone:
            held = undone.enter_context(HeldInterrupts())
            mode = super().__enter__()  # type: ignore[no-untyped-call]
            self._entered.append(held)
            undone.pop_all()
        held.let_through()
        return mode

    def __exit__(self, *exc: Any) -> None:
        with contextlib.ExitStack() as stack:
            held = self._entered.pop()
            stack.push(held)
            held.hold()
            super().__exit__(*exc)  # type: ignore[no-untyped-call]


def _is_called_by_operator(frame: types.FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if code.co_name in _CALLED_BY_OPERATORS or code.co_filename.endswith(_AROUND_THESE):
            return True
        frame = frame.f_back
    return False
