"""Models whose parts pass something on other than by arguments: a split is right, or refused with the reason."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from detrain_nb.errors import SpecError
from detrain_nb.parallel import profile, split


class Doubling(nn.Linear):
    """A layer that changes its argument before its hooks see it."""

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = super().__call__(x * 2)
        return result


class Passing(nn.Linear):
    """A layer that overrides ``__call__``, and changes nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = super().__call__(*args, **kwargs)
        return result


def layers(kind: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind(8, 8) for _ in range(4)))


def doubling(*places: int) -> nn.Module:
    """Return layers with a `Doubling` one at each of ``places``."""
    model = layers()
    for place in places:
        model[place] = Doubling(8, 8)
    return model


class Switching(nn.Linear):
    """A layer that switches gradients on or off for the code after it."""

    is_on = True

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        torch.set_grad_enabled(self.is_on)
        return result


def switching() -> nn.Module:
    """Return a model whose gradients are off from the first layer's output until the last layer has run."""
    model = layers()
    model[0], model[3] = Switching(8, 8), Switching(8, 8)
    model[0].is_on = False  # type: ignore[assignment]
    return model


def keeping() -> nn.Module:
    """Return a model in which a hook reads a value for a hook of a later layer."""
    model, kept = layers(), list[float]()
    model[0].register_forward_hook(lambda module, args, output: kept.append(output.mean().item()))
    model[2].register_forward_pre_hook(lambda module, args: (args[0] * kept.pop(),))
    return model


def passing_on() -> nn.Module:
    """Return a model in which a hook keeps a tensor for a hook of a later layer."""
    model, kept = layers(), dict[str, Tensor]()
    model[0].register_forward_hook(lambda module, args, output: kept.update(mean=output.mean()))
    model[2].register_forward_pre_hook(lambda module, args: (args[0] * kept["mean"],))
    return model


LENT: list[nn.Module] = []


def borrowing() -> nn.Module:
    """Return a model in which a hook computes with another layer, from a global."""
    model = layers()
    LENT[:] = [model[0]]
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + LENT[0](args[0]),))
    return model


def twice_counting() -> nn.Module:
    """Return a model in which the hooks of two layers advance the same counter."""
    model, count = layers(), itertools.count(1)
    model[0].register_forward_hook(lambda module, args, output: output * next(count))
    model[2].register_forward_hook(lambda module, args, output: output * next(count))
    return model


def whole_and_chain(make: Callable[[], nn.Module], at: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    found = split(make(), x, at=[at])
    return make()(x), found.stage(1)(found.stage(0)(x), x)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a call of its own": (lambda: doubling(2), "instead of the result of aten.mul.Tensor in the code of the model"),
    "a layer that stops gradients": (
        switching,
        "instead of the result of aten.addmm.default without a gradient in 3",
    ),
    "a hook that looks": (keeping, "a stage would"),
    "another's layer": (borrowing, r"a stage would use a tensor float32 \(8,\) instead of the parameter 0.bias"),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_handed_on_past_arguments_is_refused_where_a_stage_would_miss_it(name: str) -> None:
    make, why = MODELS[name]
    with pytest.raises(SpecError, match=f"the model cannot be cut at '2': .*{why}.*: pass it as an argument"):
        whole_and_chain(make, at="2")


RIGHT: list[Callable[[], nn.Module]] = [
    layers,
    lambda: layers(Passing),
    passing_on,
    lambda: doubling(2),
    twice_counting,
]


@pytest.mark.parametrize("make", RIGHT)
def test_what_a_stage_does_not_miss_is_right(make: Callable[[], nn.Module]) -> None:
    whole, parts = whole_and_chain(make, at="3")
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)


def test_cuts_that_are_chosen_leave_out_those_that_would_be_wrong() -> None:
    x = torch.ones(4, 8)
    assert split(doubling(2), x, 3).cuts == ("1", "3")
    assert len(profile(doubling(1, 2, 3), x).cuts) == 3
    with pytest.raises(SpecError, match=r"the model can be cut into at most 1 .*cuts: none; .: a stage"):
        split(doubling(1, 2, 3), x, 2)
