"""What a script for one node of a job does before torchrun: its files, its environment, its set-up.

It needs a shell, and Python with torch. No secret is written: the node has to have it, in a variable of that name.
"""

from __future__ import annotations

import os
import posixpath
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Protocol

from ..documents import read_text
from ..errors import SpecError, count_ranks
from ..launch import NodeLaunch, Program, Rendezvous, launch_job
from ..plan import Plan
from ..plan.choices import ARTIFACTS, SILENCE_S
from ..plan.job import ARTIFACTS_VARIABLE, JOB_SPEC_VARIABLE
from ..spec import Node, PipelineSpec
from ..spec.notebook import read_notebook_script
from ..spec.source import FOLDER_KINDS
from ..storage import locate
from .cloning import write_clone
from .shell import export, quote, quote_path, write_file

DEFAULT_PORT = 29500  # torchrun's own
# What no volume may hide in a container, or it does not start.
_OF_SYSTEM = ("/bin", "/dev", "/etc", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr")
# Variables of the script itself: no spec can set one that begins so.
FOLDER, NODE = "DETRAIN_NB_JOB_FOLDER", "DETRAIN_NB_JOB_NODE"
FIRST, ENDPOINT = "DETRAIN_NB_FIRST", "DETRAIN_NB_ENDPOINT"  # of Slurm: the first node, and where the others meet it
SOURCE = f'"${FOLDER}/source"'  # where the ranks run, unless their node has a workdir
JOB_SPEC = f'"${FOLDER}/job_spec.json"'
_GPUS = "CUDA_VISIBLE_DEVICES"
_ARTIFACTS = f'"${FOLDER}/artifacts"'

# In a folder in which everybody can write, as in /tmp, another user may have made that of the job, or a link there.
_SQUATTED = ": cannot be made, or another user made it where everybody can write: start this elsewhere"
_JOB_FOLDER = f'"${{{FOLDER}%/*}}"'
_REFUSE_SQUATTED = (
    'if [ -n "$(find "$PWD/." -prune -perm -0002)" ]; then',
    f"  mkdir -m 700 {_JOB_FOLDER} 2>/dev/null || {{ [ ! -L {_JOB_FOLDER} ] && [ -O {_JOB_FOLDER} ]; }} ||",
    f"    fail {_JOB_FOLDER}{quote(_SQUATTED)}",
    "fi",
)
_NOT_IN_DEV = ("epochs", "steps", "warmup_steps", "log_every", "evaluate_every")
_ODD_FOLDER = "a folder above has a $ in its name: start this elsewhere"


class Put(Protocol):
    """Writes the line of the shell by which a text comes to be a file; ``to`` is a word of the shell."""

    def __call__(self, text: str, *, to: str) -> str: ...


@dataclass(frozen=True)
class JobProgram:
    """What the ranks run, in which folder for the shell, and how it comes to the node."""

    program: Program
    below: str = ""
    lines: list[str] = field(default_factory=list)


def read_program(spec: PipelineSpec, plan: Plan, *, put: Put = write_file) -> JobProgram:
    """Read what the spec names; a script and the cells of a notebook travel by ``put``, by default in the text.

    Raises: SpecError for what no script of a shell can bring to a node.
    """
    source, arguments = spec.source, spec.program_arguments(plan)
    if source.module is not None:
        return JobProgram(Program("module", (source.module, *arguments)))
    if source.git is not None:
        assert source.entry is not None
        path = "/".join([*([source.git.folder] if source.git.folder else []), source.entry])
        return JobProgram(Program("script", (path, *arguments)), SOURCE, write_clone(source.git, to=SOURCE))
    if source.path is not None:
        assert source.entry is not None
        if "://" in source.path:
            raise SpecError(
                "source.path: a script of a shell cannot fetch a URL: give a folder that all nodes have at the same "
                "path, or source.git"
            )
        whole = os.path.join(os.path.abspath(os.path.expanduser(source.path)), source.entry)
        missing = f"source.path: {whole} is not there: every node needs it at this path"
        return JobProgram(
            Program("script", (whole, *arguments)), lines=[f"[ -f {quote(whole)} ] || fail {quote(missing)}"]
        )
    name, text = _read_script(spec)
    return JobProgram(Program("script", (name, *arguments)), SOURCE, [put(text, to=f"{SOURCE}/{quote(name)}")])


def _read_script(spec: PipelineSpec) -> tuple[str, str]:
    source = spec.source
    if source.script_text is not None:
        return "script.py", source.script_text
    if source.notebook is not None:
        return f"{PurePath(source.notebook).stem}.py", read_notebook_script(source.notebook)
    assert source.script is not None
    return PurePath(source.script).name, read_text(locate(source.script))


def list_image(spec: PipelineSpec) -> list[str]:
    """Name the image where the script starts no container: its ranks run in the Python of their nodes."""
    return ["image"] if spec.image is not None else []


def need_image(spec: PipelineSpec, *, by: str) -> str:
    """Return the image of the containers that ``by`` starts. Raises: SpecError without one."""
    if spec.image is None:
        raise SpecError(f"image: {by} starts a container on every node: give image, as ghcr.io/you/train:1")
    return spec.image


def find_checkpoint_folder(spec: PipelineSpec, *, by: str, taken: Sequence[str] = ()) -> str:
    """Return the folder of checkpoints, at which ``by`` mounts a volume; empty where none is kept in a folder.

    Raises: SpecError for a folder that hides what the container has: its system, and the folders ``taken``.
    """
    if spec.checkpoint is None:
        return ""
    scheme, is_url, path = spec.checkpoint.url.rpartition("://")
    if is_url and scheme.lower() not in ("file", "local"):
        return ""
    folder = f"/{posixpath.normpath(path).lstrip('/')}"
    hides = any(f"{folder}/".startswith(f"{each}/") for each in (*_OF_SYSTEM, *taken))
    if not path.startswith("/") or folder == "/" or ":" in folder or hides:
        raise SpecError(
            f"checkpoint.url {spec.checkpoint.url}: {by} mounts a volume there: give the whole path of a folder of its "
            "own, as /checkpoints, or a URL of storage, as s3://bucket/folder"
        )
    return folder


def launch_on(
    spec: PipelineSpec,
    plan: Plan,
    program: JobProgram,
    *,
    node_rank: int,
    endpoint: tuple[str, int],
    local_address: str = "",
) -> NodeLaunch:
    """Write the command line of one node of those that the plan has; ``endpoint`` is where the first one listens.

    ``local_address`` is where the others reach the node; empty: as torch finds it.
    """
    settings, nodes = spec.rendezvous, len(plan.nodes)
    is_static = nodes > 1 and not settings.is_elastic
    rendezvous = Rendezvous(
        "static" if is_static else "c10d",
        settings.id or spec.name,
        endpoint,
        timeout_s=settings.timeout_s,
        max_restarts=settings.max_restarts,
    )
    return launch_job(
        rendezvous,
        program.program,
        nodes=nodes if is_static else (settings.fewest(nodes), settings.max_nodes or nodes),
        ranks=len(plan.nodes[node_rank].ranks),
        node_rank=node_rank,
        python=spec.python_of(node_rank),
        local_address=local_address,
    )


def describe(spec: PipelineSpec, plan: Plan) -> str:
    """Say what the script starts: its first line."""
    nodes = len(plan.nodes)
    return f"{spec.name}: {count_ranks(plan.world_size)} on {nodes} node{'s' if nodes > 1 else ''}, {plan.device}"


def write_left_out(spec: PipelineSpec, *more: str) -> list[str]:
    """Name in a comment what the spec says and a job alone does, and ``more`` of it."""
    fields = [
        *(["artifacts"] if spec.artifacts != ARTIFACTS else []),
        *(["rendezvous.silence_s"] if spec.rendezvous.silence_s != SILENCE_S else []),
        *list_unused_in_dev(spec),
        *more,
    ]
    return [f"# Left out, as nothing here has a use for it: {', '.join(fields)}."] if fields else []


def list_unused_in_dev(spec: PipelineSpec) -> list[str]:
    """Name what the spec says and its script is not told where it is tried: three steps, and no checkpoint."""
    if not spec.training.dev:
        return []
    given = spec.training.to_fields()
    return [f"training.{name}" for name in _NOT_IN_DEV if name in given] + (["checkpoint"] if spec.checkpoint else [])


def write_begin(name: str) -> list[str]:
    """What stands at the top of a script: the first error ends it."""
    return [
        "set -e",
        "",
        "fail() {",
        f"  printf '%s\\n' {quote(name + ': ')}\"$1\" >&2",
        "  exit 2",
        "}",
    ]


def list_needed(spec: PipelineSpec) -> list[str]:
    """The variables that a node has to have: their values are written nowhere."""
    token = spec.source.git.token if spec.source.git else None
    return list(dict.fromkeys([*_list_for_ranks(spec), *([token] if token else [])]))


def _list_for_ranks(spec: PipelineSpec) -> list[str]:
    return [*spec.secrets, *(name for node in spec.nodes for name in node.env)]


def write_preparation(
    spec: PipelineSpec, plan: Plan, program: JobProgram, *, env: dict[str, str], put: Put = write_file
) -> list[str]:
    """Fill the folder of the job on a node, which the shell has in ``FOLDER``, and the environment of its ranks."""
    token = spec.source.git.token if spec.source.git else None
    return [
        *map(_need, list_needed(spec)),
        # torchrun fills in what has a $ in the path of its program
        f"case \"${FOLDER}\" in *'$'*) fail {quote(_ODD_FOLDER)} ;; esac",
        *_REFUSE_SQUATTED,
        f"mkdir -p {SOURCE} {_ARTIFACTS}",
        put(spec.job_spec(plan).to_json() + "\n", to=JOB_SPEC),
        *program.lines,
        *([f"unset {token}"] if token and token not in _list_for_ranks(spec) else []),
        f"export {JOB_SPEC_VARIABLE}={JOB_SPEC}",
        f"export {ARTIFACTS_VARIABLE}={_ARTIFACTS}",
        *(export(name, text) for name, text in {**env, **spec.env}.items()),
    ]


def _need(name: str) -> str:
    fault = f"{name} is not set: export it on this node first, its value does not stand in this script"
    return f'[ -n "${{{name}-}}" ] || fail {quote(fault)}'


def write_setup(spec: PipelineSpec, node: Node | None) -> list[str]:
    """Run the lines of the user, and go to the folder of the ranks. They may do what they like with the shell."""
    lines = [*(node.setup if node else ()), *spec.source.setup]
    workdir = node.workdir if node else None
    return [
        *([f"eval {quote(chr(10).join(lines))}"] if lines else []),
        *([f"cd {_source_folder(spec)}"] if not workdir or spec.source.kind in FOLDER_KINDS else []),
        *([f"cd {quote_path(workdir)}"] if workdir else []),
    ]


def hide_gpus(spec: PipelineSpec, node: Node | None) -> list[str]:
    """Hide the GPUs of a node whose ranks the spec puts on the CPU; a variable of the user's stays."""
    is_hidden = node is not None and node.devices == "cpu" and _GPUS not in spec.env
    return [export(_GPUS, "")] if is_hidden else []


def _source_folder(spec: PipelineSpec) -> str:
    if spec.source.path is not None:
        return quote(os.path.abspath(os.path.expanduser(spec.source.path)))
    git = spec.source.git
    return f"{SOURCE}/{quote(git.folder)}" if git and git.folder else SOURCE


def find_first_node(spec: PipelineSpec) -> tuple[str, int]:
    """Return where the first node is reached; a node alone finds a free port. Raises: SpecError."""
    settings = spec.rendezvous
    if len(spec.nodes) < 2:
        return settings.endpoint or "localhost", settings.port
    first = spec.nodes[0]
    address = settings.endpoint or first.address
    if address is None and first.host in ("localhost", "127.0.0.1", "::1"):
        raise SpecError(
            f"nodes[0] {first.name}: the other nodes do not reach it at {first.host}: give nodes[0].address, or "
            "rendezvous.endpoint"
        )
    beside = [node.name for node in spec.nodes[1:] if node.host == first.host and node.port != first.port]
    if address is None and beside:
        raise SpecError(
            f"nodes[0] {first.name}: {beside[0]} has the same host, so both are reached through forwarded ports, which "
            "lead to sshd alone: give nodes[0].address or rendezvous.endpoint, or export akash"
        )
    return address or first.host, settings.port or DEFAULT_PORT
