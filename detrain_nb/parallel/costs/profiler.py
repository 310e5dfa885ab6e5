"""What a model costs between the places where it can be cut, from one forward pass that computes and allocates nothing.

A cut is a module at whose entry one float tensor, that module's argument, is all that is left of what was computed so
far: whoever has it, and the model's inputs, can go on from there. Between two cuts lies a `Unit`.
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_leaves, tree_map

from ...errors import SpecError
from ...text import ShownAsText, table_lines
from ..arguments import require_model
from ..kept import state_kept
from ..operator_graph import AskingMode, TensorLook
from ..recording import Entries, ModuleOutput, Recording, device_of, fails_with_inputs, modules_around, record
from ..writes import writes_undone
from .block_use import BlockUse, find_block_use
from .carried_attributes import CarriedAttribute, changed_attributes, find_carried, find_gathered, note_attributes
from .cuts import Cut, find_cuts, find_replaceable
from .measuring import measure_units
from .written_buffers import WrittenBuffer, find_written_buffers

ExampleInputs = Tensor | Sequence[Any] | Mapping[str, Any]

_CPU = torch.device("cpu")
Found = TypeVar("Found")
# Of a device that is not known.
FLOPS_PER_S, BYTES_PER_S = 1e12, 1e11


@dataclass(frozen=True)
class Unit:
    """What runs from one cut to the next, for the example inputs.

    ``cut`` is the module at whose entry it begins, None for the first. ``flops`` and ``moved_bytes`` are of the forward
    pass; ``saved_bytes`` is what autograd keeps of it for the backward pass, parameters left out; ``input_bytes`` is
    the tensor that comes in, of ``input_shape`` and ``input_dtype``. ``parameters`` are those that it uses, by their
    first name in the model, ``modules`` those that are entered in it, in that order. ``forward_s`` and ``backward_s``
    are seconds, where they were measured.
    """

    cut: str | None
    flops: float
    moved_bytes: int
    saved_bytes: int
    input_bytes: int
    parameters: tuple[str, ...]
    modules: tuple[str, ...] = field(default=(), repr=False)
    input_shape: tuple[int, ...] = ()
    input_dtype: torch.dtype = torch.float32
    forward_s: float | None = None
    backward_s: float | None = None

    def joined(self, other: Unit) -> Unit:
        """Return what runs where the model is not cut before ``other``, the next unit."""
        return dataclasses.replace(
            self,
            flops=self.flops + other.flops,
            moved_bytes=self.moved_bytes + other.moved_bytes,
            saved_bytes=self.saved_bytes + other.saved_bytes,
            parameters=tuple(dict.fromkeys((*self.parameters, *other.parameters))),
            modules=(*self.modules, *other.modules),
            forward_s=_sum(self.forward_s, other.forward_s),
            backward_s=_sum(self.backward_s, other.backward_s),
        )


def _sum(seconds: float | None, others: float | None) -> float | None:
    return None if seconds is None or others is None else seconds + others


@dataclass(frozen=True)
class ModelProfile(ShownAsText):
    """The units of a model, in the order in which they run; ``parameter_bytes`` by first name, tied ones once.
    ``frozen`` are those that are not trained.

    ``num_rows`` is the first dimension of the first example input that has one, ``shared_inputs`` are those that have
    another. ``computing`` are the modules all of whose outputs depend on parameters, or on random numbers; ``outputs``
    what modules gave, where they need values. ``hindrances``: why other modules that run are no cuts;
    ``why_no_more``: of a block, or where there is no cut. ``rewrites_parameters``: its forward does, from nothing but
    these, as RWKV's when it begins to evaluate; ``written_parameters``: all that it writes into, by first name;
    ``read_past``: those that it reads from a list, a closure or another object than their module;
    ``buffers_read_past``: buffers that it writes, likewise; ``versions_asked``: parameters whose ``_version`` it reads.
    ``buffers_saved``: buffers that a forward writes in place and that its backward pass reads; ``made``: parameters and
    buffers that its first forward makes. ``cut_along_time``: a layer that takes the rows of a batch for steps in time.
    """

    units: tuple[Unit, ...]
    parameter_bytes: Mapping[str, int] = field(repr=False)
    num_rows: int = 0
    frozen: frozenset[str] = field(default=frozenset(), repr=False)
    shared_inputs: frozenset[str] = frozenset()
    computing: frozenset[str] = field(default=frozenset(), repr=False)
    outputs: Mapping[str, ModuleOutput] = field(default_factory=dict, repr=False)
    hindrances: Mapping[str, str] = field(default_factory=dict, repr=False)
    why_no_more: str = field(default="", repr=False)
    rewrites_parameters: bool = field(default=False, repr=False)
    written_parameters: frozenset[str] = field(default=frozenset(), repr=False)
    read_past: frozenset[str] = field(default=frozenset(), repr=False)
    buffers_read_past: frozenset[str] = field(default=frozenset(), repr=False)
    versions_asked: frozenset[str] = field(default=frozenset(), repr=False)
    buffers_saved: frozenset[str] = field(default=frozenset(), repr=False)
    made: frozenset[str] = field(default=frozenset(), repr=False)
    cut_along_time: str = field(default="", repr=False)
    written_buffers: tuple[WrittenBuffer, ...] = field(default=(), repr=False)
    block_use: BlockUse = field(default=BlockUse(), repr=False)

    @property
    def cuts(self) -> tuple[str, ...]:
        """The modules at whose entry the model can be cut."""
        return tuple(unit.cut for unit in self.units if unit.cut is not None)

    @functools.cached_property
    def unused(self) -> dict[str, int]:
        """Parameters that the example did not need, by first name: in which unit the module around them is entered.

        They are in its stage. What is in no module that is entered is in the first.
        """
        entered: dict[str, int] = {}
        for index, unit in enumerate(self.units):
            for module in unit.modules:
                entered.setdefault(module, index)
        unused = self.parameter_bytes.keys() - {name for unit in self.units for name in unit.parameters}
        return {
            name: next((entered[module] for module in reversed(modules_around(name)) if module in entered), 0)
            for name in self.parameter_bytes
            if name in unused
        }

    def without(self, cuts: Mapping[str, str]) -> ModelProfile:
        """Return the profile of a model that cannot be cut there, for the reasons given."""
        units: list[Unit] = []
        place_of: list[int] = []
        for unit in self.units:
            units[-1:] = [units[-1].joined(unit)] if unit.cut in cuts else [*units[-1:], unit]
            place_of.append(len(units) - 1)
        return dataclasses.replace(
            self,
            units=tuple(units),
            hindrances={**self.hindrances, **cuts},
            why_no_more=self.why_no_more or next(f"{cut}: {why}" for cut, why in cuts.items()),
            written_buffers=tuple(dataclasses.replace(each, unit=place_of[each.unit]) for each in self.written_buffers),
        )

    def times(
        self, *, flops_per_s: float | None = None, bytes_per_s: float | None = None, is_training: bool = True
    ) -> list[float]:
        """Seconds for every unit: as measured; else, or for the speeds that are given, an estimate.

        Estimated is computing or moving, whichever takes longer, and a backward pass takes twice that: once for what
        came in, and once for parameters, as far as they are trained. Before the first that is trained there is none.
        The default speeds give times that are right relative to each other at best.
        """
        if flops_per_s is None and bytes_per_s is None:
            measured = [
                unit.forward_s + (unit.backward_s if is_training else 0.0)
                for unit in self.units
                if unit.forward_s is not None and unit.backward_s is not None
            ]
            if len(measured) == len(self.units):
                return measured
        flops_per_s, bytes_per_s = flops_per_s or FLOPS_PER_S, bytes_per_s or BYTES_PER_S
        forward_s = [max(unit.flops / flops_per_s, unit.moved_bytes / bytes_per_s) for unit in self.units]
        return [passes * each for passes, each in zip(self._passes(), forward_s)] if is_training else forward_s

    def _passes(self) -> Iterator[float]:
        """What a step costs in each unit, by what a forward pass costs there."""
        is_reached = False  # by a gradient
        for unit in self.units:
            sizes = {name: self.parameter_bytes[name] for name in unit.parameters}
            trained, whole = sum(size for name, size in sizes.items() if name not in self.frozen), sum(sizes.values())
            is_reached |= trained > 0
            yield 2.0 + (trained / whole if whole else 1.0) if is_reached else 1.0

    def __str__(self) -> str:
        is_measured = all(unit.forward_s is not None for unit in self.units)
        header = ("begins at", "parameters MB", "GFLOP", "saved MB", "input MB")
        rows: list[tuple[str, ...]] = [(*header, "ms") if is_measured else header]
        for unit, seconds in zip(self.units, self.times()):
            parameter_bytes = sum(self.parameter_bytes[name] for name in unit.parameters)
            cost = [parameter_bytes / 1e6, unit.flops / 1e9, unit.saved_bytes / 1e6, unit.input_bytes / 1e6]
            cost += [1e3 * seconds] if is_measured else []
            rows.append((unit.cut or "the start", *(f"{value:.3f}" for value in cost)))
        return "\n".join(table_lines(rows))


def profile(model: nn.Module, example_inputs: ExampleInputs, *, measure: bool = False) -> ModelProfile:
    """Look what every part of ``model`` costs for ``example_inputs``, of the size of one microbatch.

    ``example_inputs``: a tensor, a sequence of the positional arguments, or a mapping of the keyword arguments; they
    may be on the meta device, and so may the model: only shapes and dtypes are looked at. A model that looks at values
    (``if x.sum() > 0``), or calls what cannot run without them, runs once for real instead, on copies of its buffers.
    ``measure``: take the time of each unit too, forward and backward, with the whole model where it is.

    Raises: SpecError for a model that has no hooks, or that looks at values and has none, and for inputs that it fails
    on.
    """
    require_model(model)
    args, kwargs = as_call(example_inputs)
    with fails_with_inputs(args, kwargs):
        found = dataclasses.replace(profile_call(model, args, kwargs), shared_inputs=shared_inputs(example_inputs))
    if not measure:
        return found
    measured = measure_units(model, args, kwargs, found.cuts)
    units = (
        dataclasses.replace(unit, forward_s=forward_s, backward_s=backward_s)
        for unit, (forward_s, backward_s) in zip(found.units, measured)
    )
    return dataclasses.replace(found, units=tuple(units))


def profile_call(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, device: torch.device = _CPU
) -> ModelProfile:
    """As ``profile``, with the arguments apart. ``device``: what the tensors say where they are: autocast asks them."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise SpecError("the model is compiled: split the one that was given to torch.compile, and compile its stages")
    num_rows = count_rows((args, kwargs))

    def look(copy: Callable[[Tensor], Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> ModelProfile:
        recording, carried = _record(model, args, kwargs, copy)
        made = _make_profile(recording, num_rows, carried)
        return dataclasses.replace(made, outputs=recording.entries.outputs) if copy is _copy else made

    return run_without_memory(look, model, args, kwargs, device=device)


def run_without_memory(
    run: Callable[[Callable[[Tensor], Tensor], tuple[Any, ...], dict[str, Any]], Found],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    device: torch.device = _CPU,
) -> Found:
    """Give what ``run(copy, args, kwargs)`` does of a model, which is as it was afterwards.

    ``copy`` gives what stands for a tensor: one without memory; or, where ``run`` wants values and there are such, a
    copy, and of a parameter itself.
    """
    with state_kept(model, args, kwargs) as tensors, writes_undone(tensors):  # operators on real tensors alone do run
        try:
            with quiet(), FakeTensorMode(allow_non_fake_inputs=True):
                return run(functools.partial(_fake, device=device), args, kwargs)
        except (RuntimeError, AssertionError) as exc:  # it looks at values, or what it calls wants them
            _require_values(model, args, kwargs, exc)
    place = device_of([*model.parameters(), *model.buffers()])
    args, kwargs = tree_map(lambda leaf: leaf.to(place) if isinstance(leaf, Tensor) else leaf, (args, kwargs))
    with state_kept(model, args, kwargs, device=place) as tensors, writes_undone(tensors):
        return run(_copy, args, kwargs)


def _record(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], copy: Callable[[Tensor], Tensor]
) -> tuple[Recording, list[CarriedAttribute]]:
    before = note_attributes(model)
    recording = record(model, args, kwargs, copy, lambda recorder, entries: AskingMode(recorder))
    changed = changed_attributes(model, before)
    if not changed:
        return recording, []
    recording = dataclasses.replace(recording, gathered=find_gathered(changed, recording.recorder))
    left = recording.recorder.computed()
    with contextlib.suppress(RuntimeError):  # another one would fail in the same way
        return recording, find_carried(model, changed, left, functools.partial(record, model, args, kwargs, copy))
    return recording, []


def as_call(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the keyword arguments that example inputs stand for. Raises: SpecError."""
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, Sequence) and not isinstance(example_inputs, str):
        return tuple(example_inputs), {}
    raise SpecError(
        f"example_inputs is a {type(example_inputs).__name__}: give a tensor, a tuple of arguments, or a dict of them"
    )


def count_rows(tree: Any) -> int:
    """The first dimension of the first tensor that has one: the size of a batch; 0 where there is none."""
    return next((len(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim()), 0)


def shared_inputs(example_inputs: ExampleInputs) -> frozenset[str]:
    """Where in a call the tensors are that have not the batch's first dimension: every microbatch gets them whole."""
    call = as_call(example_inputs)
    rows = count_rows(call)
    leaves, _ = tree_flatten_with_path(call)
    return frozenset(
        keystr(path) for path, leaf in leaves if isinstance(leaf, Tensor) and not (leaf.dim() and len(leaf) == rows)
    )


def require_known(outputs: Any) -> None:
    """Raises: SpecError for an object with tensors in it that nobody finds: gradients of them would be missed."""
    for leaf in tree_leaves(outputs):
        held = {**getattr(leaf, "__dict__", {}), **{key: getattr(leaf, key, None) for key in _slots_of(leaf)}}
        if not isinstance(leaf, Tensor) and any(isinstance(each, Tensor) for each in tree_leaves(held)):
            more = "register_dataclass" if dataclasses.is_dataclass(leaf) else "register_pytree_node"
            raise SpecError(
                f"the model returns a {type(leaf).__name__}, and what is in it is not known: return a tuple or a dict, "
                f"or make it known with torch.utils._pytree.{more}"
            )


def _slots_of(value: Any) -> list[str]:
    slots = [getattr(base, "__slots__", ()) for base in type(value).__mro__]
    return [key for each in slots for key in ((each,) if isinstance(each, str) else each)]


def _require_values(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], exc: Exception) -> None:
    """Raise ``exc``, or what it means, where a pass that computes would not help."""
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves((args, kwargs))]
    if any(isinstance(tensor, Tensor) and tensor.is_meta for tensor in tensors):
        if isinstance(exc, AssertionError) and "non-Fake Tensor" in str(exc):
            raise SpecError(
                "the model resizes a tensor that is neither a parameter nor a buffer, which torch cannot follow where "
                "others are on the meta device: make it a buffer, or profile with real parameters and inputs"
            ) from exc
        if not isinstance(exc, (DataDependentOutputException, DynamicOutputShapeException)):
            raise exc
        raise SpecError(
            f"the model looks at values of tensors ({exc.func}), which none have on the meta device: "
            "profile it with real parameters and inputs, or name the cuts"
        ) from exc


