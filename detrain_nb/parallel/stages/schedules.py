"""Schedules: torch's, by name, and schedules written as CSV.

A schedule defines which stages a rank runs, and the order of their forward and backward passes for each microbatch.
"""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleGPipe,
    ScheduleZBVZeroBubble,
    _Action,
    _add_send_recv,
    _PipelineScheduleRuntime,
    _validate_schedule,
    get_schedule_class,
)

from ...errors import SpecError
from ...plan.stages import StageLayout

_ZERO_BUBBLE = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
KINDS = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
_BACKWARD_AT_ONCE = ("1F1B", "DualPipeV")
# Schedules that need at least as many microbatches as stages, and their replacements for fewer.
_FOR_FEWER_MICROBATCHES = {"1F1B": ScheduleGPipe, "DualPipeV": ScheduleZBVZeroBubble}


def find_schedule(schedule: str | Schedule) -> Schedule:
    """Return the schedule with a case-insensitive name, or in a ``*.csv`` file. Raises: SpecError if it is invalid."""
    if isinstance(schedule, Schedule):
        return schedule
    if schedule.lower().endswith(".csv"):
        return WrittenSchedule.read(schedule)
    return Schedule(schedule)


def stages_of_rank(schedule: str | Schedule, *, rank: int, num_ranks: int, num_stages: int) -> tuple[int, ...]:
    """Return the stages that a rank of a pipeline runs, in order. Raises: SpecError if the numbers do not fit."""
    return find_schedule(schedule).stages_of_rank(rank, num_ranks=num_ranks, num_stages=num_stages)


class Schedule(StageLayout):
    """A schedule of torch.

    ``is_zero_bubble``: its backward passes have two parts. ``keeps_sent``: sent tensors are kept until the step ends.
    """

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._kind = get_schedule_class(self.name)
        self.is_zero_bubble = self.name in _ZERO_BUBBLE
        self.keeps_sent = issubclass(self._kind, (_PipelineScheduleRuntime, ScheduleGPipe))

    def fingerprint(self) -> str:
        """Return a text that is equal for schedules with which ranks can work together."""
        return self.name

    def most_kept(self, stage: int, count: int, *, num_stages: int) -> int:
        """Return the largest number of ``count`` microbatches whose activations a stage keeps at once."""
        return min(count, num_stages - stage) if self.name in _BACKWARD_AT_ONCE else count

    def make(self, stages: Sequence[Any], count: int, loss: Callable[..., Any] | None) -> Any:
        """Return torch's object for these stages and ``count`` microbatches; gradients are summed, not scaled."""
        kind: Any = self._kind
        if self.name in _FOR_FEWER_MICROBATCHES and count < stages[0].num_stages:
            kind = _FOR_FEWER_MICROBATCHES[self.name]
        one_or_all = stages[0] if issubclass(kind, PipelineScheduleSingle) else list(stages)
        return kind(one_or_all, count, loss, scale_grads=False)


