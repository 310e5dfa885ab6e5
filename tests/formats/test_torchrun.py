"""The script of torchrun: what it sets on each node, and real runs of two nodes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from detrain_nb.errors import SpecError
from detrain_nb.formats import torchrun
from detrain_nb.spec import PipelineSpec

from ..testbed.machine import free_ports
from .on_nodes import run_on_node, write_recorder

SCRIPT = """
import json, os, sys
with open(os.environ["DETRAIN_NB_JOB_SPEC"]) as file:
    size = json.load(file)["world_size"]
said = [os.environ["RANK"], "of", os.environ["WORLD_SIZE"], size, sys.argv[1:], os.environ["WORD"]]
os.write(1, (" ".join(map(str, said)) + "\\n").encode())
sys.exit(os.environ["WORD"] == "fail")
"""


def _spec(*nodes: dict[str, Any], **fields: Any) -> PipelineSpec:
    return PipelineSpec.from_dict({"name": "train", "source": {"script_text": SCRIPT}, "nodes": nodes, **fields})


def _run_on_both(spec: PipelineSpec, folder: Path) -> list[str]:
    """Run the script of a spec for two nodes as each of them; return what each one prints."""
    script = folder / "train.sh"
    script.write_bytes(torchrun.export(spec, spec.plan()).encode())
    processes = [
        subprocess.Popen(["sh", script, node], cwd=folder, stdout=subprocess.PIPE, text=True)
        for node in ("second", "first")
    ]
    try:
        said = [process.communicate(timeout=100)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], said
    return said


@pytest.mark.slow
def test_two_nodes_run_the_ranks(tmp_path: Path) -> None:
    spec = _spec(
        {"host": "first", "address": "127.0.0.1", "python": sys.executable},
        {"host": "second", "python": sys.executable},
        rendezvous={"port": free_ports(1)[0]},
        env={"WORD": "it's\n$HOME"},
        source={"script_text": SCRIPT, "arguments": ["a b", "$x ${local_rank}", "`id`\n", ""]},
    )
    said = sorted(_run_on_both(spec, tmp_path))
    arguments = ["a b", "$x ${local_rank}", "`id`\n", ""]
    assert said == [f"{rank} of 2 2 {arguments} it's\n$HOME\n" for rank in range(2)]


# Rank 1 fails in the first round, while rank 0 waits for it. MARK is a file that does not exist yet.
ONCE = """
import os, sys, torch.distributed as dist
os.write(1, f"store at {os.environ['MASTER_PORT']}\\n".encode())
dist.init_process_group("gloo")
dist.barrier()
if dist.get_rank() == 1 and not os.path.exists(os.environ["MARK"]):
    open(os.environ["MARK"], "x").close()
    sys.exit(3)
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_that_begin_anew_meet_in_a_store_of_their_own(tmp_path: Path) -> None:
    spec = _spec(
        {"host": "first", "address": "127.0.0.1", "python": sys.executable},
        {"host": "second", "python": sys.executable},
        rendezvous={"port": free_ports(1)[0], "max_restarts": 2},
        source={"script_text": ONCE},
        env={"MARK": str(tmp_path / "mark")},
    )
    first, second = (text.splitlines() for text in _run_on_both(spec, tmp_path))
    assert first == second and len(first) == 2
    assert first[0] != first[1], "in the old store are the addresses of ranks that are gone"


