"""How fast a session recovers from faults, side by side with peers: one table, and the raw figures in results/.

    python benchmarks/faults.py [--quick] [--no-peers] [--results FOLDER]

Ranks are stopped while they hang, killed, and orphaned by their kernel; real kernels are driven as a front end does it.
Toolkits take turns, round by round, and only one runs at a time. An event that takes longer than some seconds counts
as never. A toolkit that has not survived a fault is restarted for the next one.
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter

from benchmark import Benchmark, run_benchmark
from fault_measures import HUNG, QUICK, STOPS, Sizes, Stop, list_measures
from kernel import Cell
from notebook import Notebook
from peers import Toolkit
from report import NEVER, NO_SUCH_THING

_PRINTING = "import time\nfor i in range({lines}):\n    print(f'tick {i:04d}', flush=True)\n    time.sleep({gap_s})"
_SHOWN_BEFORE = 10
_PATIENCE_S = 60.0


class FaultBenchmark(Benchmark[Sizes]):
    """Stops, a rank's death, a killed kernel, and a hang."""

    name = "faults"

    def run(self) -> None:
        """Measure everything. Peers have fewer rounds: they spend minutes waiting for events that never occur."""
        for turn in range(1, self._sizes.rounds + 1):
            self._take_turns(turn, self._measure_faults, with_peers=turn <= self._sizes.peer_rounds)

    def _measure_faults(self, kit: Toolkit, turn: int) -> None:
        sizes = self._sizes
        # a session checks its ranks once a second: vary when the fault occurs between two checks
        settle_s = 0.5 + (0.37 * turn) % 1
        folder = self._begin(f"round {turn}: {kit.name}")
        notebook = Notebook(kit, folder, ranks=sizes.ranks, limit_s=sizes.limit_s, settle_s=settle_s)
        try:
            for stop in STOPS:
                self._measure_stop(notebook, stop)
            self._measure_death(notebook)
            self._measure_return(notebook)
            self._measure_hang(notebook)  # last, because it needs a different setting
        finally:
            notebook.close()

    def _measure_stop(self, notebook: Notebook, stop: Stop) -> None:
        """Measure from pressing stop until the prompt is back."""
        if stop.before:
            notebook.run(stop.before)
        cell = notebook.begin(stop.code.replace("{busy}", str(self._sizes.busy)))
        pressed_at = time.time()
        is_back = notebook.stop(cell)
        has_survived = is_back and notebook.has_survived()
        self._add(notebook, f"{stop.key}_s", cell.ended_at - pressed_at if is_back else NEVER)
        self._add(notebook, f"{stop.key}_survived", has_survived)
        if not has_survived:
            notebook.close()
        elif stop.after:
            notebook.run(stop.after)

    def _measure_death(self, notebook: Notebook) -> None:
        """Measure from SIGKILL of a rank that others wait for to the end of their cell, and to that of the next one."""
        killed = notebook.ranks - 1
        pid = notebook.pid_of(killed)
        cell = notebook.begin(HUNG)
        killed_at = time.time()
        os.kill(pid, signal.SIGKILL)
        has_ended = notebook.watch(cell)
        following = notebook.reduce() if has_ended else None
        if not has_ended and not notebook.watch(cell, more_s=_PATIENCE_S):  # it may end late; a stop may do more harm
            notebook.stop(cell)
        self._add(notebook, "kill_s", cell.ended_at - killed_at if has_ended else NEVER)
        self._add(notebook, "kill_next_s", following.ended_at - killed_at if following else NEVER)
        self._add(notebook, "kill_survived", notebook.have_kept(range(killed)))
        notebook.close()  # the next measurement needs every rank's variable

    def _measure_return(self, notebook: Notebook) -> None:
        """Kill the kernel while a cell prints; measure from attach in the next kernel until the first missed line."""
        kit, lines, gap_s = notebook.kit, self._sizes.lines, self._sizes.line_gap_s
        if not kit.attach:
            self._add(notebook, "attach_s", NO_SUCH_THING)
            self._add(notebook, "attach_lost", NO_SUCH_THING)
            self._add(notebook, "attach_survived", False)
            return
        printing = _PRINTING.replace("{lines}", str(lines)).replace("{gap_s}", str(gap_s))
        cell = notebook.kernel.send(kit.on_first.replace("{code}", printing))
        notebook.watch(cell, until=lambda: len(_ticks(cell)) >= _SHOWN_BEFORE)
        notebook.kill_kernel(cell)
        first_missed = max(_ticks(cell), default=-1) + 1

        attach = notebook.kernel.send(kit.attach)
        notebook.watch(attach, until=lambda: attach.has_ended and lines - 1 in _ticks(attach), more_s=lines * gap_s)
        came_at = _ticks(attach).get(first_missed, NEVER)
        times = Counter(int(number) for number in re.findall(r"\btick (\d{4})\b", attach.shown()))
        self._add(notebook, "attach_s", came_at - attach.sent_at)
        self._add(notebook, "attach_lost", sum(times[number] != 1 for number in range(first_missed, lines)))
        has_survived = notebook.has_survived()
        self._add(notebook, "attach_survived", has_survived)
        if not has_survived:
            notebook.close()

    def _measure_hang(self, notebook: Notebook) -> None:
        """Measure from the hang of a rank until its number appears in the output of the waiting cell."""
        if notebook.kit.name_hung:
            notebook.kernel.run(notebook.kit.name_hung)
        hung = notebook.ranks - 1
        cell = notebook.begin(HUNG, settles=False)
        notebook.watch(cell, until=lambda: cell.has_ended or _named_at(cell, hung) < NEVER)
        self._add(notebook, "hang_s", _named_at(cell, hung) - notebook.begun_at(hung))
        notebook.stop(cell)

    def _add(self, notebook: Notebook, what: str, figure: float) -> None:
        self.samples.add(notebook.kit.name, what, float(figure))


def _named_at(cell: Cell, rank: int) -> float:
    """Return when the number of a rank first appeared in the cell's output."""
    name = re.compile(rf"\brank {rank}\b", re.IGNORECASE)
    return next((arrival.at for arrival in cell.arrivals if name.search(arrival.text)), NEVER)


def _ticks(cell: Cell) -> dict[int, float]:
    """Return when each line arrived, by its number."""
    came_at: dict[int, float] = {}
    for text, at in cell.text_by_arrival():
        for number in re.findall(r"\btick (\d{4})\b", text):
            came_at.setdefault(int(number), at)
    return came_at


if __name__ == "__main__":
    run_benchmark(FaultBenchmark, description=__doc__, sizes=Sizes(), quick=QUICK, list_measures=list_measures)
