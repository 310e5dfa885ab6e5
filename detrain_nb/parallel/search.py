"""Search for all state that a model's code can reach, and so may write, whatever the model's class is.

It covers attributes, contents of containers, closures, random generators; and, from its classes, their attributes,
caches of `functools`, and the globals that their code names. The model's own state is always restored. Globals
and objects with locks may be in use elsewhere, or may record what is done once per process: they are restored only
if tensors were put into them.
"""

from __future__ import annotations

import dis
import functools
import random
import sys
import threading
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .undo import (
    ARRAYS,
    MISSING,
    REFILLED,
    FoundDict,
    Rule,
    StandIns,
    Undo,
    attributes_of,
    contents_in,
    contents_of,
    contents_of_slot,
    note_array,
    note_cell,
    note_class,
    note_items,
    note_names,
    note_slot,
    note_tensor,
    note_values,
    slots_of,
    tensors_came,
    whatever_came,
)


class Search:
    """Search from some roots that finds all ``tensors`` and the ways to note all other state."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.dicts: list[FoundDict] = []
        self.notes: list[Callable[[StandIns], Undo]] = []
        self._seen: dict[int, Any] = {}  # with the values, to keep ids valid
        self._own: list[Any] = []
        self._of_others: list[Any] = []
        self._waiting = self._own  # one of these two lists; the rule goes with it
        self._rule: Rule = whatever_came
        self._slots: dict[type, tuple[types.MemberDescriptorType, ...]] = {}
        self._packages = set(_packages_with_torch(len(sys.modules)))  # packages whose globals are searched
        self._names_of: dict[int, set[str]] = {}  # noted names, by namespace
        self._named = {"forward"}  # names that the model's code calls, as far as known
        self._unnamed: dict[str, list[Any]] = {}  # functions of classes that no code has named so far

    def find(self, root: Any) -> None:
        if isinstance(root, nn.Module):
            self._packages.update({_root_of(type(module)) for module in root.modules()} - _NOT_THE_MODELS)
        self._own.append(root)
        while self._own or self._of_others:  # state reachable in both ways is the model's own
            self._waiting, self._rule = (self._own, whatever_came) if self._own else (self._of_others, tensors_came)
            self._add(self._waiting.pop())

    def _is_new(self, value: Any) -> bool:
        is_new = id(value) not in self._seen
        self._seen[id(value)] = value
        return is_new

    def _add(self, value: Any) -> None:
        if isinstance(value, _PLAIN) or not self._is_new(value):
            return
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, type):
            self._add_class(value)
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, (torch.Generator, random.Random)) or _root_of(type(value)) == "numpy":
            self.notes.append(lambda _: note_values(value, most_bytes=_MOST_OF_AN_ARRAY) or (lambda: None))
        elif isinstance(value, ARRAYS):
            self.notes.append(lambda _: note_array(value))
        elif isinstance(value, memoryview):
            self._add_memory(value)
        elif isinstance(value, dict):
            self._add_dict(value)
            self._add_attributes(value)
        elif isinstance(value, REFILLED):
            self._waiting.extend(contents_in(value))
            self.notes.append(functools.partial(note_items, value, self._rule))
            self._add_attributes(value)
        elif self._waiting is self._own and has_locks(value):
            del self._seen[id(value)]
            self._of_others.append(value)
        else:
            self._waiting.extend(_led_to_by(value))
            self._add_attributes(value)

    def _add_attributes(self, value: Any) -> None:
        if not has_state(value):
            return
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and self._is_new(attributes):
            self._add_dict(attributes)
        owner = type(value)
        if owner not in self._slots:
            self._slots[owner] = tuple(slots_of(owner))
        for slot in self._slots[owner]:
            self._waiting.append(contents_of_slot(value, slot))
            self.notes.append(functools.partial(note_slot, value, slot))
        if _root_of(owner) not in _NOT_THE_MODELS:
            self._waiting.append(owner)

    def _add_dict(self, value: dict[Any, Any]) -> None:
        base = OrderedDict if isinstance(value, OrderedDict) else dict
        self._waiting.extend(base.values(value))
        self.dicts.append(FoundDict(base, value, self._rule))

    def _add_tensor(self, tensor: Tensor) -> None:
        self.tensors.append(tensor)
        self.dicts.append(FoundDict(dict, vars(tensor), whatever_came))
        self._own.extend(vars(tensor).values())
        if tensor.is_leaf:
            self._own.extend((tensor._backward_hooks, tensor.grad))
        self.notes.append(lambda _: note_tensor(tensor))

    def _add_memory(self, view: memoryview) -> None:
        """Add the object behind a memoryview, which may be of an unknown kind."""
        self._waiting.append(view.obj)
        if view.c_contiguous and not view.readonly and view.nbytes <= _MOST_OF_AN_ARRAY:
            self.notes.append(lambda _: note_array(view.cast("B")))

    def _add_class(self, owner: type) -> None:
        """Add a class and its bases; for a module's class, only bases that are modules."""
        for base in owner.__mro__:
            is_mixin = issubclass(owner, nn.Module) and not issubclass(base, nn.Module)
            if is_mixin or _root_of(base) in _NOT_THE_MODELS or (base is not owner and not self._is_new(base)):
                continue
            for name, each in attributes_of(base).items():
                is_called = name in self._named or name.startswith("__") or not isinstance(each, _OF_CLASSES)
                (self._own if is_called else self._unnamed.setdefault(name, [])).append(each)
            self.notes.append(functools.partial(note_class, base, self._rule))

    def _add_function(self, function: types.FunctionType) -> None:
        if _root_of(function) in _NOT_THE_MODELS:
            return
        names = _names_in(function.__code__)
        self._named.update(names)
        self._own.extend(each for name in names for each in self._unnamed.pop(name, ()))
        self._own.extend((function.__defaults__, function.__kwdefaults__, function.__dict__))
        for cell in function.__closure__ or ():
            if self._is_new(cell):
                self._own.append(contents_of(cell))
                self.notes.append(functools.partial(note_cell, cell))
        for namespace in self._namespaces_of(function, names):
            self._add_names(namespace, names, may_set=_has(function.__code__, "STORE_GLOBAL"))

    def _namespaces_of(self, function: types.FunctionType, names: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Yield the globals of a function's file, and of modules that it names or imports."""
        package = function.__globals__.get("__package__")
        imported: list[Any] = []
        if _has(function.__code__, "IMPORT_NAME"):
            imported = [sys.modules.get(each) for name in names for each in (name, f"{package}.{name}")]
        waiting = [function.__globals__, *(vars(each) for each in imported if isinstance(each, types.ModuleType))]
        met = set(map(id, waiting))
        for namespace in waiting:
            if str(namespace.get("__name__")).partition(".")[0] not in self._packages:
                continue
            yield namespace
            for each in map(namespace.get, names):
                if isinstance(each, types.ModuleType) and id(vars(each)) not in met:
                    met.add(id(vars(each)))
                    waiting.append(vars(each))

    def _add_names(self, namespace: dict[str, Any], names: Sequence[str], *, may_set: bool) -> None:
        """Add the globals that code names; a class is added only where it was defined.

        Most names are attributes: in the file they mean nothing, or a function or class, and so are not noted.
        """
        known = self._names_of.setdefault(id(namespace), set())
        noted = []
        for name in names:
            value = namespace.get(name, MISSING)
            if name in known or value is MISSING and not may_set:
                continue
            known.add(name)
            if not isinstance(value, type) or value.__module__ == namespace.get("__name__"):
                self._of_others.append(value)
            if not isinstance(value, (type, types.FunctionType, types.ModuleType)):
                noted.append(name)
        if noted:
            self.notes.append(functools.partial(note_names, namespace, noted))


# ---- what is searched

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, types.ModuleType)
_MOST_OF_AN_ARRAY = 1 << 26  # bytes: larger arrays are data, which models only read
_OF_CLASSES = (types.FunctionType, staticmethod, classmethod, property)
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, threading.Thread)
_WITHOUT_TENSORS = ("huggingface_hub", "httpx", "httpx2", "packaging", "tqdm", "regex", "tokenizers", "yaml", "IPython")
_NOT_THE_MODELS = {*sys.stdlib_module_names, "torch", "numpy", "detrain_nb", *_WITHOUT_TENSORS}
_OF_TORCH = frozenset(map(id, (torch, nn, nn.functional, Tensor)))
# Modules of the standard library whose objects hold values.
_HOLDERS = ("collections", "types", "argparse", "weakref", "_weakrefset", "functools")
_APART = (
    "torch.distributed",
    "torch._",
    "detrain_nb.parallel.tape",
    "detrain_nb.parallel.kept",
    "detrain_nb.parallel.search",
)


