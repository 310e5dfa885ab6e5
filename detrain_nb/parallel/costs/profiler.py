"""Costs of a model between the places where it can be cut, from one forward pass that neither computes nor allocates.

A cut is a module at whose entry one float tensor, that module's argument, is all that is still needed of the
computation so far: with it and the model's inputs, the pass can continue from there. Between two cuts is a `Unit`.
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
# Assumed for an unknown device.
FLOPS_PER_S, BYTES_PER_S = 1e12, 1e11


@dataclass(frozen=True)
class Unit:
    """The part of a model that runs from one cut to the next, for the example inputs.

    ``cut`` is the module at whose entry the unit begins, None for the first unit. ``flops`` and ``moved_bytes`` are of
    the forward pass; ``saved_bytes`` is what autograd keeps for the backward pass, without parameters; ``input_bytes``
    is the size of the tensor that comes in, of ``input_shape`` and ``input_dtype``. ``parameters`` are the parameters
    used, by their first name in the model; ``modules`` the modules entered, in that order. ``forward_s`` and
    ``backward_s`` are seconds, if measured.
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
        """Return the unit that results without the cut before ``other``, the next unit."""
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
    """Units of a model, in the order in which they run, and what the pass showed of the rest.

    ``parameter_bytes``: by first name, tied parameters once. ``frozen``: parameters that are not trained. ``num_rows``:
    the first dimension of the first example input that has one; ``shared_inputs``: places of the inputs with another
    first dimension. ``computing``: modules all of whose outputs depend on parameters or on random numbers. ``outputs``:
    what modules returned, if they need values. ``hindrances``: why other modules that run are not cuts;
    ``why_no_more``: the reason for one block, or for the whole model if it has no cut.

    ``rewrites_parameters``: the forward writes parameters from parameters alone, as RWKV does when it starts to
    evaluate. ``written_parameters``: every parameter that the forward writes into, by first name. ``read_past``:
    parameters read from a list, a closure or an object other than their module; ``buffers_read_past``: buffers written
    that way. ``versions_asked``: parameters whose ``_version`` is read. ``buffers_saved``: buffers that a forward
    writes in place and its backward pass reads. ``made``: parameters and buffers that the first forward makes.
    ``cut_along_time``: a layer that takes the rows of a batch for time steps.
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
        """Modules at whose entry the model can be cut."""
        return tuple(unit.cut for unit in self.units if unit.cut is not None)

    @functools.cached_property
    def unused(self) -> dict[str, int]:
        """Parameters that the example did not use, by first name: the unit in which the module around them is entered.

        They belong to the stage of that unit. Parameters in no module that is entered belong to the first unit.
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
        """Return the profile of a model that cannot be cut at ``cuts``, which gives the reasons."""
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
        """Return the seconds of each unit: as measured, or estimated if a speed is given or nothing was measured.

        An estimate is the time to compute or to move memory, whichever is longer. A backward pass takes twice that:
        once for the gradient of the input, and once for parameters, as far as these are trained. Before the first
        trained parameter there is no backward pass. With the default speeds, only the ratios between the times can be
        right.
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
        """Yield the cost of a step in each unit, as a multiple of its forward pass."""
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
    """Find what every part of ``model`` costs for ``example_inputs``, of the size of one microbatch.

    ``example_inputs``: a tensor, a sequence of the positional arguments, or a mapping of the keyword arguments. They
    and the model may be on the meta device: only shapes and dtypes are used. A model whose code reads values, as in
    ``if x.sum() > 0``, or calls code that needs them, runs once for real instead, on copies of its buffers.
    ``measure``: also measure the time of each unit, forward and backward, by running the whole model on its device.

    Raises: SpecError if the model has no hooks, needs values but is on the meta device, or fails on the inputs.
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
    """Profile as ``profile`` does, from separate arguments; tensors report being on ``device``, as to autocast."""
    if isinstance(model, torch._dynamo.OptimizedModule):
        raise SpecError(
            "the model is compiled: split the model that was given to torch.compile, and compile its stages"
        )
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
    """Return the result of ``run(copy, args, kwargs)`` on a model, which is restored afterwards.

    ``copy`` returns a stand-in for a tensor without memory; if ``run`` needs values and the model has them, it returns
    a copy, which for a parameter shares its memory.
    """
    with state_kept(model, args, kwargs) as tensors, writes_undone(tensors):  # operators on only real tensors do run
        try:
            with quiet(), FakeTensorMode(allow_non_fake_inputs=True):
                return run(functools.partial(_fake, device=device), args, kwargs)
        except (RuntimeError, AssertionError) as exc:  # it or what it calls reads values
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
    with contextlib.suppress(RuntimeError):  # a second call of the model would fail, too
        return recording, find_carried(model, changed, left, functools.partial(record, model, args, kwargs, copy))
    return recording, []


