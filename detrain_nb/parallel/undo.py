"""Notes of places that code may write into; each note returns a function that restores the place."""

from __future__ import annotations

import array
import functools
import itertools
import operator
import random
import types
import warnings
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Undo = Callable[[], None]
Rule = Callable[[Iterable[Any]], bool]  # whether to restore a place, by its new values

MISSING: Any = object()
REFILLED = (list, set, deque)
OPEN = (OrderedDict, dict, *REFILLED)  # a container's methods are those of its first match
OF_MODULES = frozenset(vars(nn.Module()))  # hooks, parameters, children
ARRAYS = (bytearray, array.array)
_OF_EVERY_CLASS = ("__dict__", "__weakref__", "__doc__", "__module__", "_abc_impl", "__slotnames__")


def whatever_came(_: Iterable[Any]) -> bool:
    """Restore always: the rule for the model's own state."""
    return True


def tensors_came(values: Iterable[Any]) -> bool:
    """Restore if a tensor came: the rule for shared state, or state that records what is done only once."""
    return any(map(_has_tensor, values))


class StandIns:
    """Replacements during a run for what cannot be restored: an empty cache, a copy of an iterator."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Any, Any]] = {}  # with the original, to keep its id valid

    def of(self, value: Any) -> Any:
        """Return the replacement of ``value``, or ``value`` itself if it needs none."""
        if type(value) not in _WITH_STAND_IN:
            return value
        if id(value) not in self._made:
            self._made[id(value)] = value, self._make(value)
        return self._made[id(value)][1]

    def of_all(self, values: Mapping[Any, Any]) -> dict[Any, Any]:
        """Return the replacements by key, where there are any."""
        if _WITH_STAND_IN.isdisjoint(map(type, values.values())):  # the usual case, and faster
            return {}
        made = {key: self.of(value) for key, value in values.items()}
        return {key: each for key, each in made.items() if each is not values[key]}

    def warn_of_moved(self) -> None:
        for value, made in self._made.values():
            if isinstance(made, _Watched) and made.is_moved:
                place = f" from line {value.gi_code.co_firstlineno}" if isinstance(value, types.GeneratorType) else ""
                name = getattr(value, "__qualname__", "")
                warnings.warn(
                    f"the model reads from a {type(value).__name__} {name}{place}, which has advanced and cannot be "
                    "put back: give the model an iterator that can be copied, such as that of a list",
                    stacklevel=2,
                )

    def _make(self, value: Any) -> Any:
        if isinstance(value, functools._lru_cache_wrapper):
            made: Any = functools.lru_cache(**value.cache_parameters())(value.__wrapped__)
            vars(made).update(vars(value))
            return made
        if isinstance(value, (staticmethod, classmethod)):
            inner = self.of(value.__wrapped__)
            return value if inner is value.__wrapped__ else type(value)(inner)
        if isinstance(value, property):
            inner = self.of(value.fget)
            return value if inner is value.fget else value.getter(inner)
        return self._copy(value)

    def _copy(self, iterator: Any) -> Any:
        """Copy an iterator, with the iterators that it reads from, which `copy.copy` would advance."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                kind, args, *states = iterator.__reduce__()
        except TypeError:  # a generator; later Pythons cannot copy itertools either
            return _Watched(iterator)
        made = kind(*map(self.of, args))
        for state in states:
            parts = tuple(map(self.of, state)) if isinstance(state, tuple) else state
            if isinstance(iterator, itertools.cycle):
                parts = [*parts[0]], parts[1]  # otherwise both would share one list
            made.__setstate__(parts)
        return made


class IteratorCopies(StandIns):
    """Replacements of iterators only, if they can be copied, for code that may have to run again."""

    def of(self, value: Any) -> Any:
        made = super().of(value) if type(value) in _ITERATORS else value
        return value if isinstance(made, _Watched) else made


class _NoStandIns(StandIns):
    """Replacements that replace nothing."""

    def of(self, value: Any) -> Any:
        return value


NO_STAND_INS = _NoStandIns()


class _Watched:
    """A generator that notes whether it was used."""

    def __init__(self, original: Any) -> None:
        self._original = original
        self.is_moved = False

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        self.is_moved = True
        return next(self._original)

    def __getattr__(self, name: str) -> Any:  # such as send
        if name.startswith("_"):
            raise AttributeError(name)
        self.is_moved = True
        return getattr(self._original, name)


