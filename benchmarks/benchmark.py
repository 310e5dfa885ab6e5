"""What all benchmarks share: toolkits take turns, leftover processes are stopped, a table and a file are written."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from kernel import Kernel, KernelError
from peers import DETRAIN_NB, PEERS, Toolkit
from report import Measure, Samples, describe_machine, fill_rows, format_table, write_results

from detrain_nb.node.system.processes import adopt_orphans, end_descendants

SizesT = TypeVar("SizesT")  # a frozen dataclass: how much is measured

_RESULTS = Path(__file__).parent / "results"


class Benchmark(Generic[SizesT]):
    """One run: the samples, the toolkits measured, and the load of the machine."""

    name: ClassVar[str] = ""  # prefix of the file names, before the date
    peers: ClassVar[Sequence[Toolkit]] = PEERS

    def __init__(self, sizes: SizesT, folder: Path, *, with_peers: bool) -> None:
        self.samples = Samples()
        self.absent = {kit.name: kit.why_not_here() if with_peers else "left out" for kit in self.peers}
        self.absent = {name: reason for name, reason in self.absent.items() if reason}
        self.load: dict[str, float] = {}
        self._sizes = sizes
        self._folder = folder

    def run(self) -> None:
        """Measure everything."""
        raise NotImplementedError

    def _take_turns(self, turn: int, measure: Callable[[Toolkit, int], None], *, with_peers: bool = True) -> None:
        """Measure each toolkit once. A peer that fails is left out from then on; any other failure ends the run."""
        for kit in (DETRAIN_NB, *(self.peers if with_peers else ())):
            if kit.name in self.absent:
                continue
            try:
                measure(kit, turn)
            except KernelError as exc:
                if kit is DETRAIN_NB:
                    raise
                self.absent[kit.name] = f"failed in round {turn}: {exc}"

    def _begin(self, part: str) -> Path:
        """Record the load; returns the folder of this part, which does not exist yet."""
        self.load[part] = _load_average()[0]
        print(f"{time.strftime('%H:%M:%S')}  {part}", file=sys.stderr, flush=True)
        return self._folder / part.replace(" ", "-").replace(":", "")

    @contextmanager
    def _kernel(self, kit: Toolkit, part: str) -> Iterator[Kernel]:
        kernel = kit.open_kernel(self._begin(part))
        try:
            yield kernel
        finally:
            kernel.close()
            end_descendants()  # a toolkit that failed may have left its ranks running


def run_benchmark(
    benchmark_class: type[Benchmark[SizesT]],
    *,
    description: str | None,
    sizes: SizesT,
    quick: SizesT,
    list_measures: Callable[[SizesT], Sequence[Measure]],
) -> None:
    """Read the command line, run, print the table and keep the raw figures."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="few repetitions of small things: does it run?")
    parser.add_argument("--no-peers", action="store_true", help="leave the other toolkits out")
    parser.add_argument("--results", type=Path, metavar="FOLDER", help="where the raw figures go (default: results/)")
    args = parser.parse_args()
    sizes = quick if args.quick else sizes

    _warn_when_busy()
    started_at, load_before = time.time(), _load_average()
    benchmark = _run_alone(benchmark_class, sizes, with_peers=not args.no_peers)
    rows = fill_rows(list_measures(sizes), benchmark.samples, [kit.name for kit in benchmark.peers])
    about = {
        "seconds": round(time.time() - started_at),
        "is_quick": args.quick,
        "sizes": asdict(sizes),  # type: ignore[call-overload]
        "machine": describe_machine(),
        "load_average": {"before": load_before, "during": benchmark.load, "after": _load_average()},
        "absent": benchmark.absent,
    }
    print(format_table(rows, benchmark.absent))
    print(f"load average {load_before[0]:.1f} before, {_load_average()[0]:.1f} after")
    if results := args.results or (None if args.quick else _RESULTS):
        name = time.strftime("%Y-%m-%d-%H%M%S", time.localtime(started_at))
        path = results / f"{f'{benchmark.name}-' if benchmark.name else ''}{name}.json"
        print(write_results(path, started_at=started_at, about=about, rows=rows, samples=benchmark.samples))


def _run_alone(benchmark_class: type[Benchmark[SizesT]], sizes: SizesT, *, with_peers: bool) -> Benchmark[SizesT]:
    """Run in a temporary folder, without GPUs; every process that was started is stopped afterwards."""
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # everything that was started is then stopped, too
    # in a shell's background, kernels and ranks would ignore the stop button, too
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with tempfile.TemporaryDirectory(prefix="detrain_nb-bench-") as folder:
            # temporary files of torchrun and the toolkits are deleted with this folder
            os.environ["TMPDIR"] = tempfile.tempdir = folder
            os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all toolkits run their ranks on the CPU
            os.environ["DETRAIN_NB_RUNTIME_DIR"] = str(Path(folder, "run"))
            benchmark = benchmark_class(sizes, Path(folder), with_peers=with_peers)
            benchmark.run()
            return benchmark
    finally:
        end_descendants()


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
