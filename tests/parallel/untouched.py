"""A record of a model and all that it can reach, equal before and after a call that leaves the model alone.

``look_of`` follows attributes, containers, hooks, closures and the code of the model's classes. It keeps no tensor,
only digests of values.
"""

from __future__ import annotations

import array
import functools
import gc
import hashlib
import random
import sys
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

__all__ = ["Look", "assert_untouched", "look_of"]

Look = dict[str, str]  # what was found, by its path

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, type(...))
_OTHERS = {*sys.stdlib_module_names, "torch", "numpy"}  # whose own state is not the model's
_MOST = 200_000  # paths; a model that exceeds this refers to objects outside itself


def look_of(model: nn.Module) -> Look:
    """Return everything that a forward of ``model`` could change, by path; an untouched model gives an equal record."""
    look = _Look()
    look.add("model", model)
    look.add("random numbers of torch", torch.random.default_generator)
    look.found["random numbers of random"] = _digest(repr(random.getstate()))
    look.found["random numbers of numpy"] = _digest(repr(np.random.get_state()))
    return look.found


def assert_untouched(model: nn.Module, before: Look) -> None:
    """Check that the model equals ``before``, which is ``look_of(model)`` before the call.

    The error names what has changed.
    """
    after = look_of(model)
    places = [place for place in (before | after) if before.get(place) != after.get(place)]
    lines = [f"{place}: {before.get(place, 'nothing')} -> {after.get(place, 'nothing')}" for place in places]
    assert not lines, f"{len(lines)} places are not as they were:\n" + "\n".join(lines[:20])


class _Look:
    def __init__(self) -> None:
        self.found: Look = {}
        self._seen: dict[int, str] = {}
        self._kept: list[Any] = []  # keeps objects alive, so that no id is reused
        self._waiting: list[tuple[str, Any]] = []

    def add(self, place: str, value: Any) -> None:
        self._waiting.append((place, value))
        while self._waiting:
            self._note(*self._waiting.pop())
            assert len(self.found) < _MOST, place

    def _note(self, place: str, value: Any) -> None:
        if isinstance(value, _PLAIN):
            self.found[place] = f"{type(value).__name__} {value!r}"
            return
        if id(value) in self._seen:
            self.found[place] = f"what {self._seen[id(value)]} is"
            return
        self._seen[id(value)] = place
        self._kept.append(value)
        self.found[place] = f"{type(value).__name__} {self._own(value)}"
        self._waiting += [(f"{place}{name}", part) for name, part in _parts(value)]

    def _own(self, value: Any) -> str:
        """Return a value's own content without its parts; for a mutable object also its identity."""
        if isinstance(value, Tensor):
            return _look_of_tensor(value)
        if isinstance(value, torch.Generator):
            return _digest(value.get_state().numpy().tobytes())
        if isinstance(value, np.ndarray):
            return f"{value.shape} {value.dtype} {_digest(value.tobytes())}"
        if isinstance(value, random.Random):
            return _digest(repr(value.getstate()))
        if isinstance(value, np.random.Generator):
            return _digest(repr(value.bit_generator.state))
        if isinstance(value, np.random.RandomState):
            return _digest(repr(value.get_state()))
        if isinstance(value, functools._lru_cache_wrapper):
            return f"{id(value)} with {_kept_in(value)}"
        if isinstance(value, memoryview):
            return f"{id(value)} {value.tobytes()!r}"
        if isinstance(value, (frozenset, set, weakref.WeakSet)):
            return f"{id(value)} {sorted(map(_name_of_item, value))}"
        if isinstance(value, Iterator) and (state := _state_of(value)):
            return f"{id(value)} {state}"
        if isinstance(value, array.array):
            return f"{id(value)} {value!r}"
        if isinstance(value, types.MethodType):  # created anew at every access
            return ""
        return f"{id(value)}"