@pytest.mark.thorough
def test_one_node_runs_its_ranks_and_fails_with_them(tmp_path: Path) -> None:
    spec = _spec({"host": "first", "python": sys.executable, "ranks": 2}, env={"WORD": "fail"})
    script = tmp_path / "train.sh"
    script.write_bytes(torchrun.export(spec, spec.plan()).encode())
    done = subprocess.run(["sh", script], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 1
    assert done.stdout.splitlines()[0].split()[1:4] == ["of", "2", "2"]


def test_node_is_chosen_by_its_name_or_number(tmp_path: Path) -> None:
    recorder = write_recorder(tmp_path / "python")
    text = torchrun.export(spec := _spec(*({"host": host, "python": recorder} for host in "ab")), spec.plan())
    for words, wanted in [(["a"], 0), (["b"], 1), (["1"], 1), (["c"], None), ([], None)]:
        done = subprocess.run(
            ["sh", "-s", *words],
            cwd=tmp_path,
            input=text,
            env={"PATH": "/usr/bin:/bin", "SEEN_AT": str(tmp_path / "seen")},
            capture_output=True,
            text=True,
            timeout=60,
        )
        if wanted is None:
            assert (done.returncode, done.stderr) == (2, "train: give the name of this node, one of a, b\n")
        else:
            assert f"--node-rank={wanted}" in (tmp_path / "seen").read_text()


def test_node_may_be_called_as_a_word_of_the_shell(tmp_path: Path) -> None:
    python = write_recorder(tmp_path / "python")
    text = torchrun.export(spec := _spec(*({"host": host, "python": python} for host in ("esac", "in"))), spec.plan())
    for number, name in enumerate(("esac", "in")):
        env = {"PATH": "/usr/bin:/bin", "SEEN_AT": str(tmp_path / name)}
        subprocess.run(["sh", "-s", name], cwd=tmp_path, input=text, env=env, text=True, timeout=60, check=True)
        assert f"--node-rank={number}" in (tmp_path / name).read_text()


def test_gpus_are_those_of_the_plan(tmp_path: Path) -> None:
    python = write_recorder(tmp_path / "python")
    spec = _spec({"host": "a", "devices": [3, 1], "python": python}, {"host": "b", "python": python})
    text = torchrun.export(spec, spec.plan(gpus={"a": 4}))
    first = run_on_node("torchrun", text, shell="sh", folder=tmp_path / "a").seen
    second = run_on_node("torchrun", text, shell="sh", folder=tmp_path / "b", node_rank=1).seen
    assert first and second
    assert first.env["CUDA_VISIBLE_DEVICES"] == "3,1" and "--nproc-per-node=2" in first.options
    assert "CUDA_VISIBLE_DEVICES" not in second.env


def test_first_node_has_an_address_that_leads_there() -> None:
    def endpoint(first: dict[str, Any], **rendezvous: Any) -> str:
        text = torchrun.export(spec := _spec(first, {"host": "b"}, rendezvous=rendezvous), spec.plan())
        return text.partition("--rdzv-endpoint=")[2].split()[0]

    assert endpoint({"host": "a"}) == "a:29500"
    assert endpoint({"host": "a", "address": "10.0.0.1"}, port=77) == "10.0.0.1:77"
    assert endpoint({"host": "a", "address": "10.0.0.1"}, endpoint="fd00::1") == "[fd00::1]:29500'"
    with pytest.raises(SpecError, match=r"nodes\[0\] localhost: the other nodes cannot reach it at localhost: give"):
        endpoint({"host": "localhost"})
    assert endpoint({"name": "a", "host": "b"}) == "b:29500", "two nodes of one machine"
    with pytest.raises(SpecError, match=r"nodes\[0\] a: b has the same host, .* or export akash$") as caught:
        endpoint(leased := {"name": "a", "host": "b", "port": 31022})
    assert "\n" not in str(caught.value)
    assert endpoint({**leased, "address": "10.0.0.1"}) == "10.0.0.1:29500"
    assert endpoint(leased, endpoint="first.example.org") == "first.example.org:29500"


def test_what_a_job_alone_does_stands_in_a_comment() -> None:
    spec = _spec(artifacts=["*.txt"], rendezvous={"silence_s": 10})
    told = "# Left out, because nothing here uses it: artifacts, rendezvous.silence_s."
    assert told in torchrun.export(spec, spec.plan()).splitlines()
    assert "Left out" not in torchrun.export(_spec(), _spec().plan())
    spec = _spec(training={"dev": True, "steps": 9}, checkpoint={"url": "kept"})
    told = "# Left out, because nothing here uses it: training.steps, checkpoint."
    assert told in torchrun.export(spec, spec.plan()).splitlines()


def test_fewer_nodes_may_be_enough() -> None:
    spec = _spec({"host": "a"}, {"host": "b"}, {"host": "c"}, rendezvous={"min_nodes": 2})
    assert "--nnodes=2:3" in torchrun.export(spec, spec.plan())
    spec = _spec({"host": "a"}, {"host": "b"}, {"host": "c"}, rendezvous={"max_nodes": 2})
    assert "--nnodes=2:2" in torchrun.export(spec, spec.plan())
