"""How each exporter's script is run on one node, what it started there, and which fields a spec needs for it."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

# Stands in for a Python with torch: it records the exact bytes of what it was started with.
RECORDER = """#!{python} -IS
import json, os, sys
seen = {{
    "argv": sys.argv[1:],
    "env": dict(os.environ),
    "folder": os.getcwd(),
    "stdin": sys.stdin.read(),
}}
with open(os.environ["SEEN_AT"], "w") as file:
    json.dump(seen, file)
"""


@dataclass(frozen=True)
class Seen:
    """What torchrun was started with."""

    options: list[str]
    program: list[str]
    env: dict[str, str]
    folder: str
    stdin: str


@dataclass(frozen=True)
class Ended:
    status: int
    errors: str
    seen: Seen | None


def write_recorder(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(RECORDER.format(python=os.path.realpath(sys.executable)))
    path.chmod(0o755)
    return str(path)


@dataclass(frozen=True)
class Start:
    """A command line, its environment, and whether it reads the script from standard input."""

    argv: list[str]
    env: dict[str, str] = field(default_factory=dict)
    reads_script: bool = False


@dataclass(frozen=True)
class Way:
    """How an export is run on a node.

    ``start`` is called with a shell, the path of the exported file, and the rank of the node; it may write files beside
    the exported one. ``needs`` has the fields a spec must have for this exporter. The two nodes are named first and
    second: ``endpoint`` returns the address at which the node of a rank looks for the first one (None: an operator sets
    PET_MASTER_ADDR), ``store`` the address that it uses if ranks may restart. ``folder`` is that of the job "train".
    """

    start: Callable[[str, Path, int], Start]
    needs: Mapping[str, Any] = field(default_factory=dict)
    endpoint: Callable[[int], str] | None = lambda node_rank: "first:29500"
    store: Callable[[int], str] = lambda node_rank: "first:29500"
    folder: str = "train.job"
    is_script: bool = True  # the exported text is a shell script


def _torchrun(shell: str, script: Path, node_rank: int) -> Start:
    return Start([shell, str(script), str(node_rank)])


def _slurm(shell: str, script: Path, node_rank: int) -> Start:
    """Return how srun starts the script: from standard input."""
    env = {"SLURM_JOB_ID": "7", "SLURM_NODEID": str(node_rank), "DETRAIN_NB_ENDPOINT": "first:29500"}
    return Start([shell, "-s", "node"], env, reads_script=True)


def _akash(shell: str, sdl: Path, node_rank: int) -> Start:
    """Return how a container of the service is started; its script should use the first of the node's two addresses."""
    service = [*yaml.safe_load(sdl.read_bytes())["services"].values()][node_rank]
    bins = sdl.with_name("bin")
    bins.mkdir(exist_ok=True)
    (bins / "hostname").write_text('#!/bin/sh\n[ "$*" = -i ] && echo 10.1.2.3 10.4.5.6\n')
    (bins / "hostname").chmod(0o755)
    job = container_of(service)
    assert job.argv[0] == "/bin/sh"
    return Start([shell, *job.argv[1:]], {"PATH": f"{bins}:{os.environ['PATH']}", **job.env})


def container_of(service: Mapping[str, Any]) -> Start:
    """Return the arguments and variables that a provider passes to the image's entrypoint for a service of an SDL."""
    env: dict[str, str] = {}
    for line in service["env"]:
        name, _, value = line.partition("=")
        env[name] = fill_in(value, env)
    return Start([fill_in(word, env) for word in service.get("args", ())], env)


def fill_in(text: str, env: Mapping[str, str]) -> str:
    """Expand a text as Kubernetes does: $(NAME) becomes the value of a variable that is set, and $$ becomes $."""
    return re.sub(
        r"\$(?:\$|\(([^)]*)\))",
        lambda found: "$" if found[1] is None else env.get(found[1], found[0]),
        text,
    )


_RUNAI = str(Path(__file__).with_name("runai_cli.py"))


def _runai(shell: str, script: Path, node_rank: int) -> Start:
    """Return how the script is run with a stand-in for Run:ai's command line, which becomes the pod of this rank."""
    runai = script.with_name("bin") / "runai"
    runai.parent.mkdir(exist_ok=True)
    runai.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -IS {shlex.quote(_RUNAI)} "$@"\n')
    runai.chmod(0o755)
    return Start([shell, str(script)], {"PATH": f"{runai.parent}:{os.environ['PATH']}", "POD": str(node_rank)})


