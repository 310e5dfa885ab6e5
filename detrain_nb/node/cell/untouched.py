"""What a value is, found out without running anything of its class: no ``__repr__``, ``__len__``, property or hook.

``isinstance`` and a plain attribute can run code of the class; what Python and torch have in C for their own types does
not.
"""

from __future__ import annotations

import itertools
import math
import sys
import types
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch

_TYPE: Any = type.__dict__
_MODULE_VARIABLES: Any = torch.nn.Module.__dict__["__dict__"]
_OPTIMIZER_VARIABLES: Any = torch.optim.Optimizer.__dict__["__dict__"]
_DICTS: tuple[Any, ...] = (dict, type(torch.nn.Module()._parameters))
_PARAMETERS, _BUFFERS, _MODULES = "_parameters", "_buffers", "_modules"  # where a module has what
_MOST_TENSORS = 20_000  # of a module
MOST_PARTS = 50_000  # modules and tensors that are looked at
_MOST_NAME_CHARS = 200
_MOST_DEPTH = 50  # of modules in modules


def bases_of(kind: type) -> tuple[type, ...]:
    """The class and all its bases."""
    found: tuple[type, ...] = _TYPE["__mro__"].__get__(kind)
    return found


def is_of(value: object, kind: type) -> bool:
    """Whether its class is ``kind`` or derived from it, whatever the class says of itself."""
    return kind in bases_of(type(value))


def name_of(kind: type) -> str:
    """The name of a class, without its module."""
    return _plain_text(_TYPE["__name__"].__get__(kind))[:_MOST_NAME_CHARS]


def _plain_text(text: str) -> str:
    """The same characters as a plain str: a class can be called by the user's kind of str."""
    return text if type(text) is str else "".join(str.__iter__(text))


def module_of(kind: type) -> str:
    """The module of a class; empty where it says something else than a name."""
    name = _TYPE["__module__"].__get__(kind)
    return name if type(name) is str else ""


def loaded(module: str, name: str) -> Any:
    """A class whose module somebody has imported; else None."""
    return vars(sys.modules[module]).get(name) if module in sys.modules else None


def is_dtensor(value: object) -> bool:
    """A DTensor itself; a class derived from it is the user's."""
    return type(value) is loaded("torch.distributed.tensor", "DTensor")


def is_table(value: object) -> bool:
    """A DataFrame of pandas or polars itself."""
    return any(type(value) is loaded(module, "DataFrame") for module in ("pandas", "polars"))


def variables_of(value: object) -> dict[str, object]:
    """What was set in an object by name; nothing where its class keeps it elsewhere."""
    for base in reversed(bases_of(type(value))):
        slot = _TYPE["__dict__"].__get__(base).get("__dict__")
        if type(slot) is types.GetSetDescriptorType:
            return dict(pairs(slot.__get__(value)))
    return {}


@contextmanager
def plain_torch() -> Iterator[None]:
    """Torch's own operators: no class, hook or mode of the user has its turn in them."""
    with ExitStack() as entered:
        entered.enter_context(torch.no_grad())
        entered.enter_context(torch._C.DisableTorchFunction())
        if modes := loaded("torch.utils._python_dispatch", "_disable_current_modes"):
            entered.enter_context(modes())
        yield


def as_tensor(value: object) -> torch.Tensor | None:
    """The numbers of a tensor as a plain one that shares its memory; None where its class decides what they are.

    Of a DTensor its part on this rank. Called inside ``plain_torch``.
    """
    if is_dtensor(value):
        value = _slot(value, "_local_tensor")
    kind = type(value)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return torch.Tensor.detach(value)  # type: ignore[arg-type]
    if torch.Tensor not in bases_of(kind):
        return None
    own = bases_of(kind)[: bases_of(kind).index(torch.Tensor)]
    if any("__torch_dispatch__" in _TYPE["__dict__"].__get__(base) for base in own):
        return None
    return torch.Tensor.as_subclass(torch.Tensor.detach(value), torch.Tensor)  # type: ignore[arg-type]


def as_array(value: object) -> Any:
    """The numbers of an array of numpy as a plain one that shares its memory; None where a mask says which count."""
    if not (array := loaded("numpy", "ndarray")) or array not in bases_of(type(value)):
        return None
    return None if loaded("numpy.ma", "MaskedArray") in bases_of(type(value)) else array.view(value, array)