def _look_of_tensor(tensor: Tensor) -> str:
    own = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device} {tensor.stride()} {tensor.layout}"
    own += f" wants gradient {tensor.requires_grad} version {tensor._version} leaf {tensor.is_leaf} {id(tensor)}"
    if isinstance(tensor, FakeTensor) or tensor.is_meta or tensor.layout != torch.strided:
        return f"{own} without values"
    values = tensor.detach().cpu().contiguous()
    raw = values.resolve_conj().resolve_neg().flatten().view(torch.uint8) if values.numel() else values
    return f"{own} at {tensor.data_ptr()} {_digest(raw.numpy().tobytes())}"


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield everything reachable from a value, with its path."""
    if isinstance(value, type):
        yield from _parts_of_class(value)
        return
    if isinstance(value, types.ModuleType):
        return
    if isinstance(value, Tensor):
        yield from ((f".{name}", part) for name, part in vars(value).items())
        if value.is_leaf and value.grad is not None:
            yield ".grad", value.grad
        yield from (
            (f".{hooks}", getattr(value, hooks))
            for hooks in ("_backward_hooks", "_post_accumulate_grad_hooks")
            if getattr(value, hooks, None)
        )
        return
    if isinstance(value, (types.FunctionType, functools._lru_cache_wrapper)):
        yield from _parts_of_function(value)
        return
    if isinstance(value, types.MethodType):
        yield from ((".__func__", value.__func__), (".__self__", value.__self__))
        return
    if isinstance(value, functools.partial):
        yield from ((".func", value.func), (".args", value.args), (".keywords", value.keywords))
    if isinstance(value, (staticmethod, classmethod)):
        yield ".__func__", value.__func__
        return
    if isinstance(value, property):
        yield from ((f".{each}", getattr(value, each)) for each in ("fget", "fset") if getattr(value, each))
        return
    if isinstance(value, types.CellType):
        try:
            yield ".cell_contents", value.cell_contents
        except ValueError:  # an empty cell
            pass
        return
    if isinstance(value, Mapping):
        try:
            yield from ((f"[{_name_of_item(key)}]", part) for key, part in value.items())
        except Exception:  # noqa: BLE001 - one that cannot be looked through is what its attributes are
            pass
        yield ".keys", " ".join(map(_name_of_item, value)) if isinstance(value, dict) else ""
    elif isinstance(value, (list, tuple)) or type(value).__name__ == "deque":
        yield ".length", len(value)
        yield from ((f"[{index}]", part) for index, part in enumerate(value))
    if type(value).__module__.partition(".")[0] in _OTHERS and not isinstance(value, nn.Module):
        if isinstance(value, (dict, list, tuple, set, functools.partial)) or type(value).__name__ == "SimpleNamespace":
            yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())
        return
    yield from ((f".{name}", part) for name, part in getattr(value, "__dict__", {}).items())
    for owner in type(value).__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for slot in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, slot) and slot not in ("__dict__", "__weakref__"):
                yield f".{slot}", getattr(value, slot)
    if isinstance(value, nn.Module):
        yield ".__class__", type(value)


def _parts_of_class(owner: type) -> Iterator[tuple[str, Any]]:
    for base in owner.__mro__:
        if not issubclass(base, nn.Module) or base.__module__.partition(".")[0] in _OTHERS:
            continue
        for name, part in list(vars(base).items()):
            if not name.startswith("__") or name in ("__init__", "__call__"):
                yield f"<{base.__qualname__}>.{name}", part


def _parts_of_function(function: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(function, functools._lru_cache_wrapper):
        yield ".__wrapped__", function.__wrapped__
        return
    if (function.__module__ or "").partition(".")[0] in _OTHERS:
        return
    yield ".__defaults__", function.__defaults__
    yield ".__kwdefaults__", function.__kwdefaults__
    yield from ((f".{name}", part) for name, part in vars(function).items() if name != "__wrapped__")
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or ()):
        yield f".<{name}>", cell
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        is_of_the_file = isinstance(value, types.FunctionType) and value.__module__ == function.__module__
        if is_of_the_file or isinstance(value, (functools._lru_cache_wrapper, dict, list, set)):
            yield f".<global {name}>", value


def _state_of(value: Any) -> str:
    """Return the state of an iterator and of those that it reads from."""
    try:
        parts = value.__reduce__()
    except TypeError:
        return ""
    leaves = tree_leaves(parts)
    return " ".join(_state_of(each) if isinstance(each, Iterator) else repr(each) for each in leaves)


def _kept_in(cache: Any) -> str:
    """Return the tensors in a functools cache; the links of its list have no named type."""
    seen: set[int] = set()
    waiting = [part for part in gc.get_referents(cache) if part is not cache.__wrapped__ and part is not vars(cache)]
    found = []
    while waiting:
        value = waiting.pop()
        if id(value) in seen or isinstance(value, (type, types.ModuleType, types.FunctionType, nn.Module)):
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            has_values = not (isinstance(value, FakeTensor) or value.is_meta)
            found.append(f"{type(value).__name__} {id(value)}{'' if has_values else ' without values'}")
        elif isinstance(value, (dict, list, tuple)) or type(value).__name__ == "_lru_list_elem":
            waiting += gc.get_referents(value)
    return ", ".join(sorted(found)) or "no tensors"


def _name_of_item(value: Any) -> str:
    return repr(value) if isinstance(value, (*_PLAIN, tuple)) else f"{type(value).__name__} {id(value)}"


def _digest(data: str | bytes) -> str:
    return hashlib.sha256(data.encode() if isinstance(data, str) else data).hexdigest()[:12]
