"""Operators on tensors without memory, written down, and run again for those whose values are wanted.

A value is computed from what was written to its storage, and from what was read for that, as far back as it matters: so
views, writes in place and ``.data`` need no care of their own. Random numbers are drawn when they are recorded, on
memory that is freed at once: so the generator goes the way that it would have gone, and its state before each operator
is known.
"""

from __future__ import annotations

import bisect
import ctypes
import hashlib
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import SpecError

__all__ = ["Place", "Tape"]

# What they write does not depend on what was there.
_DRAWING = ("normal_", "uniform_", "random_", "exponential_", "geometric_", "log_normal_", "cauchy_", "bernoulli_")
_OVERWRITING = frozenset((*_DRAWING, "zero_", "fill_", "copy_"))
_TRIM_BYTES = 1 << 25
_KEPT_SIZES = 4  # how many times the largest storage of a look is kept for the next one


@dataclass(frozen=True)
class Place:
    """Where a tensor lies: in which storage, by number, and how."""

    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(storage, self.offset, self.size, self.stride)

    def scratch(self) -> Tensor:
        """A tensor that looks like it, with whatever is in memory."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="cpu")


class _OwnGenerator:
    """Stands in arguments for a generator, whose state the operator has."""

    def __repr__(self) -> str:
        return "generator"


@dataclass
class _Op:
    """An operator call, with places for its tensors.

    ``made``: by leaf of the result, those on new storages. ``writes`` has the storages that it changes or makes,
    ``covered`` of these the ones of which nothing is left. ``state``: of the generator, before it drew.
    """

    func: Any
    args: Any
    kwargs: Any
    made: tuple[Place | None, ...]
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    covered: frozenset[int]
    default_dtype: torch.dtype
    state: Tensor | None = None

    def __repr__(self) -> str:
        return f"{self.func}({self.args}, {self.kwargs}) -> {self.made} {self.default_dtype}"


class Tape(TorchDispatchMode):
    """Records what runs inside of it, under the fake tensors of ``fakes``, and gives values."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._fakes: FakeTensorMode | None = fakes
        self._ops: dict[int, _Op] = {}
        self._count = 0
        self._numbers: dict[int, int] = {}
        self._storages: list[torch.UntypedStorage] = []  # without memory; kept, so that no other gets their identity
        self._sizes: list[int] = []
        self._passed_bytes = 0  # that were written since memory was given back
        self._met: dict[int, tuple[Tensor, Tensor]] = {}  # tensors with values, and what stands for them
        self._constants: dict[int, torch.UntypedStorage] = {}
        self._writers: dict[int, list[int]] = {}
        self._recent: dict[int, tuple[int, torch.UntypedStorage]] = {}  # with the operator before which they were so

    # ---- recording

    @property
    def _is_recording(self) -> bool:
        return self._fakes is not None

    def is_changed(self, tensor: Tensor) -> bool:
        """Whether a tensor that is not fake was written to."""
        is_met = any(tensor.untyped_storage()._cdata == real.untyped_storage()._cdata for real, _ in self._met.values())
        return is_met and bool(self._writers.get(self._number(self.fake(tensor))))

    def place_of(self, tensor: Tensor) -> Place:
        """Raises: SpecError for what is not dense and on the CPU."""
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.device.type != "cpu":
            kind = f"{str(tensor.layout).removeprefix('torch.')} tensor on {tensor.device}"
            raise SpecError(
                f"the code makes a {kind}: deferred values are of dense tensors on the CPU; materialize them elsewhere"
            )
        size, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        return Place(self._number(tensor), int(tensor.storage_offset()), size, stride, tensor.dtype)

    def fake(self, tensor: Tensor) -> Tensor:
        """What stands for a tensor with values: it has those that the tensor has now, or had when it was first met."""
        assert self._fakes is not None
        if isinstance(tensor, FakeTensor):
            return tensor
        if id(tensor) not in self._met:
            with _disable_current_modes():
                made = self._fakes.from_tensor(tensor.detach(), static_shapes=True)
                if self._is_new(made):
                    self._constants[self._number(made)] = tensor.untyped_storage().clone()
            self._met[id(tensor)] = tensor, made
        return self._met[id(tensor)][1]

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.ops.aten.lift_fresh.default:  # what torch.tensor() gives
            return self._lift(func, *args)
        args, kwargs = tree_map(lambda leaf: self.fake(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._look(func, args, kwargs)
        self._record(func, args, kwargs, result)
        assert self._fakes is not None
        self._fakes.fake_tensor_converter.meta_converter.tensor_memo.clear()  # it has weak references, and then
        return result  # Module.to() cannot swap tensors

    def _lift(self, func: Any, tensor: Tensor) -> Any:
        made = func(tensor)
        if not isinstance(tensor, FakeTensor) and self._is_new(made):
            with _disable_current_modes():
                self._constants[self._number(made)] = tensor.detach().clone().untyped_storage()
        return made

    def _look(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The code asks for values: they are computed, and what comes of them is a constant. Raises: SpecError."""
        if func._schema.is_mutable:
            raise SpecError(f"{func} writes in a way that depends on values, which cannot be deferred")
        with _disable_current_modes():
            args, kwargs = tree_map(self._current, (args, kwargs))
            result = func(*args, **kwargs)
        return tree_map(lambda leaf: self.fake(leaf) if isinstance(leaf, Tensor) else leaf, result)

    def _current(self, leaf: Any) -> Any:
        return self.value(self.place_of(leaf)) if isinstance(leaf, Tensor) else leaf

    def _scratch(self, leaf: Any) -> Any:
        return self.place_of(leaf).scratch() if isinstance(leaf, Tensor) else leaf

    def _record(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        made = tuple(self.place_of(leaf) if self._is_new(leaf) else None for leaf in leaves)
        written = _written(func, args, kwargs)
        name = func._overloadpacket.__name__
        if not written and (name.startswith(("empty", "new_empty")) or not any(made)):
            return
        reads = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_blind = False
        if name.endswith("_like") or name.startswith("new_"):
            reads = []
        elif written and name in _OVERWRITING:
            others = reads[1:]  # the first is what is written
            is_blind = not {*map(self._number, written)} & {*map(self._number, others)}
            reads = others if is_blind else reads
        fresh = [place.storage for place in made if place is not None]
        covered = {self._number(leaf) for leaf in written if is_blind and _is_whole(leaf)}
        noted: tuple[Any, Any] = tree_map(self._noted, (tuple(args), kwargs))
        op = _Op(
            func,
            *noted,
            made,
            tuple(dict.fromkeys(map(self._number, reads))),
            tuple(dict.fromkeys([*map(self._number, written), *fresh])),
            frozenset(covered | set(fresh)),
            torch.get_default_dtype(),
        )
        if torch.Tag.nondeterministic_seeded in func.tags:
            self._draw(op, args, kwargs)
        for number in op.writes:
            self._writers.setdefault(number, []).append(self._count)
        self._ops[self._count] = op
        self._count += 1

    def _noted(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return _OwnGenerator()
        return self.place_of(leaf) if isinstance(leaf, Tensor) else leaf

    def _draw(self, op: _Op, args: Any, kwargs: Any) -> None:
        """Have the generator go on, as far as the operator takes it."""
        generators = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
        generator = generators[0] if generators else torch.default_generator
        with _disable_current_modes():
            op.state = generator.get_state()
            args, kwargs = tree_map(self._current if op.reads else self._scratch, (args, kwargs))
            op.func(*args, **kwargs)
            if op.reads:
                self._recent = {}  # it may have written to them
        self._free_what_piles_up(op)

    def _is_new(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage()._cdata not in self._numbers

    def _number(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._numbers:
            self._numbers[storage._cdata] = len(self._storages)
            self._storages.append(storage)
        return self._numbers[storage._cdata]

    def close(self, places: Iterable[Place]) -> None:
        """Forget what the values of ``places`` do not need."""
        kept, storages = self._needed([(place.storage, self._count) for place in places], {})
        self._ops = {index: self._ops[index] for index in sorted(kept)}
        self._constants = {number: each for number, each in self._constants.items() if number in storages}
        self._writers = {}
        for index, op in self._ops.items():
            for number in op.writes:
                self._writers.setdefault(number, []).append(index)
        self._sizes = [int(storage.nbytes()) for storage in self._storages]
        self._fakes, self._storages, self._met, self._numbers, self._recent = None, [], {}, {}, {}

    # ---- values

    def value(self, place: Place) -> Tensor:
        """Compute what the tensor at ``place`` has now, on the CPU; the default generator is used for it."""
        wanted = [(place.storage, self._count)]
        try:
            needed, storages = self._needed(wanted, self._recent)
        except _Overwritten:
            self._recent = {}
            needed, storages = self._needed(wanted, self._recent)
        found = {number: each for number, (_, each) in self._recent.items() if number in storages}
        times = {number: self._recent[number][0] for number in found}
        self._recent = {}
        with torch.no_grad(), torch.random.fork_rng([]):
            self._run(sorted(needed), found, times, place.storage)
        tensor = place.on(self._storage(place.storage, found))
        if self._is_recording:
            times[place.storage] = self._count
            self._recent = {number: (times[number], each) for number, each in found.items()}
        return tensor

    def _needed(
        self, wanted: list[tuple[int, int]], recent: Mapping[int, tuple[int, Any]]
    ) -> tuple[set[int], set[int]]:
        """The operators that make storages what they were before an operator, and all storages that these touch."""
        ops: set[int] = set()
        storages: set[int] = set()
        waiting = list(wanted)
        met: set[tuple[int, int]] = set()
        while waiting:
            number, before = waiting.pop()
            storages.add(number)
            writers = self._writers.get(number, [])
            end, begin = bisect.bisect_left(writers, before), 0
            if number in recent:
                begin = bisect.bisect_left(writers, recent[number][0])
                if begin > end:
                    raise _Overwritten
            for index in reversed(writers[begin:end]):
                if (number, index) in met:
                    break
                met.add((number, index))
                op = self._ops[index]
                if index not in ops:
                    ops.add(index)
                    waiting += [(read, index) for read in op.reads]
                    storages.update(op.writes)
                if number in op.covered:
                    break
        return ops, storages

    def _run(
        self, indices: list[int], found: dict[int, torch.UntypedStorage], times: dict[int, int], wanted: int
    ) -> None:
        """Run operators on the storages ``found``, and note in ``times`` before which operator each is as it is.

        What none of them needs any more is freed, or, while recording, kept for the next look, which may go on from it.
        """
        last_use: dict[int, int] = {}
        for index in indices:
            last_use.update(dict.fromkeys((*self._ops[index].reads, *self._ops[index].writes), index))
        last_use[wanted] = self._count
        ending: dict[int, list[int]] = {}
        for number, index in last_use.items():
            ending.setdefault(index, []).append(number)
        done: deque[int] = deque()
        default_dtype = torch.get_default_dtype()
        try:
            for index in indices:
                op = self._ops[index]
                torch.set_default_dtype(op.default_dtype)
                self._run_one(op, found)
                times.update(dict.fromkeys(op.reads, index) | dict.fromkeys(op.writes, index + 1))
                done.extend(ending.get(index, ()))
                largest = max(each.nbytes() for each in found.values())
                most = _KEPT_SIZES * largest if self._is_recording else -1
                while done and sum(found[number].nbytes() for number in done) > most:
                    del found[done.popleft()]
                self._free_what_piles_up(op)
        finally:
            torch.set_default_dtype(default_dtype)

    def _run_one(self, op: _Op, found: dict[int, torch.UntypedStorage]) -> None:
        generator: torch.Generator | None = None
        if op.state is not None:
            torch.default_generator.set_state(op.state)
            generator = torch.Generator().set_state(op.state)

        def given(leaf: Any) -> Any:
            if isinstance(leaf, Place):
                is_used = leaf.storage in op.reads or leaf.storage in op.writes
                return leaf.on(self._storage(leaf.storage, found)) if is_used else leaf.scratch()
            return generator if isinstance(leaf, _OwnGenerator) else leaf

        args, kwargs = tree_map(given, (op.args, op.kwargs))
        result = op.func(*args, **kwargs)
        leaves = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        for place, leaf in zip(op.made, leaves):
            if place is None:
                continue
            look = (leaf.storage_offset(), tuple(leaf.shape), leaf.stride(), leaf.dtype)
            storage = leaf.untyped_storage()
            is_own = all(storage._cdata != each._cdata for each in found.values())
            is_same = look == (place.offset, place.size, place.stride, place.dtype)
            if is_own and is_same:
                found[place.storage] = storage
            else:
                found.pop(place.storage, None)
                place.on(self._storage(place.storage, found)).copy_(leaf)

    def _storage(self, number: int, found: dict[int, torch.UntypedStorage]) -> torch.UntypedStorage:
        """What was never written is zero."""
        if number not in found:
            constant = self._constants.get(number)
            found[number] = (
                constant.clone()
                if constant is not None
                else torch.zeros(self._size(number), dtype=torch.uint8, device="cpu").untyped_storage()
            )
        return found[number]

    def _size(self, number: int) -> int:
        return int(self._storages[number].nbytes()) if self._is_recording else self._sizes[number]

    def _free_what_piles_up(self, op: _Op) -> None:
        """Called when it has run."""
        self._passed_bytes += sum(map(self._size, op.writes))
        if self._passed_bytes > _TRIM_BYTES:
            self._passed_bytes = 0
            _trim()

    # ---- what it is

    def __len__(self) -> int:
        return len(self._ops)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tape:
        return self

    def fingerprint(self) -> str:
        """Of operators and constants: what the values are, but for the random numbers."""
        digest = hashlib.sha256()
        for index, op in self._ops.items():
            digest.update(f"{index} {op!r}\n".encode())
        for number, constant in sorted(self._constants.items()):
            digest.update(f"{number} {constant.nbytes()}\n".encode())
            digest.update(_bytes_of(constant))
        return digest.hexdigest()

    def drawn_from(self) -> str:
        """A fingerprint of the ``states``."""
        digest = hashlib.sha256()
        for op in self._ops.values():
            if op.state is not None:
                digest.update(_bytes_of(op.state.untyped_storage()))
        return digest.hexdigest()

    @property
    def states(self) -> Tensor:
        """Of the generators, before each operator that draws: uint8 of (operators, bytes of a state)."""
        found = [op.state for op in self._ops.values() if op.state is not None]
        return torch.stack(found) if found else torch.empty(0, 0, dtype=torch.uint8)

    @states.setter
    def states(self, states: Tensor) -> None:
        drawing = [op for op in self._ops.values() if op.state is not None]
        for op, state in zip(drawing, states):
            op.state = state.clone()


class _Overwritten(Exception):
    """What was kept has been written to since it was as it is wanted."""


def _trim() -> None:
    """Give free memory back to the system, where the C library can: between what lives on it would be kept."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _bytes_of(storage: torch.UntypedStorage) -> bytes | ctypes.Array[ctypes.c_char]:
    """Its memory, not a copy of it."""
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()) if storage.nbytes() else b""


def _written(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    if func is torch.ops.aten.native_batch_norm.default:  # its schema does not say so
        *_, running_mean, running_var, is_training, _, _ = args
        return [leaf for leaf in (running_mean, running_var) if isinstance(leaf, Tensor) and is_training]
    if not func._schema.is_mutable:
        return []
    given = [*zip(func._schema.arguments, args)]
    given += [(argument, kwargs[argument.name]) for argument in func._schema.arguments if argument.name in kwargs]
    leaves = tree_leaves([value for argument, value in given if argument.is_write])
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]


def _is_whole(tensor: Tensor) -> bool:
    """Whether each element of its storage is in it, once."""
    numel = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1):
        if stride != numel:
            return False
        numel *= size
    return bool(numel * tensor.element_size() == tensor.untyped_storage().nbytes())
