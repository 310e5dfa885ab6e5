"""Copies of modules: with the same tensors, or with others in their places."""

from __future__ import annotations

import copy
import itertools
import types
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .blocks import StandIn
from .compiled import leave_as_written
from .recording import TensorMemo

__all__ = [
    "follow_copies",
    "ghost_of",
    "holds_words_alone",
    "replace_tensors",
    "shallow_copy",
    "zeros_without_memory",
]


def shallow_copy(module: nn.Module) -> nn.Module:
    """Another module with the same tensors and children, whose dictionaries are its own."""
    copied: nn.Module = module.__class__.__new__(module.__class__)
    copied.__dict__.update(
        {
            key: _own(value) if key.startswith("_") and isinstance(value, (dict, set)) else value
            for key, value in module.__dict__.items()
        }
    )
    for slot in _slots_of(module.__class__):
        if hasattr(module, slot):
            setattr(copied, slot, getattr(module, slot))
    return copied


def _own(container: Any) -> Any:
    """Another one with the same in it, and the same attributes; itself, where its class lets nobody set items."""
    try:
        return copy.copy(container)
    except Exception:  # noqa: BLE001 - as the configurations of diffusers do
        return container


def _slots_of(owner: type) -> list[str]:
    members = (each for base in owner.__mro__ for each in vars(base).items())
    return [name for name, each in members if isinstance(each, types.MemberDescriptorType)]


def follow_copies(copies: Mapping[int, nn.Module], found: Mapping[int, nn.Module]) -> None:
    """Have the attributes and hooks of ``copies`` lead to these too, where they led to ``found``, which were copied.

    In containers, as the one whose a method is, and in what a function has of where it was made.
    """
    functions: dict[int, types.FunctionType] = {}

    def follow(leaf: Any) -> Any:
        if isinstance(leaf, types.MethodType) and id(leaf.__self__) in found:
            made, name = copies[id(leaf.__self__)], getattr(leaf.__func__, "__name__", "")
            if isinstance(made, StandIn) and getattr(type(leaf.__self__), name, None) is leaf.__func__:
                return getattr(made, name)
            return types.MethodType(leaf.__func__, made)
        if isinstance(leaf, types.FunctionType):
            return follow_function(leaf) if _leads_to(leaf, found, set()) else leaf
        return copies[id(leaf)] if id(leaf) in found else leaf

    def follow_function(function: types.FunctionType) -> types.FunctionType:
        if id(function) not in functions:
            cells = function.__closure__ or ()
            own = tuple(types.CellType() if _leads_to(_in(cell), found, set()) else cell for cell in cells)
            made = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, own)
            functions[id(function)] = made  # which may be in a cell of its own
            made.__defaults__ = function.__defaults__ and tuple(map(follow, function.__defaults__))
            made.__kwdefaults__ = function.__kwdefaults__
            made.__dict__.update(function.__dict__)
            for cell, mine in zip(cells, own):
                if mine is not cell:
                    mine.cell_contents = follow(_in(cell))
        return functions[id(function)]

    for made in copies.values():
        if isinstance(made, StandIn):
            continue
        for key, value in list(vars(made).items()):
            if key in _OF_MODULES or isinstance(value, _PLAIN) or holds_words_alone(value):
                if key in _HOOKS:
                    value.update({number: follow(hook) for number, hook in value.items()})
                continue
            leaves = tree_leaves(value)
            if any(follow(leaf) is not leaf for leaf in leaves):
                made.__dict__[key] = tree_map(follow, value)


def _leads_to(value: Any, found: Mapping[int, nn.Module], seen: set[int]) -> bool:
    """Whether it is one of ``found``, or a function of them."""
    if isinstance(value, types.MethodType):
        return id(value.__self__) in found
    if not isinstance(value, types.FunctionType):
        return id(value) in found
    if id(value) in seen:
        return False
    seen.add(id(value))
    held = (*map(_in, value.__closure__ or ()), *(value.__defaults__ or ()))
    return any(_leads_to(each, found, seen) for each in held)


def _in(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing is there so far
        return None


def holds_words_alone(value: Any) -> bool:
    """Whether a container has nothing but words and numbers in it, or rows of these, as a vocabulary has."""
    if type(value) not in (list, tuple, dict, set, frozenset):
        return False
    held = value.values() if isinstance(value, dict) else value
    rows = [each for each in held if type(each) not in _WORDS]
    return all(type(each) in (list, tuple) for each in rows) and _WORDS.issuperset(map(type, itertools.chain(*rows)))


_WORDS = frozenset((bool, int, float, str, bytes, type(None)))
_PLAIN = (bool, int, float, str, type(None), Tensor)


class _OwnSubclass:
    """Before a user's class among the bases of one that is made of it: its ``__init_subclass__`` is not for ours."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def make_subclass(base: type[nn.Module], name: str, own: dict[str, Any], *before: type[nn.Module]) -> type[nn.Module]:
    """Return a class with what ``own`` has, and what ``before`` and ``base``, a user's class or made of one, have."""
    first = () if issubclass(base, _OwnSubclass) else (_OwnSubclass,)
    return type(name, (*before, *first, base), own)


_OF_MODULES = frozenset(vars(nn.Module()))  # hooks, parameters, children: these have been copied
_HOOKS = frozenset(key for key in _OF_MODULES if key.endswith("_hooks"))

# A ghost has its own of these too: its code may write into those of the module, which are the user's.
_OPEN = (list, dict, set, deque)


def ghost_of(module: nn.Module, make: TensorMemo | None = None) -> nn.Module:
    """A copy of a module, and of all in it, whose tensors are on the meta device; what is shared stays shared.

    ``make``: gives other tensors than those.
    """
    copies: dict[int, nn.Module] = {}
    found: dict[int, nn.Module] = {}
    to_meta = make or TensorMemo(_as_ghost)

    def copied(inner: nn.Module) -> nn.Module:
        if id(inner) not in copies:
            found[id(inner)] = inner
            ghost = copies[id(inner)] = shallow_copy(inner)
            own = {key: _own(value) for key, value in ghost.__dict__.items() if isinstance(value, _OPEN)}
            ghost.__dict__.update(own)
            ghost._modules.update({key: copied(child) for key, child in inner._modules.items() if child is not None})
            for tensors in (ghost._parameters, ghost._buffers):
                tensors.update({key: to_meta(tensor) for key, tensor in tensors.items()})
            leave_as_written(ghost)
        return copies[id(inner)]

    made = copied(module)
    follow_copies(copies, found)
    return made


def replace_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """In all attributes, and in what these contain: recurrent layers have their parameters in a list too."""
    for key, value in module.__dict__.items():
        if not holds_words_alone(value) and any(
            isinstance(leaf, Tensor) and change(leaf) is not leaf for leaf in tree_leaves(value)
        ):
            module.__dict__[key] = tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, value)


def _as_ghost(tensor: Tensor) -> Tensor:
    made = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


def zeros_without_memory(like: Tensor, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # they are kept, and a training pass may save them
        return torch.zeros((), dtype=like.dtype, device=device).expand(like.shape)
