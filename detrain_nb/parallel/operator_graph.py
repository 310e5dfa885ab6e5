"""The operators of a forward pass as a graph: what each reads and makes, or writes into, by the numbers of tensors."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from .operators import leaves_of, storage_of, tensors_of
from .recorders import OperatorRecorder
from .writes import written_by


@dataclass(frozen=True)
class TensorLook:
    """Facts about a tensor other than its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, leaf: Any) -> Any:
        """Return the look of a tensor; return anything else unchanged."""
        return cls(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"


@dataclass
class Op:
    """One operator call: the tensors, by number, that it read and made, or wrote into."""

    reads: list[int]
    makes: list[int]
    flops: float
    moved_bytes: int
    inside: tuple[str, ...]  # the modules whose code runs, from the outermost
    is_look: bool  # the code reads a computed value
    saved_bytes: int = 0
    writes: Sequence[int] = ()  # those in ``makes`` that existed before
    call: tuple[Any, ...] = ()  # operator, grad mode, and arguments other than tensors
    asks: Sequence[int] = ()  # those it read whose values the code learns, directly or by a size
    is_into: bool = False  # it puts values into a copy of the first tensor it read


class Recorder(OperatorRecorder[Tensor]):
    """Mode that notes every operator that runs, and what autograd saves."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.size_bytes: list[int] = []
        self.looks: list[TensorLook] = []
        self.is_computed: list[bool] = []  # whether it depends on a parameter, or is one
        self.names: dict[int, str] = {}  # of parameters, by number
        self.inside: tuple[str, ...] = ()  # the modules whose code runs, from the outermost
        self.made_in: dict[int, int] = {}  # the checkpoint in which a tensor was made, by number
        self._checkpoints: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._count = itertools.count(1)
        self._on_storage: dict[int, list[int]] = {}  # numbers of the tensors on each storage
        self.rewrites_parameters = False
        self.written_parameters: set[str] = set()
        self.versions_asked: set[str] = set()  # parameters, by name
        self._saved: set[int] = set()  # storages
        self._in_place: set[int] = set()  # tensors, by number, whose version an operator has changed
        # A weak proxy: the graph holds this hook, and tensors here hold the graph; a cycle would never be freed.
        self.pack = functools.partial(Recorder.save, weakref.proxy(self))
        for name, tensor in parameters.items():
            number = self.number(tensor)
            if number not in self.names:
                self.names[number] = name
                self.is_computed[number] = True
                self._saved.add(storage_of(tensor))
        self._of_parameters = frozenset(self._saved)
        self.parameter_bytes = {name: self.size_bytes[number] for number, name in self.names.items()}
        self.frozen = frozenset(name for number, name in self.names.items() if not self.kept[number].requires_grad)

    def on_new(self, tensor: Tensor) -> None:
        self._on_storage.setdefault(storage_of(tensor), []).append(len(self.looks))
        self.size_bytes.append(tensor.numel() * tensor.element_size())
        self.looks.append(TensorLook.of(tensor))
        self.is_computed.append(False)

    def follow(self, tensor: Tensor) -> int:
        """Note that a tensor now has other memory."""
        number = self.number(tensor)
        self._on_storage.setdefault(storage_of(tensor), []).append(number)
        return number

    def has_written(self, tensor: Tensor) -> bool:
        number = self.known(tensor)
        return any(number in op.writes for op in self.ops)

    def saves_what_it_writes(self, tensor: Tensor) -> bool:
        """Return whether autograd keeps a tensor, or a view of it, that is written in place."""
        return self.known(tensor) in self._in_place and storage_of(tensor) in self._saved

    def computed(self) -> set[int]:
        """Return the ids of tensors that depend on a parameter."""
        return {id(tensor) for tensor, is_computed in zip(self.kept, self.is_computed) if is_computed}

    def save(self, tensor: Tensor) -> None:
        """Count a tensor that autograd saves; several tensors on one storage count once."""
        storage = storage_of(tensor)
        if storage not in self._saved and self.ops:
            self._saved.add(storage)
            is_strided = tensor.layout == torch.strided
            self.ops[-1].saved_bytes += tensor.untyped_storage().nbytes() if is_strided else 0

    def checkpoint(self) -> int:
        """Return the number of the torch.utils.checkpoint that the code is in, and that reruns it later; 0 for none."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None or hooks[0] is self.pack:
            return 0
        return self._checkpoints.setdefault(hooks[0], next(self._count))  # not by id, which may be reused

    def on_question(self, tensor: Tensor) -> None:
        self.ops.append(Op([self.number(tensor)], [], 0.0, 0, self.inside, is_look=False))

    def on_operator(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        try:
            return super().on_operator(func, types, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as exc:
            if any(id(leaf) in self.computed() for leaf in leaves_of(args, kwargs)):
                exc.inside = self.inside  # type: ignore[union-attr]  # for the error about the blocks there
            raise

    def note(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        given = leaves_of(args, kwargs)
        reads = [self.number(leaf) for leaf in given if isinstance(leaf, Tensor)]
        makes = list(map(self.number, tensors_of((result,))))
        moves = makes and not func.is_view  # a view moves no bytes
        moved_bytes = sum(self.size_bytes[number] for number in {*reads, *makes}) if moves else 0
        is_from_computed = any(self.is_computed[number] for number in reads)
        written = self._written(func, args, kwargs)
        self.written_parameters.update(self.names[number] for number in written if number in self.names)
        self._in_place.update(written if func._schema.is_mutable else ())
        if written and self._is_of_parameters(written, reads):
            self.rewrites_parameters = True
            reads, makes = [], [number for number in makes if number not in written]
        else:
            makes += written
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags  # another stage would draw different numbers
        for number in makes:
            self.made_in.setdefault(number, self.checkpoint())
            self.is_computed[number] |= is_drawn or is_from_computed
        is_look = torch.Tag.data_dependent_output in func.tags and is_from_computed
        flops = _count_flops(func, args, kwargs, result)
        op = Op(reads, makes, flops, moved_bytes, self.inside, is_look, writes=written)
        plain = (leaf for leaf in given if not isinstance(leaf, Tensor))
        op.call = (func, torch.is_grad_enabled(), *plain)
        op.asks = [self.number(leaf) for leaf in _asked_by(func, args, kwargs)]
        op.is_into = func._overloadpacket.__name__ in _INTO_A_COPY
        self.ops.append(op)

    def look(self, tensor: Tensor) -> None:
        """Note that the code learns a tensor's values other than by an operator."""
        number = self.number(tensor)
        self.ops.append(Op([number], [], 0.0, 0, self.inside, self.is_computed[number], asks=[number]))

    def ask_version(self, tensor: Tensor) -> None:
        """Note that the code learns whether a tensor, or its base, has been written into."""
        alike = self._on_storage.get(storage_of(tensor), ())
        self.versions_asked.update(self.names[number] for number in alike if number in self.names)

    def _is_of_parameters(self, written: Sequence[int], reads: Sequence[int]) -> bool:
        """Return whether parameters are written from nothing computed but themselves, as every stage can do."""
        storages = {storage_of(self.kept[number]) for number in written}
        computed = {storage_of(self.kept[number]) for number in reads if self.is_computed[number]}
        return storages <= self._of_parameters and computed <= storages

    def _written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
        """Return numbers of the tensors that an in-place operator changes: its own, and all on the same memory."""
        written = written_by(func, args, kwargs)
        for leaf in written:  # transpose_() changes the shape
            self.looks[self.number(leaf)] = TensorLook.of(leaf)
        storages = dict.fromkeys(map(storage_of, written))
        return [number for storage in storages for number in self._on_storage[storage]]


class AskingMode(TorchFunctionMode):
    """Mode that notes conversions to lists and arrays, and queries of a version, which are not operators."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in (Tensor.tolist, Tensor.numpy, Tensor.__array__):
            self._recorder.look(args[0])
        elif getattr(func, "__self__", None) is Tensor._version:
            self._recorder.ask_version(args[0])
        return func(*args, **(kwargs or {}))


_INTO_A_COPY = frozenset(
    {
        *("index_put", "index_add", "index_copy", "index_fill", "index_reduce", "masked_scatter"),
        *("scatter", "scatter_add", "scatter_reduce", "select_scatter", "slice_scatter", "diagonal_scatter"),
    }
)


def _asked_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors whose values an operator reveals, directly or by the shape of its result."""
    if func is torch.ops.aten.index.Tensor:
        indices = tensors_of((args[1],))
        return [leaf for leaf in indices if leaf.dtype in (torch.bool, torch.uint8)]  # others matter by shape
    if func is torch.ops.aten.masked_select.default:
        return [args[1]]
    if func.tags and not _TELLING.isdisjoint(func.tags):
        return tensors_of(args, kwargs)
    return []


_TELLING = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


def _count_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    packet = func._overloadpacket
    if func.namespace == "aten" and (own := _UNCOUNTED.get(packet.__name__)):
        count = float(own(args, result))
    else:
        known = flop_registry.get(packet)
        count = float(known(*args, **kwargs, out_val=result)) if known else 0.0
    return count * (4 if count and any(leaf.is_complex() for leaf in tensors_of((result,))) else 1)


def _of_attention(args: Sequence[Any], result: Any) -> int:
    (batch, heads, queries, width), keys, values = args[0].shape, args[1].shape[2], args[2].shape[3]
    return int(2 * batch * heads * queries * keys * (width + values))


def _of_weights(weights: Sequence[Tensor], rows: Tensor) -> int:
    """Return the FLOPs of multiplying each row by each of these matrices."""
    return 2 * (rows.numel() // rows.shape[-1]) * sum(weight.numel() for weight in weights if weight.dim() > 1)


def _of_groups(args: Sequence[Any], result: Any) -> int:
    rows, weights, *_ = args
    if rows.dim() == weights.dim() == 2:  # groups are along the summed dimension
        return int(2 * rows.numel() * weights.shape[-1])
    return int(2 * result.numel() * rows.shape[-1])


# What torch does not count, by the name of the operator.
_UNCOUNTED: dict[str, Callable[[Sequence[Any], Any], int]] = {
    "_scaled_dot_product_flash_attention_for_cpu": _of_attention,  # torch counts only the GPU kernels
    "_grouped_mm": _of_groups,  # the experts of a mixture
    "mkldnn_rnn_layer": lambda args, result: _of_weights(args[1:3], args[0]),
    "_cudnn_rnn": lambda args, result: _of_weights(args[1], args[0]),
    "_trilinear": lambda args, result: _of_weights(args[1:2], args[0]),
    "mv": lambda args, result: 2 * args[0].numel(),
    "addmv": lambda args, result: 2 * args[1].numel(),
    "dot": lambda args, result: 2 * args[0].numel(),
}
