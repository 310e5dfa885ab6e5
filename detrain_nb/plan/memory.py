"""Peak memory of ranks, by purpose: numbers only, without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class RankBytes:
    """The peak memory of each of ``ranks``, in bytes, and the ``phase`` of a step in which it occurs."""

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
    """The memory of all ranks of a layout; ``mesh`` maps its axes to their sizes."""

    mesh: Mapping[str, int]
    schedule: str
    rows: tuple[RankBytes, ...]

    @property
    def peak(self) -> RankBytes:
        """The ranks with the highest peak."""
        return max(self.rows, key=lambda row: row.total_bytes)
