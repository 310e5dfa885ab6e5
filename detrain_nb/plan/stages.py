"""Rules of each schedule: the stages of a rank, and the numbers of microbatches it accepts."""

from __future__ import annotations

from ..errors import SpecError
from .choices import SCHEDULES

_ONE_STAGE = ("GPipe", "1F1B")
_WHOLE_BACKWARD = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS")  # backward is not split to fill gaps
_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
_NEED_AS_MANY_MICROBATCHES = ("1F1B", "DualPipeV")
_IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")  # with equal numbers of microbatches


def schedule_name(text: str) -> str:
    """Return the schedule's name in its usual case. Raises: SpecError."""
    found = next((name for name in SCHEDULES if name.lower() == text.lower()), None)
    if found is None:
        raise SpecError(f"unknown schedule {text!r}: choose one of {', '.join(SCHEDULES)}, or a file *.csv")
    return found


class StageLayout:
    """The requirements of a torch schedule on stages and microbatches; ``has_one_stage``: one per rank."""

    def __init__(self, name: str) -> None:
        self.name = schedule_name(name)
        self.has_one_stage = self.name in _ONE_STAGE

    def __str__(self) -> str:
        return self.name

    def num_stages(self, num_ranks: int) -> int:
        """Return the default number of stages of a pipeline."""
        return num_ranks if self.has_one_stage else 2 * num_ranks

    def num_microbatches(self, num_stages: int) -> int:
        """Return the default number of microbatches."""
        return 2 * num_stages

    def require_microbatches(self, count: int, *, num_stages: int, num_ranks: int) -> None:
        """Check that the schedule accepts ``count`` microbatches. Raises: SpecError."""
        if count < 1:
            raise SpecError(f"{count} microbatches: must be at least 1")
        if self.name in _NEED_AS_MANY_MICROBATCHES and count < num_stages:
            raise SpecError(
                f"{self} needs at least as many microbatches as stages: {count} are fewer than {num_stages}"
            )
        if not self.accepts(count, num_ranks=num_ranks):
            rounds, rest = count // num_ranks, count % (count // num_ranks)
            raise SpecError(
                f"{self} runs {count} microbatches on {num_ranks} ranks in {rounds} rounds, but {count} is not "
                f"divisible by {rounds}: give {count - rest}"
            )

    def accepts(self, count: int, *, num_ranks: int) -> bool:
        """Return whether the schedule runs ``count`` microbatches in rounds of equal size."""
        return self.name not in _IN_ROUNDS or count % max(1, count // num_ranks) == 0

    def least_bubble(self, *, num_ranks: int, num_microbatches: int) -> float | None:
        """Return the share of a step in which ranks wait when all stages take equal time; unequal ones wait longer.

        None for a schedule that splits the backward pass, as the share then depends on its parts.
        """
        if self.name not in _WHOLE_BACKWARD:
            return None
        works = num_microbatches * self.num_stages(num_ranks) // num_ranks
        return (num_ranks - 1) / (works + num_ranks - 1)

    def stages_of_rank(self, rank: int, *, num_ranks: int, num_stages: int) -> tuple[int, ...]:
        """Return the stages of a rank. Raises: SpecError when ``num_stages`` do not fit on ``num_ranks``."""
        if self.has_one_stage and num_stages != num_ranks:
            raise SpecError(
                f"{self} has one stage per rank, but there are {num_stages} stages and {num_ranks} ranks: "
                "use Interleaved1F1B for several stages per rank"
            )
        if num_stages % num_ranks:
            raise SpecError(
                f"{num_stages} stages are not divisible by {num_ranks} ranks: {self} needs equally many on each rank"
            )
        if self.name in _V_SHAPED:
            if num_stages != 2 * num_ranks:
                needed = 2 * num_ranks
                raise SpecError(
                    f"{self} has two stages per rank: {num_ranks} ranks need {needed} stages, not {num_stages}"
                )
            return rank, num_stages - 1 - rank
        return tuple(range(rank, num_stages, num_ranks))
