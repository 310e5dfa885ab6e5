"""Which storages live while a model trains, and how long; so what is there when most is, phase by phase."""

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
    """What is there, by kind, when most is in a phase."""

    phase: str
    size_bytes: tuple[float, ...]

    @property
    def total_bytes(self) -> float:
        return sum(self.size_bytes)


@dataclass
class _Stay:
    """The time of a storage with one size. ``kind``: where it was told."""

    size_bytes: int
    phase: int
    kind: str = ""
    end: int | None = None


class Storages(OperatorMode):
    """Notes the storages that are made in it, and when they go.

    ``are_fake``: what has values is then no tensor of the model, but numbers that schedules and ranks reckon with, and
    keeps them. ``keeps_sent``: what goes to another rank stays until `let_go`, as its sender waits no earlier.
    """

    def __init__(self, *, are_fake: bool, keeps_sent: bool = False) -> None:
        super().__init__()
        self._are_fake, self._keeps_sent = are_fake, keeps_sent
        self._sent: list[Any] = []
        self._faked: dict[tuple[Any, ...], Tensor] = {}
        self._phases: list[tuple[str, int]] = [("start", 0)]
        self._changes: list[tuple[_Stay, int]] = []  # and how many bytes come, or go
        self._here: dict[int, tuple[weakref.ref[Any], _Stay]] = {}  # by the storage's address

    # ---- what happens

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """In here everything is noted; FSDP2 gives memory back by another size, which is no operator."""
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
        """What comes now is in another phase; of a "forward" one activations are what outlives it."""
        self._phases.append((phase, len(self._changes)))

    def let_go(self) -> None:
        """All has arrived that was sent."""
        self._sent.clear()

    def tell(self, tensors: Iterable[Any], kind: str) -> None:
        """Say what storages are of which that was not said before; unknown ones are noted."""
        for tensor in tensors:
            if isinstance(tensor, Tensor):
                self._note(tensor.to_local() if isinstance(tensor, DTensor) else tensor, kind)

    def on_operator(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if any(issubclass(kind, (DTensor, AsyncCollectiveTensor)) for kind in types):
            return NotImplemented  # their parts come here themselves
        if self._are_fake:
            given = tensors_of(args, kwargs)
            fake = next((leaf for leaf in given if isinstance(leaf, FakeTensor)), None)
            if given and fake is None:
                with unset_fake_temporarily():
                    return func(*args, **kwargs)
            if fake is not None and not func._schema.is_mutable:
                args = [self._as_fake(each, fake.fake_mode) for each in args]
            if func is torch.ops.aten._local_scalar_dense.default and len(self._phases) == 1:
                return 1  # a schedule asks whether all stages know their shapes
        if self._keeps_sent and func is torch.ops.c10d.send.default:
            self._sent.append(args[0])
        result = run_operator(func, args, kwargs)
        if not self._are_fake and func is torch.ops.c10d.recv_.default and len(self._phases) == 1:
            for tensor in args[0]:
                tensor.fill_(1)  # the same question, and no memory that nobody wrote
        for leaf in tensors_of((result,)):
            self._note(leaf)
        return result

    def _as_fake(self, value: Any, fakes: FakeTensorMode) -> Any:
        """One that looks the same in the place of a tensor with values: torch would make one anew for each operator."""
        if type(value) is not Tensor or value.numel() < 2 or value.layout != torch.strided or value.requires_grad:
            return value
        look = value.shape, value.stride(), value.dtype, value.device
        if look not in self._faked:
            with fakes:
                self._faked[look] = torch.empty_strided(look[0], look[1], dtype=look[2], device=look[3])
        return self._faked[look]

    def _note(self, tensor: Tensor, kind: str = "") -> None:
        place = tensor.fake_device if isinstance(tensor, FakeTensor) else tensor.device
        if place.type == "meta":  # what stands for other stages asks shapes there
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

    # ---- what it comes to

    def peaks(self) -> list[Peak]:
        """Of every phase, in their order."""
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
