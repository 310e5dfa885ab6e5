"""How fast jobs start, are followed and are listed, next to torchrun over ssh and a hand-written batch script.

    python benchmarks/jobs.py [--quick] [--results FOLDER]

The hosts are namespaces of this machine with real SSH servers (tests/testbed); the cluster is a Slurm cluster on
loopback (tests/formats). Needs root. Our starts and the others alternate.
"""

from __future__ import annotations

import os
import shlex
import shutil
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

from benchmark import Benchmark, run_benchmark
from hosts import Hosts, hosts_up, unavailable
from jobs_measures import BY_HAND, QUICK, SSH_TORCHRUN, Sizes, list_measures
from report import US

from detrain_nb.formats import slurm
from detrain_nb.jobs import LogLine, jobs, submit
from detrain_nb.jobs.record import Record
from detrain_nb.spec import PipelineSpec
from tests.formats.slurm_cluster import SlurmCluster, slurm_cluster

_LIMIT_S = 180.0
_FIRST = "first line of the training"
_TRAIN = f"""
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print("{_FIRST}", flush=True)
if path := os.environ.get("FIRST_LINE"):
    os.utime(path)
dist.barrier()
dist.destroy_process_group()
"""
_PRINT = """
import os, time

rank, count, per_s = os.environ["RANK"], {count}, {per_s}
began = time.monotonic()
for number in range(count):
    print(f"{{number:07d}} {{'x' * 50}}")
    if number % 50 == 49:
        time.sleep(max(0.0, began + number / per_s - time.monotonic()))
print("ended", time.time(), flush=True)
"""
_BY_HAND = """#!/bin/bash
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task={ranks}
#SBATCH --output=%x-%j.out
export OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo PYTHONUNBUFFERED=1 FIRST_LINE={first}
export PORT=$((20000 + SLURM_JOB_ID % 10000))
srun --cpus-per-task={ranks} bash -c 'exec {python} -m torch.distributed.run --nnodes=2 --nproc-per-node={ranks} \\
  --node-rank=$SLURM_NODEID --master-addr=127.0.0.1 --master-port=$PORT {script}'
"""


