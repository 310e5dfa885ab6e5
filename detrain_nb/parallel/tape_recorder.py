"""Recording on a tape what a constructor does to tensors, while these have no memory.

Random numbers are drawn while recording, on memory that is freed at once: so the generator passes through the
states that it would have had, and the state before each operator is known.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import SpecError
from .operators import storage_of, tensors_of
from .recorders import OperatorRecorder, TensorMemo
from .tape import Op, OwnGenerator, Place, Tape
from .writes import written_by

# Their results do not depend on the old values.
_DRAWING = ("normal_", "uniform_", "random_", "exponential_", "geometric_", "log_normal_", "cauchy_", "bernoulli_")
_OVERWRITING = frozenset((*_DRAWING, "zero_", "fill_", "copy_"))


class TapeRecorder(OperatorRecorder[torch.UntypedStorage]):
    """Mode that records operators on the fake tensors of ``fakes``."""

    def __init__(self, fakes: FakeTensorMode) -> None:
        super().__init__(lambda storage: storage._cdata)  # not data_ptr(): these have no memory
        self.tape = Tape(lambda number: int(self.kept[number].nbytes()))
        self._fakes = fakes
        self._stand_ins = TensorMemo(functools.partial(TapeRecorder._stand_in, weakref.proxy(self)))

    def is_changed(self, tensor: Tensor) -> bool:
        """Return whether a real tensor was written to."""
        is_met = storage_of(tensor) in map(storage_of, self._stand_ins.given)
        return is_met and self.tape.is_written(self._number(self.fake(tensor)))

    def place_of(self, tensor: Tensor) -> Place:
        """Return the place of a tensor. Raises: SpecError when it is not dense and on the CPU."""
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg() or tensor.device.type != "cpu":
            kind = f"{str(tensor.layout).removeprefix('torch.')} tensor on {tensor.device}"
            raise SpecError(
                f"the code makes a {kind}, but deferred supports dense tensors on the CPU only: make it there, and "
                "give materialize a device"
            )
        size, stride = tuple(map(int, tensor.shape)), tuple(map(int, tensor.stride()))
        return Place(self._number(tensor), int(tensor.storage_offset()), size, stride, tensor.dtype)

    def fake(self, tensor: Tensor) -> Tensor:
        """Return the fake of a real tensor, which has the values of the tensor now or at its first use."""
        found: Tensor = tensor if isinstance(tensor, FakeTensor) else self._stand_ins(tensor)
        return found

    def _stand_in(self, tensor: Tensor) -> Tensor:
        with _disable_current_modes():
            made = self._fakes.from_tensor(tensor.detach(), static_shapes=True)
            if self._is_new(made):
                self.tape.set_constant(self._number(made), tensor.untyped_storage().clone())
        return made

    def finish(self, places: Iterable[Place]) -> None:
        """Keep on the tape only what the values of ``places`` need."""
        self.tape.close(places, {number: int(each.nbytes()) for number, each in enumerate(self.kept)})

    def on_operator(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if func is torch.ops.aten.lift_fresh.default:  # the result of torch.tensor()
            return self._lift(func, *args)
        args, kwargs = tree_map(lambda leaf: self.fake(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
        try:
            result = super().on_operator(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._look(func, args, kwargs)
        self._fakes.fake_tensor_converter.meta_converter.tensor_memo.clear()  # its weak references
        return result  # would keep Module.to() from swapping tensors

    def _lift(self, func: Any, tensor: Tensor) -> Any:
        made = func(tensor)
        if not isinstance(tensor, FakeTensor) and self._is_new(made):
            with _disable_current_modes():
                self.tape.set_constant(self._number(made), tensor.detach().clone().untyped_storage())
        return made

    def _look(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Compute values that the code reads; results become constants. Raises: SpecError."""
        if func._schema.is_mutable:
            raise SpecError(
                f"{func} writes in a way that depends on values, which cannot be deferred: make the model without "
                "deferred()"
            )
        with _disable_current_modes():
            args, kwargs = tree_map(self._current, (args, kwargs))
            result = func(*args, **kwargs)
        return tree_map(lambda leaf: self.fake(leaf) if isinstance(leaf, Tensor) else leaf, result)

    def _current(self, leaf: Any) -> Any:
        return self.tape.value(self.place_of(leaf)) if isinstance(leaf, Tensor) else leaf

    def _scratch(self, leaf: Any) -> Any:
        return self.place_of(leaf).scratch() if isinstance(leaf, Tensor) else leaf

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        made = tuple(self.place_of(leaf) if self._is_new(leaf) else None for leaf in tensors_of((result,)))
        written = written_by(func, args, kwargs)
        name = func._overloadpacket.__name__
        if not written and (name.startswith(("empty", "new_empty")) or not any(made)):
            return
        reads = tensors_of(args, kwargs)
        is_blind = False
        if name.endswith("_like") or name.startswith("new_"):
            reads = []
        elif written and name in _OVERWRITING:
            others = reads[1:]  # the first is written
            is_blind = not {*map(self._number, written)} & {*map(self._number, others)}
            reads = others if is_blind else reads
        fresh = [place.storage for place in made if place is not None]
        covered = {self._number(leaf) for leaf in written if is_blind and _is_whole(leaf)}
        noted: tuple[Any, Any] = tree_map(self._noted, (tuple(args), kwargs))
        op = Op(
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
        self.tape.add(op)

    def _noted(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Generator):
            return OwnGenerator()
        return self.place_of(leaf) if isinstance(leaf, Tensor) else leaf

    def _draw(self, op: Op, args: Any, kwargs: Any) -> None:
        """Advance the generator as the operator does."""
        generators = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Generator)]
        generator = generators[0] if generators else torch.default_generator
        with _disable_current_modes():
            op.state = generator.get_state()
            args, kwargs = tree_map(self._current if op.reads else self._scratch, (args, kwargs))
            op.func(*args, **kwargs)
            if op.reads:
                self.tape.forget_values()  # it may have written to them
        self.tape.free_what_piles_up(op)

    def _is_new(self, tensor: Tensor) -> bool:
        return self.known(tensor.untyped_storage()) < 0

    def _number(self, tensor: Tensor) -> int:
        return self.number(tensor.untyped_storage())


def _is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor contains each element of its storage exactly once."""
    numel = 1
    for stride, size in sorted((stride, size) for stride, size in zip(tensor.stride(), tensor.shape) if size > 1):
        if stride != numel:
            return False
        numel *= size
    return bool(numel * tensor.element_size() == tensor.untyped_storage().nbytes())
