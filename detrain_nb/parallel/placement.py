"""Which stages a rank runs: schedules by torch's names, and how each lays stages on ranks."""

from __future__ import annotations

from torch.distributed.pipelining.schedules import (
    PipelineScheduleSingle,
    ScheduleGPipe,
    ScheduleZBVZeroBubble,
    get_schedule_class,
)

from ..errors import SpecError

__all__ = ["SCHEDULES", "accepts", "find_schedule", "stages_of_rank", "stages_per_rank"]

SCHEDULES = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
# Those that need at least as many microbatches as stages, and what has their stages where they have them, and does not.
NEED_AS_MANY_MICROBATCHES = {"1F1B": ScheduleGPipe, "DualPipeV": ScheduleZBVZeroBubble}


def find_schedule(schedule: str) -> str:
    """Return torch's name of a schedule, however its letters are written. Raises: SpecError."""
    found = next((name for name in SCHEDULES if name.lower() == schedule.lower()), None)
    if found is None:
        raise SpecError(f"there is no schedule {schedule!r}: choose one of {', '.join(SCHEDULES)}")
    return found


def accepts(schedule: str, num_microbatches: int, *, num_ranks: int) -> bool:
    """Whether a schedule takes so many microbatches; of those that need many, another one takes fewer."""
    if schedule not in ("Interleaved1F1B", "InterleavedZeroBubble"):
        return True
    return num_microbatches % max(1, num_microbatches // num_ranks) == 0


def stages_of_rank(schedule: str, *, rank: int, num_ranks: int, num_stages: int) -> tuple[int, ...]:
    """Return the stages that a rank of a pipeline runs, in their order. Raises: SpecError."""
    name = find_schedule(schedule)
    if issubclass(get_schedule_class(name), PipelineScheduleSingle) and num_stages != num_ranks:
        raise SpecError(
            f"{name} has one stage on each rank: {num_stages} stages do not go onto {num_ranks} ranks; "
            "Interleaved1F1B has several on each"
        )
    if num_stages % num_ranks:
        raise SpecError(f"{num_stages} stages do not divide by {num_ranks} ranks: {name} needs as many on each")
    if name in V_SHAPED:
        if num_stages != 2 * num_ranks:
            needed = 2 * num_ranks
            raise SpecError(f"{name} has two stages on each rank: {num_ranks} ranks need {needed}, not {num_stages}")
        return rank, num_stages - 1 - rank
    return tuple(range(rank, num_stages, num_ranks))


def stages_per_rank(schedule: str) -> int:
    """How many a rank of a pipeline has where nobody says it."""
    return 1 if issubclass(get_schedule_class(find_schedule(schedule)), PipelineScheduleSingle) else 2
