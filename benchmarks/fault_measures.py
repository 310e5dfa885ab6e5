"""The measurements of a session with faults, their sizes, and the goals."""

from __future__ import annotations

from dataclasses import dataclass, replace

from report import Goal, Measure, always, median, worst


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    rounds: int = 5
    peer_rounds: int = 2
    ranks: int = 4
    limit_s: float = 10.0  # an event that takes longer counts as never
    lines: int = 120
    line_gap_s: float = 0.05
    busy: int = 500_000_000  # the number to which a rank counts, in C


QUICK = Sizes(rounds=1, peer_rounds=1, ranks=2, lines=60, limit_s=40.0, busy=200_000_000)


@dataclass(frozen=True)
class Stop:
    """A cell that hangs or computes on at least one rank; ``before`` and ``after`` are cells to run around it."""

    key: str
    title: str
    code: str
    goal: Goal | None = None
    before: str = ""
    after: str = ""


# The last rank sleeps instead of joining the collective.
HUNG = """
import time
if rank == {n} - 1:
    time.sleep(600)
else:
    dist.all_reduce(torch.ones(1))
"""
# The last rank computes in C, holds the GIL and handles no signal; it returns by itself.
BUSY = HUNG.replace("time.sleep(600)", "sum(range({busy}))")
_GOAL = Goal(1.0)
STOPS = (
    Stop("stop_loop", "stop a Python loop, s", "while True:\n    pass"),
    Stop("stop_sleep", "stop time.sleep, s", "import time\ntime.sleep(600)"),
    Stop("stop_hung", "stop a hung all_reduce, s", HUNG, _GOAL),
    Stop(
        "stop_hung_ddp",
        "  with a DDP model alive, s",
        HUNG,
        _GOAL,
        before="ddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))",
        after="del ddp",
    ),
    Stop("stop_busy", "  the missing rank computes, s", BUSY, _GOAL),
    Stop("stop_recv", "stop recv against recv, s", "dist.recv(torch.ones(1), (rank + 1) % {n})", _GOAL),
)


def list_measures(sizes: Sizes) -> list[Measure]:
    """Return the rows of the table; small sizes have no goals."""
    limit_s, yes = sizes.limit_s, Goal(1, is_more_better=True)
    measures = []
    for stop in STOPS:
        survived = f"{stop.key}_survived"
        measures += [
            Measure(stop.key, stop.title, f"{stop.key}_s", median, goal=stop.goal, limit_s=limit_s),
            Measure(survived, "    survived", survived, always, goal=yes),
        ]
    measures += [
        Measure("kill", "SIGKILL of a rank: the cell ends, s", "kill_s", median, goal=Goal(0.3), limit_s=limit_s),
        Measure("kill_next", "  the next has ended, s", "kill_next_s", median, goal=Goal(0.5), limit_s=limit_s),
        Measure("kill_survived", "    the others survived", "kill_survived", always, goal=yes),
        Measure("attach", "attach: first missed line, s", "attach_s", median, goal=Goal(0.5), limit_s=limit_s),
        Measure("attach_lost", "  missed lines lost or repeated", "attach_lost", worst, goal=Goal(0)),
        Measure("attach_survived", "    survived", "attach_survived", always, goal=yes),
        Measure("hang", "a hung rank is named (hang=1), s", "hang_s", median, limit_s=limit_s),
    ]
    return measures if sizes == Sizes() else [replace(measure, goal=None) for measure in measures]
