"""A plan in one call, as plain JSON: what layers cost, which stages they form, when ranks compute, what they hold."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..errors import SpecError
from ..plan import MOST_PASSES, PlanDescription, StepTimeline, resolve_axes
from ..text import format_size
from .arguments import require_mesh, require_model, require_sizes, require_whole
from .costs.partitioner import Partition, StageNode, partition_at
from .costs.profiler import ExampleInputs, profile
from .dry_run import dry_run
from .parallelize import split_for
from .rank_memory import DryRun
from .stages.schedules import Schedule, find_schedule
from .stages.splitter import Split
from .stages.timeline import timeline

_NOT_MEASURED = (
    "times are estimated from operations and bytes, so at best their ratios are right: measure=True measures them"
)
_NO_DRY_RUN = "memory is estimated by the partition: a dry run cannot be made while a process group exists, as on ranks"


def describe_plan(
    model: nn.Module,
    mesh: DeviceMesh | Mapping[str, int],
    *,
    example_inputs: ExampleInputs,
    pp: Literal["auto"] | Sequence[str] | Split = "auto",
    nodes: Sequence[StageNode] | None = None,
    schedule: str | Schedule = "1F1B",
    num_microbatches: int | None = None,
    compare: Sequence[str | Schedule] = (),
    measure: bool = False,
    **layout: Any,
) -> dict[str, Any]:
    """Describe how ``model`` would be split over ``mesh``: plain JSON for ``widgets.plan``, which needs no torch.

    ``mesh``: the result of ``make_mesh``, or sizes by axis. ``example_inputs``, ``pp``, ``nodes``, ``schedule``,
    ``num_microbatches``: as in ``parallelize``. ``compare``: further schedules, whose timelines are shown next to it.
    ``measure``: run each layer and time it. ``layout``: other arguments of ``dry_run``, such as ``tp``, ``fsdp``
    or ``precision``. Memory comes from a dry run; if a process group exists, it is estimated instead.

    Not collective: one rank may call it alone. Raises: SpecError.
    """
    require_model(model)
    require_whole(num_microbatches=num_microbatches)
    sizes, order = _sizes_of(mesh), find_schedule(schedule)
    num_ranks = sizes.get("pp", 1)
    costs = profile(model, example_inputs, measure=measure)
    found, lines = None, list[StepTimeline]()
    notes = [] if measure else [_NOT_MEASURED]
    if num_ranks > 1:
        num_stages = order.num_stages(num_ranks)
        found = split_for(model, example_inputs, pp, nodes, num_stages=num_stages, known=costs)
        num_microbatches = num_microbatches or order.num_microbatches(num_stages)
        known = _costed(found, nodes, num_microbatches)
        lines, left_out = _timelines([order, *map(find_schedule, compare)], known, num_ranks)
        notes += left_out
    else:
        whole = (0, len(costs.units))
        known = partition_at(costs, whole, [StageNode()], num_microbatches=num_microbatches or 1)
    rehearsed: DryRun | None = None
    if dist.is_initialized():
        notes.append(_NO_DRY_RUN)
    else:
        options = {"pp": found or "auto", "schedule": order, "num_microbatches": num_microbatches, **layout}
        rehearsed = dry_run(model, sizes, example_inputs=example_inputs, **options)
    return PlanDescription(_name_of(model), known.costs(), tuple(lines), rehearsed, tuple(notes)).to_dict()


def _sizes_of(mesh: DeviceMesh | Mapping[str, int]) -> dict[str, int]:
    """Return the size of each axis. Raises: SpecError when ``mesh`` is neither a mesh nor sizes by axis."""
    if isinstance(mesh, Mapping):
        require_sizes(mesh)
        if short := next((axis for axis, size in mesh.items() if size < 1), None):
            raise SpecError(f"{short}={mesh[short]}: a plan needs the size of every axis")
        world_size = 1
        for size in mesh.values():
            world_size *= size
        return resolve_axes(mesh, world_size)
    require_mesh(mesh)
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape))


def _costed(found: Split, nodes: Sequence[StageNode] | None, num_microbatches: int) -> Partition:
    """Return what the stages cost with ``num_microbatches``; a split by names has no partition yet."""
    known = found.partition
    if known is not None and known.num_microbatches == num_microbatches:
        return known
    chosen = nodes if nodes is not None else [StageNode() for _ in range(found.num_stages)]
    on = known.nodes if known is not None else chosen
    return partition_at(found.profile, found.bounds, on, num_microbatches=num_microbatches)


def _timelines(orders: Sequence[Schedule], known: Partition, num_ranks: int) -> tuple[list[StepTimeline], list[str]]:
    """Return timelines of the plan, of it with twice the microbatches and of others; and notes of those left out."""
    count = known.num_microbatches
    found: list[StepTimeline] = [timeline(orders[0], num_ranks, count, stage_s=known.stage_s)]
    with contextlib.suppress(SpecError):  # a user's own schedule may not support more
        found.append(timeline(orders[0], num_ranks, 2 * count, stage_s=known.stage_s))
    found += [timeline(order, num_ranks, count, stage_s=known.stage_s) for order in orders[1:]]
    notes = []
    while found and sum(len(works) for each in found for works in each.ranks) > MOST_PASSES:
        last = found.pop()
        notes.append(
            f"the timeline of {last.schedule} with {last.num_microbatches} microbatches has too many passes to draw; "
            f"its bubble is {100 * last.bubble:.0f} %"
        )
    return found, notes


def _name_of(model: nn.Module) -> str:
    """Return the class of a model and its size."""
    parameters = list(model.parameters())
    count = sum(parameter.numel() for parameter in parameters)
    size_bytes = sum(parameter.numel() * parameter.element_size() for parameter in parameters)
    return f"{type(model).__name__}, {count:,} parameters ({format_size(size_bytes)})"
