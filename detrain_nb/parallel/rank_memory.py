"""What the ranks of a layout hold, as a table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..plan import MeshMemory, PlanDescription, RankBytes
from ..text import ShownAsText, format_size, table_lines
from .stages.splitter import Split
from .tensor.plan import TensorPlan


@dataclass(frozen=True)
class RankMemory(RankBytes):
    """What the first rank at one place of the pipeline holds at its peak, in bytes; the others there hold no more.

    ``phase``: when the peak is: in a "forward" pass, the "loss", a "backward" pass or the step of the "optimizer". It
    consists of parameters with buffers; the gradients that exist by then; the optimizer's state; activations of all
    microbatches in flight, with the batch; and working memory: layers that FSDP2 has gathered, what the loss
    computes from the output, what is recomputed, and buffers for sending between ranks.
    ``largest``: shapes of the largest parameters there, by name, as one rank has them.
    """

    largest: tuple[tuple[str, tuple[int, ...]], ...] = ()


@dataclass(frozen=True)
class DryRun(MeshMemory, ShownAsText):
    """A layout and what its ranks would hold, shown as a table."""

    rows: tuple[RankMemory, ...]
    split: Split | None = None
    plan: TensorPlan | None = None

    @property
    def peak(self) -> RankMemory:
        """The row of the ranks that hold most."""
        return max(self.rows, key=lambda row: row.total_bytes)

    def to_dict(self) -> dict[str, Any]:
        """Return the dry run as plain JSON for ``widgets.plan``, with the partition of its split."""
        found = self.split.partition if self.split is not None else None
        return PlanDescription(costs=found.costs() if found is not None else None, memory=self).to_dict()

    def __str__(self) -> str:
        sizes = " x ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        parts = ("weights", "gradients", "optimizer", "activations", "working")
        table: list[tuple[str, ...]] = [("ranks", "stages", "parameters", "peak", *parts, "phase")]
        for row in self.rows:
            ranks = f"{row.ranks[0]}-{row.ranks[-1]}" if len(row.ranks) > 1 else str(row.ranks[0])
            stages = ",".join(map(str, row.stages))
            bytes_text = map(format_size, (row.total_bytes, *row.parts_bytes))
            table.append((ranks, stages, f"{row.num_parameters:,}", *bytes_text, row.phase))
        lines = table_lines(table, num_right=len(table[0]))
        head = f"{sizes}: {len(self.rows) and sum(len(row.ranks) for row in self.rows)} ranks, {self.schedule}"
        if self.plan is not None and self.plan.what_is_whole:
            lines.append(self.plan.headline())
        return "\n".join([head, *lines])