class JobsBenchmark(Benchmark[Sizes]):
    """Starts on hosts and on a cluster, a followed log, a long list."""

    name = "jobs"
    peers = ()

    def run(self) -> None:
        """Measure everything."""
        os.environ |= {
            "XDG_STATE_HOME": str(self._folder / "state"),
            "XDG_CACHE_HOME": str(self._folder / "cache"),
        }
        with hosts_up(self._sizes.hosts, letter="j") as hosts:
            self._measure_starts(hosts)
        self._begin("follow")
        for _ in range(self._sizes.follows):
            self._measure_follow()
        self._measure_list()
        if missing := [tool for tool in ("slurmctld", "slurmd", "srun", "munged") if not _find(tool)]:
            self.absent[BY_HAND] = f"no {', '.join(missing)} here"
            return
        with slurm_cluster() as cluster:
            self._measure_batches(cluster)

    # ---- from submission to the first line

    def _measure_starts(self, hosts: Hosts) -> None:
        """Measure starts. The first of each kind reads from disk, and ours sends the code: it is shown separately."""
        self._begin("starts on hosts")
        hosts.copy("train.py", _TRAIN)
        self.samples.add(US, "first_s", self._time_ours(hosts, 0))
        self._time_ssh(hosts)
        for turn in range(1, self._sizes.starts + 1):
            self.samples.add(US, "start_s", self._time_ours(hosts, turn))
            self.samples.add(SSH_TORCHRUN, "start_s", self._time_ssh(hosts))

    def _time_ours(self, hosts: Hosts, turn: int) -> float:
        """Submit from a process with open connections that has submitted before."""
        arrived: list[float] = []

        def note(line: LogLine) -> None:
            if line.text == _FIRST:
                arrived.append(time.perf_counter())

        spec = PipelineSpec.from_dict({"name": f"start-{turn}", "source": {"script_text": _TRAIN}})
        started = time.perf_counter()
        job = submit(spec, nodes=hosts.nodes(ranks=self._sizes.ranks))
        job.attach(note).check()
        job.close()
        return arrived[0] - started

    def _time_ssh(self, hosts: Hosts) -> float:
        """Run ``ssh`` to all hosts at once, each starting torchrun with a script that is already there."""
        started = time.perf_counter()
        running = [
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            for command in hosts.ssh_torchrun("train.py", self._sizes.ranks)
        ]
        try:
            first = running[0]
            assert first.stdout is not None
            said = []
            for line in first.stdout:
                said.append(line)
                if _FIRST in line:
                    return time.perf_counter() - started
            raise RuntimeError(f"torchrun over ssh failed: {''.join(said)[-2000:]}")
        finally:
            for process in running:
                process.communicate(timeout=_LIMIT_S)

    # ---- the batch script

    def _measure_batches(self, cluster: SlurmCluster) -> None:
        self._begin("batch scripts")
        script, first, begun = (cluster.folder / name for name in ("train.py", "first", "begun"))
        script.write_text(_TRAIN)
        nodes = [{"host": name, "ranks": self._sizes.ranks, "python": sys.executable} for name in ("a", "b")]
        env = {"GLOO_SOCKET_IFNAME": "lo", "FIRST_LINE": str(first)}
        fields = {
            "nodes": nodes,
            "env": env,
            "rendezvous": {"endpoint": "127.0.0.1"},
            "source": {"script": str(script)},
        }
        spec = PipelineSpec.from_dict({"name": "train", **fields})
        by_hand = _BY_HAND.format(
            ranks=self._sizes.ranks, first=shlex.quote(str(first)), python=sys.executable, script=script
        )
        ours = slurm.export(spec, spec.plan())
        for turn in range(self._sizes.batches + 1):
            for who, batch in ((US, ours), (BY_HAND, by_hand)):
                seconds = _time_batch(cluster, batch, first, begun)
                if turn:
                    self.samples.add(who, "batch_s", seconds)

    # ---- a followed log

    def _measure_follow(self) -> None:
        """Follow a job on this machine: which lines arrived, in which order, and when the last one arrived."""
        sizes = self._sizes
        count = int(sizes.lines_per_s * sizes.follow_s)
        seen: dict[str, list[str]] = {}
        behind: list[float] = []

        def note(line: LogLine) -> None:
            if line.text.startswith("ended"):
                behind.append(time.time() - float(line.text.split()[1]))
            else:
                seen.setdefault(line.source, []).append(line.text[:7])

        fields = {"nodes": [{"host": "localhost", "ranks": sizes.follow_ranks}]}
        text = _PRINT.format(count=count, per_s=sizes.lines_per_s)
        job = submit(PipelineSpec.from_dict({"name": "follow", "source": {"script_text": text}, **fields}))
        job.attach(note).check()
        job.remove()
        wanted = [f"{number:07d}" for number in range(count)]
        wrong = [_count_wrong(seen.get(str(rank), []), wanted) for rank in range(sizes.follow_ranks)]
        self.samples.add(US, "follow_lost", sum(wrong))
        self.samples.add(US, "follow_behind_s", max(behind))

    # ---- a long list

    def _measure_list(self) -> None:
        """Format the whole list as text, for finished jobs: no node is queried."""
        folder = self._begin("list")
        file = folder / "jobs.sqlite"
        record = Record(file)
        _fill(record, file, self._sizes.records)
        for _ in range(self._sizes.lists):
            started = time.perf_counter()
            str(jobs(limit=self._sizes.records, record=record))
            self.samples.add(US, "list_ms", 1e3 * (time.perf_counter() - started))


def _count_wrong(seen: list[str], wanted: list[str]) -> int:
    """Count the lines that are missing, repeated or out of order."""
    if seen == wanted:
        return 0
    return max(1, len(set(wanted) - set(seen)) + len(seen) - len(set(seen)))


def _time_batch(cluster: SlurmCluster, batch: str, first: Path, begun: Path) -> float:
    """Return the seconds from the script's first line until a rank has touched ``first`` for the last time."""
    *_, last = [index for index, line in enumerate(batch.splitlines()) if line.startswith("#SBATCH")]
    lines = batch.splitlines()
    lines.insert(last + 1, f'[ "${{1-}}" = node ] || touch {shlex.quote(str(begun))}')  # ours reruns itself there
    first.touch()
    job = cluster.submit("\n".join(lines) + "\n")
    if (state := cluster.wait(job, limit_s=_LIMIT_S)) != "COMPLETED":
        raise RuntimeError(f"the batch job is {state}: {cluster.output(job)[-2000:]}")
    return first.stat().st_mtime - begun.stat().st_mtime


def _fill(record: Record, file: Path, count: int) -> None:
    """Record so many finished jobs; writing them one by one would take minutes."""
    record.add("first", name="run", nodes="[]", spec="{}", state="ended")
    columns = "name, state, exit_code, submitted_at, started_at, ended_at, world_size, metrics, updated_at, release"
    columns += ", spec_digest, nodes"
    copy = f"INSERT INTO jobs (id, {columns}) SELECT ?, {columns} FROM jobs WHERE id = 'first'"
    with closing(sqlite3.connect(file)) as db, db:
        db.executemany(copy, [(f"run-20260101-{number:06d}-abcd",) for number in range(1, count)])


def _find(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin:/sbin")


if __name__ == "__main__":
    if reason := unavailable():
        sys.exit(reason)
    run_benchmark(JobsBenchmark, description=__doc__, sizes=Sizes(), quick=QUICK, list_measures=list_measures)
