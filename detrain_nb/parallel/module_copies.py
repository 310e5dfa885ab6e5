"""Copies of modules: with the same tensors, or with others in their places."""

from __future__ import annotations

import contextlib
import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from .compiled import leave_as_written
from .holders import follow_copies, holds_words_alone
from .recorders import TensorMemo
from .undo import MISSING, OPEN, contents_of_slot, slots_of


def shallow_copy(module: nn.Module) -> nn.Module:
    """Return a copy of a module with the same tensors and children, but dictionaries of its own."""
    copied: nn.Module = module.__class__.__new__(module.__class__)
    copied.__dict__.update(
        {
            key: _own(value) if key.startswith("_") and isinstance(value, (dict, set)) else value
            for key, value in module.__dict__.items()
        }
    )
    for slot in slots_of(module.__class__):
        if (held := contents_of_slot(module, slot)) is not MISSING:
            slot.__set__(copied, held)
    return copied


def _own(container: Any) -> Any:
    """Return a shallow copy of a container with its attributes, or itself if its class cannot be copied."""
    kind = type(container)
    # The usual kinds; `copy` is slow for an OrderedDict.
    if kind in _COPIED and not getattr(container, "__dict__", None):
        return kind(container)
    try:
        return copy.copy(container)
    except Exception:  # noqa: BLE001 - the configurations of diffusers cannot be copied
        return container


_COPIED = (dict, OrderedDict, list, set)


class _OwnSubclass:
    """Base placed before a user's class in ours, so that the user's ``__init_subclass__`` is not called."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


def make_subclass(base: type[nn.Module], name: str, own: dict[str, Any], *before: type[nn.Module]) -> type[nn.Module]:
    """Return a class with the members ``own`` and the bases ``before`` and ``base``, a user's class or ours."""
    first = () if issubclass(base, _OwnSubclass) else (_OwnSubclass,)
    return type(name, (*before, *first, base), own)


def ghost_of(module: nn.Module, make: TensorMemo | None = None) -> nn.Module:
    """Return a deep copy of a module with its tensors on the meta device; shared parts stay shared.

    ``make``: function that makes other tensors than these.
    """
    copies: dict[int, nn.Module] = {}
    found: dict[int, nn.Module] = {}
    to_meta = make or TensorMemo(_as_ghost)

    def copied(inner: nn.Module) -> nn.Module:
        if id(inner) not in copies:
            found[id(inner)] = inner
            ghost = copies[id(inner)] = shallow_copy(inner)
            are_shared = ((key, value) for key, value in ghost.__dict__.items() if inner.__dict__.get(key) is value)
            # Copied, as its code may write into the containers, which are the user's.
            own = {key: _own(value) for key, value in are_shared if isinstance(value, OPEN)}
            ghost.__dict__.update(own)
            ghost._modules.update({key: copied(child) for key, child in inner._modules.items() if child is not None})
            for tensors in (ghost._parameters, ghost._buffers):
                tensors.update({key: to_meta(tensor) for key, tensor in tensors.items()})
            leave_as_written(ghost)
        return copies[id(inner)]

    # Active modes would make each tensor a hundred times slower.
    with _disable_current_modes() if make is None else contextlib.nullcontext():
        made = copied(module)
    follow_copies(copies, found)
    return made


def replace_tensors(module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace tensors in all attributes of a module, even in containers, such as the lists of recurrent layers."""
    for key, value in module.__dict__.items():
        if not holds_words_alone(value) and any(
            isinstance(leaf, Tensor) and change(leaf) is not leaf for leaf in tree_leaves(value)
        ):
            module.__dict__[key] = tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf, value)


def _as_ghost(tensor: Tensor) -> Tensor:
    made = torch.empty_like(tensor, device="meta", requires_grad=False)
    return nn.Parameter(made, requires_grad=False) if isinstance(tensor, nn.Parameter) else made


def zeros_without_memory(like: Tensor, device: torch.device) -> Tensor:
    with torch.inference_mode(False):  # a training pass may save these zeros for backward
        return torch.zeros((), dtype=like.dtype, device=device).expand(like.shape)
