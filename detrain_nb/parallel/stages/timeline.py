"""Times at which each rank of a pipeline computes or waits: a schedule simulated with the times of its stages."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from ...errors import SpecError
from ...plan import PlanDescription, StepTimeline, Work
from ...text import ShownAsText
from ..arguments import require_whole
from .schedules import KINDS, Schedule, WrittenSchedule, find_schedule

_WIDTH = 100  # characters of the text form
_SHARES = {"F": 1 / 3, "I": 1 / 3, "W": 1 / 3, "B": 2 / 3}  # of a stage's time for one microbatch
_COLOURS = {"F": "#4e79a7", "B": "#59a14f", "I": "#59a14f", "W": "#edc948"}


@dataclass(frozen=True)
class Timeline(StepTimeline, ShownAsText):
    """Work of a pipeline's ranks in one step; it prints as text, and ``draw`` plots it."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain JSON, for ``widgets.plan``. Raises: SpecError if it is too long to be drawn."""
        return PlanDescription(timelines=(self,)).to_dict()

    def __str__(self) -> str:
        scale = _WIDTH / self.step_s
        lines = []
        for rank, works in enumerate(self.ranks):
            cells = [" "] * _WIDTH
            for work in works:
                first = round(work.begin_s * scale)
                last = max(round(work.end_s * scale), first + 1)
                mark = str(work.microbatch % 10) if work.kind == "F" else {"B": "=", "I": "=", "W": "-"}[work.kind]
                cells[first:last] = mark * (min(last, _WIDTH) - first)
            lines.append(f"rank {rank:2}  {''.join(cells).rstrip()}")
        legend = "digits: forward of that microbatch, =: backward"
        if any(work.kind == "W" for works in self.ranks for work in works):
            legend += ", -: gradients of weights"
        lines.append(f"{self.schedule}: {1e3 * self.step_s:.3f} ms, {100 * self.bubble:.0f} % bubble ({legend})")
        return "\n".join(lines)

    def draw(self, axes: Any = None) -> Any:
        """Draw it with matplotlib, which must be installed, on ``axes`` or on new axes; return them."""
        if axes is None:
            from matplotlib import pyplot

            _, axes = pyplot.subplots(figsize=(10, 0.5 + 0.4 * len(self.ranks)), layout="constrained")
        for rank, works in enumerate(self.ranks):
            for work in works:
                width = work.end_s - work.begin_s
                colour = _COLOURS[work.kind]
                axes.barh(rank, 1e3 * width, left=1e3 * work.begin_s, color=colour, edgecolor="white", linewidth=0.5)
                if width > self.step_s / 50:
                    middle = 1e3 * (work.begin_s + width / 2)
                    axes.text(middle, rank, str(work.microbatch), ha="center", va="center", color="white", fontsize=7)
        axes.set_yticks(range(len(self.ranks)), [f"rank {rank}" for rank in range(len(self.ranks))])
        axes.invert_yaxis()
        axes.set_xlabel("ms")
        axes.set_title(f"{self.schedule}: {100 * self.bubble:.0f} % bubble")
        return axes


def timeline(
    schedule: str | Schedule, num_ranks: int, num_microbatches: int, *, stage_s: Sequence[float] | None = None
) -> Timeline:
    """Simulate a schedule, without the time that tensors travel.

    ``stage_s``: seconds of each stage for one microbatch, forward and backward, as in ``Partition.stage_s``; by default
    all stages of a rank take 3 ms together. A forward pass takes a third of it.

    Raises: SpecError if the schedule cannot run with these numbers.
    """
    require_whole(num_ranks=num_ranks, num_microbatches=num_microbatches)
    order = find_schedule(schedule)
    name = order.name
    num_stages = order.num_stages(num_ranks)
    times = [3e-3 * num_ranks / num_stages] * num_stages if stage_s is None else list(stage_s)
    if len(times) != num_stages:
        raise SpecError(f"stage_s has {len(times)} times, but {name} has {num_stages} stages on {num_ranks} ranks")
    if isinstance(order, WrittenSchedule):
        order.require_microbatches(num_microbatches, num_stages=num_stages, num_ranks=num_ranks)
        return Timeline(name, _play(_steps(order.orders(num_microbatches)), times))
    if order.has_one_stage:  # torch's own list of 1F1B is off by one on the last rank, in 2.13
        ahead = [num_microbatches if name == "GPipe" else num_ranks - rank for rank in range(num_ranks)]
        return Timeline(name, _play([_one_stage(r, num_microbatches, ahead[r]) for r in range(num_ranks)], times))
    try:
        orders = get_schedule_ops(name, num_ranks, num_microbatches, num_stages // num_ranks)
    except (ValueError, AssertionError) as exc:
        raise SpecError(f"{name} with {num_microbatches} microbatches on {num_ranks} ranks: {exc}") from exc
    return Timeline(name, _play(_steps(orders), times))


Step = tuple[str, int, int]  # kind, stage, microbatch


def _one_stage(rank: int, count: int, ahead: int) -> list[Step]:
    """Return the passes of a rank with one stage; forward passes are ``ahead`` of the backward ones."""
    order: list[Step] = [("F", rank, number) for number in range(min(ahead, count))]
    for number in range(count):
        order.append(("B", rank, number))
        if number + ahead < count:
            order.append(("F", rank, number + ahead))
    return order


def _steps(orders: Sequence[Sequence[Any]]) -> list[list[Step]]:
    return [[part for action in order if action is not None for part in _parts(action)] for order in orders]


def _parts(action: Any) -> list[Step]:
    """Return the passes of an action; overlapping forward and backward passes count one after the other."""
    if action.sub_actions:
        return [part for inner in action.sub_actions for part in _parts(inner)]
    kind = KINDS.get(action.computation_type.name)
    return [(kind, action.stage_index, action.microbatch_index)] if kind else []


def _play(waiting: list[list[Step]], times: Sequence[float]) -> tuple[tuple[Work, ...], ...]:
    """Run every rank's steps in order, each as soon as its inputs exist."""
    ended: dict[Step, float] = {}
    free = [0.0] * len(waiting)
    done: list[list[Work]] = [[] for _ in waiting]
    while any(waiting):
        is_stuck = True
        for rank, steps in enumerate(waiting):
            while steps and (ready := _ready_s(steps[0], ended, len(times))) is not None:
                kind, stage, microbatch = step = steps.pop(0)
                begin = max(free[rank], ready)
                ended[step] = free[rank] = begin + _SHARES[kind] * times[stage]
                done[rank].append(Work(kind, stage, microbatch, begin, free[rank]))
                is_stuck = False
        if is_stuck:
            raise AssertionError(f"the schedule deadlocks at {[steps[0] for steps in waiting if steps]}")
    return tuple(map(tuple, done))


def _ready_s(step: Step, ended: dict[Step, float], num_stages: int) -> float | None:
    """Return when a step could begin, or None if what it needs is not done."""
    kind, stage, microbatch = step
    if kind == "F":
        return ended.get(("F", stage - 1, microbatch)) if stage else 0.0
    if kind == "W":
        return ended.get(("I", stage, microbatch))
    own = ended.get(("F", stage, microbatch))
    if stage + 1 == num_stages or own is None:
        return own
    after = ended.get(("B", stage + 1, microbatch), ended.get(("I", stage + 1, microbatch)))
    return None if after is None else max(own, after)