class WrittenSchedule(Schedule):
    """A schedule in a file, in the format in which torch writes its own: a line for each rank, a cell for each action.

    ``0F3`` is the forward pass of microbatch 3 through stage 0; ``B`` is the backward pass, ``I`` and ``W`` its halves
    for inputs and for weights; ``(1F2;0B0)OVERLAP_F_B`` is two passes at once; an empty cell is none. Sends and
    receives are derived from it. For a batch with fewer microbatches the others are left out.
    """

    def __init__(self, name: str, orders: Sequence[Sequence[_Action | None]]) -> None:
        """Take the actions of each rank. Raises: SpecError if no pipeline could run them."""
        self.name = name
        self._orders = [list(order) for order in orders]
        passes = [(rank, part) for rank, order in enumerate(self._orders) for part in _parts(order)]
        if not passes:
            raise SpecError(f"{name} has no pass, such as 0F0")
        if strange := next((part for _, part in passes if not part.is_compute_op), None):
            raise SpecError(
                f"{name} contains {strange}: write only passes (F, B, I, W); sends and receives are derived from them"
            )
        if repeated := [part for part, times in Counter(part for _, part in passes).items() if times > 1]:
            raise SpecError(f"{name} contains {repeated[0]} more than once")
        if idle := set(range(len(self._orders))) - {rank for rank, _ in passes}:
            raise SpecError(f"{name} has no pass for rank {min(idle)}: remove its line and use fewer ranks")
        self._rank_of = {part.stage_index: rank for rank, part in passes}
        self._count = 1 + max(part.microbatch_index or 0 for _, part in passes)
        self._num_stages = 1 + max(self._rank_of)
        self.has_one_stage = self._num_stages == len(self._orders)
        self.is_zero_bubble = any(_kind_of(part) in "IW" for _, part in passes)
        self.keeps_sent = True
        if missing := sorted(set(range(self._num_stages)) - self._rank_of.keys()):
            raise SpecError(f"{name} has {self._num_stages} stages, but no rank runs stage {missing[0]}")
        try:
            _validate_schedule(self._numbered(self._count), len(self._orders), self._num_stages, self._count)
        except AssertionError as exc:
            raise SpecError(f"{name}: {str(exc).splitlines()[0]}") from exc
        try:
            _add_send_recv(self._numbered(self._count), self._rank_of.__getitem__, self._num_stages)  # type: ignore[arg-type]
        except AssertionError as exc:
            raise SpecError(f"{name} deadlocks: a pass comes before one that it needs") from exc

    @classmethod
    def read(cls, path: str) -> WrittenSchedule:
        """Read a schedule from a file. Raises: SpecError if the file cannot be read or is not a schedule."""
        try:
            text = Path(path).read_text(encoding="utf-8-sig")  # some programs write a byte order mark
        except (OSError, UnicodeDecodeError) as exc:
            raise SpecError(f"the schedule {path} cannot be read: {exc}") from exc
        orders = []
        for number, row in enumerate(csv.reader(io.StringIO(text)), 1):
            if not row:
                continue
            try:
                orders.append([_Action.from_str(cell) for cell in row])
            except (RuntimeError, ValueError) as exc:
                raise SpecError(f"{path}, line {number}: {exc}; write an action as 0F3 or 1B0") from exc
        return cls(Path(path).name, orders)

    def num_stages(self, num_ranks: int) -> int:
        if num_ranks != len(self._orders):
            raise SpecError(f"{self} has lines for {len(self._orders)} ranks, but there are {num_ranks} ranks")
        return self._num_stages

    def num_microbatches(self, num_stages: int) -> int:
        return self._count

    def require_microbatches(self, count: int, *, num_stages: int, num_ranks: int) -> None:
        super().require_microbatches(count, num_stages=num_stages, num_ranks=num_ranks)
        if count > self._count:
            raise SpecError(f"num_microbatches={count}, but {self} has only {self._count}")

    def stages_of_rank(self, rank: int, *, num_ranks: int, num_stages: int) -> tuple[int, ...]:
        if num_stages != self.num_stages(num_ranks):
            raise SpecError(f"{self} has {self._num_stages} stages, but the model is cut into {num_stages}")
        return tuple(stage for stage in range(num_stages) if self._rank_of[stage] == rank)

    def fingerprint(self) -> str:
        return str(self._orders)

    def orders(self, count: int) -> list[list[_Action | None]]:
        """Return the actions of each rank, in order, for the first ``count`` microbatches."""
        return [[kept for action in order for kept in _within(action, count)] for order in self._orders]

    def most_kept(self, stage: int, count: int, *, num_stages: int) -> int:
        kept = most = 0
        for part in _parts(self.orders(count)[self._rank_of[stage]]):
            if part.stage_index == stage:
                kept += {"F": 1, "I": 0}.get(_kind_of(part), -1)
                most = max(most, kept)
        return most

    def make(self, stages: Sequence[Any], count: int, loss: Callable[..., Any] | None) -> Any:
        runtime = _PipelineScheduleRuntime(list(stages), count, loss, scale_grads=False)
        runtime._prepare_schedule_with_comms(self._numbered(count))
        return runtime

    def _numbered(self, count: int) -> dict[int, list[_Action | None]]:
        return dict(enumerate(self.orders(count)))


def _kind_of(part: _Action) -> str:
    return KINDS[part.computation_type.name]


def _parts(order: Sequence[_Action | None]) -> Iterator[_Action]:
    for action in order:
        if action is not None:
            yield from action.sub_actions or (action,)


def _within(action: _Action | None, count: int) -> Iterator[_Action | None]:
    """Yield an action, or the parts of it that are for the first ``count`` microbatches."""
    if action is None:
        yield None
        return
    parts = action.sub_actions or (action,)
    kept = [part for part in parts if (part.microbatch_index or 0) < count]
    yield from (action,) if len(kept) == len(parts) else kept