def is_dense(tensor: torch.Tensor) -> bool:
    """Its numbers lie in one storage, each as its dtype has it."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def layout_of(value: object) -> dict[str, Any] | None:
    """How a DTensor lies on its mesh: the sizes of the mesh, a placement for each, and where this rank is.

    ``kinds``: shard, copy, or partial (a sum whose terms the ranks have).
    """
    if not is_dtensor(value):
        return None
    spec = _slot(value, "_spec")
    at = spec.mesh.get_coordinate()
    return {
        "mesh": [int(size) for size in spec.mesh.shape],
        "placements": [str(placement)[:_MOST_NAME_CHARS] for placement in spec.placements],
        "kinds": [_kind_of(placement) for placement in spec.placements],
        "at": [int(place) for place in at] if at is not None else None,
    }


def _kind_of(placement: Any) -> str:
    if placement.is_replicate():
        return "copy"
    return "partial" if placement.is_partial() else "shard"


def whole_shape(value: object) -> list[int]:
    """The shape of a DTensor over all ranks."""
    return [int(size) for size in _slot(value, "_spec").shape]


def _slot(value: object, name: str) -> Any:
    return type(value).__dict__[name].__get__(value)


class Inside(NamedTuple):
    """Tensors, each once and with its path; ``parameters`` are those of them that a module has as such.

    ``is_cut``: there may be more, as of very much the first is looked at.
    """

    tensors: list[tuple[str, object]]
    parameters: list[object]
    is_cut: bool

    def counted(self, number: int) -> str:
        """``number``, which was counted in them, in words."""
        return f"{'at least ' if self.is_cut else ''}{number:,}"

    def count_numbers(self) -> str:
        """Say how many numbers the parameters have, on all ranks together. Called inside ``plain_torch``."""
        return self.counted(sum(map(_count, self.parameters)))


def tensors_of(value: object) -> Inside | None:
    """The parameters and buffers of a module, or the state of an optimizer; None where it is neither.

    They are what lies in the object, not what it says of itself.
    """
    if is_of(value, torch.nn.Module):
        found = _of_module(value)
    elif is_of(value, torch.optim.Optimizer):
        found = _of_optimizer(value)
    else:
        return None
    seen: set[int] = set()
    tensors: list[tuple[str, object]] = []
    parameters: list[object] = []
    for count, (path, part, kind) in enumerate(found):
        if count == MOST_PARTS or len(tensors) == _MOST_TENSORS:
            return Inside(tensors, parameters, is_cut=True)
        if id(part) not in seen and is_of(part, torch.Tensor):
            seen.add(id(part))
            tensors.append((path, part))
            if kind == _PARAMETERS:
                parameters.append(part)
    return Inside(tensors, parameters, is_cut=False)


def _of_module(module: object, path: str = "", seen: set[int] | None = None) -> Iterator[tuple[str, object, str]]:
    """What it has as tensors, and the modules inside it, each with its path and where it has it."""
    seen = {id(module)} if seen is None else seen
    own = _MODULE_VARIABLES.__get__(module)
    for kind in (_PARAMETERS, _BUFFERS):
        for name, tensor in pairs(dict.get(own, kind)):
            yield f"{path}{name}", tensor, kind
    for name, child in children_of(module):
        yield f"{path}{name}", child, _MODULES
        if id(child) not in seen and path.count(".") < _MOST_DEPTH:
            seen.add(id(child))
            yield from _of_module(child, f"{path}{name}.", seen)


def children_of(module: object) -> Iterator[tuple[str, object]]:
    """The modules directly inside a module, with their names."""
    own = _MODULE_VARIABLES.__get__(module)
    return ((name, child) for name, child in pairs(dict.get(own, _MODULES)) if is_of(child, torch.nn.Module))


def _count(part: object) -> int:
    if is_dtensor(part):
        return math.prod(whole_shape(part))
    tensor = as_tensor(part)
    return 0 if tensor is None else tensor.numel()


def _of_optimizer(optimizer: object) -> Iterator[tuple[str, object, str]]:
    state: Any = dict.get(_OPTIMIZER_VARIABLES.__get__(optimizer), "state")
    of_parameters = list(dict.values(state)) if is_of(state, dict) else []
    for number, of_parameter in enumerate(of_parameters[:MOST_PARTS]):
        for name, tensor in pairs(of_parameter):
            yield f"{number}.{name}", tensor, ""


def learning_rates(optimizer: object) -> list[float]:
    """One for each group of an optimizer's parameters, where it is a number."""
    groups = dict.get(_OPTIMIZER_VARIABLES.__get__(optimizer), "param_groups")
    rates: list[Any] = (
        [group.get("lr") for group in groups[:100] if type(group) is dict] if type(groups) is list else []
    )
    return [rate for rate in rates if type(rate) in (int, float)]


def pairs(named: Any) -> list[tuple[str, object]]:
    """What a plain dict has under names; of very many the first, one more than are looked at."""
    if type(named) not in _DICTS:
        return []
    items: list[tuple[Any, object]] = list(itertools.islice(dict.items(named), MOST_PARTS + 1))
    return [(name, value) for name, value in items if type(name) is str]
