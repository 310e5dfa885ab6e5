"""When each rank of a pipeline computes, and when it waits: passes with their times, without torch."""

from __future__ import annotations

from dataclasses import dataclass

PASSES = {"F": "forward", "B": "backward", "I": "backward, for inputs", "W": "backward, for weights"}


@dataclass(frozen=True)
class Work:
    """A rank computes from ``begin_s`` to ``end_s``: ``kind`` "F" forward, "B" backward, "I" and "W" its two halves."""

    kind: str
    stage: int
    microbatch: int
    begin_s: float
    end_s: float


@dataclass(frozen=True)
class StepTimeline:
    """What the ranks of a pipeline do in one step."""

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
        """The share of all ranks' time in which they wait."""
        busy = sum(work.end_s - work.begin_s for works in self.ranks for work in works)
        return 1 - busy / (self.step_s * len(self.ranks)) if self.step_s else 0.0

    def idle(self, rank: int) -> float:
        """The share of the step in which this rank waits."""
        busy = sum(work.end_s - work.begin_s for work in self.ranks[rank])
        return 1 - busy / self.step_s if self.step_s else 0.0
