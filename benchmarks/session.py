"""How fast a session is, side by side with peers and floors: one table, and the raw figures in results/.

    python benchmarks/session.py [--quick] [--no-peers] [--results FOLDER]

Everything is driven through real kernels. Toolkits take turns, round by round, and only one runs at a time; the closest
comparisons (a cell and a plain cell, a value and one socket, a start and torchrun's) alternate one by one.
"""

from __future__ import annotations

import time

from benchmark import Benchmark, run_benchmark
from floors import OneSocket, time_torchrun
from kernel import Kernel, KernelError
from measures import PLAIN, QUICK, SOCKET, TORCHRUN, Sizes, list_measures
from output import LINE_BYTES, count_lost, flood, lone_prints, print_latencies_ms, seconds_until_all_there
from peers import DETRAIN_NB, Toolkit
from report import US, median

from detrain_nb import Session

_WARM_UP = 5
_NOOP = "pass"
_ALL_REDUCE = "t = torch.ones(1)\ndist.all_reduce(t)"


class SessionBenchmark(Benchmark[Sizes]):
    """Starts, cells, output and values."""

    def run(self) -> None:
        """Measure everything."""
        for ranks in self._sizes.start_ranks:
            self._measure_starts(ranks)
        for turn in range(1, self._sizes.rounds + 1):
            self._measure_more_ranks(turn)
            self._take_turns(turn, self._measure_session)

    # ---- start

    def _measure_starts(self, ranks: int) -> None:
        """Measure from the call, in a running Python, until every rank has done one all_reduce: ours and torchrun's.

        A restart is measured from the stop of the previous session.
        """
        self._begin(f"start of {ranks} ranks")
        _time_our_start(ranks)  # the first start of each reads files from disk that later ones find in memory
        time_torchrun(ranks)
        for _ in range(self._sizes.starts):
            self.samples.add(US, f"start_{ranks}_s", _time_our_start(ranks))
            self.samples.add(TORCHRUN, f"start_{ranks}_s", time_torchrun(ranks))
            self.samples.add(US, f"restart_{ranks}_s", _time_our_restart(ranks))

    # ---- one session

    def _measure_session(self, kit: Toolkit, turn: int) -> None:
        with self._kernel(kit, f"round {turn}: {kit.name}") as kernel:
            self.samples.add(kit.name, "first_cell_s", kit.start_ranks(kernel, self._sizes.ranks))
            self._measure_noop(kit, kernel)
            contestants = {kit.name: kit.on_first}
            if kit is DETRAIN_NB:
                contestants[PLAIN] = "{code}"
            for who, template in contestants.items():
                self._measure_print(kernel, who, template)
            for _ in range(self._sizes.floods):
                for who, template in contestants.items():
                    self._measure_flood(kernel, who, template)
            if kit.pull:
                self._measure_values(kit, kernel)
            if kit.stop:
                kernel.run(kit.stop)

    def _measure_noop(self, kit: Toolkit, kernel: Kernel) -> None:
        plain, noop = _time_pairs(kernel, kit.on_all.replace("{code}", _NOOP), self._sizes.pairs)
        self.samples.add(kit.name, "plain_ms", *plain)
        self.samples.add(kit.name, "noop_ms", *noop)

    def _measure_more_ranks(self, turn: int) -> None:
        """Measure ranks without a process group: the cost of a no-op cell for each additional rank."""
        added: dict[int, float] = {}
        noop_cell = DETRAIN_NB.on_all.replace("{code}", _NOOP)
        with self._kernel(DETRAIN_NB, f"round {turn}: more ranks") as kernel:
            for ranks in self._sizes.more_ranks:
                kernel.run(f"%distributed start -n {ranks} --no-init --force")
                plain, noop = _time_pairs(kernel, noop_cell, self._sizes.more_ranks_pairs)
                kernel.run("%distributed stop")
                self.samples.add(US, f"plain_{ranks}_ms", *plain)
                self.samples.add(US, f"noop_{ranks}_ms", *noop)
                added[ranks] = median(noop) - median(plain)
        few, most = min(added), max(added)
        self.samples.add(US, "rank_ms", (added[most] - added[few]) / (most - few))

    def _measure_print(self, kernel: Kernel, who: str, template: str) -> None:
        count = self._sizes.prints
        latencies_ms = print_latencies_ms(kernel.run(template.replace("{code}", lone_prints(count))))
        if not latencies_ms:
            raise KernelError(f"none of {count} prints arrived")
        self.samples.add(who, "print_ms", *latencies_ms)
        self.samples.add(who, "prints_lost", count - len(latencies_ms))

    def _measure_flood(self, kernel: Kernel, who: str, template: str) -> None:
        count = self._sizes.lines
        cell = kernel.run(template.replace("{code}", flood(count)), timeout_s=300)
        self.samples.add(who, "flood_s", seconds_until_all_there(cell))
        self.samples.add(who, "flood_end_s", cell.seconds)
        self.samples.add(who, "flood_lost", count_lost(cell, count))
        self.samples.add(who, "flood_wire", cell.wire_bytes / (count * LINE_BYTES))

    def _measure_values(self, kit: Toolkit, kernel: Kernel) -> None:
        """Measure pull and push in turn with equal bytes over one socket; the first of each is a warm-up."""
        size_bytes = self._sizes.value_bytes
        kernel.run(kit.on_first.replace("{code}", kit.value.replace("{count}", str(size_bytes // 4))))
        one_socket = OneSocket(size_bytes)
        try:
            for repetition in range(self._sizes.values + 1):
                pulled, pushed = kernel.run(kit.pull).seconds, kernel.run(kit.push).seconds
                pushed_to_all, sent = kernel.run(kit.push_all).seconds, one_socket.time()
                if repetition:
                    self.samples.add(kit.name, "pull", size_bytes / pulled / 1e9)
                    self.samples.add(kit.name, "push", size_bytes / pushed / 1e9)
                    self.samples.add(kit.name, "push_all_s", pushed_to_all)
                    self.samples.add(SOCKET, "gb_per_s", size_bytes / sent / 1e9)
        finally:
            one_socket.close()


def _time_our_start(ranks: int) -> float:
    started = time.perf_counter()
    with Session.start(ranks=ranks) as session:
        session.run_cell(_ALL_REDUCE)
        return time.perf_counter() - started


def _time_our_restart(ranks: int) -> float:
    with Session.start(ranks=ranks, warm_s=60) as before:
        before.run_cell(_ALL_REDUCE)
        started = time.perf_counter()
        before.stop()
        with Session.start(ranks=ranks) as session:
            session.run_cell(_ALL_REDUCE)
            return time.perf_counter() - started


def _time_pairs(kernel: Kernel, noop_cell: str, count: int) -> tuple[list[float], list[float]]:
    """Return the milliseconds of plain and of no-op cells, which alternate."""
    plain, noop = [], []
    for repetition in range(-_WARM_UP, count):
        plain_s, noop_s = kernel.run(_NOOP).seconds, kernel.run(noop_cell).seconds
        if repetition >= 0:
            plain.append(1e3 * plain_s)
            noop.append(1e3 * noop_s)
    return plain, noop


if __name__ == "__main__":
    run_benchmark(SessionBenchmark, description=__doc__, sizes=Sizes(), quick=QUICK, list_measures=list_measures)
