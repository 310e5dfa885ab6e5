"""The batch script on a Slurm test cluster: ranks meet, a failed rank fails the job, cancelling leaves no process."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from detrain_nb.errors import SpecError
from detrain_nb.formats import export_spec, import_text, slurm
from detrain_nb.spec import PipelineSpec

from .slurm_cluster import PATH, SlurmCluster, slurm_cluster
from .test_torchrun import ONCE


@pytest.fixture(scope="module")
def cluster(needs_debian: Callable[..., None]) -> Iterator[SlurmCluster]:
    needs_debian("slurmctld", "slurmd", "slurm-client", "munge")
    with slurm_cluster() as started:
        yield started


def _spec(text: str, *, ranks: int = 2, nodes: int = 2, **fields: Any) -> PipelineSpec:
    given = [{"host": f"host{index}", "ranks": ranks, "python": sys.executable} for index in range(nodes)]
    return PipelineSpec.from_dict(
        {
            "name": "train",
            "source": {"script_text": text, **fields.pop("source", {})},
            "nodes": given,
            "rendezvous": {"endpoint": "127.0.0.1"},  # the names of this cluster's nodes do not resolve
            **fields,
        }
    )


MEET = """
import os, sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank()])
dist.all_reduce(total)
where = os.environ["SLURMD_NODENAME"], os.environ["GROUP_RANK"]
said = ["rank", dist.get_rank(), "of", dist.get_world_size(), *where, int(total), sys.argv[1:], os.environ["WORD"]]
os.write(1, (" ".join(map(str, said)) + "\\n").encode())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_four_ranks_on_two_nodes_meet(cluster: SlurmCluster) -> None:
    spec = _spec(MEET, env={"WORD": "it's $HOME", "GLOO_SOCKET_IFNAME": "lo"}, source={"arguments": ["a b", "$x"]})
    job = cluster.submit(slurm.export(spec, spec.plan(), time="00:05:00"))
    assert cluster.wait(job, limit_s=100) == "COMPLETED", cluster.output(job)
    assert sorted(line for line in cluster.output(job).splitlines() if line.startswith("rank")) == [
        f"rank {rank} of 4 n{rank // 2} {rank // 2} 6 ['a b', '$x'] it's $HOME" for rank in range(4)
    ]


@pytest.mark.slow
def test_rank_that_fails_once_begins_anew_with_the_others(cluster: SlurmCluster, tmp_path: Path) -> None:
    rendezvous = {"endpoint": "127.0.0.1", "max_restarts": 2}
    env = {"GLOO_SOCKET_IFNAME": "lo", "MARK": str(tmp_path / "mark")}
    spec = _spec(ONCE, ranks=1, env=env, rendezvous=rendezvous)
    job = cluster.submit(slurm.export(spec, spec.plan(), time="00:05:00"))
    assert cluster.wait(job, limit_s=100) == "COMPLETED", cluster.output(job)
    assert len({line for line in cluster.output(job).splitlines() if line.startswith("store at")}) == 2


@pytest.mark.slow
def test_nodes_get_the_variables_of_the_script_where_sbatch_exports_none(cluster: SlurmCluster) -> None:
    spec = _spec("import os; print('word', os.environ['WORD'])", ranks=1, env={"WORD": "there"})
    job = cluster.submit(slurm.export(spec, spec.plan()), env={"SBATCH_EXPORT": "NONE"})
    assert cluster.wait(job, limit_s=100) == "COMPLETED", cluster.output(job)
    assert cluster.output(job).count("word there") == 2


@pytest.mark.slow
def test_failure_of_a_rank_is_that_of_the_job(cluster: SlurmCluster) -> None:
    spec = _spec("import sys; sys.exit('wrong data')", ranks=1, nodes=1)
    job = cluster.submit(slurm.export(spec, spec.plan()))
    assert cluster.wait(job, limit_s=100) == "FAILED"
    assert "wrong data" in cluster.output(job)


@pytest.mark.slow
def test_cancelled_job_leaves_no_process(cluster: SlurmCluster, tmp_path: Path) -> None:
    script = f"import os, time; open(f'{tmp_path}/{{os.getpid()}}', 'w').close(); time.sleep(1000)"
    spec = _spec(script, ranks=1)
    job = cluster.submit(slurm.export(spec, spec.plan()))
    _wait_until(lambda: len(os.listdir(tmp_path)) == 2, limit_s=60)
    ranks = [int(name) for name in os.listdir(tmp_path)]
    assert all(map(_is_running, ranks))
    cluster.run("scancel", str(job))
    assert cluster.wait(job, limit_s=60) == "CANCELLED"
    _wait_until(lambda: not any(map(_is_running, ranks)), limit_s=30)


