"""Models whose parts hand something on past their arguments: a split of them is right, or refused with the reason."""

from __future__ import annotations

import functools
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
    """A layer whose call is its own, and changes nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        result: Tensor = super().__call__(*args, **kwargs)
        return result


def layers(kind: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(kind(8, 8) for _ in range(4)))


def doubling() -> nn.Module:
    return layers(Doubling)


def keeping(*, is_value: bool) -> nn.Module:
    """A hook of one layer keeps something for a hook of a later one; a number, where it looks at a value."""
    model, kept = layers(), dict[str, Any]()

    def keep(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        kept["mean"] = output.mean().item() if is_value else output.mean().detach()

    model[0].register_forward_hook(keep)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] * kept["mean"],))
    return model


def setting() -> nn.Module:
    """A hook of one layer sets an attribute of the next."""
    model = layers()

    def hand_on(module: nn.Module, args: tuple[Tensor], output: Tensor) -> None:
        model[2].scale = output.detach().mean()

    model[1].register_forward_hook(hand_on)
    model[2].register_forward_pre_hook(lambda module, args: (args[0] * module.scale,))
    return model


def borrowing() -> nn.Module:
    """A hook computes with another layer, which an object has that nobody can look into."""
    model = layers()
    others = iter(())
    lend = functools.partial(next, others, model[0])
    model[2].register_forward_pre_hook(lambda module, args: (args[0] + lend()(args[0]),))
    return model


def twice_counting() -> nn.Module:
    """A hook of one layer counts for a hook of another one."""
    model, count = layers(), itertools.count(1)
    model[0].register_forward_hook(lambda module, args, output: output * next(count))
    model[2].register_forward_hook(lambda module, args, output: output * next(count))
    return model


def whole_and_chain(make: Callable[[], nn.Module], at: str) -> tuple[Tensor, Tensor]:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
    found = split(make(), x, at=[at])
    return make()(x), found.stage(1)(found.stage(0)(x), x)


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a call of its own": (doubling, "in the place of what aten.mul.Tensor gives in the code of the model itself"),
    "a hook that keeps": (lambda: keeping(is_value=False), "in the place of what"),
    "a hook that looks": (lambda: keeping(is_value=True), "a stage would"),
    "a hook that sets": (setting, "a stage would fail"),
    "another's layer": (borrowing, "a stage would take a tensor float32 .8,. in the place of the parameter 0.bias"),
}


@pytest.mark.parametrize("name", MODELS)
def test_what_is_handed_on_past_arguments_is_refused_where_a_stage_would_miss_it(name: str) -> None:
    make, why = MODELS[name]
    with pytest.raises(SpecError, match=f"the model cannot be cut at '2': .*{why}.*: pass it as an argument"):
        whole_and_chain(make, at="2")


@pytest.mark.parametrize("make", [lambda: layers(Passing), layers, lambda: keeping(is_value=False), twice_counting])
def test_what_a_stage_does_not_miss_is_right(make: Callable[[], nn.Module]) -> None:
    whole, parts = whole_and_chain(make, at="3")
    torch.testing.assert_close(parts, whole, rtol=0, atol=0)


def test_cuts_that_are_chosen_leave_out_those_that_would_be_wrong() -> None:
    model = keeping(is_value=False)
    x = torch.ones(4, 8)
    assert profile(model, x).cuts == ("2", "3")
    assert split(model, x, 2).cuts == ("3",)
    with pytest.raises(SpecError, match=r"3 stages, and the model can be cut into 2 at most .*not at .*: "):
        split(model, x, 3)
