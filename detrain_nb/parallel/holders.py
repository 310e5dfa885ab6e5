"""Objects that hold modules from outside the module tree, and copies of a model that hold other modules instead.

These are containers, objects, functions with their closures, methods and `functools.partial`. Objects that lead to
no copied module are shared by all copies.
"""

from __future__ import annotations

import copy
import functools
import itertools
import types
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .blocks import StandIn
from .search import has_state
from .undo import MISSING, OF_MODULES, OPEN, contents_in, contents_of, contents_of_slot, refill, slots_of

_MOST_DEEP = 8  # steps from an attribute to a module: deeper objects are not the model's
_WORDS = frozenset((bool, int, float, str, bytes, type(None)))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, Tensor, torch.dtype, torch.device, types.ModuleType)
_HOOKS = frozenset(key for key in OF_MODULES if key.endswith("_hooks"))


def follow_copies(copies: Mapping[int, nn.Module], found: Mapping[int, nn.Module]) -> None:
    """Make the attributes and hooks of ``copies`` refer to these where they referred to the originals ``found``.

    Objects in between, such as one that holds a module, are copied too; the user's own ones stay unchanged.
    """
    held = [(made, key, value) for made in copies.values() for key, value in _held_by(made)]
    follow = _Following(copies, found, [value for _, _, value in held])
    for made, key, value in held:
        if key in _HOOKS:
            getattr(made, key).update({number: follow(hook) for number, hook in value.items()})
        elif (followed := follow(value)) is not value:
            object.__setattr__(made, key, followed)


def _held_by(made: nn.Module) -> Iterable[tuple[str, Any]]:
    if isinstance(made, StandIn):
        return
    for key, value in list(vars(made).items()):
        if key in _HOOKS:
            if value:
                yield key, value
        elif not (key in OF_MODULES or isinstance(value, _PLAIN) or holds_words_alone(value)):
            yield key, value
    for slot in slots_of(type(made)):
        yield slot.__name__, contents_of_slot(made, slot)


def _parts_of(value: Any) -> Iterable[Any]:
    return (part for part in _all_parts_of(value) if not isinstance(part, _PLAIN))


def _all_parts_of(value: Any) -> Iterable[Any]:
    if holds_words_alone(value):
        return
    if isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, types.FunctionType):
        yield from (value.__defaults__, value.__kwdefaults__, *map(contents_of, value.__closure__ or ()))
        yield from vars(value).values()
    elif isinstance(value, functools.partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, functools._lru_cache_wrapper):
        yield value.__wrapped__
    elif type(value) is weakref.ref:
        yield value()
    elif isinstance(value, (tuple, frozenset)):
        yield from value
    elif isinstance(value, OPEN) or has_state(value):
        yield from contents_in(value)
        yield from (held.values() if isinstance(held := getattr(value, "__dict__", None), dict) else ())
        yield from (contents_of_slot(value, slot) for slot in slots_of(type(value)))


def holds_words_alone(value: Any) -> bool:
    """Return whether a container has only strings and numbers, or rows of them, as a vocabulary has."""
    if type(value) not in (list, tuple, dict, set, frozenset):
        return False
    held = (*value, *value.values()) if isinstance(value, dict) else value
    rows = [each for each in held if type(each) not in _WORDS]
    return all(type(each) in (list, tuple) for each in rows) and _WORDS.issuperset(map(type, itertools.chain(*rows)))


class _Following:
    """Function that maps objects to their copies if they lead to modules; ``roots`` are all such objects."""

    def __init__(self, copies: Mapping[int, nn.Module], found: Mapping[int, nn.Module], roots: Iterable[Any]) -> None:
        self._copies, self._found = copies, found
        self._made: dict[int, Any] = {}
        self._kept: list[Any] = []  # keeps ids valid
        self._leading = self._find_leading(roots)

    def _find_leading(self, roots: Iterable[Any]) -> set[int]:
        """Return the ids of objects that lead to a found module, by going back from it to all holders."""
        holders: dict[int, list[int]] = {}
        level = list(roots)
        for _ in range(_MOST_DEEP):
            self._kept += level
            deeper = []
            for value in level:
                for part in () if id(value) in self._found else _parts_of(value):
                    if id(part) not in holders:
                        deeper.append(part)
                    holders.setdefault(id(part), []).append(id(value))
            level = deeper
        self._kept += level
        leading, waiting = set[int](), [*self._found]
        while waiting:
            each = waiting.pop()
            if each not in leading:
                leading.add(each)
                waiting += holders.get(each, ())
        return leading

    def __call__(self, value: Any) -> Any:
        if id(value) in self._found:
            return self._copies[id(value)]
        if id(value) not in self._leading:
            return value
        if id(value) not in self._made:
            made = self._copied(value)
            self._made.setdefault(id(value), made)  # unless a cycle made it already
        return self._made[id(value)]

    def _copied(self, value: Any) -> Any:
        if isinstance(value, types.MethodType):
            return self._method(value)
        if isinstance(value, types.FunctionType):
            return self._function(value)
        if isinstance(value, functools.partial):
            keywords = {key: self(each) for key, each in value.keywords.items()}
            return type(value)(self(value.func), *map(self, value.args), **keywords)
        if isinstance(value, functools._lru_cache_wrapper):
            return functools.lru_cache(**value.cache_parameters())(self(value.__wrapped__))
        if isinstance(value, weakref.ref):
            target = value()
            return weakref.ref(self(target)) if id(target) in self._found else value  # a copy would be deleted
        if isinstance(value, (tuple, frozenset)):
            parts = map(self, value)
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return self._open(value)

    def _method(self, method: types.MethodType) -> Any:
        owner, name = self(method.__self__), getattr(method.__func__, "__name__", "")
        if isinstance(owner, StandIn) and getattr(type(method.__self__), name, None) is method.__func__:
            return getattr(owner, name)
        return types.MethodType(self(method.__func__), owner)

    def _function(self, function: types.FunctionType) -> types.FunctionType:
        cells = function.__closure__ or ()
        own = tuple(types.CellType() if id(contents_of(cell)) in self._leading else cell for cell in cells)
        made = types.FunctionType(function.__code__, function.__globals__, function.__name__, None, own)
        self._made[id(function)] = made  # before its cells, which may refer to it
        made.__defaults__ = self(function.__defaults__)
        made.__kwdefaults__ = self(function.__kwdefaults__)
        made.__dict__.update({key: self(each) for key, each in vars(function).items()})
        for cell, mine in zip(cells, own):
            if mine is not cell:
                mine.cell_contents = self(contents_of(cell))
        return made

    def _open(self, value: Any) -> Any:
        """Return a copy of a container or object, or itself if its class cannot be copied."""
        owner: Any = type(value)
        is_container = isinstance(value, OPEN)
        try:
            made = object.__new__(owner) if not is_container and owner.__new__ is object.__new__ else copy.copy(value)
        except Exception:  # noqa: BLE001 - the configurations of diffusers cannot be copied
            return value
        if made is value:
            return value
        self._made[id(value)] = made  # before its contents, which may refer to it
        if is_container:
            refill(made, map(self, contents_in(value)))
        if isinstance(held := getattr(value, "__dict__", None), dict):
            made.__dict__.update({key: self(each) for key, each in held.items()})
        for slot in slots_of(owner):  # bypasses __setattr__ of its class
            if (each := contents_of_slot(value, slot)) is not MISSING:
                slot.__set__(made, self(each))
        return made
