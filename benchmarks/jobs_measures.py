"""The measurements of jobs, their sizes, and the goals."""

from __future__ import annotations

from dataclasses import dataclass, replace

from report import Goal, Measure, median, worst

SSH_TORCHRUN, BY_HAND = "ssh + torchrun", "sbatch by hand"


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    hosts: int = 2
    ranks: int = 2  # on each host
    starts: int = 5
    batches: int = 5
    follows: int = 5
    follow_ranks: int = 4
    lines_per_s: int = 5_000  # of each rank
    follow_s: float = 10.0
    lists: int = 5
    records: int = 10_000


QUICK = Sizes(starts=1, batches=1, follows=1, follow_ranks=2, lines_per_s=1_000, follow_s=1.0, lists=1, records=200)


def list_measures(sizes: Sizes) -> list[Measure]:
    """Return the rows of the table; small sizes have no goals."""
    where, speed = f"{sizes.hosts} x {sizes.ranks} ranks", f"{sizes.follow_ranks} ranks x {sizes.lines_per_s:,} lines/s"
    start, batch = (SSH_TORCHRUN, "start_s"), (BY_HAND, "batch_s")
    start_goal, batch_goal = Goal(1.3, is_of_comparison=True), Goal(1.2, is_of_comparison=True)
    measures = [
        Measure("submit", f"submit to the first line, {where}, s", "start_s", median, start, "ratio", start_goal),
        Measure("first", "  the first time, our code travels, s", "first_s", median, start, "ratio"),
        Measure("batch", "batch script to the first line, s", "batch_s", median, batch, "ratio", batch_goal),
        Measure("follow_lost", f"{speed}: lost or twice", "follow_lost", worst, goal=Goal(0)),
        Measure("follow_behind", "  printed to shown, the last line, s", "follow_behind_s"),
        Measure("list", f"list {sizes.records:,} records, ms", "list_ms", goal=Goal(100)),
    ]
    return measures if sizes == Sizes() else [replace(measure, goal=None) for measure in measures]
