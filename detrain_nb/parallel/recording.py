"""One forward pass, written down: each operator with the tensors that it reads and makes, each module with its place.

As a rule it runs on tensors without memory, and computes nothing.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter, tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from ..errors import DetrainError, SpecError
from .compiled import as_written
from .operators import OperatorMode, leaves_of
from .writes import written_by

__all__ = [
    "AskingMode",
    "Entries",
    "ModuleOutput",
    "Op",
    "Recorder",
    "Recording",
    "TensorLook",
    "TensorMemo",
    "device_of",
    "fails_with_inputs",
    "first_float_tensor",
    "modules_around",
    "record",
    "takes_gradients",
    "tensors_in",
    "without_fused_layers",
]

_CPU = torch.device("cpu")


class TensorMemo:
    """A function of tensors that gives the same one for the same one, and leaves everything else as it is."""

    def __init__(self, make: Callable[[Tensor], Tensor]) -> None:
        self._make = make
        self._made: dict[int, tuple[Tensor, Tensor]] = {}  # the original too, so that its id stays its own

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._made:
            self._made[id(value)] = value, self._make(value)
        return self._made[id(value)][1]

    def has(self, value: Tensor) -> bool:
        """Whether it was given before."""
        return id(value) in self._made


@dataclass(frozen=True)
class Recording:
    """``buffers``: by name, the tensors, by number, that each was when the pass began and when it ended.

    ``read_past``: parameters that are trained, or written, by name, of which the code reads the tensor itself: not as
    an attribute of their module, but in a list, a closure or another object. ``buffers_read_past``: buffers likewise.
    ``gathered``: by number, in which attributes of modules the pass has left tensors that it made. ``buffers_saved``:
    those that it writes in place, and that autograd keeps for the backward pass. ``made``: parameters and buffers that
    were not there before the pass.
    """

    recorder: Recorder
    entries: Entries
    outputs: Any
    buffers: Mapping[str, tuple[int, int]]
    read_past: frozenset[str]
    buffers_read_past: frozenset[str]
    buffers_saved: frozenset[str]
    made: frozenset[str]
    gathered: Mapping[int, str] = field(default_factory=dict)


def record(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    copy: Callable[[Tensor], Tensor],
    around: Callable[[Recorder, Entries], contextlib.AbstractContextManager[None]] = (
        lambda recorder, entries: contextlib.nullcontext()
    ),
) -> Recording:
    """Run ``model`` on what ``copy`` makes of its tensors, and of its inputs', ``around`` it, under `state_kept`."""
    made = TensorMemo(copy)
    parameters, buffers = tensors_in(model, "_parameters", made), tensors_in(model, "_buffers", made)
    args, kwargs = tree_map(made, args), tree_map(made, kwargs)
    recorder = Recorder(parameters)
    entries = Entries(model, recorder)
    storages = {name: _storage_of(tensor) for name, tensor in parameters.items()}
    with (
        entries.watched(),
        around(recorder, entries),
        without_fused_layers(),
        as_written(),
        torch.enable_grad(),
        saved_tensors_hooks(recorder.pack, _unpack),
        recorder,
    ):
        try:
            outputs = torch.func.functional_call(model, {**parameters, **buffers}, args, kwargs, tie_weights=False)
        except RuntimeError as exc:
            if "yet support saved tensor hooks" not in str(exc):
                raise
            raise SpecError(_TAKES_GRADIENTS) from exc  # by torch.func
    recorder.written_parameters.update(  # as an assignment to ``weight.data`` does, which is no operator
        name for name, tensor in parameters.items() if _storage_of(tensor) != storages[name]
    )
    after = {**buffers, **entries.buffers_left}
    numbers = {name: (recorder.number(buffers[name]), recorder.number(after[name])) for name in buffers}
    read_past = frozenset(_read_past(model, "_parameters", recorder, parameters))
    buffers_read_past = frozenset(_read_past(model, "_buffers", recorder, buffers))
    saved = frozenset(name for name, tensor in buffers.items() if recorder.saves_what_it_writes(tensor))
    there = {**tensors_in(model, "_parameters", lambda each: each), **tensors_in(model, "_buffers", lambda each: each)}
    made_now = frozenset(there.keys() - parameters.keys() - buffers.keys())
    return Recording(recorder, entries, outputs, numbers, read_past, buffers_read_past, saved, made_now)


