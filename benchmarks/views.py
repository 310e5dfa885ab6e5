"""What live views cost: the agent, this process and the ranks, with a watch and without one, in turns.

    python benchmarks/views.py [--quick] [--results FOLDER]

Each block is one cell of a training loop that runs for some seconds, with `session.watch()` open or not; the order of
the two changes from pair to pair. Processor time is the kernel's own count, in nanoseconds.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmark import Benchmark, run_benchmark
from report import US, Goal, Measure, median, worst

from detrain_nb import Session
from detrain_nb.agents import PID_NAME, runtime_folder

WITHOUT = "without a watch"
_DEFINED = """
import time
import detrain_nb
from detrain_nb.metrics import note_step

model = torch.nn.Linear(256, 256)

def train(seconds):
    '''Steps a second, and a second of its processor time, of a loop that computes, reduces and logs.'''
    batch, ended, step = torch.randn(32, 256), False, 0
    began, used = time.monotonic(), time.process_time()
    while not ended:
        model(batch).square().mean().backward()
        dist.all_reduce(model.weight.grad)
        model.zero_grad()
        step += 1
        detrain_nb.log_metrics(step, loss=1.0, folder=folder)
        flag = torch.tensor(float(time.monotonic() - began > seconds))
        dist.all_reduce(flag)
        ended = bool(flag)
    return [step / (time.monotonic() - began), step / (time.process_time() - used)]

def count(calls):
    '''Microseconds that it takes to say which step this is.'''
    began = time.perf_counter()
    for step in range(calls):
        note_step(step)
    return 1e6 * (time.perf_counter() - began) / calls
"""


@dataclass(frozen=True)
class Sizes:
    """How much is measured."""

    ranks: int = 2
    pairs: int = 10  # of blocks
    block_s: float = 10.0
    calls: int = 20_000


QUICK = Sizes(pairs=1, block_s=2.0, calls=500)


def least(values: Sequence[float]) -> float:
    """The smallest."""
    return min(values)


def list_measures(sizes: Sizes) -> list[Measure]:
    """The rows of the table."""

    def cost(key: str, title: str, limit: float) -> Measure:
        goal = Goal(limit, is_of_comparison=True)
        return Measure(key, f"{title}, % of a core", key, median, (WITHOUT, key), "difference", goal)

    per_cpu_s = (WITHOUT, "steps_per_cpu_s")
    return [
        cost("agent_run", f"board cost: agent of {sizes.ranks} ranks that train", 1.0),
        cost("kernel_run", "  this process", 5.0),
        cost("agent_idle", "  agent, idle ranks", 1.0),
        cost("kernel_idle", "  this process", 5.0),
        cost("rank_asleep", "  a rank that sleeps in a cell, with its worker", 1.0),
        Measure("steps", "  steps/s", "steps_per_s", median, (WITHOUT, "steps_per_s"), "ratio"),
        Measure("steps_least", "    of a pair of blocks, least ratio", "steps_ratio", least),
        Measure("steps_median", "    median ratio", "steps_ratio", median),
        Measure("steps_most", "    most ratio", "steps_ratio", worst),
        Measure("steps_cpu", "  steps per s of a rank's processor time", "steps_per_cpu_s", median, per_cpu_s, "ratio"),
        Measure("boards", "  boards a second", "boards_per_s", median),
        Measure("note_step", "  log_metrics says its step, us more", "note_step_us", median),
    ]


class ViewsBenchmark(Benchmark[Sizes]):
    """One session; blocks with and without a watch."""

    name = "views"
    peers = ()

    def run(self) -> None:
        """Measure everything."""
        with Session.start(self._sizes.ranks, device="cpu") as session:
            agent = int(Path(runtime_folder(), session.name, PID_NAME).read_text())
            session.push({"folder": str(self._folder / "metrics")})
            session.run_cell(_DEFINED)
            session.run_cell("train(1.0)")  # what is slow the first time
            for pair in range(self._sizes.pairs):
                self._begin(f"pair {pair + 1}")
                self._measure_pair(session, agent, begins_with_watch=pair % 2 == 0)
            for each in session.run_cell(f"count({self._sizes.calls})").values.values():
                self.samples.add(US, "note_step_us", each)

    def _measure_pair(self, session: Session, agent: int, *, begins_with_watch: bool) -> None:
        steps = {}
        for is_watched in (begins_with_watch, not begins_with_watch):
            steps[is_watched] = self._measure_block(session, agent, is_watched=is_watched)
            self._measure_idle(session, agent, is_watched=is_watched)
            self._measure_asleep(session, is_watched=is_watched)
        self.samples.add(US, "steps_ratio", steps[True] / steps[False])

    def _measure_block(self, session: Session, agent: int, *, is_watched: bool) -> float:
        who, boards = US if is_watched else WITHOUT, []
        with ExitStack() as opened:
            if is_watched:
                opened.enter_context(session.watch(boards.append))
            before = _Used.now(agent)
            result = session.run_cell(f"train({self._sizes.block_s})")
            self._add(who, "run", before, _Used.now(agent))
        steps, per_cpu_s = map(float, result.values[0])
        self.samples.add(who, "steps_per_s", steps)
        self.samples.add(who, "steps_per_cpu_s", per_cpu_s)
        if is_watched:
            self.samples.add(who, "boards_per_s", len(boards) / self._sizes.block_s)
        return steps

    def _measure_idle(self, session: Session, agent: int, *, is_watched: bool) -> None:
        with ExitStack() as opened:
            if is_watched:
                opened.enter_context(session.watch())
            before = _Used.now(agent)
            time.sleep(self._sizes.block_s / 2)
            self._add(US if is_watched else WITHOUT, "idle", before, _Used.now(agent))

    def _measure_asleep(self, session: Session, *, is_watched: bool) -> None:
        """What looking at a rank takes from it, where it uses nothing itself."""
        rank = session.status().ranks[0].pid
        worker = int(Path(f"/proc/{rank}/stat").read_text().rpartition(")")[2].split()[1])
        with ExitStack() as opened:
            if is_watched:
                opened.enter_context(session.watch())
            before, began = _used_s(rank) + _used_s(worker), time.monotonic()
            session.run_cell(f"time.sleep({self._sizes.block_s / 2})")
            used, seconds = _used_s(rank) + _used_s(worker) - before, time.monotonic() - began
        self.samples.add(US if is_watched else WITHOUT, "rank_asleep", 100 * used / seconds)

    def _add(self, who: str, what: str, before: _Used, after: _Used) -> None:
        seconds = after.clock_s - before.clock_s
        self.samples.add(who, f"agent_{what}", 100 * (after.agent_s - before.agent_s) / seconds)
        self.samples.add(who, f"kernel_{what}", 100 * (after.kernel_s - before.kernel_s) / seconds)


@dataclass(frozen=True)
class _Used:
    """Processor time until a moment."""

    agent_s: float
    kernel_s: float
    clock_s: float

    @classmethod
    def now(cls, agent: int) -> _Used:
        return cls(_used_s(agent), time.process_time(), time.monotonic())


def _used_s(pid: int) -> float:
    """Processor time of all threads of a process."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


if __name__ == "__main__":
    run_benchmark(ViewsBenchmark, description=__doc__, sizes=Sizes(), quick=QUICK, list_measures=list_measures)
