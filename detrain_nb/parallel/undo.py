"""What is noted of a place that code may write into; each note gives what puts it back.

What is not the model's own may say what was done once and for all: of it only what tensors came to is put back.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import operator
import types
import warnings
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "MISSING",
    "REFILLED",
    "Dict",
    "StandIns",
    "Undo",
    "attributes_of",
    "contents_of",
    "note_cell",
    "note_class",
    "note_dicts",
    "note_items",
    "note_names",
    "note_slot",
    "note_tensor",
]

Undo = Callable[[], None]

MISSING: Any = object()
REFILLED = (list, set, deque, bytearray)
_OF_EVERY_CLASS = ("__dict__", "__weakref__", "__doc__", "__module__", "_abc_impl", "__slotnames__")


class StandIns:
    """For what cannot be put back: an empty cache, or an iterator that goes on from the same place."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}  # the original too, so that its id stays its own

    def of(self, value: Any) -> Any:
        """``value`` itself where it needs none."""
        if type(value) not in _WITH_STAND_IN:
            return value
        if id(value) not in self._made:
            self._made[id(value)] = value, _make_stand_in(value)
        return self._made[id(value)][1]

    def of_all(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """By their keys, those that there are."""
        if _WITH_STAND_IN.isdisjoint(map(type, values.values())):  # as a rule, and quicker
            return {}
        made = {key: self.of(value) for key, value in values.items()}
        return {key: each for key, each in made.items() if each is not values[key]}


_COUNTING: tuple[type, ...] = (itertools.count, itertools.repeat, type(iter(())), type(iter([])), type(iter(range(0))))
_WITH_STAND_IN = frozenset((functools._lru_cache_wrapper, staticmethod, classmethod, property, *_COUNTING))


def _make_stand_in(value: Any) -> Any:
    if isinstance(value, functools._lru_cache_wrapper):
        made: Any = functools.lru_cache(**value.cache_parameters())(value.__wrapped__)
        vars(made).update(vars(value))
        return made
    if isinstance(value, (staticmethod, classmethod)):
        inner = _make_stand_in(value.__wrapped__)
        return value if inner is value.__wrapped__ else type(value)(inner)
    if isinstance(value, property):
        inner = _make_stand_in(value.fget)
        return value if inner is value.fget else value.getter(inner)
    if isinstance(value, _COUNTING):
        with contextlib.suppress(TypeError), warnings.catch_warnings():  # a later Python copies none
            warnings.simplefilter("ignore", DeprecationWarning)
            return copy.copy(value)
    return value


Dict = tuple[Any, Any, bool]  # its class that changes it, the dictionary, and whether it is the model's own


def note_dicts(dicts: Sequence[Dict], stand_ins: StandIns) -> Undo:
    """Of many, most of which are empty, as those of hooks are."""
    empty, notes = list[Dict](), list[Undo]()
    for base, value, is_own in dicts:
        if base.__len__(value):
            notes.append(_note_dict(base, value, stand_ins, is_own=is_own))
        else:
            empty.append((base, value, is_own))

    def undo() -> None:
        for base, value, is_own in empty:
            if base.__len__(value) and (is_own or _has_tensor(value)):
                base.clear(value)
        for each in notes:
            each()

    return undo


def _note_dict(base: Any, value: Any, stand_ins: StandIns, *, is_own: bool) -> Undo:
    was = dict(base.items(value))
    for key, stand_in in stand_ins.of_all(was).items():
        base.__setitem__(value, key, stand_in)
    given = dict(base.items(value))

    def undo() -> None:
        is_same = len(was) == base.__len__(value) and all(map(operator.is_, base.values(value), was.values()))
        if is_same and all(map(operator.is_, base.keys(value), was)):
            return
        now = dict(base.items(value))
        if is_own or _has_tensor([each for key, each in now.items() if each is not given.get(key, MISSING)]):
            base.clear(value)
            for key, each in was.items():
                base.__setitem__(value, key, each)
            return
        for key, each in now.items():  # of others, who have learnt something
            if each is given.get(key, MISSING) and each is not was[key]:
                base.__setitem__(value, key, was[key])

    return undo


def note_items(base: Any, value: Any, *, is_own: bool) -> Undo:
    was = list(base.__iter__(value))

    def undo() -> None:
        now = list(base.__iter__(value))
        if len(now) == len(was) and all(map(operator.is_, now, was)):
            return
        ids = set(map(id, was))
        if is_own or _has_tensor([each for each in now if id(each) not in ids]):
            base.clear(value)
            (base.update if base is set else base.extend)(value, was)

    return undo


def note_tensor(tensor: Tensor) -> Undo:
    """What it is beside its values; without these it counts writes all the same."""
    is_leaf, requires_grad = tensor.is_leaf, tensor.requires_grad
    grad, hooks = (tensor.grad, tensor._backward_hooks) if is_leaf else (None, None)
    writes = None if tensor.is_inference() else tensor._version

    def undo() -> None:
        if writes is not None and tensor._version != writes:
            torch._C._autograd._unsafe_set_version_counter((tensor,), (writes,))
        if not is_leaf:
            return
        if tensor.requires_grad != requires_grad:
            tensor.requires_grad_(requires_grad)
        if tensor.grad is not grad:
            tensor.grad = grad
        if tensor._backward_hooks is not hooks:
            tensor._backward_hooks = hooks

    return undo


def note_class(owner: type, stand_ins: StandIns, *, is_own: bool) -> Undo:
    was = attributes_of(owner)
    given = {**was, **(made := stand_ins.of_all(was))}
    for name, each in made.items():
        type.__setattr__(owner, name, each)

    def undo() -> None:
        now = attributes_of(owner)
        for name in (*now, *(was.keys() - now.keys())):
            found = now.get(name, MISSING)
            if found is was.get(name, MISSING) or not (is_own or found is given.get(name) or _has_tensor(found)):
                continue
            type.__setattr__(owner, name, was[name]) if name in was else type.__delattr__(owner, name)

    return undo


def note_slot(value: Any, slot: str, _: StandIns) -> Undo:
    was = getattr(value, slot, MISSING)

    def undo() -> None:
        if getattr(value, slot, MISSING) is not was:
            object.__delattr__(value, slot) if was is MISSING else object.__setattr__(value, slot, was)

    return undo


def note_cell(cell: types.CellType, stand_ins: StandIns) -> Undo:
    was = contents_of(cell)
    if was is MISSING:
        return lambda: None
    if (stand_in := stand_ins.of(was)) is not was:
        cell.cell_contents = stand_in
    return functools.partial(setattr, cell, "cell_contents", was)


def note_names(namespace: dict[str, Any], names: Sequence[str], stand_ins: StandIns) -> Undo:
    was = {name: namespace.get(name, MISSING) for name in names}
    given = {**was, **(made := stand_ins.of_all(was))}
    namespace.update(made)

    def undo() -> None:
        for name, each in given.items():
            now = namespace.get(name, MISSING)
            if now is each and each is was[name] or now is not each and not _has_tensor(now):
                continue
            if was[name] is MISSING:
                del namespace[name]
            else:
                namespace[name] = was[name]

    return undo


def attributes_of(owner: type) -> dict[str, Any]:
    return {name: each for name, each in vars(owner).items() if name not in _OF_EVERY_CLASS}


def contents_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return MISSING


def _has_tensor(value: Any, depth: int = 6) -> bool:
    """Whether there is one in it: in containers, and in attributes of objects."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, (str, bytes, type, types.ModuleType, types.FunctionType)) or not depth:
        return False
    parts: Any = value.values() if isinstance(value, dict) else value if isinstance(value, _CONTAINERS) else ()
    return any(_has_tensor(each, depth - 1) for each in (*parts, *getattr(value, "__dict__", {}).values()))


_CONTAINERS = (*REFILLED, tuple, frozenset)