_EMPTY: dict[Any, Any] = {}
_ITERATORS = (
    *(kind for kind in vars(itertools).values() if isinstance(kind, type)),
    *map(type, itertools.tee(())),
    *(enumerate, filter, map, zip, reversed, types.GeneratorType),
    *(type(iter(kind())) for kind in (tuple, list, set, dict, deque, str, bytes, bytearray)),
    *map(type, (iter(range(0)), iter(_EMPTY.values()), iter(_EMPTY.items()), iter(int, 0), iter(array.array("b")))),
    *map(
        type, (reversed([]), reversed(_EMPTY), reversed(_EMPTY.values()), reversed(_EMPTY.items()), reversed(deque()))
    ),
)
_WITH_STAND_IN = frozenset((functools._lru_cache_wrapper, staticmethod, classmethod, property, *_ITERATORS))


class FoundDict(NamedTuple):
    """A dict to note; ``base``: the class whose methods change it."""

    base: Any
    value: Any
    rule: Rule


def note_dicts(dicts: Sequence[FoundDict], stand_ins: StandIns) -> Undo:
    """Note many dicts, most of which are empty, such as those of hooks."""
    empty, notes = list[FoundDict](), list[Undo]()
    for found in dicts:
        if found.base.__len__(found.value):
            notes.append(_note_dict(found, stand_ins))
        else:
            empty.append(found)

    def undo() -> None:
        for base, value, rule in empty:
            if base.__len__(value) and rule(base.values(value)):
                base.clear(value)
        for each in notes:
            each()

    return undo


def _note_dict(found: FoundDict, stand_ins: StandIns) -> Undo:
    base, value, rule = found
    was = dict(base.items(value))
    for key, stand_in in stand_ins.of_all(was).items():
        base.__setitem__(value, key, stand_in)
    given = dict(base.items(value))

    def undo() -> None:
        is_same = len(was) == base.__len__(value) and all(map(operator.is_, base.values(value), was.values()))
        if is_same and all(map(operator.is_, base.keys(value), was)):
            return
        now = dict(base.items(value))
        if rule(each for key, each in now.items() if each is not given.get(key, MISSING)):
            refill(value, (*was, *was.values()))
            return
        for key, each in now.items():  # shared state, which has changed without tensors
            if each is given.get(key, MISSING) and each is not was[key]:
                base.__setitem__(value, key, was[key])

    return undo


def note_items(value: Any, rule: Rule, stand_ins: StandIns) -> Undo:
    base, was = base_of(value), contents_in(value)
    made = stand_ins.of_all(dict(enumerate(was))) if base is not set else {}
    for index, stand_in in made.items():
        base.__setitem__(value, index, stand_in)
    known = {*map(id, was), *map(id, made.values())}

    def undo() -> None:
        now = contents_in(value)
        if not are_same(now, was) and (made or rule(each for each in now if id(each) not in known)):
            refill(value, was)

    return undo


def note_array(value: Any) -> Undo:
    was = bytes(value) if isinstance(value, memoryview) else value[:]  # a slice of it would be no copy

    def undo() -> None:
        if bytes(value) != bytes(was):
            value[:] = was

    return undo


def note_values(value: Any, *, most_bytes: int) -> functools.partial[Any] | None:
    """Return a function that restores a random generator, or an array up to ``most_bytes``; None for anything else."""
    if isinstance(value, torch.Generator):
        return functools.partial(value.set_state, value.get_state())
    if isinstance(value, random.Random):
        return functools.partial(value.setstate, value.getstate())
    if isinstance(value, bytearray):
        return functools.partial(value.__setitem__, slice(None), bytes(value))
    if type(value).__module__.partition(".")[0] != "numpy":
        return None
    if (bits := getattr(value, "bit_generator", getattr(value, "_bit_generator", None))) is not None:
        return functools.partial(setattr, bits, "state", bits.state)
    if type(value).__name__ == "ndarray" and value.flags.writeable and value.nbytes <= most_bytes:
        return functools.partial(value.__setitem__, ..., value.copy())
    return None


def note_tensor(tensor: Tensor) -> Undo:
    """Note a tensor's state other than its values, such as its version, gradient and hooks."""
    is_leaf, requires_grad = tensor.is_leaf, tensor.requires_grad
    grad, hooks = (tensor.grad, tensor._backward_hooks) if is_leaf else (None, None)
    writes = None if tensor.is_inference() else tensor._version
    has_place = tensor.layout == torch.strided and type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__
    place_undone = _note_place(tensor) if has_place else None

    def undo() -> None:
        if is_leaf and not tensor.is_leaf:  # a tensor with a gradient was written into it
            tensor.detach_()
        if place_undone is not None:
            place_undone()
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


