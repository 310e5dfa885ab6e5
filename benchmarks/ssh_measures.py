"""The measurements of a session on hosts over SSH, their sizes, and the goals."""

from __future__ import annotations

from dataclasses import dataclass, replace

from report import Goal, Measure, always, median, worst

# Floors of a session over SSH.
LOCAL_AND_LINK, TORCHRUN_AND_SSH, CHANNEL, SFTP = "local + link", "torchrun + ssh", "one SSH channel", "sftp get"

DELAY_MS = 20  # each way, of the slow link


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    hosts: int = 2
    ranks: int = 2  # on each host
    rounds: int = 3
    rounds_far: int = 2
    cells: int = 40  # remote and local no-op cells in turn, in each round
    pings: int = 5  # after each pair of cells
    starts: int = 5
    values: int = 5
    value_bytes: int = 64 << 20
    floods: int = 3
    flood_bytes: int = 300_000_000
    attach_hosts: int = 16  # 0: skipped
    attaches: int = 5
    fault_rounds: int = 5


QUICK = Sizes(
    rounds=1,
    rounds_far=1,
    cells=3,
    pings=2,
    starts=1,
    values=1,
    value_bytes=4 << 20,
    floods=1,
    flood_bytes=3_000_000,
    attach_hosts=0,
    attaches=0,
    fault_rounds=1,
)


def list_measures(sizes: Sizes) -> list[Measure]:
    """Return the rows of the table; small sizes have no goals."""
    where, megabytes, flood = f"{sizes.hosts} x {sizes.ranks} ranks", sizes.value_bytes >> 20, sizes.flood_bytes / 1e6
    noop_goal, start_goal = Goal(1.0, is_of_comparison=True), Goal(1.2, is_of_comparison=True)
    near, far = (LOCAL_AND_LINK, "noop_ms"), (LOCAL_AND_LINK, "noop_far_ms")
    fast, channel = Goal(100, is_more_better=True), (CHANNEL, "mb_per_s")
    as_sftp = Goal(0.8, is_of_comparison=True, is_more_better=True)
    measures = [
        Measure("noop", f"no-op cell, {where}, ms", "noop_ms", median, near, "difference", noop_goal),
        Measure("noop_far", f"  {DELAY_MS} ms away, ms", "noop_far_ms", median, far, "difference"),
        Measure("start", f"start {where}, s", "start_s", median, (TORCHRUN_AND_SSH, "start_s"), "ratio", start_goal),
        Measure("attach", f"attach to {sizes.attach_hosts} hosts, s", "attach_s", goal=Goal(1.0)),
        Measure("flood", f"{flood:g} MB in 64 KB writes, MB/s", "flood", median, channel, "ratio", fast),
        Measure("flood_lines", "  in lines of 60 bytes, MB/s", "flood_lines", median, channel, "ratio"),
        Measure("flood_lost", "  bytes lost", "flood_lost", worst, goal=Goal(0)),
        Measure("flood_memory", "  the agent's memory, MB", "flood_memory_mb", worst, goal=Goal(50)),
        Measure("pull", f"pull {megabytes} MB, MB/s", "pull", median, (SFTP, "mb_per_s"), "ratio", as_sftp),
        Measure("far_connection", "SSH sessions killed: silence, s", "far_connection_s"),
        Measure("far_connection_lost", "  lines lost or repeated", "far_connection_lost", worst, goal=Goal(0)),
        Measure("far_stop", "stop of a rank that waits for another host, s", "far_stop_s", goal=Goal(1.0)),
        Measure("far_kill", "SIGKILL of a rank: the cell ends, s", "far_kill_s", goal=Goal(0.3)),
        Measure("far_kill_next", "  the next has ended, s", "far_kill_next_s", goal=Goal(0.5)),
        Measure("far_kept", "    the other kept its variables", "far_kept", always, goal=Goal(1, is_more_better=True)),
        Measure("far_node", "SIGKILL of an agent: the cell ends, s", "far_node_s", goal=Goal(0.5)),
    ]
    if not sizes.attach_hosts:
        measures = [measure for measure in measures if measure.key != "attach"]
    return measures if sizes == Sizes() else [replace(measure, goal=None) for measure in measures]
