"""Interrupts come where they do no harm."""

from __future__ import annotations

import signal
from typing import Any

import pytest
import torch
from torch import nn

from detrain_nb.parallel import profile
from detrain_nb.parallel.interrupts import HeldInterrupts, OperatorMode
from detrain_nb.parallel.kept import state_kept


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
    """Torch would end the process, where it takes no exception from a mode."""

    class Interrupts(OperatorMode):
        was_left = False

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            signal.raise_signal(signal.SIGINT)
            result = func(*args, **(kwargs or {}))
            self.was_left = True
            return result

    mode = Interrupts()
    with pytest.raises(KeyboardInterrupt), mode:
        torch.ones(2)
        signal.sigtimedwait([], 10)  # the interrupt ends it
    assert mode.was_left
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_model_is_put_back_by_whom_is_interrupted_meanwhile() -> None:
    class Interrupted(list[int]):
        """Its own code sends an interrupt while it is put back."""

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