def _fake(tensor: Tensor, *, device: torch.device) -> Tensor:
    """All on one device: the model and its inputs need not be where they will be."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


def _copy(tensor: Tensor) -> Tensor:
    """Of a parameter another one on its memory: who reads the parameter itself has it from elsewhere."""
    if not isinstance(tensor, nn.Parameter):
        return tensor.detach().clone()
    made = nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
    vars(made).update(vars(tensor))
    return made


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Where torch cannot run an operator without values it logs a traceback; here the error itself is dealt with.

    Nor does it matter here what torch says of the gradient of a tensor that is no leaf, as a model may keep one.
    """
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    was_disabled = logger.disabled
    logger.disabled = True
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The .grad attribute of a Tensor")
            yield
    finally:
        logger.disabled = was_disabled


def _make_profile(recording: Recording, num_rows: int, carried: Sequence[CarriedAttribute]) -> ModelProfile:
    require_known(recording.outputs)
    written = find_written_buffers(recording)
    found = find_cuts(recording, written, carried)
    begins = [cut.index for cut in found.cuts]
    written = [dataclasses.replace(each, unit=bisect.bisect_right(begins, each.last_write)) for each in written]
    block_use = find_block_use(recording)
    time_first = recording.entries.time_first  # where the second dimension is as large nobody can tell
    return ModelProfile(
        tuple(_make_units(recording, found.cuts, block_use.idle)),
        recording.recorder.parameter_bytes,
        num_rows,
        recording.recorder.frozen,
        computing=find_replaceable(recording),
        hindrances=found.hindrances,
        why_no_more=found.why_no_more,
        rewrites_parameters=recording.recorder.rewrites_parameters,
        written_parameters=frozenset(recording.recorder.written_parameters),
        read_past=recording.read_past,
        buffers_read_past=recording.buffers_read_past,
        versions_asked=frozenset(recording.recorder.versions_asked),
        buffers_saved=recording.buffers_saved,
        made=recording.made,
        cut_along_time=next((name for name, shape in time_first if shape[0] == num_rows != shape[1]), ""),
        written_buffers=tuple(written),
        block_use=block_use,
    )


