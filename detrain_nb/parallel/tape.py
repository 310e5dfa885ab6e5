"""A record of operators on tensors without memory, rerun for those tensors whose values are needed.

A value is computed from the writes to its storage, and from what these read, as far back as it matters: so
views, in-place writes and ``.data`` need no special care. tape_recorder.py records the tape.
"""

from __future__ import annotations

import bisect
import ctypes
import hashlib
import sys
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from .operators import tensors_of

_TRIM_BYTES = 1 << 25
_KEPT_SIZES = 4  # times the largest storage that is kept between two reads


@dataclass(frozen=True)
class Place:
    """Where a tensor is: the number of its storage, and its layout there."""

    storage: int
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        return torch.empty(0, dtype=self.dtype, device="cpu").set_(storage, self.offset, self.size, self.stride)

    def scratch(self) -> Tensor:
        """Return an uninitialised tensor of this layout."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="cpu")


class OwnGenerator:
    """Stand-in in arguments for a generator, whose state is in the operator."""

    def __repr__(self) -> str:
        return "generator"


@dataclass
class Op:
    """An operator call, with places for its tensors.

    ``made``: for each leaf of the result, its place if it is on a new storage. ``writes``: the storages that it changes
    or makes; ``covered``: those it overwrites completely. ``state``: of the generator, before it drew.
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


class Tape:
    """Operators in order, and the values that they make. It is open until all operators are recorded."""

    def __init__(self, size_of: Callable[[int], int]) -> None:
        """``size_of``: the bytes of a storage, by its number."""
        self._size_of = size_of
        self._is_open = True
        self._ops: dict[int, Op] = {}
        self._count = 0
        self._constants: dict[int, torch.UntypedStorage] = {}
        self._writers: dict[int, list[int]] = {}
        self._recent: dict[int, tuple[int, torch.UntypedStorage]] = {}  # with the operator up to which they are current
        self._passed_bytes = 0  # written since memory was last trimmed

    # ---- while it is open

    def add(self, op: Op) -> None:
        for number in op.writes:
            self._writers.setdefault(number, []).append(self._count)
        self._ops[self._count] = op
        self._count += 1

    def set_constant(self, number: int, storage: torch.UntypedStorage) -> None:
        """Set the contents of a storage before its first write, which are zeros by default."""
        self._constants[number] = storage

    def is_written(self, number: int) -> bool:
        return bool(self._writers.get(number))

    def forget_values(self) -> None:
        """Drop kept values, which may have been written to: the next value is computed from the beginning."""
        self._recent = {}

    def close(self, places: Iterable[Place], sizes: Mapping[int, int]) -> None:
        """Drop what the values of ``places`` do not need. ``sizes``: the bytes of storages, by number."""
        kept, storages = self._needed([(place.storage, self._count) for place in places], {})
        self._ops = {index: self._ops[index] for index in sorted(kept)}
        self._constants = {number: each for number, each in self._constants.items() if number in storages}
        self._writers = {number: [each for each in ops if each in kept] for number, ops in self._writers.items()}
        self._size_of, self._is_open, self._recent = sizes.__getitem__, False, {}

    # ---- values

    def value(self, place: Place) -> Tensor:
        """Compute the current value of the tensor at ``place`` on the CPU, with the default generator."""
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
        if self._is_open:
            times[place.storage] = self._count
            self._recent = {number: (times[number], each) for number, each in found.items()}
        return tensor

    def _needed(
        self, wanted: list[tuple[int, int]], recent: Mapping[int, tuple[int, Any]]
    ) -> tuple[set[int], set[int]]:
        """Return the operators that produce storages as they were before an operator, and all storages involved."""
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
        """Run operators on the storages ``found``; note in ``times`` the operator up to which each is current.

        Storages that are no longer needed are freed; while recording, some are kept for the next read, to resume from.
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
                most = _KEPT_SIZES * largest if self._is_open else -1
                while done and sum(found[number].nbytes() for number in done) > most:
                    del found[done.popleft()]
                self.free_what_piles_up(op)
        finally:
            torch.set_default_dtype(default_dtype)

    def _run_one(self, op: Op, found: dict[int, torch.UntypedStorage]) -> None:
        generator: torch.Generator | None = None
        if op.state is not None:
            torch.default_generator.set_state(op.state)
            generator = torch.Generator().set_state(op.state)

        def given(leaf: Any) -> Any:
            if isinstance(leaf, Place):
                is_used = leaf.storage in op.reads or leaf.storage in op.writes
                return leaf.on(self._storage(leaf.storage, found)) if is_used else leaf.scratch()
            return generator if isinstance(leaf, OwnGenerator) else leaf

        args, kwargs = tree_map(given, (op.args, op.kwargs))
        result = op.func(*args, **kwargs)
        for place, leaf in zip(op.made, tensors_of((result,))):
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
        """Return a storage; one that was never written is zero."""
        if number not in found:
            constant = self._constants.get(number)
            found[number] = (
                constant.clone()
                if constant is not None
                else torch.zeros(self._size_of(number), dtype=torch.uint8, device="cpu").untyped_storage()
            )
        return found[number]

    def free_what_piles_up(self, op: Op) -> None:
        """Trim free memory now and then, after an operator has run."""
        self._passed_bytes += sum(map(self._size_of, op.writes))
        if self._passed_bytes > _TRIM_BYTES:
            self._passed_bytes = 0
            _trim()

    # ---- fingerprints

    def __len__(self) -> int:
        return len(self._ops)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tape:
        return self

    def fingerprint(self) -> str:
        """Return a digest of operators and constants: of everything that determines values but random numbers."""
        digest = hashlib.sha256()
        for index, op in self._ops.items():
            digest.update(f"{index} {op!r}\n".encode())
        for number, constant in sorted(self._constants.items()):
            digest.update(f"{number} {constant.nbytes()}\n".encode())
            digest.update(_bytes_of(constant))
        return digest.hexdigest()

    def drawn_from(self) -> str:
        """Return a digest of ``states``."""
        digest = hashlib.sha256()
        for op in self._ops.values():
            if op.state is not None:
                digest.update(_bytes_of(op.state.untyped_storage()))
        return digest.hexdigest()

    @property
    def states(self) -> Tensor:
        """States of the generators before each operator that draws: uint8 of (operators, bytes of a state)."""
        found = [op.state for op in self._ops.values() if op.state is not None]
        return torch.stack(found) if found else torch.empty(0, 0, dtype=torch.uint8)

    @states.setter
    def states(self, states: Tensor) -> None:
        drawing = [op for op in self._ops.values() if op.state is not None]
        for op, state in zip(drawing, states):
            op.state = state.clone()


class _Overwritten(Exception):
    """A kept value is newer than the one that is needed."""


def _trim() -> None:
    """Return free memory to the system if the C library can; it would keep memory between live blocks."""
    if sys.platform.startswith("linux"):
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def _bytes_of(storage: torch.UntypedStorage) -> bytes | ctypes.Array[ctypes.c_char]:
    """Return the memory of a storage, without copying it."""
    return (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr()) if storage.nbytes() else b""
