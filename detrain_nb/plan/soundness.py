"""Checks of the parts of a plan: bounded counts, no negative numbers, no overlapping passes."""

from __future__ import annotations

from collections.abc import Sequence

from ..errors import SpecError
from ..text import show
from .costs import StageCosts
from .memory import MeshMemory
from .passes import PASSES, StepTimeline, Work

MOST_LAYERS, MOST_STAGES = 1_000, 256
MOST_PASSES = 10_000  # of all timelines together
_MOST_TIMELINES, _MOST_AXES, _MOST_COUNT = 16, 8, 1_000_000
_MOST_NUMBER = 1e18  # of seconds, bytes, parameters: sums and ratios of them stay finite


def require_sound_costs(costs: StageCosts) -> None:
    """Check the costs of a plan. Raises: SpecError."""
    _require_count(len(costs.layers), MOST_LAYERS, "layers")
    _require_count(len(costs.stages), MOST_STAGES, "stages")
    _require_count(costs.num_microbatches, _MOST_COUNT, "microbatches")
    if any(stage.num_layers < 1 for stage in costs.stages) or costs.bounds[-1] != len(costs.layers):
        counts = ", ".join(str(stage.num_layers) for stage in costs.stages[:8])
        raise SpecError(
            f"the stages have {counts} layers, but the model has {len(costs.layers)}: put each layer into one stage"
        )
    for index, layer in enumerate(costs.layers):
        numbers = (layer.time_s, layer.state_bytes, layer.activation_bytes, layer.input_bytes)
        _require_numbers(numbers, f"layer {index}")
    for index, stage in enumerate(costs.stages):
        limit = stage.node_memory_bytes or 0.0
        _require_numbers((stage.time_s, stage.memory_bytes, limit), f"stage {index}")
        if 0 < limit < 1:
            raise SpecError(f"stage {index}: node_memory_bytes is {limit}: omit it when it is unknown")
    _require_numbers((costs.even_imbalance or 0.0,), "the even split")


def require_sound_timelines(timelines: Sequence[StepTimeline]) -> None:
    """Check the timelines of a plan. Raises: SpecError."""
    if len(timelines) > _MOST_TIMELINES:
        raise SpecError(f"the plan has {len(timelines)} timelines, the limit is {_MOST_TIMELINES}")
    num_passes = sum(len(works) for each in timelines for works in each.ranks)
    if num_passes > MOST_PASSES:
        raise SpecError(f"the timelines have {num_passes} passes, the limit is {MOST_PASSES}: use fewer microbatches")
    for each in timelines:
        _require_count(len(each.ranks), MOST_STAGES, "ranks of a pipeline")
        if not all(each.ranks):
            raise SpecError(f"the timeline of {each.schedule} has a rank without passes: remove it")
        for rank, works in enumerate(each.ranks):
            _require_order(works, f"rank {rank} of the timeline of {each.schedule}")
        if not each.step_s:
            raise SpecError(f"the timeline of {each.schedule} has length 0 s: give the times of the stages")


def _require_order(works: Sequence[Work], whose: str) -> None:
    free_s = 0.0
    for work in works:
        if work.kind not in PASSES:
            raise SpecError(f"{whose} has a pass of kind {show(work.kind)}: choose from {', '.join(PASSES)}")
        if not (0 <= work.stage < MOST_STAGES and 0 <= work.microbatch < _MOST_COUNT):
            raise SpecError(
                f"{whose} has microbatch {work.microbatch} of stage {work.stage}: microbatches are from 0 to "
                f"{_MOST_COUNT - 1}, stages from 0 to {MOST_STAGES - 1}"
            )
        if not (work.end_s <= _MOST_NUMBER and free_s <= work.begin_s <= work.end_s):
            raise SpecError(
                f"{whose} has a pass from {work.begin_s} s to {work.end_s} s, after one that ends at {free_s} s: "
                "passes must not overlap"
            )
        free_s = work.end_s


def require_sound_memory(memory: MeshMemory) -> None:
    """Check the memory of a plan. Raises: SpecError."""
    _require_count(len(memory.mesh), _MOST_AXES, "axes")
    _require_count(len(memory.rows), MOST_STAGES, "rows of ranks")
    for axis, size in memory.mesh.items():
        _require_count(size, _MOST_COUNT, f"ranks along {axis}")
    for row in memory.rows:
        if not row.ranks or not row.stages or len(row.stages) > MOST_STAGES:
            raise SpecError(f"a row of memory needs at least 1 rank, and 1 to {MOST_STAGES} stages")
        _require_numbers((*row.ranks, *row.stages, row.num_parameters, *row.parts_bytes), f"rank {row.ranks[0]}")


def _require_count(count: int, most: int, what: str) -> None:
    if not 1 <= count <= most:
        raise SpecError(f"the plan has {count} {what}: must be from 1 to {most}")


def _require_numbers(numbers: Sequence[float], whose: str) -> None:
    for number in numbers:
        if not 0 <= number <= _MOST_NUMBER:
            raise SpecError(f"{whose} has the number {number}: times and bytes must be from 0 to {_MOST_NUMBER:g}")
