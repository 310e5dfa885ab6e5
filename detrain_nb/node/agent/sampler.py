"""The resource use of a node's ranks, measured by its agent while a notebook watches, without involving the ranks.

Processor time and memory come from /proc and cover the rank's own process only, not its children such as DataLoader
workers. GPU figures come from one nvidia-smi (gpu_watch.py), steps from a file (step_rates.py).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...wire import Measure, Measured, RankUp
from ..system.proc_files import read
from ..system.processes import process_use
from .gpu_watch import Gpu, GpuWatch, VisibleGpus
from .snapshot import Run
from .step_rates import StepRates

_LEAST_GAP_S, _MOST_GAP_S = 0.1, 60.0
_LONGEST_S = 60.0  # for one order, in case the notebook disappears
_UNKNOWN = -1


@dataclass(frozen=True)
class _Use:
    """The processor time used up to a moment."""

    cpu_s: float
    clock_s: float


class Sampler:
    """The measurements of one session, taken only while an order for them is in effect."""

    def __init__(self) -> None:
        self.due_at: float | None = None  # when to measure or stop next; None while no notebook watches
        self.visible = VisibleGpus()
        self._gap_s = _MOST_GAP_S
        self._until = 0.0
        self._used: dict[int, _Use] = {}  # by process
        self._node_used: tuple[int, int] | None = None  # ticks of all processors: busy and total
        self._gpus: GpuWatch | None = None
        self._steps = StepRates()

    def take_order(self, message: Measure) -> None:
        """Measure for ``message.for_s`` seconds from now; stop if that is 0."""
        now = time.monotonic()
        self._until = now + min(message.for_s, _LONGEST_S)
        self._gap_s = min(max(message.every_s, _LEAST_GAP_S), _MOST_GAP_S)
        if message.for_s <= 0:
            self.end()
        elif self.due_at is None:
            self.due_at = now
        else:
            self.due_at = min(self.due_at, now + self._gap_s)

    def measure(self, ranks: Sequence[RankUp], runs: Mapping[int, Run]) -> Measured | None:
        """Measure the processes of ``ranks`` if it is time; else return None. ``runs``: the cells they are running."""
        now = time.monotonic()
        if self.due_at is None or now < self.due_at:
            return None
        if now >= self._until:
            self.end()
            return None
        next_at = self.due_at + self._gap_s
        self.due_at = min(next_at if next_at > now else now + self._gap_s, self._until)
        return self._measure(ranks, runs)

    def end(self) -> None:
        """Stop measuring."""
        self.due_at = None
        self._used.clear()
        self._node_used = None
        self._steps.forget()
        if self._gpus is not None:
            self._gpus.end()
            self._gpus = None

    def _measure(self, ranks: Sequence[RankUp], runs: Mapping[int, Run]) -> Measured:
        used = {up.pid: process_use(up.pid) for up in ranks}
        clock_s = time.monotonic()
        shares = {pid: self._share(pid, cpu_s, clock_s) for pid, (cpu_s, _) in used.items()}
        self._used = {pid: _Use(cpu_s, clock_s) for pid, (cpu_s, _) in used.items()}
        gpus = self._look_at_gpus(ranks)
        began_s = {rank: run.began_s for rank, run in runs.items()}
        rates = self._steps.read(ranks, began_s=began_s, now=clock_s)
        memory = _memory_of_node()
        return Measured(
            [up.rank for up in ranks],
            [shares[up.pid] for up in ranks],
            [used[up.pid][1] for up in ranks],
            [round(min(rates.get(up.rank, _UNKNOWN), Measured.MOST_STEPS_PER_S), 4) for up in ranks],
            [runs[up.rank].cell if up.rank in runs else _UNKNOWN for up in ranks],
            [self.visible.find(up.device, gpus) for up in ranks],
            [gpu.name for gpu in gpus],
            [gpu.percent for gpu in gpus],
            [gpu.used_bytes for gpu in gpus],
            [gpu.total_bytes for gpu in gpus],
            self._node_share(),
            memory[0] - memory[1],
            memory[0],
        )

    def _share(self, pid: int, cpu_s: float, clock_s: float) -> float:
        """Return the use since the last measurement, in percent of one processor."""
        before = self._used.get(pid)
        if before is None or clock_s <= before.clock_s:
            return _UNKNOWN
        percent = 100 * (cpu_s - before.cpu_s) / (clock_s - before.clock_s)
        return round(min(max(0.0, percent), Measured.MOST_PERCENT), 1)

    def _node_share(self) -> float:
        before, self._node_used = self._node_used, _ticks_of_node()
        if before is None or self._node_used is None or self._node_used[1] <= before[1]:
            return _UNKNOWN
        busy, of_all = self._node_used[0] - before[0], self._node_used[1] - before[1]
        return round(min(100.0, max(0.0, 100 * busy / of_all)), 1)

    def _look_at_gpus(self, ranks: Sequence[RankUp]) -> list[Gpu]:
        if not any(up.device.startswith("cuda") for up in ranks):
            return []
        if self._gpus is None:
            self._gpus = GpuWatch()
        return self._gpus.read()


def _ticks_of_node() -> tuple[int, int] | None:
    """Return the busy and total ticks of all processors since boot."""
    fields = (read("/proc/stat") or "").partition("\n")[0].split()[1:9]
    if len(fields) < 5 or not all(field.isdigit() for field in fields):
        return None
    ticks = list(map(int, fields))
    return sum(ticks) - ticks[3] - ticks[4], sum(ticks)  # busy: all but idle and iowait


def _memory_of_node() -> tuple[int, int]:
    """Return the total and the available memory in bytes; 0 if unknown."""
    found = dict.fromkeys(("MemTotal", "MemAvailable"), 0)
    for line in (read("/proc/meminfo") or "").splitlines()[:8]:
        name, _, rest = line.partition(":")
        number = rest.split()[:1]
        if name in found and number and number[0].isdigit():
            found[name] = int(number[0]) << 10
    return found["MemTotal"], min(found["MemAvailable"], found["MemTotal"])
