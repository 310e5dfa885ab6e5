"""Lifetimes of storages while a model trains, and from these the peak of memory in each phase."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor

from .operators import OperatorMode, run_operator, tensors_of
from .sameness import dense_parts

KINDS = ("weights", "gradients", "activations", "working")


@dataclass(frozen=True)
class Peak:
    """Bytes by kind at the peak of a phase."""

    phase: str
    size_bytes: tuple[float, ...]

    @property
    def total_bytes(self) -> float:
        return sum(self.size_bytes)


@dataclass
class _Stay:
    """Lifetime of a storage at one size. ``kind``: if it was given by `tell`."""

    size_bytes: int
    phase: int
    kind: str = ""
    end: int | None = None


class Storages(OperatorMode):
    """Mode that notes when storages are created and freed.

    ``are_fake``: tensors with values are then not the model's, but numbers of schedules and ranks, and keep their
    values. ``keeps_sent``: sent tensors stay until `let_go`, as the sender waits no earlier.
    """

    def __init__(self, *, are_fake: bool, keeps_sent: bool = False) -> None:
        super().__init__()
        self._are_fake, self._keeps_sent = are_fake, keeps_sent
        self._sent: list[Any] = []
        self._faked: dict[tuple[Any, ...], Tensor] = {}
        self._phases: list[tuple[str, int]] = [("start", 0)]
        self._changes: list[tuple[_Stay, int]] = []  # with the bytes that are added
        self._here: dict[int, tuple[weakref.ref[Any], _Stay]] = {}  # by the storage's address

    # ---- what happens

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Note everything in the block; also resizes, by which FSDP2 frees memory, and which are not operators."""
        resize = torch.UntypedStorage.resize_

        def noted(storage: torch.UntypedStorage, size_bytes: int) -> Any:
            result = resize(storage, size_bytes)
            self._on_resize(storage)
            return result

        torch.UntypedStorage.resize_ = noted  # type: ignore[assignment, method-assign]
        try:
            with self:
                yield
        finally:
            torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]

    def begin(self, phase: str) -> None:
        """Begin a phase; activations are what is made in a "forward" phase and outlives it."""
        self._phases.append((phase, len(self._changes)))

    def let_go(self) -> None:
        """Release sent tensors, as all have arrived."""
        self._sent.clear()

    def tell(self, tensors: Iterable[Any], kind: str) -> None:
        """Set the kind of storages that have none yet, and note unknown ones."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._note(tensor.to_local() if isinstance(tensor, DTensor) else tensor, kind)

    def on_operator(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # their parts are handled separately
        if self._are_fake:
            given = tensors_of(args, kwargs)
            fake = next((leaf for leaf in given if isinstance(leaf, FakeTensor)), None)
            if given and fake is None:
                with unset_fake_temporarily():
                    return func(*args, **kwargs)
            if fake is not None and not func._schema.is_mutable:
                args = [self._as_fake(each, fake.fake_mode) for each in args]
            if func is torch.ops.aten._local_scalar_dense.default and len(self._phases) == 1:
                return 1  # the answer to a schedule: all stages know their shapes
        if self._keeps_sent and func is torch.ops.c10d.send.default:
            self._sent.append(args[0])
        result = run_operator(func, args, kwargs)
        if not self._are_fake and func is torch.ops.c10d.recv_.default and len(self._phases) == 1:
            for tensor in args[0]:
                tensor.fill_(1)  # the answer to the same query, in initialised memory
        for leaf in tensors_of((result,)):
            self._note(leaf)
        return result

    def _as_fake(self, value: Any, fakes: FakeTensorMode) -> Any:
        """Return a cached fake tensor with the look of a tensor with values; torch would make one for each operator."""
        if type(value) is not Tensor or value.numel() < 2 or value.layout != torch.strided or value.requires_grad:
            return value
        look = value.shape, value.stride(), value.dtype, value.device
        if look not in self._faked:
            with fakes:
                self._faked[look] = torch.empty_strided(look[0], look[1], dtype=look[2], device=look[3])
        return self._faked[look]

    def _note(self, tensor: Tensor, kind: str = "") -> None:
        place = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if place.type == "meta":  # stubs of other stages compute shapes there
            return
        if tensor.layout != torch.strided:
            for part in dense_parts(tensor):
                self._note(part, kind)
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._here:
            self._enter(storage, kind)
        elif not self._here[key][1].kind:
            self._here[key][1].kind = kind

    def _enter(self, storage: torch.UntypedStorage, kind: str) -> None:
        key = storage._cdata
        stay = _Stay(storage.nbytes(), len(self._phases) - 1, kind)
        self._changes.append((stay, stay.size_bytes))
        self._here[key] = weakref.ref(storage, functools.partial(self._leave, key)), stay

    def _leave(self, key: int, _: object = None) -> None:
        _, stay = self._here.pop(key)
        stay.end = len(self._phases) - 1
        self._changes.append((stay, -stay.size_bytes))

    def _on_resize(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._here and self._here[key][1].size_bytes != storage.nbytes():
            self._leave(key)
            self._enter(storage, "working")

    # ---- results

    def peaks(self) -> list[Peak]:
        """Return the peak of every phase, in order."""
        now = dict.fromkeys(KINDS, 0)
        found: list[Peak] = []
        begins = [begin for _, begin in self._phases] + [len(self._changes)]
        for index, (name, begin) in enumerate(self._phases):
            most = tuple(now.values())
            for stay, size_bytes in self._changes[begin : begins[index + 1]]:
                now[self._kind_of(stay)] += size_bytes
                if sum(now.values()) > sum(most):
                    most = tuple(now.values())
            found.append(Peak(name, most))
        return found

    def _kind_of(self, stay: _Stay) -> str:
        if stay.kind:
            return stay.kind
        is_kept = self._phases[stay.phase][0] == "forward" and (stay.end is None or stay.end > stay.phase)
        return "activations" if is_kept else "working"
