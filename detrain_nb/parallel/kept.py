"""A model left as it was: what its code writes while we run it, beside what it returns, is put back afterwards.

Its state is found by what leads to it, whatever its class is: attributes, what is in containers, closures, random
generators; and from its classes their attributes, caches of `functools`, and the names that its code has in its files.
"""

from __future__ import annotations

import contextlib
import copy
import dis
import functools
import random
import sys
import threading
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .interrupts import HeldInterrupts
from .undo import (
    MISSING,
    REFILLED,
    Dict,
    StandIns,
    Undo,
    attributes_of,
    contents_of,
    note_cell,
    note_class,
    note_dicts,
    note_items,
    note_names,
    note_slot,
    note_tensor,
)

__all__ = ["State", "random_state_kept", "state_kept"]

_CPU = torch.device("cpu")


@contextlib.contextmanager
def state_kept(*roots: Any, device: torch.device = _CPU) -> Iterator[list[Tensor]]:
    """Put back what is written in here by code of ``roots``, models and what they are called with.

    Yields the tensors that were found; their values are left to `writes_undone`. Caches of functions are empty ones in
    here, and come back with all that they had: nothing that was computed without values stays in one. Random numbers
    that are drawn in here, on the CPU and on ``device``, are drawn again. Objects with locks, which are not the model's
    alone, and those of the standard library are left as the code leaves them. So is what stands in its files, but for
    names and containers there to which tensors came.
    """
    state = State(*roots)
    with state.kept(device):
        yield state.tensors


@contextlib.contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Draw what is drawn inside again afterwards: on the CPU and on ``device``, and with Python and numpy."""
    numpy = sys.modules.get("numpy")
    of_python, of_numpy = random.getstate(), numpy and numpy.random.get_state()
    is_other = device.type not in ("cpu", "meta")
    try:
        with torch.random.fork_rng([device] if is_other else [], device_type=device.type if is_other else None):
            yield
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)


class State:
    """All that leads on from some roots, found once; ``kept`` notes what it is at that moment.

    What is the model's own is put back whatever became of it. What stands in the files of its code may be of others
    too, or say what was done once and for all: of it only what tensors came to.
    """

    def __init__(self, *roots: Any) -> None:
        self._roots = roots
        self.tensors: list[Tensor] = []
        self._dicts: list[Dict] = []
        self._notes: list[Callable[[StandIns], Undo]] = []
        search = _Search(self.tensors, self._dicts, self._notes)
        for root in roots:
            search.find(root)

    def __deepcopy__(self, memo: dict[int, Any]) -> State:
        return State(*copy.deepcopy(self._roots, memo))

    @contextlib.contextmanager
    def kept(self, device: torch.device = _CPU) -> Iterator[None]:
        stand_ins, undos = StandIns(), list[Undo]()
        with HeldInterrupts() as interrupts, random_state_kept(device):
            try:
                undos.append(note_dicts(self._dicts, stand_ins))
                for note in self._notes:
                    undos.append(note(stand_ins))
                try:
                    interrupts.let_through()
                    yield
                finally:
                    interrupts.hold()
            finally:
                for undo in reversed(undos):
                    undo()


class _Search:
    def __init__(self, tensors: list[Tensor], dicts: list[Dict], notes: list[Callable[[StandIns], Undo]]) -> None:
        self._tensors, self._dicts, self._notes = tensors, dicts, notes
        self._seen: dict[int, Any] = {}  # the values too, so that an id stays its own
        self._own: list[Any] = []
        self._in_files: list[Any] = []
        self._packages: set[str] = set()  # where the classes of the model's modules come from
        self._names_of: dict[int, set[str]] = {}  # of a file, that are noted
        self._named = {"forward"}  # what code of the model calls by name, as far as it is known
        self._unnamed: dict[str, list[Any]] = {}  # functions of classes that nobody has named so far

    def find(self, root: Any) -> None:
        if isinstance(root, nn.Module):
            self._packages.update({_root_of(type(module)) for module in root.modules()} - _NOT_THE_MODELS)
        self._own.append(root)
        while self._own or self._in_files:
            is_own = bool(self._own)
            self._add((self._own if is_own else self._in_files).pop(), is_own=is_own)

    def _is_new(self, value: Any) -> bool:
        is_new = id(value) not in self._seen
        self._seen[id(value)] = value
        return is_new

    def _add(self, value: Any, *, is_own: bool) -> None:
        if isinstance(value, _PLAIN) or not self._is_new(value):
            return
        waiting = self._own if is_own else self._in_files
        if isinstance(value, Tensor):
            self._add_tensor(value)
        elif isinstance(value, type):
            self._add_class(value, is_own=is_own)
        elif isinstance(value, types.FunctionType):
            self._add_function(value)
        elif isinstance(value, torch.Generator):
            self._notes.append(lambda _: functools.partial(_set_generator, value, value.get_state()))
        elif isinstance(value, random.Random):
            self._notes.append(lambda _: functools.partial(value.setstate, value.getstate()))
        elif type(value).__module__.partition(".")[0] == "numpy":
            self._add_of_numpy(value)
        elif isinstance(value, dict):
            self._add_dict(value, is_own=is_own)
            self._add_attributes(value, is_own=is_own)
        elif isinstance(value, REFILLED):
            base: Any = next(each for each in REFILLED if isinstance(value, each))
            waiting.extend(base.__iter__(value))
            self._notes.append(lambda _: note_items(base, value, is_own=is_own))
            self._add_attributes(value, is_own=is_own)
        else:
            waiting.extend(_led_to_by(value))
            self._add_attributes(value, is_own=is_own)

    def _add_attributes(self, value: Any, *, is_own: bool) -> None:
        if not _has_state(value):
            return
        waiting = self._own if is_own else self._in_files
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict) and self._is_new(attributes):
            self._add_dict(attributes, is_own=is_own)
        for slot in _slots_of(type(value)):  # type: ignore[arg-type]
            waiting.append(getattr(value, slot, MISSING))
            self._notes.append(functools.partial(note_slot, value, slot))
        if _root_of(type(value)) not in _NOT_THE_MODELS:
            waiting.append(type(value))

    def _add_dict(self, value: dict[Any, Any], *, is_own: bool) -> None:
        base = OrderedDict if isinstance(value, OrderedDict) else dict
        (self._own if is_own else self._in_files).extend(base.values(value))
        self._dicts.append((base, value, is_own))

    def _add_tensor(self, tensor: Tensor) -> None:
        self._tensors.append(tensor)
        self._add_dict(vars(tensor), is_own=True)
        if tensor.is_leaf:
            self._own.append(tensor._backward_hooks)
        self._notes.append(lambda _: note_tensor(tensor))

    def _add_of_numpy(self, value: Any) -> None:
        """An array in memory, or a generator of random numbers."""
        bits = getattr(value, "bit_generator", getattr(value, "_bit_generator", None))
        if bits is not None:
            self._notes.append(lambda _: functools.partial(setattr, bits, "state", bits.state))
        elif type(value).__name__ == "ndarray" and value.flags.writeable and value.nbytes <= _MOST_OF_AN_ARRAY:
            self._notes.append(lambda _: functools.partial(value.__setitem__, ..., value.copy()))

    def _add_class(self, owner: type, *, is_own: bool) -> None:
        """And those that it inherits from; of a module's those alone that are modules."""
        for base in owner.__mro__:
            is_mixin = issubclass(owner, nn.Module) and not issubclass(base, nn.Module)
            if is_mixin or _root_of(base) in _NOT_THE_MODELS or (base is not owner and not self._is_new(base)):
                continue
            for name, each in attributes_of(base).items():
                is_called = name in self._named or name.startswith("__") or not isinstance(each, _OF_CLASSES)
                (self._own if is_called else self._unnamed.setdefault(name, [])).append(each)
            self._notes.append(functools.partial(note_class, base, is_own=is_own))

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
                self._notes.append(functools.partial(note_cell, cell))
        modules = [function.__globals__.get(name) for name in names]
        for namespace in (
            function.__globals__,
            *(vars(each) for each in modules if isinstance(each, types.ModuleType)),
        ):
            if str(namespace.get("__name__")).partition(".")[0] in self._packages:
                self._add_names(namespace, names, may_set=_sets_names(function.__code__))

    def _add_names(self, namespace: dict[str, Any], names: Sequence[str], *, may_set: bool) -> None:
        """Those that code has in a file; a class is looked into where it was made.

        Most are of attributes, and stand for nothing in a file, or for a function or a class, and will go on to.
        """
        known = self._names_of.setdefault(id(namespace), set())
        noted = []
        for name in names:
            value = namespace.get(name, MISSING)
            if name in known or value is MISSING and not may_set:
                continue
            known.add(name)
            if not isinstance(value, type) or value.__module__ == namespace.get("__name__"):
                self._in_files.append(value)
            if not isinstance(value, (type, types.FunctionType, types.ModuleType)):
                noted.append(name)
        if noted:
            self._notes.append(functools.partial(note_names, namespace, noted))


