"""How fast a model over ranks is, side by side with plain torch and DeTrain: one table, raw figures in results/.

    python benchmarks/parallel.py [--quick] [--no-peers] [--results FOLDER]

Real gloo ranks on the CPU, with one thread each. Compared variants alternate step by step in the same ranks, or, with
DeTrain, start by start; every round starts new ranks.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmark import Benchmark, run_benchmark
from parallel_measures import DETRAIN, PARTS, QUICK, Sizes, list_measures, write_sizes

from detrain_nb.node.system.processes import end_descendants

# They import torch, which would create temporary files before this benchmark has its own folder for them.
_OURS, _DETRAINS = (str(Path(__file__).with_name(name)) for name in ("parallel_ranks.py", "parallel_peers.py"))
_LIMIT_S = 600.0  # for one start
_PEER_LIMIT_S = 200.0
_END_LIMIT_S = 10.0
_SHOWN_CHARS = 3000
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "TP_SOCKET_IFNAME": "lo",  # for DeTrain
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}


class RanksFailed(RuntimeError):
    """Error with the traceback of the rank that failed first."""


class ParallelBenchmark(Benchmark[Sizes]):
    """Steps of a pipeline, of tensor parallel layers and of shards; cuts; the Trainer and its checkpoints."""

    name = "parallel"
    peers = ()

    def __init__(self, sizes: Sizes, folder: Path, *, with_peers: bool) -> None:
        super().__init__(sizes, folder, with_peers=with_peers)
        if reason := _why_no_detrain() if with_peers else "left out":
            self.absent[DETRAIN] = reason

    def run(self) -> None:
        """Measure everything, round by round."""
        for turn in range(1, self._sizes.rounds + 1):
            for part, ranks in PARTS.items():
                arguments = [part, write_sizes(self._sizes), str(turn)]
                self._measure(f"round {turn}: {part}", _OURS, arguments, ranks, _LIMIT_S)
                if part == "mlp":
                    self._measure_detrain(turn)

    def _measure_detrain(self, turn: int) -> None:
        """Measure DeTrain. If it fails, it is left out from then on."""
        sizes = self._sizes
        for width in sizes.mlp_widths:
            for count in sizes.mlp_microbatches:
                if DETRAIN in self.absent:
                    return
                arguments = [write_sizes(sizes), str(width), str(count)]
                part = f"round {turn}: mlp {width} in {count} by DeTrain"
                try:
                    self._measure(part, _DETRAINS, arguments, 3, _PEER_LIMIT_S)
                except RanksFailed as exc:
                    print(exc, file=sys.stderr)
                    self.absent[DETRAIN] = f"failed in round {turn}: width {width}, {count} microbatches"

    def _measure(self, part: str, script: str, arguments: Sequence[str], ranks: int, limit_s: float) -> None:
        """Add the measurements of new ranks."""
        folder = self._begin(part)
        folder.mkdir()
        run_ranks([script, *arguments, str(folder)], ranks=ranks, folder=folder, limit_s=limit_s)
        for who, by_what in json.loads((folder / "samples.json").read_text(encoding="utf-8")).items():
            for what, values in by_what.items():
                self.samples.add(who, what, *values)


def _why_no_detrain() -> str:
    """Return what is missing; empty if DeTrain can be measured."""
    name, _, wanted = DETRAIN.partition(" ")
    try:
        found = importlib.metadata.version(name.lower())
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
    return "" if found == wanted else f"{found} is installed"


def run_ranks(command: Sequence[str], *, ranks: int, folder: Path, limit_s: float) -> None:
    """Run torchrun in ``folder`` until it exits; the output of its ranks goes to standard error here.

    Raises: RanksFailed.
    """
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    log_path = folder / "log"
    with open(log_path, "wb") as log:
        started = subprocess.Popen(
            [*torchrun, *command],
            cwd=folder,
            env={**os.environ, **_ENVIRONMENT},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        try:
            printed, _ = started.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise RanksFailed(f"not at its end after {limit_s:g} s") from None
        finally:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
                started.wait(_END_LIMIT_S)
            end_descendants()
    print(printed, end="", file=sys.stderr)
    if started.returncode:
        errors = sorted(folder.glob("error-*"), key=lambda path: path.stat().st_mtime_ns)
        said = (errors[0] if errors else log_path).read_text(encoding="utf-8", errors="replace")
        raise RanksFailed(said[-_SHOWN_CHARS:])


if __name__ == "__main__":
    run_benchmark(ParallelBenchmark, description=__doc__, sizes=Sizes(), quick=QUICK, list_measures=list_measures)
