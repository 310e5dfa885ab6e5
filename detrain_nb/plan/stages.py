"""Which stages a rank of a pipeline runs, and into how many microbatches a batch may be cut: by the schedule's name."""

from __future__ import annotations

from ..errors import SpecError
from .choices import SCHEDULES

_ONE_STAGE = ("GPipe", "1F1B")
_WHOLE_BACKWARD = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS")  # none of its parts fills a gap
_V_SHAPED = ("ZBVZeroBubble", "DualPipeV")
_NEED_AS_MANY_MICROBATCHES = ("1F1B", "DualPipeV")
_IN_ROUNDS = ("Interleaved1F1B", "InterleavedZeroBubble")  # of as many microbatches each


def schedule_name(text: str) -> str:
    """Return the name that is meant, however its letters are written. Raises: SpecError."""
    found = next((name for name in SCHEDULES if name.lower() == text.lower()), None)
    if found is None:
        raise SpecError(f"there is no schedule {text!r}: choose one of {', '.join(SCHEDULES)}, or a file *.csv")
    return found


class StageLayout:
    """What a schedule of torch asks of stages and microbatches; ``has_one_stage``: on each rank."""

    def __init__(self, name: str) -> None:
        self.name = schedule_name(name)
        self.has_one_stage = self.name in _ONE_STAGE

    def __str__(self) -> str:
        return self.name

    def num_stages(self, num_ranks: int) -> int:
        """How many a pipeline has where nobody says it. Raises: SpecError."""
        return num_ranks if self.has_one_stage else 2 * num_ranks

    def num_microbatches(self, num_stages: int) -> int:
        """How many a batch is cut into where nobody says it."""
        return 2 * num_stages

    def require_microbatches(self, count: int, *, num_stages: int, num_ranks: int) -> None:
        """Raises: SpecError where it cannot take so many."""
        if count < 1:
            raise SpecError(f"{count} microbatches: a batch is cut into 1 or more")
        if self.name in _NEED_AS_MANY_MICROBATCHES and count < num_stages:
            raise SpecError(
                f"{self} needs at least as many microbatches as stages: {count} are fewer than {num_stages}"
            )
        if not self.accepts(count, num_ranks=num_ranks):
            rounds, rest = count // num_ranks, count % (count // num_ranks)
            raise SpecError(
                f"{self} runs {count} microbatches on {num_ranks} ranks in {rounds} rounds of as many each: "
                f"give {count - rest}, or another number that does so"
            )

    def accepts(self, count: int, *, num_ranks: int) -> bool:
        """Whether a batch may be cut into so many, of as many or fewer than are wanted."""
        return self.name not in _IN_ROUNDS or count % max(1, count // num_ranks) == 0

    def least_bubble(self, *, num_ranks: int, num_microbatches: int) -> float | None:
        """The share of a step in which ranks wait for each other where all stages take equally long: else it is more.

        None for a schedule where that depends on the parts of a backward pass.
        """
        if self.name not in _WHOLE_BACKWARD:
            return None
        works = num_microbatches * self.num_stages(num_ranks) // num_ranks
        return (num_ranks - 1) / (works + num_ranks - 1)

    def stages_of_rank(self, rank: int, *, num_ranks: int, num_stages: int) -> tuple[int, ...]:
        """Raises: SpecError where so many stages do not go onto so many ranks."""
        if self.has_one_stage and num_stages != num_ranks:
            raise SpecError(
                f"{self} has one stage on each rank: {num_stages} stages do not go onto {num_ranks} ranks; "
                "Interleaved1F1B has several on each"
            )
        if num_stages % num_ranks:
            raise SpecError(f"{num_stages} stages do not divide by {num_ranks} ranks: {self} needs as many on each")
        if self.name in _V_SHAPED:
            if num_stages != 2 * num_ranks:
                needed = 2 * num_ranks
                raise SpecError(
                    f"{self} has two stages on each rank: {num_ranks} ranks need {needed}, not {num_stages}"
                )
            return rank, num_stages - 1 - rank
        return tuple(range(rank, num_stages, num_ranks))
