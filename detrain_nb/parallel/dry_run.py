"""A layout tried without ranks: what each of hundreds of GPUs would hold, computed on one laptop.

One rank of each kind trains one batch on tensors without memory. This is more accurate, and shorter, than a formula
for each layout: torch itself decides what shards gather, what is recomputed and what a schedule receives.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
from torch.utils._pytree import tree_leaves

from ..errors import SpecError
from ..plan import resolve_axes
from .arguments import require_model, require_sizes, require_whole
from .costs.partitioner import StageNode
from .costs.profiler import ExampleInputs, ModelProfile, profile
from .data_parallel import resolve_sharding
from .limits import require_read_as_attributes, require_unasked, require_unwritten
from .losses import Loss
from .mesh import make_mesh
from .parallelize import (
    dtype_of,
    lay_out_all,
    plan_for,
    require_axes_for,
    require_cut_fits,
    require_loss_fits,
    split_for,
)
from .rank_memory import DryRun, RankMemory
from .rehearsal import Actor, as_one_rank_runs, fake_ranks
from .repeated import Skipping, UnlikeBlocks
from .replicated import local_part
from .stages.schedules import Schedule, find_schedule
from .stages.splitter import Split
from .storages import Peak
from .tensor.plan import TensorPlan

_ADAM_STATES = 2  # tensors for each parameter, of its size


@contextlib.contextmanager
def _rest_uncollected() -> Iterator[None]:
    """Keep older objects out of garbage collections in the block: scanning all of them would take seconds."""
    is_ours = not gc.get_freeze_count()
    if is_ours:
        gc.freeze()
    try:
        yield
    finally:
        if is_ours:
            gc.unfreeze()


@_rest_uncollected()
def dry_run(
    model: nn.Module,
    mesh_sizes: Mapping[str, int],
    *,
    example_inputs: ExampleInputs,
    loss: Loss | None = None,
    target: Any = None,
    pp: Literal["auto"] | Sequence[str] | Split = "auto",
    nodes: Sequence[StageNode] | None = None,
    schedule: str | Schedule = "1F1B",
    num_microbatches: int | None = None,
    tp: Literal["auto"] | TensorPlan = "auto",
    sequence_parallel: bool = False,
    loss_parallel: bool = False,
    fsdp: bool | None = None,
    reshard_after_forward: bool | None = None,
    precision: str | None = None,
    activations: str = "none",
    optimizer_states: int = _ADAM_STATES,
) -> DryRun:
    """Return what each rank of a mesh would hold of ``model``, which is left as it is and may be on the meta device.

    ``mesh_sizes``: by axis, as for ``make_mesh``, but without -1. ``example_inputs``, ``target``: of one microbatch;
    only the shapes of the target matter. The default ``loss`` is the mean of the output, which needs less memory than
    cross entropy over many classes. ``optimizer_states``: tensors that the optimizer keeps for each parameter. The
    other arguments are those of ``parallelize``.

    The result counts the tensors at the peak of a step, as ``torch.cuda.max_memory_allocated`` does. It leaves out:
    the gaps between them (``max_memory_reserved``), what CUDA and NCCL keep for themselves and, in the step of an
    optimizer that works on all parameters at once (``foreach``), one or two times the size of the parameters. Kernels
    are those of CPUs.
    Raises: SpecError as ``parallelize`` does, and when a process group exists: call it in the notebook kernel itself,
    or before making one.
    """
    require_model(model)
    require_sizes(mesh_sizes)
    require_whole(0, optimizer_states=optimizer_states)
    if dist.is_initialized():
        raise SpecError(
            "dry_run cannot run while a process group exists: call it in the notebook itself, or before making one"
        )
    world_size = 1
    for axis, size in mesh_sizes.items():
        if size < 1:
            raise SpecError(f"{axis}={size}: a dry run needs the size of every axis")
        world_size *= size
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise SpecError(
            "no parameter of the model has requires_grad, but a dry run is of a training step: set it on those to train"
        )
    sizes = resolve_axes(mesh_sizes, world_size)
    require_axes_for(sizes, pp, nodes, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    require_loss_fits(loss, model, sizes)
    order, num_ranks = find_schedule(schedule), sizes.get("pp", 1)
    found, costs = None, profile(model, example_inputs)
    if num_ranks > 1:
        found = split_for(model, example_inputs, pp, nodes, num_stages=order.num_stages(num_ranks), known=costs)
    plan = plan_for(model, example_inputs, tp, sizes, sequence_parallel=sequence_parallel, loss_parallel=loss_parallel)
    if found is not None:
        num_microbatches = num_microbatches or order.num_microbatches(found.num_stages)
        order.require_microbatches(num_microbatches, num_stages=found.num_stages, num_ranks=num_ranks)
    options = {"fsdp": fsdp, "reshard_after_forward": reshard_after_forward, "activations": activations}
    layout = _Layout(
        sizes,
        world_size,
        found,
        order,
        plan,
        {**options, "dtype": dtype_of(precision)},
        num_microbatches,
        loss or _mean_of_output,
        loss_parallel,
        optimizer_states,
        costs,
    )
    rows = layout.try_with(model, example_inputs, target)
    return DryRun(sizes, order.name if found is not None else "no pipeline", rows, found, plan)


@dataclass(frozen=True)
class _Layout:
    """Everything that was asked for except the model and its inputs."""

    sizes: Mapping[str, int]
    world_size: int
    found: Split | None
    order: Schedule
    plan: TensorPlan | None
    options: Mapping[str, Any]  # arguments of `resolve_sharding`
    num_microbatches: int | None
    loss: Loss
    loss_parallel: bool
    optimizer_states: int
    costs: ModelProfile

    def try_with(self, model: nn.Module, example_inputs: ExampleInputs, target: Any) -> tuple[RankMemory, ...]:
        """Try every place of the pipeline. Raises: SpecError when code reads the values of meta tensors."""
        try:
            return self._try(Actor(model, example_inputs, target, self.loss, has_values=False))
        except RuntimeError as exc:  # also when torch cannot run an operator without memory
            tensors = [*model.parameters(), *model.buffers(), *tree_leaves((example_inputs, target))]
            if any(isinstance(tensor, Tensor) and tensor.is_meta for tensor in tensors):
                if not isinstance(exc, (DataDependentOutputException, DynamicOutputShapeException)):
                    raise
                raise SpecError(
                    f"the model or its loss reads values of tensors ({exc.func}), which do not exist on the meta "
                    "device: give real parameters and inputs"
                ) from exc
        return self._try(Actor(model, example_inputs, target, self.loss, has_values=True))

    def _try(self, actor: Actor) -> tuple[RankMemory, ...]:
        num_ranks = self.sizes.get("pp", 1)
        size = self.world_size // num_ranks
        parts: dict[int, _Part] = {}
        for places in self._places_alike(num_ranks):
            for place in places[-2:]:
                parts[place] = self._try_place(place, size, actor)
            for place in places[:-2]:
                parts[place] = self._with_more_kept(place, parts, *places[-2:])
        return tuple(self._row_of(place, parts[place], size) for place in range(num_ranks))

    def _row_of(self, place: int, part: _Part, size: int) -> RankMemory:
        stages: tuple[int, ...] = (0,)
        if self.found is not None:
            num_ranks, num_stages = self.world_size // size, self.found.num_stages
            stages = self.order.stages_of_rank(place, num_ranks=num_ranks, num_stages=num_stages)
        return part.row(tuple(range(place * size, (place + 1) * size)), stages)

    def _places_alike(self, num_ranks: int) -> list[list[int]]:
        """Group places that hold the same; in a group of 1F1B, each keeps one microbatch less than the one before."""
        alike: dict[Any, list[int]] = {}
        for place in range(num_ranks):
            is_inner = self.order.name == "1F1B" and 0 < place < num_ranks - 1
            alike.setdefault(self._look_of(place) if is_inner else place, []).append(place)
        return list(alike.values())

    def _look_of(self, place: int) -> Any:
        assert self.found is not None
        begin, end = self.found.bounds[place : place + 2]
        costs = self.found.profile
        sizes = costs.parameter_bytes
        units = tuple(
            (unit.flops, unit.moved_bytes, unit.saved_bytes, *(sizes[name] for name in unit.parameters))
            for unit in costs.units[begin:end]
        )
        unused = ((unit - begin, sizes[name]) for name, unit in costs.unused.items() if begin <= unit < end)
        return units, tuple(sorted(unused))

    def _with_more_kept(self, place: int, parts: Mapping[int, _Part], more: int, less: int) -> _Part:
        """Extrapolate a place from two later ones like it: each further microbatch in flight adds the same amount."""
        assert self.found is not None
        most, least = parts[more].by_phase(), parts[less].by_phase()
        found = least.plus((less - place) / (less - more), most, least)
        units, bounds = self.found.profile.units, self.found.bounds
        names, theirs = (
            [name for unit in units[bounds[stage] : bounds[stage + 1]] for name in unit.parameters]
            for stage in (place, less)
        )
        own_name = dict(zip(theirs, names))
        return replace(found, largest=tuple((own_name.get(name, name), shape) for name, shape in found.largest))

    def _try_place(self, place: int, size: int, actor: Actor) -> _Part:
        def play(skip: Callable[[nn.Module], None]) -> _Part:
            with actor.model_kept():
                return self._play(place, actor, skip)

        with fake_ranks(place * size, self.world_size), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's warnings to ranks appear on the real ranks
            try:
                return _with_left_out(play)
            except UnlikeBlocks:
                return play(lambda module: None)

    def _played_microbatches(self, place: int) -> int | None:
        """Return how many microbatches to play; under 1F1B, none after the first of a second round holds more."""
        count = self.num_microbatches
        if count is None or self.found is None or self.order.name != "1F1B":
            return count
        return min(count, 1 + self.order.most_kept(place, count, num_stages=self.found.num_stages))

    def _play(self, place: int, actor: Actor, skip: Callable[[nn.Module], None]) -> _Part:
        mesh = make_mesh(**self.sizes, device_type="cpu")
        found, num_played = self.found, self._played_microbatches(place)
        sharding = resolve_sharding(mesh, schedule=self.order if found is not None else None, **self.options)
        require_cut_fits(actor.model, self.sizes, sharding)
        if sharding.kind == "fsdp":
            require_unwritten(self.costs.written_parameters, actor.model, axis="dp_shard")
            require_unasked(self.costs.versions_asked, axis="dp_shard")
            require_read_as_attributes(self.costs.read_past, axis="dp_shard")
            sharding = replace(sharding, block_use=self.costs.block_use)
        model = actor.copy()
        laid_out = lay_out_all(
            model,
            mesh,
            plan=self.plan,
            sharding=sharding,
            found=None if found is None else replace(found, model=model),
            schedule=as_one_rank_runs(self.order),
            num_microbatches=num_played,
            loss=actor.copy_of_loss(),
            loss_parallel=self.loss_parallel,
            example_inputs=actor.example_inputs,
            device=torch.device("cpu"),
            before=skip,
            boundaries=actor.boundaries(found, sharding.dtype if sharding.kind == "fsdp" else None),
        )
        peaks = actor.play(laid_out, keeps_sent=self.order.keeps_sent)
        if num_played is not None and self.num_microbatches is not None:
            peaks = _with_more_microbatches(peaks, self.num_microbatches / num_played - 1)
        named = [
            (name, local_part(parameter), parameter.requires_grad) for name, parameter in laid_out.named_parameters()
        ]
        trained = sum(tensor.nbytes for _, tensor, is_trained in named if is_trained)
        largest = sorted(named, key=lambda each: -each[1].nbytes)[:3]
        return _Part(
            sum(tensor.numel() for _, tensor, _ in named),
            self.optimizer_states * trained,
            peaks,
            tuple((name, tuple(tensor.shape)) for name, tensor, _ in largest),
        )


@dataclass(frozen=True)
class _Part:
    """Sizes found for one rank; the optimizer's state exists in every phase."""

    num_parameters: float
    optimizer_bytes: float
    peaks: Sequence[Peak]
    largest: tuple[tuple[str, tuple[int, ...]], ...]

    def by_phase(self) -> _Part:
        """Return a copy with only the largest peak of each phase."""
        most: dict[str, Peak] = {}
        for peak in self.peaks:
            known = most.setdefault(peak.phase, peak)
            most[peak.phase] = max(known, peak, key=lambda each: each.total_bytes)
        return replace(self, peaks=list(most.values()))

    def plus(self, times: float, more: _Part, less: _Part) -> _Part:
        """Return a copy with ``times`` the difference between ``more`` and ``less`` added."""
        if [each.phase for each in more.peaks] != [each.phase for each in less.peaks]:
            raise UnlikeBlocks

        def add(now: float, more: float, less: float) -> float:
            return now + times * (more - less)

        peaks = [
            Peak(now.phase, tuple(map(add, now.size_bytes, with_it.size_bytes, without.size_bytes)))
            for now, with_it, without in zip(self.peaks, more.peaks, less.peaks)
        ]
        return replace(
            self,
            num_parameters=add(self.num_parameters, more.num_parameters, less.num_parameters),
            optimizer_bytes=add(self.optimizer_bytes, more.optimizer_bytes, less.optimizer_bytes),
            peaks=peaks,
        )

    def row(self, ranks: tuple[int, ...], stages: tuple[int, ...]) -> RankMemory:
        most = max(self.peaks, key=lambda peak: peak.total_bytes)
        weights, gradients, activations, working = map(round, most.size_bytes)
        return RankMemory(
            ranks,
            stages,
            round(self.num_parameters),
            weights,
            gradients,
            round(self.optimizer_bytes),
            activations,
            working,
            most.phase,
            self.largest,
        )


def _with_left_out(play: Callable[[Callable[[nn.Module], None]], _Part]) -> _Part:
    """Play with few blocks of each row of equal ones, and add what the others hold, from a play with one more."""
    skip = Skipping()
    found = fewest = play(skip)
    for row, times in enumerate(skip.left_out):
        if times:
            found = found.plus(times, play(Skipping([0] * row + [1])), fewest)
    return found


def _with_more_microbatches(peaks: Sequence[Peak], share: float) -> list[Peak]:
    """Add the other microbatches' share of the batch, and of the buffers that a schedule allocates up front."""
    _, _, batch, buffers = peaks[0].size_bytes
    more = (0.0, 0.0, share * batch, share * buffers)
    return [Peak(peak.phase, tuple(map(operator.add, peak.size_bytes, more))) for peak in peaks]


def _mean_of_output(output: Any, target: Any) -> Tensor:
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return torch.stack([leaf.float().mean() for leaf in leaves]).sum()
