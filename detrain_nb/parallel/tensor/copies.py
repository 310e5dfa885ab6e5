"""Copies of modules and of their arguments, with the same treatment of objects that cannot be copied."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..holders import follow_copies, holds_words_alone
from ..undo import own_attributes

Value = TypeVar("Value")
_MOST_COPIED = 1000  # words


def copied(module: nn.Module, *, shared: Iterable[Tensor] = ()) -> nn.Module:
    """Copy ``module``, except the tensors in ``shared``.

    A tensor that its code has kept from a pass, such as an auxiliary loss, has no gradient in the copy. A lock is
    replaced by a new one, as the ranks of a proof are threads. Other attributes that cannot be copied, and
    vocabularies, are shared.
    """
    known: dict[int, Any] = {id(tensor): tensor for tensor in shared}
    for value in _attributes_of(module):
        if holds_words_alone(value):
            if len(value) > _MOST_COPIED:
                known[id(value)] = value
            continue
        for leaf in tree_leaves(value):
            if isinstance(leaf, Tensor) and not leaf.is_leaf:
                known[id(leaf)] = leaf.detach().clone()
            elif type(leaf) in _LOCKS:
                known[id(leaf)] = _LOCKS[type(leaf)]()
    try:
        return _copied_with_what_leads_to_it(module, dict(known))
    except Exception:  # noqa: BLE001 - a user's object may raise anything: find which one
        for value in _attributes_of(module):
            try:
                copy.deepcopy(value, dict(known))
            except Exception:  # noqa: BLE001 - as above
                known[id(value)] = value
    return _copied_with_what_leads_to_it(module, known)


def _copied_with_what_leads_to_it(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Deepcopy, and redirect weak references and functions to the copy, which ``deepcopy`` leaves as they are."""
    made = copy.deepcopy(module, memo)
    found = {id(each): each for each in memo.get(id(memo), ()) if isinstance(each, nn.Module)}
    follow_copies({key: memo[key] for key in found}, found)
    return made


def copied_or_shared(value: Value) -> Value:
    """Copy an argument of a module, or return it if it cannot be copied."""
    try:
        return _LOCKS[type(value)]() if type(value) in _LOCKS else copy.deepcopy(value)
    except Exception:  # noqa: BLE001 - an object of the user's may raise anything
        return value


_LOCKS: dict[type, Callable[[], Any]] = {type(make()): make for make in (threading.Lock, threading.RLock)}


def _attributes_of(module: nn.Module) -> Iterator[Any]:
    """Yield what the user's code has stored in the module and in its submodules."""
    for part in module.modules():
        yield from own_attributes(part).values()
