"""The cost of live views, with and without a watch, in turns; how soon they respond and are drawn, and their size.

    python benchmarks/views.py [--quick] [--results FOLDER]

Each block is one cell of a training loop that runs for some seconds, with `session.watch()` open or not; the order of
the two changes from pair to pair. Processor time is the kernel's own count, in nanoseconds. Buttons and tiles are
those of a real JupyterLab in Debian's Chromium (views_pages.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from benchmark import Benchmark, run_benchmark
from report import US, Goal, Measure, median, p95, worst

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # tests are not installed

from detrain_nb.widgets import LiveView
from detrain_nb.widgets.board_view import BoardView

from detrain_nb import Session, widgets
from detrain_nb.agents import PID_NAME, runtime_folder
from detrain_nb.jobs.record import Record
from detrain_nb.pipelines import MyPipelines
from detrain_nb.plan import Layer, PlanDescription, StageCost, StageCosts
from detrain_nb.spec import Node
from tests.widgets.made_boards import MadeSession, board_with_a_hang

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
    lines: int = 100_000
    floods: int = 5
    turns: int = 40  # redraws of 64 tiles
    pipelines: int = 100
    lists: int = 20


QUICK = Sizes(pairs=1, block_s=2.0, calls=500, floods=1, turns=3, lists=1)


def least(values: Sequence[float]) -> float:
    """Return the smallest value."""
    return min(values)


def list_measures(sizes: Sizes) -> list[Measure]:
    """Return the rows of the table."""

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
        Measure("button", f"a button during {sizes.lines:,} lines, ms", "button_ms", median, goal=Goal(300)),
        Measure("button_p95", "  p95", "button_ms", p95),
        Measure("tiles", "64 tiles, from told to painted, ms", "tiles_ms", median, goal=Goal(500)),
        Measure("tiles_worst", "  worst", "tiles_ms", worst),
        Measure("settled", "settled views, the largest, kB", "settled_kb", worst, goal=Goal(50)),
        Measure("list", f"list of {sizes.pipelines} pipelines, ms", "list_ms", median, goal=Goal(200)),
        Measure("list_first", "  read for the first time", "list_first_ms", median),
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
            session.run_cell("train(1.0)")  # warm up
            for pair in range(self._sizes.pairs):
                self._begin(f"pair {pair + 1}")
                self._measure_pair(session, agent, begins_with_watch=pair % 2 == 0)
            for each in session.run_cell(f"count({self._sizes.calls})").values.values():
                self.samples.add(US, "note_step_us", each)

        self._begin("list")
        self._measure_list()
        self._begin("settled")
        self._measure_settled()
        self._begin("pages")
        self._measure_pages()

    def _measure_list(self) -> None:
        """Measure the list that the console's page gets: files on a local disk, each of which has run."""
        os.environ |= {"XDG_STATE_HOME": str(self._folder / "state"), "XDG_CACHE_HOME": str(self._folder / "cache")}
        _make_pipelines(self._folder / "pipelines", self._sizes.pipelines)
        for _ in range(self._sizes.lists):
            view = widgets.console(self._folder / "pipelines")
            for what in ("list_first_ms", "list_ms"):
                began = time.perf_counter()
                told = view.state()
                self.samples.add(US, what, 1000 * (time.perf_counter() - began))
            assert len(told["list"]["entries"]) == self._sizes.pipelines
            view.close()

    def _measure_settled(self) -> None:
        """Measure the largest plain form of each kind, as bytes of JSON in the notebook's file."""
        hosts = [Node(host=f"gpu{number}.example.org", user="alice") for number in range(128)]
        views: list[LiveView] = [
            BoardView(MadeSession(board_with_a_hang(count)))  # type: ignore[arg-type]
            for count in (64, 1000)
        ]
        views += [widgets.nodes(hosts), widgets.plan(_many_stages()), widgets.console(self._folder / "pipelines")]
        for view in views:
            bundle = view.settled().bundle(end="as it was when this cell ran; run it again for the live view")
            self.samples.add(US, "settled_kb", len(json.dumps(bundle, ensure_ascii=False).encode()) / 1000)
            view.close()

    def _measure_pages(self) -> None:
        missing = [name for name in ("playwright", "jupyterlab") if importlib.util.find_spec(name) is None]
        if missing := missing + [name for name in ("chromium",) if shutil.which(name) is None]:
            self.absent["JupyterLab"] = f"no {', '.join(missing)} here"
            return
        from views_pages import open_pages

        sizes = self._sizes
        with open_pages(self._folder / "lab") as pages:
            self.samples.add(US, "button_ms", *pages.press_buttons(lines=sizes.lines, floods=sizes.floods))
            self.samples.add(US, "tiles_ms", *pages.draw_tiles(turns=sizes.turns))

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
        """Measure the processor time that watching costs a sleeping rank."""
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


def _make_pipelines(folder: Path, count: int) -> None:
    mine, record = MyPipelines(folder), Record()
    nodes = [{"host": f"gpu{number}", "ranks": 8} for number in (1, 2)]
    for number in range(count):
        name = f"train-{number}"
        spec = {"name": name, "source": {"script_text": "print(1)"}, "nodes": nodes}
        made = mine.create({**spec, "parallelism": {"pp": 2, "tp": 2}, "training": {"steps": 5000}})
        record.add(f"{name}-1", name=name, nodes="[]", spec="{}", state="ended", file=os.fsencode(made.path))


def _many_stages() -> PlanDescription:
    layers = tuple(Layer(f"model.layers.{number}.block", 1e-3, 30e6, 10e6, 2e6) for number in range(256))
    stages = tuple(StageCost(1, 1e-3, 40e6, f"gpu{number}") for number in range(256))
    return PlanDescription("a large model", costs=StageCosts(layers, stages, 4, 1.5))


@dataclass(frozen=True)
class _Used:
    """Processor times up to a moment."""

    agent_s: float
    kernel_s: float
    clock_s: float

    @classmethod
    def now(cls, agent: int) -> _Used:
        return cls(_used_s(agent), time.process_time(), time.monotonic())


def _used_s(pid: int) -> float:
    """Return the processor time of all threads of a process."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in threads) / 1e9


if __name__ == "__main__":
    run_benchmark(ViewsBenchmark, description=__doc__, sizes=Sizes(), quick=QUICK, list_measures=list_measures)