def _is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def _wait_until(is_done: Callable[[], bool], *, limit_s: float) -> None:
    until = time.monotonic() + limit_s
    while not is_done():
        assert time.monotonic() < until
        time.sleep(0.05)


def test_slurm_is_asked_for_what_the_plan_needs() -> None:
    gpus = {"host0": 4, "host1": 4}
    spec = _spec("a = 1", ranks=4)
    lines = slurm.export(spec, spec.plan(gpus=gpus), time="1-00:00:00", partition="gpu,gpu2", account="me").splitlines()
    assert [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH")] == [
        "--job-name=train",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=4",
        "--output=%x-%j.out",
        "--time=1-00:00:00",
        "--partition=gpu,gpu2",
        "--account=me",
    ]
    assert "#SBATCH --cpus-per-task=4" in slurm.export(spec, spec.plan()).splitlines()


def test_script_of_windows_is_one_that_sbatch_takes(needs_debian: Callable[..., None], tmp_path: Path) -> None:
    needs_debian("slurm-client")
    spec = _spec("import sys\r\nprint(1)\r\n", source={"arguments": ["a\r\nb"]}, env={"WORD": "\r\n"})
    text = export_spec(spec, "slurm")
    assert "\r\n" not in text and "\r" not in export_spec(_spec("print()"), "slurm")
    (tmp_path / "slurm.conf").write_text("ClusterName=a\nSlurmctldHost=localhost(127.0.0.1)\nSlurmctldPort=1\n")
    env = {"PATH": PATH, "SLURM_CONF": str(tmp_path / "slurm.conf")}
    sent = text.replace("\n", "\r\n").encode()
    done = subprocess.run(["sbatch"], env=env, input=sent, capture_output=True, timeout=60)
    assert b"DOS line breaks" in done.stderr
    imported = import_text(text, name="train.sbatch").spec
    assert imported and (imported.source.script_text, imported.env) == (spec.source.script_text, spec.env)
    assert imported.source.arguments == spec.source.arguments


def test_script_without_slurm_says_so(tmp_path: Path) -> None:
    (script := tmp_path / "train.sbatch").write_text(export_spec(_spec("print()", rendezvous={}), "slurm"))
    (tmp_path / "head").symlink_to(str(shutil.which("head")))
    env = {"PATH": str(tmp_path), "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_JOB_ID": "1"}
    done = subprocess.run(["/bin/bash", script], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "train: scontrol lists no node of this job: start it with sbatch" in done.stderr


def test_what_slurm_chooses_itself_stands_in_a_comment() -> None:
    spec = _spec("a = 1").with_overrides(
        {"nodes": [{"host": "a", "address": "10.0.0.1", "devices": [2, 3]}, {"host": "b", "devices": [0, 1]}]}
    )
    spec = spec.with_overrides({"artifacts": ["*.txt"]})
    lines = slurm.export(spec, spec.plan(gpus={"a": 4, "b": 2})).splitlines()
    told = "# Left out, because nothing here uses it: artifacts, nodes.address, the indices in nodes.devices."
    assert told in lines[: lines.index("set -e")]
    assert "Left out" not in slurm.export(_spec("a = 1"), _spec("a = 1").plan())


@pytest.mark.parametrize("value", ["a b", "a\n#SBATCH --uid=0", "$(id)", "'"])
def test_option_that_is_none_is_refused(value: str) -> None:
    spec = _spec("a = 1")
    with pytest.raises(SpecError, match=r"^--partition .*: give a value that sbatch accepts"):
        slurm.export(spec, spec.plan(), partition=value)


def test_nodes_that_differ_are_refused() -> None:
    def export(*nodes: dict[str, Any], **fields: Any) -> None:
        spec = _spec("a = 1").with_overrides({"nodes": list(nodes), **fields})
        slurm.export(spec, spec.plan())

    with pytest.raises(SpecError, match="a has 1 rank on cpu, b has 2 on cpu: give both the same"):
        export({"host": "a"}, {"host": "b", "ranks": 2})
    with pytest.raises(SpecError, match="workdir of a and b differ: give both the same"):
        export({"host": "a"}, {"host": "b", "workdir": "/x"})
    with pytest.raises(SpecError, match="Slurm starts all nodes of a job at once"):
        export({"host": "a"}, {"host": "b"}, **{"rendezvous.min_nodes": 1})
