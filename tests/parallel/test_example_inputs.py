"""Example inputs that a model cannot be called with are told, with what they are, wherever they are given."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from detrain_nb import parallel as par
from detrain_nb.errors import SpecError

GIVEN_TO: dict[str, Callable[[nn.Module, Any], Any]] = {
    "profile": par.profile,
    "split": partial(par.split, stages=2),
    "tp_plan": par.tp_plan,
    "dry_run": lambda model, inputs: par.dry_run(model, {"pp": 2}, example_inputs=inputs),
}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("take", GIVEN_TO.values(), ids=GIVEN_TO)
@pytest.mark.parametrize(
    "shape, message",
    [
        ([(2, 7)], r"the model fails on the example inputs \(float32 \(2, 7\)\): .*8.*: give what it is called with"),
        ([(2, 8), (2, 8)], r"\(float32 \(2, 8\), float32 \(2, 8\)\): .* takes 2 positional arguments but 3 were given"),
        ({"y": (2, 8)}, r"\(y=float32 \(2, 8\)\): .* unexpected keyword argument 'y'"),
        ([], r"the model fails on the example inputs \(none\): .* missing 1 required positional argument"),
    ],
    ids=str,
)
def test_wrong_inputs_are_told(take: Callable[..., Any], device: str, shape: Any, message: str) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).to(device)
    if isinstance(shape, dict):
        inputs: Any = {name: torch.zeros(size, device=device) for name, size in shape.items()}
    else:
        inputs = tuple(torch.zeros(size, device=device) for size in shape)
    with pytest.raises(SpecError, match=message) as caught:
        take(model, inputs)
    assert isinstance(caught.value.__cause__, (RuntimeError, TypeError)), "what torch says is not lost"