def _pod(shell: str, script: Path, node_rank: int) -> Start:
    """Return how an operator of Kubeflow starts a pod, with the ConfigMap's files and torchrun's variables."""
    config, *_, job = yaml.safe_load_all(script.read_text())
    (files := script.parent / "files").mkdir(exist_ok=True)
    for name, text in config["data"].items():
        (files / name).write_bytes(text.encode())
    if job["kind"] == "PyTorchJob":
        replicas = job["spec"]["pytorchReplicaSpecs"]
        num_nodes, ranks = sum(each["replicas"] for each in replicas.values()), job["spec"]["nprocPerNode"]
        container = replicas["Worker" if node_rank else "Master"]["template"]["spec"]["containers"][0]
    else:
        container = job["spec"]["trainer"]
        num_nodes, ranks = container["numNodes"], container["numProcPerNode"]
    env = {"PET_NNODES": num_nodes, "PET_NPROC_PER_NODE": ranks, "PET_NODE_RANK": node_rank}
    around = {"MASTER_ADDR": "first", "MASTER_PORT": 29500, "RANK": node_rank, "WORLD_SIZE": num_nodes * int(ranks)}
    env |= around | {"PET_MASTER_ADDR": "first", "PET_MASTER_PORT": 29500}
    env |= {each["name"]: "127.0.0.1" for each in container.get("env", ()) if "fieldRef" in each["valueFrom"]}
    program, script_at, work_at = container["command"]
    assert program == "/bin/sh" and work_at == "/detrain-nb"
    at = script_at.replace("/etc/detrain-nb", str(files))
    return Start([shell, at, str(script.parent)], {name: str(value) for name, value in env.items()})


WAYS: Mapping[str, Way] = {
    "torchrun": Way(_torchrun),
    "slurm": Way(_slurm, folder="train-7.job"),
    "akash": Way(
        _akash,
        needs={"image": "ghcr.io/you/train:1"},
        endpoint=lambda node_rank: "first:29500" if node_rank else "10.1.2.3:29500",
        store=lambda node_rank: "first:29500" if node_rank else "localhost:29500",
        is_script=False,
    ),
    "runai": Way(_runai, needs={"image": "a/b:1"}),
    **{
        kind: Way(_pod, needs={"image": "ghcr.io/you/train:1"}, endpoint=None, is_script=False)
        for kind in ("pytorchjob", "trainjob")
    },
}

# Targets that another program reads: nothing of them is run here.
READ: Mapping[str, Mapping[str, Any]] = {
    "torchtitan": {},
    "torchtitan-toml": {},
    "accelerate": {"parallelism": {"dp_replicate": -1, "dp_shard": 1}},
}
NEEDS: Mapping[str, Mapping[str, Any]] = {**{name: way.needs for name, way in WAYS.items()}, **READ}


def run_on_node(
    exporter: str, text: str, *, shell: str, folder: Path, node_rank: int = 0, env: dict[str, str] | None = None
) -> Ended:
    """Run an export in ``folder`` as the node of rank ``node_rank`` does."""
    folder.mkdir(exist_ok=True)
    script, seen_at = folder / "exported", folder / "seen.json"
    script.write_bytes(text.encode())
    seen_at.unlink(missing_ok=True)
    start = WAYS[exporter].start(shell, script, node_rank)
    around = {"PATH": os.environ["PATH"], "HOME": str(folder), "SEEN_AT": str(seen_at), "LC_ALL": "C.UTF-8"}
    with script.open("rb") as stdin:
        done = subprocess.run(
            start.argv,
            cwd=folder,
            env={**around, **start.env, **(env or {})},
            stdin=stdin if start.reads_script else subprocess.DEVNULL,
            capture_output=True,
            timeout=60,
        )
    return Ended(done.returncode, done.stderr.decode(), _read(seen_at) if seen_at.exists() else None)


def _read(path: Path) -> Seen:
    seen = json.loads(path.read_text())
    argv: Sequence[str] = seen["argv"]
    end = argv.index("--")
    # the script doubles each $, because torchrun expands them
    program = [word.replace("$$", "$") for word in argv[end + 1 :]]
    return Seen(list(argv[:end]), program, seen["env"], seen["folder"], seen["stdin"])
