"""Interrupts are held back until they do no harm."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from detrain_nb.parallel import profile
from detrain_nb.parallel.interrupts import HeldInterrupts
from detrain_nb.parallel.kept import state_kept
from detrain_nb.parallel.operators import OperatorMode


def test_interrupt_waits_until_it_is_let_through() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), HeldInterrupts():
        signal.raise_signal(signal.SIGINT)
        done.append("held")
    assert done == ["held"]
    with pytest.raises(KeyboardInterrupt), HeldInterrupts() as interrupts:
        interrupts.let_through()
        signal.raise_signal(signal.SIGINT)
        done.append("let through")
    assert done == ["held"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_in_a_mode_comes_behind_the_operator() -> None:
    """torch would end the process if the mode raised where torch expects no exception."""

    class Interrupts(OperatorMode):
        was_left = False

        def on_operator(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            signal.raise_signal(signal.SIGINT)
            result = func(*args, **kwargs)
            self.was_left = True
            return result

    mode = Interrupts()
    with pytest.raises(KeyboardInterrupt), mode:
        torch.ones(2)
        signal.sigtimedwait([], 10)  # the interrupt ends the wait
    assert mode.was_left
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_interrupt_in_what_torch_wraps_a_mode_in_comes_after_the_operator(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mode's `__torch_dispatch__` has not started, or has returned. torch would still end the process."""
    seen = []

    class Sees(OperatorMode):
        def on_operator(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
            seen.append(func)
            return func(*args, **kwargs)

    frames, interrupts = torch._dynamo.eval_frame, [signal.SIGINT]
    was = frames.set_eval_frame

    def sends(callback: Any) -> Any:
        while interrupts:
            signal.raise_signal(interrupts.pop())
        return was(callback)

    # The interrupted function must belong to that file.
    monkeypatch.setattr(sends, "__code__", sends.__code__.replace(co_filename=frames.__file__))
    with pytest.raises(KeyboardInterrupt), Sees():
        monkeypatch.setattr(frames, "set_eval_frame", sends)
        torch.ones(2)
        signal.sigtimedwait([], 10)  # the interrupt ends the wait
    assert seen and not interrupts


def test_interrupt_comes_after_what_is_entered() -> None:
    """A mode that is interrupted inside its `__enter__`, when it is already on, would stay on."""

    class Begins:
        state = "not begun"

        def __enter__(self) -> None:
            signal.raise_signal(signal.SIGINT)
            self.state = "begun"

        def __exit__(self, *exc: object) -> None:
            self.state = "ended"

    begins = Begins()
    with pytest.raises(KeyboardInterrupt), HeldInterrupts() as interrupts:
        interrupts.let_through()
        with begins:
            signal.sigtimedwait([], 10)
    assert begins.state == "ended"


def test_interrupt_comes_after_what_is_called_at_the_end_of_an_object() -> None:
    """Python would only print the exception, and continue."""

    class Ends:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt), HeldInterrupts() as interrupts:
        interrupts.let_through()
        Ends()
        signal.sigtimedwait([], 10)
        pytest.fail("the interrupt was lost")


def test_interrupt_is_not_held_by_what_is_around_its_user() -> None:
    done = list[str]()

    def use() -> None:
        with HeldInterrupts() as interrupts:
            interrupts.let_through()
            signal.raise_signal(signal.SIGINT)
            done.append("too late")

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with pytest.raises(KeyboardInterrupt):
            use()
        yield

    with around():
        assert not done


def test_model_is_put_back_by_whom_is_interrupted_meanwhile() -> None:
    class Interrupted(list[int]):
        """A list with state of its own; both are restored although an interrupt arrives."""

        def __init__(self) -> None:
            super().__init__([1])
            self.note = "as it was"

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen, self.calls = nn.Linear(4, 4), Interrupted(), 0

    model = Model()
    with pytest.raises(KeyboardInterrupt), state_kept(model):
        model.seen.append(2)
        model.seen.note, model.calls = "changed", 1
        signal.raise_signal(signal.SIGINT)
    assert (list(model.seen), model.seen.note, model.calls) == ([1], "as it was", 0)
    assert profile(model.layer, torch.ones(2, 4)).units
