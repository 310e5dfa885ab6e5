"""The measurements of a session, their sizes, and the goals."""

from __future__ import annotations

from dataclasses import dataclass, replace

from report import ITSELF, Goal, Measure, median, p95, worst

# Floors and comparisons.
PLAIN, SOCKET, TORCHRUN = "plain cell", "one Unix socket", "torchrun"


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    rounds: int = 3
    ranks: int = 4
    pairs: int = 60  # of a plain and a no-op cell, in each round
    prints: int = 30
    floods: int = 2
    lines: int = 100_000
    values: int = 4
    value_bytes: int = 64 << 20
    more_ranks: tuple[int, ...] = (4, 16, 32)
    more_ranks_pairs: int = 30
    starts: int = 5
    start_ranks: tuple[int, int] = (4, 8)


QUICK = Sizes(
    rounds=1,
    ranks=2,
    pairs=3,
    prints=3,
    floods=1,
    lines=2_000,
    values=1,
    value_bytes=4 << 20,
    more_ranks=(2, 4),
    more_ranks_pairs=3,
    starts=1,
    start_ranks=(2, 3),
)


def list_measures(sizes: Sizes) -> list[Measure]:
    """Return the rows of the table; small sizes have no goals."""
    ranks, most, megabytes = sizes.ranks, max(sizes.more_ranks), sizes.value_bytes >> 20
    few, many = sizes.start_ranks
    start_few, start_many = f"start_{few}_s", f"start_{many}_s"
    own_plain, socket = (ITSELF, "plain_ms"), (SOCKET, "gb_per_s")
    plain_print, plain_flood, plain_wire = (PLAIN, "print_ms"), (PLAIN, "flood_s"), (PLAIN, "flood_wire")
    noop_goal, start_few_goal, start_many_goal = (Goal(limit, is_of_comparison=True) for limit in (1.2, 0.8, 0.4))
    measures = [
        Measure("noop", f"no-op cell, {ranks} ranks, ms", "noop_ms", median, own_plain, "difference", noop_goal),
        Measure("noop_per_rank", f"  each further rank up to {most}, ms", "rank_ms", goal=Goal(0.35)),
        Measure("print", "a lone print, median, ms", "print_ms", median, plain_print, "ratio", Goal(10)),
        Measure("print_p95", "  p95, ms", "print_ms", p95, plain_print, "ratio", Goal(30)),
        Measure("flood", f"{sizes.lines:,} lines, s", "flood_s", median, plain_flood, "ratio", Goal(1.0)),
        Measure("flood_end", "  until the cell ended, s", "flood_end_s", median, (PLAIN, "flood_end_s"), "ratio"),
        Measure("flood_lost", "  lost or broken", "flood_lost", worst, (PLAIN, "flood_lost"), goal=Goal(0)),
        Measure("flood_wire", "  bytes sent per byte", "flood_wire", worst, plain_wire, "ratio", Goal(1.5)),
        Measure("pull", f"pull {megabytes} MB, GB/s", "pull", median, socket, "ratio", Goal(0.3, is_more_better=True)),
        Measure("push", f"push {megabytes} MB to one rank, GB/s", "push", median, socket, "ratio"),
        Measure("push_all", f"push {megabytes} MB to {ranks} ranks, s", "push_all_s"),
        Measure(
            "start_few", f"start {few} ranks, s", start_few, median, (TORCHRUN, start_few), "ratio", start_few_goal
        ),
        Measure(
            "start_many", f"start {many} ranks, s", start_many, median, (TORCHRUN, start_many), "ratio", start_many_goal
        ),
        Measure(
            "restart_few",
            f"restart {few} ranks, s",
            f"restart_{few}_s",
            median,
            (TORCHRUN, start_few),
            "ratio",
            Goal(0.15, is_of_comparison=True),
        ),
        Measure(
            "restart_many", f"restart {many} ranks, s", f"restart_{many}_s", median, (TORCHRUN, start_many), "ratio"
        ),
        Measure("first_cell", f"first cell of a notebook, {ranks} ranks, s", "first_cell_s"),
    ]
    return measures if sizes == Sizes() else [replace(measure, goal=None) for measure in measures]
