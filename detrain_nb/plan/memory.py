"""What ranks hold when they hold most, by what it is for: numbers alone, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RankBytes:
    """What each of ``ranks`` holds at most, in bytes, and in which ``phase`` of a step that is."""

    ranks: tuple[int, ...]
    stages: tuple[int, ...]
    num_parameters: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    activation_bytes: int
    working_bytes: int = 0
    phase: str = ""

    @property
    def parts_bytes(self) -> tuple[int, ...]:
        return (
            self.parameter_bytes,
            self.gradient_bytes,
            self.optimizer_bytes,
            self.activation_bytes,
            self.working_bytes,
        )

    @property
    def total_bytes(self) -> int:
        return sum(self.parts_bytes)


@dataclass(frozen=True)
class MeshMemory:
    """A layout, and what its ranks would hold; ``mesh`` has the sizes of its axes."""

    mesh: Mapping[str, int]
    schedule: str
    rows: tuple[RankBytes, ...]

    @property
    def peak(self) -> RankBytes:
        """The ranks that hold most."""
        return max(self.rows, key=lambda row: row.total_bytes)
