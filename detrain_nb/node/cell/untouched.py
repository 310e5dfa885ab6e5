"""Inspection of values without running any code of their class: no ``__repr__``, ``__len__``, property or hook.

``isinstance`` and plain attribute access can run code of the class; the C functions that Python and torch have for
their own types do not.
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
_PARAMETERS, _BUFFERS, _MODULES = "_parameters", "_buffers", "_modules"  # where a module keeps what
_MOST_TENSORS = 20_000  # of a module
MOST_PARTS = 50_000  # modules and tensors that are inspected
_MOST_NAME_CHARS = 200
_MOST_DEPTH = 50  # of modules in modules


def bases_of(kind: type) -> tuple[type, ...]:
    """Return the class and all its bases."""
    found: tuple[type, ...] = _TYPE["__mro__"].__get__(kind)
    return found


def is_of(value: object, kind: type) -> bool:
    """Return whether its class is ``kind`` or derived from it, whatever the class claims."""
    return kind in bases_of(type(value))


def name_of(kind: type) -> str:
    """Return the name of a class, without its module."""
    return _plain_text(_TYPE["__name__"].__get__(kind))[:_MOST_NAME_CHARS]


def _plain_text(text: str) -> str:
    """Return the same characters as a plain str: a class name may be an instance of a user's str subclass."""
    return text if type(text) is str else "".join(str.__iter__(text))


def module_of(kind: type) -> str:
    """Return the module of a class; empty if it is not a plain name."""
    name = _TYPE["__module__"].__get__(kind)
    return name if type(name) is str else ""


def loaded(module: str, name: str) -> Any:
    """Return a class if its module has been imported; else None."""
    return vars(sys.modules[module]).get(name) if module in sys.modules else None


def is_dtensor(value: object) -> bool:
    """Return whether it is a DTensor itself; a derived class is the user's."""
    return type(value) is loaded("torch.distributed.tensor", "DTensor")


def is_table(value: object) -> bool:
    """Return whether it is a DataFrame of pandas or polars itself."""
    return any(type(value) is loaded(module, "DataFrame") for module in ("pandas", "polars"))


def variables_of(value: object) -> dict[str, object]:
    """Return the attributes set on an object; empty if its class keeps them elsewhere."""
    for base in reversed(bases_of(type(value))):
        slot = _TYPE["__dict__"].__get__(base).get("__dict__")
        if type(slot) is types.GetSetDescriptorType:
            return dict(pairs(slot.__get__(value)))
    return {}


@contextmanager
def plain_torch() -> Iterator[None]:
    """Use torch's own operators, without any class, hook or mode of the user."""
    with ExitStack() as entered:
        entered.enter_context(torch.no_grad())
        entered.enter_context(torch._C.DisableTorchFunction())
        if modes := loaded("torch.utils._python_dispatch", "_disable_current_modes"):
            entered.enter_context(modes())
        yield


def as_tensor(value: object) -> torch.Tensor | None:
    """Return a plain tensor that shares the memory of ``value``; None if its class defines what the elements are.

    For a DTensor, this is its part on this rank. Called inside ``plain_torch``.
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
    """Return a plain array that shares the memory of ``value``; None for a masked array."""
    if not (array := loaded("numpy", "ndarray")) or array not in bases_of(type(value)):
        return None
    return None if loaded("numpy.ma", "MaskedArray") in bases_of(type(value)) else array.view(value, array)


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether its elements are in one storage, each stored as its dtype."""
    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def layout_of(value: object) -> dict[str, Any] | None:
    """Return how a DTensor is placed on its mesh: the sizes of the mesh, a placement for each, this rank's coordinates.

    ``kinds``: shard, copy, or partial (a sum whose terms are on the ranks).
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
    """Return the shape of a DTensor over all ranks."""
    return [int(size) for size in _slot(value, "_spec").shape]


def _slot(value: object, name: str) -> Any:
    return type(value).__dict__[name].__get__(value)


class Inside(NamedTuple):
    """Tensors, each once and with its path; ``parameters`` are those registered as parameters of a module.

    ``is_cut``: there may be more, as only the first ones were inspected.
    """

    tensors: list[tuple[str, object]]
    parameters: list[object]
    is_cut: bool

    def counted(self, number: int) -> str:
        """Format ``number``, a count over the tensors."""
        return f"{'at least ' if self.is_cut else ''}{number:,}"

    def count_numbers(self) -> str:
        """Return the number of elements of all parameters, over all ranks. Called inside ``plain_torch``."""
        return self.counted(sum(map(_count, self.parameters)))


def tensors_of(value: object) -> Inside | None:
    """Return the parameters and buffers of a module, or the state of an optimizer; None for other values.

    They are read from the object itself, not from its methods.
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
    """Yield the tensors of a module and the modules inside it, each with its path and the place it is kept in."""
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
    """Return the modules directly inside a module, with their names."""
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
    """Return the learning rate of each parameter group, if it is a number."""
    groups = dict.get(_OPTIMIZER_VARIABLES.__get__(optimizer), "param_groups")
    rates: list[Any] = (
        [group.get("lr") for group in groups[:100] if type(group) is dict] if type(groups) is list else []
    )
    return [rate for rate in rates if type(rate) in (int, float)]


def pairs(named: Any) -> list[tuple[str, object]]:
    """Return the named items of a plain dict; of very many, one more than are inspected."""
    if type(named) not in _DICTS:
        return []
    items: list[tuple[Any, object]] = list(itertools.islice(dict.items(named), MOST_PARTS + 1))
    return [(name, value) for name, value in items if type(name) is str]
