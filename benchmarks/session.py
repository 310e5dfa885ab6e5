"""How fast a session is, side by side with peers and floors: one table, and the raw figures in results/.

    python benchmarks/session.py [--quick] [--no-peers] [--results FOLDER]

Everything is driven through real kernels. Toolkits take turns, round by round, with only one of them running; what is
compared most closely (a cell and a plain cell, a value and one socket, a start and torchrun's) alternates one by one.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from floors import OneSocket, time_torchrun
from kernel import Kernel, KernelError
from measures import PLAIN, QUICK, SOCKET, TORCHRUN, Sizes, list_measures
from output import LINE_BYTES, count_lost, flood, lone_prints, print_latencies_ms, seconds_until_all_there
from peers import DETRAIN_NB, PEERS, Toolkit
from report import US, Samples, describe_machine, fill_rows, format_table, median, write_results

from detrain_nb import Session
from detrain_nb.node.processes import adopt_orphans, end_descendants

_WARM_UP = 5
_NOOP = "pass"
_ALL_REDUCE = "t = torch.ones(1)\ndist.all_reduce(t)"


class Benchmark:
    """One run: what was measured, on which toolkits, and how busy the machine was."""

    def __init__(self, sizes: Sizes, folder: Path, *, with_peers: bool) -> None:
        self.samples = Samples()
        self.absent = {kit.name: kit.why_not_here() if with_peers else "left out" for kit in PEERS}
        self.absent = {name: reason for name, reason in self.absent.items() if reason}
        self.load: dict[str, float] = {}
        self._sizes = sizes
        self._folder = folder

    def run(self) -> None:
        """Measure everything. A peer that fails is left out from then on; whatever else fails ends the run."""
        for ranks in self._sizes.start_ranks:
            self._measure_starts(ranks)
        for turn in range(1, self._sizes.rounds + 1):
            self._measure_more_ranks(turn)
            for kit in (DETRAIN_NB, *PEERS):
                if kit.name in self.absent:
                    continue
                try:
                    self._measure_session(kit, turn)
                except KernelError as exc:
                    if kit is DETRAIN_NB:
                        raise
                    self.absent[kit.name] = f"failed in round {turn}: {exc}"

    def _begin(self, part: str) -> None:
        self.load[part] = _load_average()[0]
        print(f"{time.strftime('%H:%M:%S')}  {part}", file=sys.stderr, flush=True)

    @contextmanager
    def _kernel(self, kit: Toolkit, part: str) -> Iterator[Kernel]:
        self._begin(part)
        kernel = kit.open_kernel(self._folder / part.replace(" ", "-").replace(":", ""))
        try:
            yield kernel
        finally:
            kernel.close()
            end_descendants()  # a toolkit that failed may have left its ranks

    # ---- start

    def _measure_starts(self, ranks: int) -> None:
        """From the call, in a Python that runs, until every rank has done one all_reduce: ours and torchrun's."""
        self._begin(f"start of {ranks} ranks")
        _time_our_start(ranks)  # the first start of each reads files that no later one reads from the disk
        time_torchrun(ranks)
        for _ in range(self._sizes.starts):
            self.samples.add(US, f"start_{ranks}_s", _time_our_start(ranks))
            self.samples.add(TORCHRUN, f"start_{ranks}_s", time_torchrun(ranks))

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
        """Ranks without a process group: what a no-op cell costs more for each of them."""
        added: dict[int, float] = {}
        noop_cell = DETRAIN_NB.on_all.replace("{code}", _NOOP)
        with self._kernel(DETRAIN_NB, f"round {turn}: more ranks") as kernel:
            for ranks in self._sizes.more_ranks:
                kernel.run(f"%distributed start -n {ranks} --no-init")
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
        """Pull and push in turn with the same bytes over one socket; the first of each imports and is not counted."""
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


def _time_pairs(kernel: Kernel, noop_cell: str, count: int) -> tuple[list[float], list[float]]:
    """Milliseconds of plain cells and of no-op cells, one after the other."""
    plain, noop = [], []
    for repetition in range(-_WARM_UP, count):
        plain_s, noop_s = kernel.run(_NOOP).seconds, kernel.run(noop_cell).seconds
        if repetition >= 0:
            plain.append(1e3 * plain_s)
            noop.append(1e3 * noop_s)
    return plain, noop


def _load_average() -> list[float]:
    return [round(load, 2) for load in os.getloadavg()]


def _warn_when_busy() -> None:
    load, cores = _load_average()[0], len(os.sched_getaffinity(0))
    if load > cores / 4:
        print(
            f"warning: load average {load:.1f} on {cores} cores: other programs run, the figures will be too high; "
            f"wait until it is below {cores / 4:g}",
            file=sys.stderr,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions of small things: does it run?")
    parser.add_argument("--no-peers", action="store_true", help="leave the other toolkits out")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="where the raw figures go (default: results/)")
    args = parser.parse_args()
    sizes = QUICK if args.quick else Sizes()

    _warn_when_busy()
    started_at, load_before = time.time(), _load_average()
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that everything started is ended too
    try:
        with tempfile.TemporaryDirectory(prefix="detrain_nb-bench-") as folder:
            # what torchrun and the toolkits leave among temporary files goes with this folder
            os.environ["TMPDIR"] = tempfile.tempdir = folder
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # ranks are on the CPU, everybody's
            os.environ["DETRAIN_NB_RUNTIME_DIR"] = str(Path(folder, "run"))
            benchmark = Benchmark(sizes, Path(folder), with_peers=not args.no_peers)
            benchmark.run()
    finally:
        end_descendants()
    rows = fill_rows(list_measures(sizes), benchmark.samples, [kit.name for kit in PEERS])
    about = {
        "seconds": round(time.time() - started_at),
        "is_quick": args.quick,
        "sizes": asdict(sizes),
        "machine": describe_machine(),
        "load_average": {"before": load_before, "during": benchmark.load, "after": _load_average()},
        "absent": benchmark.absent,
    }
    print(format_table(rows, benchmark.absent))
    print(f"load average {load_before[0]:.1f} before, {_load_average()[0]:.1f} after")
    results: Path | None = args.results or (None if args.quick else Path(__file__).parent / "results")
    if results:
        print(write_results(results, started_at=started_at, about=about, rows=rows, samples=benchmark.samples))


if __name__ == "__main__":
    main()