def _make_units(recording: Recording, cuts: Sequence[Cut], idle: Mapping[str, int]) -> Iterator[Unit]:
    recorder = recording.recorder
    begins: list[tuple[int, str | None, int | None]] = [(0, None, None)]
    begins += [(cut.index, cut.module, cut.number) for cut in cuts]
    ends = [cut.index for cut in cuts] + [len(recorder.ops)]
    modules = _modules_by_cut(recording.entries, [cut.module for cut in cuts])
    for block, index in idle.items():  # it is to be where it would have run
        unit = begins[bisect.bisect_right([begin for begin, *_ in begins], index) - 1]
        parts = (name for name, _ in recording.entries.model.get_submodule(block).named_modules(prefix=block))
        modules[unit[1]] = (*modules[unit[1]], *parts)
    for (begin, cut, number), end in zip(begins, ends):
        ops = recorder.ops[begin:end]
        used = dict.fromkeys(read for op in ops for read in op.reads if read in recorder.names)
        look = recorder.looks[number] if number is not None else TensorLook((), torch.float32)
        yield Unit(
            cut,
            flops=sum(op.flops for op in ops),
            moved_bytes=sum(op.moved_bytes for op in ops),
            saved_bytes=sum(op.saved_bytes for op in ops),
            input_bytes=recorder.size_bytes[number] if number is not None else 0,
            parameters=tuple(recorder.names[read] for read in used),
            modules=modules[cut],
            input_shape=look.shape,
            input_dtype=look.dtype,
        )


def _modules_by_cut(entries: Entries, cuts: Sequence[str]) -> dict[str | None, tuple[str, ...]]:
    """Every module that is entered, by the cut that comes last before; a cut's own is behind it, with those around."""
    found: dict[str | None, dict[str, None]] = {None: {}, **{cut: {} for cut in cuts}}
    current: str | None = None
    for _, name, _ in entries.entered:
        if name in found:
            current = name
            found[current].update(dict.fromkeys(entries.inside[name]))
        found[current][name] = None
    return {cut: tuple(names) for cut, names in found.items()}
