"""How fast a session on hosts over SSH recovers from faults: killed connections, a stop, a death, a lost node."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

from hosts import Hosts

from detrain_nb import Session
from detrain_nb.errors import CellInterrupted, RankLost
from detrain_nb.session.state.cell_observer import CellObserver

_SETTLE_S = 0.7
_LINES, _LINE_GAP_S = 200, 0.01
_COUNT = f"import time\nfor i in range({_LINES}):\n    print(i)\n    time.sleep({_LINE_GAP_S})"
_HUNG = "import time\nif rank == 0: dist.recv(torch.ones(1), 1)\ntime.sleep(600)"
_REDUCE = "t = torch.ones(1)\ndist.all_reduce(t)\nt.item()"


class _Arrivals(CellObserver):
    """Times at which output of the second host's rank arrived."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def output(self, rank: int, stream: str, text: str) -> None:
        if rank == 1:
            self.at.append(time.perf_counter())


def measure_faults(hosts: Hosts, folder: Path, add: Callable[[str, float], None]) -> None:
    """Measure with one rank on each of two hosts; ``add`` gets each figure with its name."""
    with Session.start(1, nodes=hosts.nodes(2), device="cpu", folder=str(folder)) as session:
        _measure_connection(session, hosts, add)
        _measure_stop(session, add)
        _measure_death(session, hosts, add)
        agent = hosts.agent(1)
        with _acting(lambda: os.kill(agent, signal.SIGKILL)) as acted_at, contextlib.suppress(RankLost):
            session.run_cell(_HUNG)
        add("far_node_s", time.perf_counter() - acted_at[0])


def _measure_connection(session: Session, hosts: Hosts, add: Callable[[str, float], None]) -> None:
    """Measure the output gap of a host whose SSH sessions are killed, and the lines that are lost or repeated."""
    arrivals = _Arrivals()
    with _acting(lambda: hosts.kill_sessions(1)):
        cell = session.run_cell(_COUNT, observer=arrivals).cell
    add("far_connection_s", max(after - before for before, after in pairwise(arrivals.at)))
    came = session.log.text(cell, 1).split()
    add("far_connection_lost", float(sum(came.count(str(number)) != 1 for number in range(_LINES))))


def _measure_stop(session: Session, add: Callable[[str, float], None]) -> None:
    """Measure from a stop to the end of a cell in which one host's rank waits for the other's."""
    with _acting(lambda: os.kill(os.getpid(), signal.SIGINT)) as acted_at, contextlib.suppress(CellInterrupted):
        session.run_cell(_HUNG)
    add("far_stop_s", time.perf_counter() - acted_at[0])
    session.run_cell("kept = 1000 + rank\n" + _REDUCE)


def _measure_death(session: Session, hosts: Hosts, add: Callable[[str, float], None]) -> None:
    """Measure from SIGKILL of the second host's rank to the end of the cell, and to the end of the next one."""
    victim = hosts.pid_of(1, session.status().ranks[1].pid)
    with _acting(lambda: os.kill(victim, signal.SIGKILL)) as acted_at:
        with contextlib.suppress(RankLost):
            session.run_cell(_HUNG)
        add("far_kill_s", time.perf_counter() - acted_at[0])
        session.run_cell(_REDUCE)
        add("far_kill_next_s", time.perf_counter() - acted_at[0])
    add("far_kept", float(session.pull("kept", ranks=0) == {0: 1000}))


@contextlib.contextmanager
def _acting(act: Callable[[], object]) -> Iterator[list[float]]:
    """Act some time after the block has begun; yields the time of the act."""
    acted_at: list[float] = []

    def run() -> None:
        acted_at.append(time.perf_counter())
        act()

    timer = threading.Timer(_SETTLE_S, run)
    timer.start()
    try:
        yield acted_at
    finally:
        timer.join()