def _read_past(model: nn.Module, kind: str, recorder: Recorder, replaced: Mapping[str, Tensor]) -> Iterator[str]:
    """Where a tensor is replaced in its module, one that is read was elsewhere; it matters where it changes."""
    for prefix, part in model.named_modules():
        if isinstance(part, nn.RNNBase):  # they have a list of their own, which follows where a parameter is set
            continue
        for key, tensor in getattr(part, kind).items():
            name = f"{prefix}.{key}" if prefix else key
            if tensor is None or replaced.get(name, tensor) is tensor or not recorder.has_read(tensor):
                continue
            if tensor.requires_grad or recorder.has_written(tensor) or recorder.has_written(replaced[name]):
                yield name


@contextlib.contextmanager
def fails_with_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[None]:
    """What a model's own forward raises for example inputs is told with them. Raises: SpecError."""
    try:
        yield
    except (DetrainError, torch.OutOfMemoryError, NotImplementedError):  # an operator without fake tensors says so
        raise
    except (RuntimeError, TypeError, ValueError, LookupError, AssertionError) as exc:
        given = [*map(_look_of, args), *(f"{name}={_look_of(value)}" for name, value in kwargs.items())]
        why = str(exc).rstrip(".")
        if isinstance(exc, (LookupError, AssertionError)):  # some say a name alone, or nothing
            why = f"{type(exc).__name__}: {why}".removesuffix(": ")
        raise SpecError(
            f"the model fails on the example inputs ({', '.join(given) or 'none'}): {why}: give what it is called "
            "with, of one microbatch"
        ) from exc


def _look_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return repr(value) if isinstance(value, (bool, int, float, str, type(None))) else type(value).__name__


def device_of(tree: Any, otherwise: torch.device = _CPU) -> torch.device:
    """Of the first tensor, or ``otherwise`` where there is none."""
    return next((leaf.device for leaf in tree_iter(tree) if isinstance(leaf, Tensor)), otherwise)


@contextlib.contextmanager
def without_fused_layers() -> Iterator[None]:
    """In here torch's transformer layers run as they do in training.

    Where no gradient is wanted they would take the weights of all layers inside of them, past those that are cut, and
    give nested tensors, which no boundary between stages can carry. The threads of a proof enter it in one that is
    there already: whoever has turned this off turns it on again.
    """
    if not torch.backends.mha.get_fastpath_enabled():
        yield
        return
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def tensors_in(model: nn.Module, kind: str, made: Callable[[Any], Any]) -> dict[str, Tensor]:
    """What ``made`` makes of a kind of tensors; each place in a module once, however many names the module has."""
    return {
        f"{name}.{key}" if name else key: made(tensor)
        for name, module in model.named_modules()
        for key, tensor in getattr(module, kind).items()
        if tensor is not None
    }


def first_float_tensor(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Tensor | None:
    """The argument of a module that is taken for what was computed so far, as masks and positions are not."""
    values = (*args, *kwargs.values())
    return next((value for value in values if isinstance(value, Tensor) and value.is_floating_point()), None)


def modules_around(name: str) -> list[str]:
    """The names of the modules that a module is part of, from the model itself on."""
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(len(parts))]


@dataclass(frozen=True)
class TensorLook:
    """What is known of a tensor beside its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class ModuleOutput:
    """What a module gave for its first float argument, of ``argument_shape``: a tree of `TensorLook`."""

    argument_shape: tuple[int, ...]
    tree: Any

    def scaled_to(self, argument: Tensor) -> Any:
        """The same, on the meta device, for another argument: sizes that are the argument's follow it, as do rows."""
        return tree_map(lambda leaf: self._scale(leaf, argument) if isinstance(leaf, TensorLook) else leaf, self.tree)

    def _scale(self, look: TensorLook, argument: Tensor) -> Tensor:
        shape = list(look.shape)
        for place, (was, now) in enumerate(zip(self.argument_shape, argument.shape)):
            if place < len(shape) and shape[place] == was:
                shape[place] = now
            elif place == 0 and shape and was and shape[0] * now % was == 0:
                shape[0] = shape[0] * now // was
        return torch.empty(shape, dtype=look.dtype, device="meta")