def _root_of(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _led_to_by(value: Any) -> Sequence[Any]:
    """Return the objects that an immutable object refers to."""
    if isinstance(value, (tuple, frozenset)):
        return tuple(value)
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    if isinstance(value, (staticmethod, classmethod, functools._lru_cache_wrapper)):
        return (value.__wrapped__,)
    if isinstance(value, property):
        return value.fget, value.fset
    if isinstance(value, functools.partial):
        return value.func, value.args, value.keywords
    if type(value) is weakref.ref:
        return (value(),)
    return ()


def has_state(value: Any) -> bool:
    """Return whether the attributes of ``value`` may be the model's."""
    if isinstance(value, nn.Module):
        return True
    name = str(type(value).__module__)
    return not (name.startswith(_APART) or _root_of(type(value)) in sys.stdlib_module_names and name not in _HOLDERS)


def has_locks(value: Any) -> bool:
    """Return whether other threads may be using ``value``."""
    held = getattr(value, "__dict__", None)
    return (
        isinstance(held, dict)
        and any(isinstance(each, _LOCKS) for each in held.values())
        and not isinstance(value, nn.Module)
    )


# These caches depend only on what the process has imported, and on code, so all callers can share them.
@functools.lru_cache(maxsize=1)
def _packages_with_torch(num_loaded: int) -> frozenset[str]:
    """Return the packages that may hold tensors; ``num_loaded``: number of modules, a cache key for later imports.

    Without this limit, a model that names a library for plots or tables would lead through all of it.
    """
    found = {
        name.partition(".")[0]
        for name, module in sys.modules.copy().items()
        if isinstance(module, types.ModuleType) and not _OF_TORCH.isdisjoint(map(id, vars(module).copy().values()))
    }
    return frozenset(found - _NOT_THE_MODELS)


@functools.lru_cache(maxsize=4096)
def _has(code: types.CodeType, instruction: str) -> bool:
    """Return whether code, or code inside it, may have an instruction, such as that of a ``global`` or an import."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return dis.opmap[instruction] in code.co_code[::2] or any(_has(each, instruction) for each in inner)


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Return the names of globals and attributes in code, and in code inside it."""
    inner = (name for each in code.co_consts if isinstance(each, types.CodeType) for name in _names_in(each))
    return tuple(dict.fromkeys((*code.co_names, *inner)))