def as_call(example_inputs: ExampleInputs) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that example inputs stand for. Raises: SpecError for others."""
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
    """Return the first dimension of the first tensor that has one (the batch size), or 0 without any."""
    return next((len(leaf) for leaf in tree_leaves(tree) if isinstance(leaf, Tensor) and leaf.dim()), 0)


def shared_inputs(example_inputs: ExampleInputs) -> frozenset[str]:
    """Return the places of tensors without the batch's first dimension: every microbatch gets them whole."""
    call = as_call(example_inputs)
    rows = count_rows(call)
    leaves, _ = tree_flatten_with_path(call)
    return frozenset(
        keystr(path) for path, leaf in leaves if isinstance(leaf, Tensor) and not (leaf.dim() and len(leaf) == rows)
    )


def require_known(outputs: Any) -> None:
    """Raise SpecError for an object whose tensors pytree cannot find: their gradients would be missed."""
    for leaf in tree_leaves(outputs):
        held = {**getattr(leaf, "__dict__", {}), **{key: getattr(leaf, key, None) for key in _slots_of(leaf)}}
        if not isinstance(leaf, Tensor) and any(isinstance(each, Tensor) for each in tree_leaves(held)):
            more = "register_dataclass" if dataclasses.is_dataclass(leaf) else "register_pytree_node"
            raise SpecError(
                f"the model returns a {type(leaf).__name__}, whose contents pytree does not know: return a tuple or a "
                f"dict, or register it with torch.utils._pytree.{more}"
            )


def _slots_of(value: Any) -> list[str]:
    slots = [getattr(base, "__slots__", ()) for base in type(value).__mro__]
    return [key for each in slots for key in ((each,) if isinstance(each, str) else each)]


def _require_values(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], exc: Exception) -> None:
    """Raise ``exc``, or an error that explains it, if a pass that computes would not help."""
    tensors = [*model.parameters(), *model.buffers(), *tree_leaves((args, kwargs))]
    if any(isinstance(tensor, Tensor) and tensor.is_meta for tensor in tensors):
        if isinstance(exc, AssertionError) and "non-Fake Tensor" in str(exc):
            raise SpecError(
                "the model resizes a tensor that is neither a parameter nor a buffer, which torch cannot follow with "
                "meta tensors: make it a buffer, or profile with real parameters and inputs"
            ) from exc
        if not isinstance(exc, (DataDependentOutputException, DynamicOutputShapeException)):
            raise exc
        raise SpecError(
            f"the model reads values of tensors ({exc.func}), which do not exist on the meta device: profile it with "
            "real parameters and inputs, or name the cuts"
        ) from exc


def _fake(tensor: Tensor, *, device: torch.device) -> Tensor:
    """Make a fake tensor; all are on one device, as the model and its inputs need not be where they will run."""
    made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    return made.requires_grad_(tensor.requires_grad)


def _copy(tensor: Tensor) -> Tensor:
    """Copy a tensor; a parameter's copy shares its memory: code that reads the original got it from elsewhere."""
    if not isinstance(tensor, nn.Parameter):
        return tensor.detach().clone()
    made = nn.Parameter(tensor.detach(), requires_grad=tensor.requires_grad)
    vars(made).update(vars(tensor))
    return made


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence torch's logged traceback for operators that need values: the error itself is handled here.

    Also silence its warning about the gradient of a non-leaf tensor, which a model may keep.
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
    time_first = recording.entries.time_first  # undecidable if the second dimension is equal
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
    for block, index in idle.items():  # it belongs to the unit in which it would have run
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
    """Return every entered module by the last cut before it; a cut has itself and the modules around it."""
    found: dict[str | None, dict[str, None]] = {None: {}, **{cut: {} for cut in cuts}}
    current: str | None = None
    for _, name, _ in entries.entered:
        if name in found:
            current = name
            found[current].update(dict.fromkeys(entries.inside[name]))
        found[current][name] = None
    return {cut: tuple(names) for cut, names in found.items()}