def _note_place(tensor: Tensor) -> Undo:
    """Note a tensor's memory, which ``tensor.data = other`` and operators such as ``resize_`` change."""
    alias, was = tensor.detach(), _place_of(tensor)
    size_bytes = alias.untyped_storage().nbytes()

    def undo() -> None:
        storage = alias.untyped_storage()
        if storage.nbytes() != size_bytes:
            storage.resize_(size_bytes)
        if _place_of(tensor) != was:
            tensor.data = alias

    return undo


def _place_of(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def note_class(owner: type, rule: Rule, stand_ins: StandIns) -> Undo:
    was = attributes_of(owner)
    given = {**was, **(made := stand_ins.of_all(was))}
    for name, each in made.items():
        type.__setattr__(owner, name, each)

    def undo() -> None:
        now = attributes_of(owner)
        for name in (*now, *(was.keys() - now.keys())):
            found = now.get(name, MISSING)
            if found is was.get(name, MISSING) or not (found is given.get(name) or rule([found])):
                continue
            type.__setattr__(owner, name, was[name]) if name in was else type.__delattr__(owner, name)

    return undo


def note_slot(value: Any, slot: types.MemberDescriptorType, stand_ins: StandIns) -> Undo:
    was = contents_of_slot(value, slot)
    if (stand_in := stand_ins.of(was)) is not was:
        slot.__set__(value, stand_in)

    def undo() -> None:
        if contents_of_slot(value, slot) is not was:
            slot.__delete__(value) if was is MISSING else slot.__set__(value, was)

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
            if now is each and each is was[name] or now is not each and not tensors_came([now]):
                continue
            if was[name] is MISSING:
                del namespace[name]
            else:
                namespace[name] = was[name]

    return undo


def base_of(container: Any) -> Any:
    """Return the class of a container among ``OPEN``, or None."""
    return next((base for base in OPEN if isinstance(container, base)), None)


def contents_in(container: Any) -> list[Any]:
    """Return the contents of a container in ``OPEN``, for a dict its keys and then its values; else nothing."""
    if (base := base_of(container)) is None:
        return []
    return [*base.__iter__(container), *(base.values(container) if isinstance(container, dict) else ())]


def refill(container: Any, contents: Iterable[Any]) -> None:
    """Replace the contents by the methods of the base class: a Counter's own would count."""
    base = base_of(container)
    base.clear(container)
    if isinstance(container, dict):
        keys_and_values = [*contents]
        half = len(keys_and_values) // 2
        for key, value in zip(keys_and_values[:half], keys_and_values[half:]):
            base.__setitem__(container, key, value)
    else:
        (base.update if base is set else base.extend)(container, contents)


def are_same(now: Sequence[Any], was: Sequence[Any]) -> bool:
    return len(now) == len(was) and all(map(operator.is_, now, was))


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Return the attributes that the user's code has set: no parameters, buffers, children or hooks."""
    return {key: value for key, value in vars(module).items() if key not in OF_MODULES}


def attributes_of(owner: type) -> dict[str, Any]:
    return {name: each for name, each in vars(owner).items() if name not in _OF_EVERY_CLASS}


def slots_of(owner: type) -> Iterator[types.MemberDescriptorType]:
    """Yield the slots of Python classes; members of C types may be read-only."""
    for base in owner.__mro__:
        if "__slots__" in vars(base):
            yield from (each for each in vars(base).values() if isinstance(each, types.MemberDescriptorType))


def contents_of_slot(value: Any, slot: types.MemberDescriptorType) -> Any:
    """Return the contents of a slot, even if a property hides it; MISSING if it is empty."""
    try:
        return slot.__get__(value)
    except AttributeError:  # it is empty
        return MISSING


def contents_of(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is empty
        return MISSING


def _has_tensor(value: Any, depth: int = 6) -> bool:
    """Return whether ``value`` contains a tensor, in containers or in attributes of objects."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, (str, bytes, type, types.ModuleType, types.FunctionType)) or not depth:
        return False
    parts: Any = value.values() if isinstance(value, dict) else value if isinstance(value, _CONTAINERS) else ()
    return any(_has_tensor(each, depth - 1) for each in (*parts, *getattr(value, "__dict__", {}).values()))


_CONTAINERS = (*REFILLED, tuple, frozenset)