@dataclass
class Op:
    """One operator call: the tensors, by number, that it read and made, or wrote into."""

    reads: list[int]
    makes: list[int]
    flops: float
    moved_bytes: int
    inside: tuple[str, ...]  # the modules whose code runs, from the outermost
    is_look: bool  # the code asks for a value that was computed
    saved_bytes: int = 0
    writes: Sequence[int] = ()  # of those that it made, what was there before
    call: tuple[Any, ...] = ()  # the operator, whether a gradient is noted, and what it was given beside tensors
    asks: Sequence[int] = ()  # of what it read, whose values the code gets to know: as such, or by how many there are
    is_into: bool = False  # it puts others into a copy of the first that it read


class Recorder(OperatorMode):
    """Notes every operator that runs, and what autograd keeps."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.ops: list[Op] = []
        self.size_bytes: list[int] = []
        self.looks: list[TensorLook] = []
        self.is_computed: list[bool] = []  # it depends on a parameter, or is one
        self.names: dict[int, str] = {}  # of parameters, by number
        self.inside: tuple[str, ...] = ()  # the modules whose code runs, from the outermost
        self.made_in: dict[int, int] = {}  # in which checkpoint a tensor was made, by number
        self._checkpoints: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._count = itertools.count(1)
        self._numbers: dict[int, int] = {}
        self._kept: list[Tensor] = []  # so that no other tensor gets the id of one that has gone
        self._on_storage: dict[int, list[int]] = {}  # the tensors, by number, that are on one storage
        self.rewrites_parameters = False
        self.written_parameters: set[str] = set()
        self.versions_asked: set[str] = set()  # parameters, by name
        self._saved: set[int] = set()  # storages
        self._in_place: set[int] = set()  # tensors, by number, whose version an operator has changed
        # The graph has it as long as a tensor here has the graph: held by both, neither would ever go.
        self.pack = functools.partial(Recorder.save, weakref.proxy(self))
        for name, tensor in parameters.items():
            number = self.number(tensor)
            if number not in self.names:
                self.names[number] = name
                self.is_computed[number] = True
                self._saved.add(_storage_of(tensor))
        self._of_parameters = frozenset(self._saved)
        self.parameter_bytes = {name: self.size_bytes[number] for number, name in self.names.items()}

    def number(self, tensor: Tensor) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._kept)
            self._on_storage.setdefault(_storage_of(tensor), []).append(len(self._kept))
            self._kept.append(tensor)
            self.size_bytes.append(tensor.numel() * tensor.element_size())
            self.looks.append(_look_at(tensor))
            self.is_computed.append(False)
        return self._numbers[id(tensor)]

    def tensor(self, number: int) -> Tensor:
        return self._kept[number]

    def follow(self, tensor: Tensor) -> int:
        """Note that a tensor is on other memory now."""
        number = self.number(tensor)
        self._on_storage.setdefault(_storage_of(tensor), []).append(number)
        return number

    def has_read(self, tensor: Tensor) -> bool:
        return id(tensor) in self._numbers

    def has_written(self, tensor: Tensor) -> bool:
        number = self._numbers.get(id(tensor))
        return any(number in op.writes for op in self.ops)

    def saves_what_it_writes(self, tensor: Tensor) -> bool:
        """Whether autograd keeps a tensor, or a view of it, that is written in place."""
        return self._numbers.get(id(tensor)) in self._in_place and _storage_of(tensor) in self._saved

    def computed(self) -> set[int]:
        """The ids of tensors that depend on a parameter."""
        return {id(tensor) for tensor, is_computed in zip(self._kept, self.is_computed) if is_computed}

    def save(self, tensor: Tensor) -> None:
        """Called by autograd for what it keeps; several tensors on one storage are kept once."""
        storage = _storage_of(tensor)
        if storage not in self._saved and self.ops:
            self._saved.add(storage)
            is_strided = tensor.layout == torch.strided
            self.ops[-1].saved_bytes += tensor.untyped_storage().nbytes() if is_strided else 0

    def checkpoint(self) -> int:
        """Which torch.utils.checkpoint the code is in, that will run again in the backward pass; 0 for none."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None or hooks[0] is self.pack:
            return 0
        return self._checkpoints.setdefault(hooks[0], next(self._count))  # not by its id, which the next may have

    def on_question(self, tensor: Tensor) -> None:
        self.ops.append(Op([self.number(tensor)], [], 0.0, 0, self.inside, is_look=False))

    def on_operator(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        try:
            result = func(*args, **kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException) as exc:
            if any(id(leaf) in self.computed() for leaf in leaves_of(args, kwargs)):
                exc.inside = self.inside  # type: ignore[union-attr]  # for what is told of the blocks there
            raise
        given = leaves_of(args, kwargs)
        reads = [self.number(leaf) for leaf in given if isinstance(leaf, Tensor)]
        makes = [self.number(leaf) for leaf in leaves_of((result,)) if isinstance(leaf, Tensor)]
        moves = makes and not func.is_view  # else it gives another view
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
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags  # another stage would draw something else
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
        return result

    def look(self, tensor: Tensor) -> None:
        """Note that the code gets to know a tensor's values otherwise than by an operator."""
        number = self.number(tensor)
        self.ops.append(Op([number], [], 0.0, 0, self.inside, self.is_computed[number], asks=[number]))

    def ask_version(self, tensor: Tensor) -> None:
        """Note that the code gets to know whether somebody has written into a tensor, or into what it is a view of."""
        alike = self._on_storage.get(_storage_of(tensor), ())
        self.versions_asked.update(self.names[number] for number in alike if number in self.names)

    def _is_of_parameters(self, written: Sequence[int], reads: Sequence[int]) -> bool:
        """Parameters are written, from nothing that was computed but themselves: every stage can do that to its own."""
        storages = {_storage_of(self._kept[number]) for number in written}
        computed = {_storage_of(self._kept[number]) for number in reads if self.is_computed[number]}
        return storages <= self._of_parameters and computed <= storages

    def _written(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[int]:
        """What an operator in place writes into: its tensor, and all others that are on its memory."""
        written = written_by(func, args, kwargs)
        for leaf in written:  # transpose_() gives it another shape
            self.looks[self.number(leaf)] = _look_at(leaf)
        storages = dict.fromkeys(map(_storage_of, written))
        return [number for storage in storages for number in self._on_storage[storage]]


class AskingMode(TorchFunctionMode):
    """Notes where the code makes lists of tensors, and arrays, or asks for a version: these are no operators."""

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
    """The tensors whose values an operator tells: as such, or by the shape of what it makes."""
    if func is torch.ops.aten.index.Tensor:
        indices = [leaf for leaf in tree_leaves(args[1]) if isinstance(leaf, Tensor)]
        return [leaf for leaf in indices if leaf.dtype in (torch.bool, torch.uint8)]  # of others it is their shape
    if func is torch.ops.aten.masked_select.default:
        return [args[1]]
    if func.tags and not _TELLING.isdisjoint(func.tags):
        return [leaf for leaf in leaves_of(args, kwargs) if isinstance(leaf, Tensor)]
    return []


_TELLING = frozenset((torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape))


def _unpack(packed: None) -> Tensor:
    raise SpecError(_TAKES_GRADIENTS)


def takes_gradients(exc: SpecError, *, by_transform: bool = False) -> bool:
    """Whether a pass was refused because the model takes gradients in its forward; ``by_transform``: by torch.func."""
    return _TAKES_GRADIENTS in str(exc) and not (by_transform and exc.__cause__ is None)


_TAKES_GRADIENTS = (
    "the model takes gradients in its own forward (torch.autograd.grad, torch.func.grad), which a pass without a "
    "backward one cannot follow: lay it out without pp and tp (dp_replicate, dp_shard)"
)


def _storage_of(tensor: Tensor) -> int:
    """A sparse tensor, which is kept as long as this is of use, has none that could be asked for."""
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)


def _count_flops(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> float:
    packet = func._overloadpacket
    if packet is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu:  # torch counts only those of GPUs
        (batch, heads, queries, width), keys, values = args[0].shape, args[1].shape[2], args[2].shape[3]
        return float(2 * batch * heads * queries * keys * (width + values))
    count = flop_registry.get(packet)
    return float(count(*args, **kwargs, out_val=result)) if count else 0.0


class Entries:
    """When each module is entered and left, counted in operators."""

    def __init__(self, model: nn.Module, recorder: Recorder) -> None:
        self.model = model
        self._recorder = recorder
        self.entered: list[tuple[int, str, int | None]] = []  # the operator that comes next, the module, its argument
        self.inside: dict[str, tuple[str, ...]] = {}  # the modules whose code, or hook, has called it first
        self.checkpointed_with: set[str] = set()  # with what they are given: no place to go on from
        self.reentrant: set[str] = set()  # where no gradient is noted of what has one: a checkpoint does that later
        self.left: dict[str, int] = {}
        self.given: dict[str, list[int]] = {}  # tensors that it returned, by number
        self.outputs: dict[str, ModuleOutput] = {}  # of modules that give tensors alone
        self.giving_others: set[str] = set()  # modules that return more than tensors
        self.calls: dict[str, int] = {}
        self.time_first: list[tuple[str, tuple[int, ...]]] = []  # layers that want (T, B, D), and what they get
        self.buffers_left: dict[str, Tensor] = {}  # as they are when the model returns

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        handles = []
        try:
            for name, module in self.model.named_modules():
                handles.append(module.register_forward_pre_hook(self._on_entry(name), prepend=True, with_kwargs=True))
                handles.append(module.register_forward_hook(self._on_exit(name), with_kwargs=True))
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _on_entry(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.calls[name] = self.calls.get(name, 0) + 1
            self.inside.setdefault(name, self._recorder.inside)
            self._recorder.inside = (*self._recorder.inside, name)
            argument = first_float_tensor(args, kwargs)
            if argument is not None and is_functorch_wrapped_tensor(argument):  # in torch.vmap: one row of it
                argument = None
            number = None if argument is None else self._recorder.number(argument)
            if argument is not None and _takes_time_first(module) and argument.dim() == 3:
                self.time_first.append((name, tuple(argument.shape)))
            self.entered.append((len(self._recorder.ops), name, number))
            if argument is not None and argument.requires_grad and not torch.is_grad_enabled():
                self.reentrant.add(name)
            around = self._recorder.checkpoint()
            if around and number is not None and self._recorder.made_in.get(number) == around:
                self.checkpointed_with.add(name)

        return note

    def _on_exit(self, name: str) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            argument = first_float_tensor(args, kwargs)
            if argument is not None and output is argument:  # dropout that evaluates: what reads it next reads another
                with torch.enable_grad():  # into a view made without, nobody may write
                    output = argument.view_as(argument)
            self._recorder.inside = self._recorder.inside[:-1]
            self.left[name] = len(self._recorder.ops)
            if not name:
                self.buffers_left = tensors_in(module, "_buffers", lambda buffer: buffer)
            leaves = tree_leaves(output)
            tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
            given = (self._recorder.number(leaf) for leaf in tensors if not is_functorch_wrapped_tensor(leaf))
            self.given.setdefault(name, []).extend(given)
            if not all(isinstance(leaf, (Tensor, type(None))) for leaf in leaves):
                self.giving_others.add(name)
            elif argument is not None:
                self.outputs[name] = ModuleOutput(tuple(argument.shape), tree_map(_look_at, output))
            return output

        return note


def _takes_time_first(module: nn.Module) -> bool:
    return isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and not module.batch_first


def _look_at(leaf: Any) -> Any:
    return TensorLook(tuple(leaf.shape), leaf.dtype) if isinstance(leaf, Tensor) else leaf
