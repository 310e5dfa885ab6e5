"""Example inputs that a model cannot be called with: the error describes them, wherever they are passed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

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
        ([(2, 7)], r"the model fails on the example inputs \(float32 \(2, 7\)\): .*8.*; give inputs of one microbatch"),
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


class Asserts(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        assert len(x) == 3
        return super().forward(x)


@pytest.mark.parametrize("take", GIVEN_TO.values(), ids=GIVEN_TO)
def test_what_a_model_asserts_of_its_inputs_is_told(take: Callable[..., Any]) -> None:
    with pytest.raises(
        SpecError, match=r"(?s)on the example inputs \(float32 \(2, 8\)\): AssertionError.*; give inputs of one"
    ):
        take(nn.Sequential(Asserts(8, 8), nn.Linear(8, 8)), torch.zeros(2, 8))


class Resizes(nn.Sequential):
    """Resizes a tensor that has values, which is impossible in a run without values."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Linear(8, 8))
        self.table = torch.ones(8, device="cpu")

    def forward(self, x: Tensor) -> Tensor:
        self.table.resize_(len(x) + 9)
        result: Tensor = super().forward(x)
        return result


@pytest.mark.parametrize("take", [GIVEN_TO["split"], GIVEN_TO["dry_run"]], ids=["split", "dry_run"])
def test_tensor_that_is_resized_wants_a_model_with_values(take: Callable[..., Any]) -> None:
    take(Resizes(), torch.zeros(2, 8))
    with torch.device("meta"):
        model = Resizes()
    with pytest.raises(
        SpecError, match=r"resizes a tensor that is neither a parameter nor a buffer, .*: make it a buff"
    ):
        take(model, torch.zeros(2, 8))
