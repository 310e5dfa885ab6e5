"""The command that submits to Run:ai: its flags, the variables of the tutorial, and how a pod runs it."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from detrain_nb.errors import SpecError
from detrain_nb.formats import export_spec
from detrain_nb.spec import PipelineSpec

from ..testbed.machine import free_ports
from . import runai_cli
from .on_nodes import run_on_node, write_recorder

GPUS = {"host": "a", "devices": [0, 1, 2, 3, 4, 5, 6, 7]}


def _spec(*nodes: dict[str, Any], **fields: Any) -> PipelineSpec:
    source = {"script_text": "print()\n"}
    return PipelineSpec.from_dict({"name": "train", "source": source, "nodes": nodes, "image": "a/b:1", **fields})


def _submit(spec: PipelineSpec, folder: Path, **options: str) -> runai_cli.Submitted:
    """Run the script with a `runai` that prints its arguments; return them parsed."""
    script, program = folder / "train.sh", folder / "bin" / "runai"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f"#!{sys.executable} -IS\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    program.chmod(0o755)
    script.write_text(export_spec(spec, "runai", options=options))
    done = subprocess.run(
        ["sh", script], env={"PATH": f"{program.parent}:/usr/bin:/bin"}, capture_output=True, timeout=60, check=True
    )
    return runai_cli.parse(json.loads(done.stdout))


def test_two_nodes_are_a_master_and_a_worker(tmp_path: Path) -> None:
    spec = _spec(GPUS, {**GPUS, "host": "b"}, secrets=["HF_TOKEN"])
    options = {"project": "team-a", "pvc": "data:/mnt/data", "secret": "tokens"}
    new = _submit(spec, tmp_path, **options)
    assert (new.command, new.names, new.pods, new.faults) == (("training", "pytorch", "submit"), ["train"], 2, [])
    wanted = {"-p": ["team-a"], "-i": ["a/b:1"], "-g": ["8"], "--existing-pvc": ["claimname=data,path=/mnt/data"]}
    assert wanted.items() <= new.flags.items() and {"--large-shm", "--command"} <= new.flags.keys()
    assert new.flags["--env-secret"] == ["HF_TOKEN=tokens,key=HF_TOKEN"]
    old = _submit(spec, tmp_path, cli="old", **options)
    assert (old.command, old.flags.pop("--name"), old.pods) == (("submit-dist", "pytorch"), ["train"], 2)
    assert wanted.items() <= old.flags.items() and old.faults == []
    assert old.flags["-e"] == ["HF_TOKEN=SECRET:tokens,HF_TOKEN"]


def test_one_node_is_a_workload_of_one_pod(tmp_path: Path) -> None:
    for cli, command, cpus in (("new", ("training", "submit"), "--cpu-core-request"), ("old", ("submit",), "--cpu")):
        found = _submit(_spec({"host": "a", "ranks": 3}, secrets=["T"]), tmp_path, cli=cli)
        assert (found.command, found.pods, found.faults) == (command, 1, [])
        assert found.flags[cpus] == ["3"] and "-g" not in found.flags
        assert found.secrets == {"T": "T"}


def test_variables_of_the_tutorial_have_their_places(tmp_path: Path) -> None:
    """NGPU, LOG_RANK, CONFIG_FILE and the overrides of the tutorial, and the variable that it sets for PyTorch."""
    python = write_recorder(tmp_path / "python")
    arguments = ["--job.config_file", "./train_configs/llama3_8b.toml", "--training.steps", "100"]
    spec = _spec(
        {**GPUS, "python": python},
        {**GPUS, "host": "b", "python": python},
        source={"module": "torchtitan.train", "arguments": arguments},
        env={"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"},
    )
    text = export_spec(spec, "runai", options={"log_ranks": "0,1"})
    seen = run_on_node("runai", text, shell="sh", folder=tmp_path / "pod", node_rank=1).seen
    assert seen and seen.program == ["torchtitan.train", *arguments]
    assert {"--nnodes=2", "--nproc-per-node=8", "--local-ranks-filter=0,1", "--role=rank", "--tee=3"} <= {*seen.options}
    assert seen.env["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"


def test_what_the_job_makes_is_on_the_volume(tmp_path: Path) -> None:
    (volume := tmp_path / "volume").mkdir()
    spec = _spec({"host": "a", "python": write_recorder(tmp_path / "python")})
    text = export_spec(spec, "runai", options={"pvc": f"data:{volume}"})
    seen = run_on_node("runai", text, shell="sh", folder=tmp_path / "pod").seen
    assert seen and seen.env["DETRAIN_NB_ARTIFACTS"] == f"{volume}/train.job/0/artifacts"


def test_what_the_cluster_decides_stands_in_a_comment() -> None:
    spec = _spec({"host": "a", "address": "10.0.0.1"}, {"host": "b"}, rendezvous={"endpoint": "a", "port": 77})
    told = "# Left out, because nothing here uses it: nodes.address, rendezvous.endpoint, rendezvous.port."
    assert told in export_spec(spec, "runai").splitlines()


REFUSED: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "a name of a file": (
        {"name": "Train_1"},
        {},
        r"^name Train_1: is invalid in Kubernetes: .* at most 59 here",
    ),
    "a name without room for that of a pod": (
        {"name": "a" * 55, "nodes": [{"host": "a"}, {"host": "b"}]},
        {},
        "at most 54",
    ),
    "a node that there is not": (
        {"nodes": [{"host": "a", "devices": [*range(99)]}]},
        {},
        "^99 GPUs on a node: .* at most 16",
    ),
    "nodes that differ": (
        {"nodes": [{"host": "a"}, {"host": "b", "ranks": 2}]},
        {},
        "^Run:ai needs nodes that are alike",
    ),
    "a long script": (
        {"source": {"script_text": "#" * 131_000}},
        {},
        r"^source: the script has 13\d,\d{3} bytes, but Run:ai accepts 131,071 ",
    ),
    "a command line of nobody": ({}, {"cli": "v3"}, "^--cli 'v3': give \"new\""),
    "a claim that is mounted nowhere": ({}, {"pvc": "data"}, "^--pvc 'data': give the claim and its mount path"),
    "a path with a comma": ({}, {"pvc": "data:/a,ro"}, "^--pvc "),
    "a rank that no pod has": ({}, {"log_ranks": "0,2"}, r"^--log-ranks 0,2: a node has local ranks 0 to 1, not 2"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_run_ai_cannot_do_is_refused_with_one_line(case: str) -> None:
    fields, options, message = REFUSED[case]
    with pytest.raises(SpecError, match=message) as caught:
        export_spec(_spec(**fields), "runai", options=options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "line",
    [
        "training pytorch submit a -i b --gpu 8 -- torchrun",  # --gpu is a flag of the old command line
        "training pytorch submit --name a -i b --command -- torchrun",
        "submit-dist pytorch a -i b --command -- torchrun",
        "submit-dist pytorch --name a -i b --existing-pvc data:/mnt --command -- torchrun",
        "submit --name A_1 -i b --command -- torchrun",
        "training submit a --command -- torchrun",
        "training submit a -i b -g 0 --command -- torchrun",
        "training submit a -i b -- torchrun",
        "training submit a -i b --workers 2 --command -- torchrun",
        "training submit a -i b --cpu 2 --command -- torchrun",
        "training submit a -i b --large-shm=yes --command -- torchrun",
        "submit --name a -i b --workers 2 --command -- torchrun",
        "submit --name a -i b --env-secret A=b,key=c --command -- torchrun",
        "train a",
    ],
)
def test_stand_in_takes_no_command_line_that_is_wrong(line: str) -> None:
    assert runai_cli.parse(shlex.split(line)).faults


@pytest.mark.parametrize(
    "line",
    [
        "training pytorch submit a --image=b --workers=2 --gpu-devices-request 8 -c --node-pools x -e C=d -- torchrun",
        "training submit a -i b --env-secret A=b,key=c --existing-pvc=claimname=d,path=/e -t --runs 2 --command -- x",
        "submit-dist pytorch --name=a --image b --workers=1 --gpu 8 --memory 64G --clean-pod-policy All --command -- x",
        "submit --name a -i b -g 1 -v /c:/d --interactive --command -- x",
    ],
)
def test_stand_in_takes_what_is_documented(line: str) -> None:
    found = runai_cli.parse(shlex.split(line))
    assert not found.faults
    assert found.flags["-i"] == ["b"] and (found.names or found.flags["--name"]) == ["a"]


def test_stand_in_reads_arguments_as_kubernetes_does() -> None:
    assert runai_cli.expand("$(A) $(B) $$(A) $A $ $$", {"A": "a"}) == "a $(B) $(A) $A $ $"


SCRIPT = """
import os, torch.distributed as dist
dist.init_process_group("gloo")
dist.barrier()
os.write(1, f"{dist.get_rank()} of {dist.get_world_size()} {os.environ['WORD']}\\n".encode())
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_pods_form_one_group(tmp_path: Path) -> None:
    """Two pods run on this machine, with the real torchrun."""
    python = {"python": sys.executable}
    spec = _spec(
        {"host": "a", **python},
        {"host": "b", **python},
        source={"script_text": SCRIPT},
        env={"WORD": "$$ it's $(HOME)"},
    )
    found = _submit(spec, tmp_path)
    port = str(free_ports(1)[0])
    pods = []
    for rank in (1, 0):
        (folder := tmp_path / f"pod-{rank}").mkdir()
        env = {"PATH": "/usr/bin:/bin", "HOME": str(folder), "RANK": str(rank), "WORLD_SIZE": "2"}
        env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        argv = [runai_cli.expand(word, env) for word in found.argv]
        pods.append(subprocess.Popen(argv, cwd=folder, env=env, stdout=subprocess.PIPE, text=True))
    try:
        said = [pod.communicate(timeout=100)[0] for pod in pods]
    finally:
        for pod in pods:
            pod.kill()
    assert sorted(said) == [f"{rank} of 2 $$ it's $(HOME)\n" for rank in range(2)]
