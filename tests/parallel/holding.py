"""Models that call their layers through something that is no module: an object, a function, a container."""

from __future__ import annotations

import dataclasses
import functools
import weakref
from collections import UserList, namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

Call = Callable[[Tensor], Tensor]
Pair = namedtuple("Pair", "first second")


class Slots:
    __slots__ = ("layer", "unset")

    def __init__(self, layer: Any) -> None:
        self.layer = layer

    def __call__(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    layer: nn.Module


class Strict:
    """An object that refuses new attributes once it is made."""

    def __init__(self, layer: nn.Module) -> None:
        self.__dict__["layer"] = layer

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(name)


class Unregistered(nn.Module):
    """A module that is no submodule of the model; its layer is registered in the model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layer(x)
        return result


def run(layer: nn.Module | None, x: Tensor, *, more: Any = None) -> Tensor:
    result: Tensor = x if layer is None else layer(x)
    for each in more or ():
        result = each(result)
    return result


def by_lists(layers: list[nn.Module], x: Tensor) -> Tensor:
    for layer in layers:
        x = layer(x)
    return x


def in_a_cycle(layer: nn.Module) -> Call:
    holder = SimpleNamespace(layer=layer, parts=[])
    holder.me = holder
    holder.parts += [holder.parts, (holder, holder.parts)]
    return in_closure(holder, lambda held: held.parts[1][1][0][1][0].me.layer)


def by_default(layer: nn.Module) -> Call:
    def call(x: Tensor, *, layers: Any = {"one": [layer]}) -> Tensor:  # noqa: B006 - so it is written
        result: Tensor = layers["one"][0](x)
        return result

    return call


def by_attribute(layer: nn.Module) -> Call:
    def call(x: Tensor) -> Tensor:
        result: Tensor = call.layer(x)  # type: ignore[attr-defined]
        return result

    call.layer = layer  # type: ignore[attr-defined]
    return call


def in_closure(held: Any, find: Callable[[Any], Any]) -> Call:
    def call(x: Tensor) -> Tensor:
        result: Tensor = find(held)(x)
        return result

    return call


HOLDERS: dict[str, Callable[[nn.Module], Call]] = {
    "slots": Slots,
    "objects": lambda layer: Slots(Slots(Slots(layer))),
    "frozen": lambda layer: in_closure(Frozen(layer), lambda held: held.layer),
    "strict": lambda layer: in_closure(Strict(layer), lambda held: held.layer),
    "unregistered": lambda layer: in_closure([Unregistered(layer)], lambda held: held[0]),
    "user list": lambda layer: in_closure(UserList([layer]), lambda held: held[0]),
    "partial": lambda layer: functools.partial(run, layer),
    "partial of keywords": lambda layer: functools.partial(run, None, more=[layer]),
    "partial of a module": functools.partial,
    "partial of a list": lambda layer: functools.partial(by_lists, [layer]),
    "method of an object": lambda layer: Slots(layer).__call__,
    "method of a module": lambda layer: in_closure({"run": [layer.forward]}, lambda held: held["run"][0]),
    "cached method": lambda layer: functools.lru_cache(maxsize=1)(layer.forward),
    "list": lambda layer: in_closure([(layer,)], lambda held: held[0][0]),
    "dict": lambda layer: in_closure({"one": {"two": layer}}, lambda held: held["one"]["two"]),
    "key": lambda layer: in_closure({layer: 1}, lambda held: next(iter(held))),
    "set": lambda layer: in_closure({layer}, lambda held: next(iter(held))),
    "named tuple": lambda layer: in_closure(Pair(1, layer), lambda held: held.second),
    "weak reference": lambda layer: in_closure(weakref.ref(layer), lambda held: held()),
    "weak key": lambda layer: in_closure(weakref.WeakKeyDictionary({layer: 1}), lambda held: next(iter(held))),
    "default": by_default,
    "attribute": by_attribute,
    "cycle": in_a_cycle,
}


class Held(nn.Module):
    """Calls its middle layer through an object that holds it."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.call = HOLDERS[way](self.middle)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.last(self.call(self.first(x)).tanh())
        return result


def _with_layer(other: nn.Module, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (other(args[0]).tanh(),)


def _with_weight(other: nn.Linear, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    return (args[0] @ other.weight,)


def _twice(self: nn.Linear, x: Tensor) -> Tensor:
    return 2 * nn.functional.linear(x, self.weight, self.bias)


class Hooked(nn.Sequential):
    """Before a layer runs, a hook calls another layer or reads its weight; or a layer's forward is replaced."""

    def __init__(self, way: str) -> None:
        super().__init__(*(nn.Linear(8, 8) for _ in range(4)))
        self.aside = nn.Linear(8, 8)
        if way == "layer":
            self[2].register_forward_pre_hook(functools.partial(_with_layer, self.aside))
        elif way == "weight":
            self[2].register_forward_pre_hook(functools.partial(_with_weight, self[0]))
        elif way == "method":
            self[0].forward = _twice.__get__(self[0])  # type: ignore[method-assign]
        elif way == "block":
            self[0] = Unregistered(nn.Linear(8, 8))
            self[0].forward = functools.partial(Unregistered.forward, self[0])  # type: ignore[method-assign]
        elif way == "partial":
            self[0].forward = functools.partial(_twice, self[0])  # type: ignore[method-assign]
        else:
            self[0].forward = functools.partial(_around, self[0].forward)  # type: ignore[method-assign]

    def forward(self, x: Tensor) -> Tensor:
        for number in range(4):
            x = self[number](x)
        return x


def _around(forward: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.tanh(forward(x))
