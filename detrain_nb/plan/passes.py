"""The timeline of a pipeline: when each rank computes and when it waits, without torch."""

from __future__ import annotations

from dataclasses import dataclass

PASSES = {"F": "forward", "B": "backward", "I": "backward, for inputs", "W": "backward, for weights"}


@dataclass(frozen=True)
class Work:
    """One pass of a rank, from ``begin_s`` to ``end_s``.

    ``kind`` is "F" for forward, "B" for backward, "I" and "W" for the two halves of a backward pass.
    """

    kind: str
    stage: int
    microbatch: int
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class StepTimeline:
    """The passes of all ranks of a pipeline in one step."""

    schedule: str
    ranks: tuple[tuple[Work, ...], ...]

    @property
    def step_s(self) -> float:
        return max(work.end_s for works in self.ranks for work in works)

    @property
    def num_microbatches(self) -> int:
        return 1 + max(work.microbatch for works in self.ranks for work in works)

    @property
    def bubble(self) -> float:
        """The share of the ranks' time that they spend waiting, over all ranks."""
        busy = sum(work.end_s - work.begin_s for works in self.ranks for work in works)
        return 1 - busy / (self.step_s * len(self.ranks)) if self.step_s else 0.0

    def idle(self, rank: int) -> float:
        """Return the share of the step in which a rank waits."""
        busy = sum(work.end_s - work.begin_s for work in self.ranks[rank])
        return 1 - busy / self.step_s if self.step_s else 0.0