# ---- what is looked into

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, types.ModuleType)
_MOST_OF_AN_ARRAY = 1 << 26  # bytes: a larger one is data, which a model reads
_OF_CLASSES = (types.FunctionType, staticmethod, classmethod, property)
_LOCKS = (type(threading.Lock()), type(threading.RLock()), threading.Condition, threading.Event, threading.Thread)
_NOT_THE_MODELS = {*sys.stdlib_module_names, "torch", "numpy", "detrain_nb"}
_HOLDERS = ("collections", "types", "argparse", "weakref", "functools")  # of the standard library: they hold values
_APART = ("torch.distributed", "torch._", "detrain_nb.parallel.tape", "detrain_nb.parallel.kept")


def _set_generator(generator: torch.Generator, state: Tensor) -> None:
    generator.set_state(state)


def _root_of(value: Any) -> str:
    return str(getattr(value, "__module__", "")).partition(".")[0]


def _led_to_by(value: Any) -> Sequence[Any]:
    """What something leads to that does not change itself."""
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
    return ()


def _has_state(value: Any) -> bool:
    """Whether its attributes may be the model's."""
    if isinstance(value, nn.Module):
        return True
    name = str(type(value).__module__)
    if name.startswith(_APART) or _root_of(type(value)) in sys.stdlib_module_names and name not in _HOLDERS:
        return False
    held = getattr(value, "__dict__", None)
    return not (isinstance(held, dict) and any(isinstance(each, _LOCKS) for each in held.values()))


@functools.lru_cache(maxsize=1024)
def _slots_of(owner: type) -> tuple[str, ...]:
    return tuple(
        name
        for base in owner.__mro__
        if _root_of(base) not in _NOT_THE_MODELS
        for name, each in vars(base).items()
        if isinstance(each, types.MemberDescriptorType)
    )


@functools.lru_cache(maxsize=4096)
def _sets_names(code: types.CodeType) -> bool:
    """Whether it may have a statement as ``global``."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return dis.opmap["STORE_GLOBAL"] in code.co_code[::2] or any(map(_sets_names, inner))


@functools.lru_cache(maxsize=4096)
def _names_in(code: types.CodeType) -> tuple[str, ...]:
    """Of globals and of attributes, that code has, and the code in it."""
    inner = (name for each in code.co_consts if isinstance(each, types.CodeType) for name in _names_in(each))
    return tuple(dict.fromkeys((*code.co_names, *inner)))
