"""What the script of a job's node does before torchrun: it writes files, sets the environment, runs the setup lines.

It needs a shell, and Python with torch. Secrets are never written: the node must have them in its environment.
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

DEFAULT_PORT = 29500  # torchrun's default
# Folders that a volume must not hide, or the container does not start.
_OF_SYSTEM = ("/bin", "/dev", "/etc", "/lib", "/lib64", "/proc", "/sbin", "/sys", "/usr")
# Variables of the script itself: a spec cannot set any with this prefix.
FOLDER, NODE = "DETRAIN_NB_JOB_FOLDER", "DETRAIN_NB_JOB_NODE"
FIRST, ENDPOINT = "DETRAIN_NB_FIRST", "DETRAIN_NB_ENDPOINT"  # with Slurm: the first node, and its rendezvous endpoint
SOURCE = f'"${FOLDER}/source"'  # where the ranks run, unless their node has a workdir
JOB_SPEC = f'"${FOLDER}/job_spec.json"'
_GPUS = "CUDA_VISIBLE_DEVICES"
_ARTIFACTS = f'"${FOLDER}/artifacts"'

# In a world-writable folder such as /tmp, another user may have created the job's folder, or a link in its place.
_SQUATTED = ": cannot be created, or another user owns it in a world-writable folder: start this elsewhere"
_JOB_FOLDER = f'"${{{FOLDER}%/*}}"'
_REFUSE_SQUATTED = (
    'if [ -n "$(find "$PWD/." -prune -perm -0002)" ]; then',
    f"  mkdir -m 700 {_JOB_FOLDER} 2>/dev/null || {{ [ ! -L {_JOB_FOLDER} ] && [ -O {_JOB_FOLDER} ]; }} ||",
    f"    fail {_JOB_FOLDER}{quote(_SQUATTED)}",
    "fi",
)
_NOT_IN_DEV = ("epochs", "steps", "warmup_steps", "log_every", "evaluate_every")
_ODD_FOLDER = "a parent folder has a $ in its name: start this elsewhere"


class Put(Protocol):
    """A function that returns a shell line which writes a text to a file; ``to`` is a shell word."""

    def __call__(self, text: str, *, to: str) -> str: ...


@dataclass(frozen=True)
class JobProgram:
    """What the ranks run, the shell word of the folder it is in, and the lines that bring it to the node."""

    program: Program
    below: str = ""
    lines: list[str] = field(default_factory=list)


def read_program(spec: PipelineSpec, plan: Plan, *, put: Put = write_file) -> JobProgram:
    """Return the program of the spec; ``put`` writes a script, or a notebook's cells, by default inside the text.

    Raises: SpecError for a source that a shell script cannot bring to a node.
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
                "source.path: a shell script cannot fetch a URL: give a folder that all nodes have at the same path, "
                "or source.git"
            )
        whole = os.path.join(os.path.abspath(os.path.expanduser(source.path)), source.entry)
        missing = f"source.path: {whole} does not exist: every node needs it at this path"
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
    """Return the field ``image`` if set, for a script that starts no container: ranks use their node's Python."""
    return ["image"] if spec.image is not None else []


def need_image(spec: PipelineSpec, *, by: str) -> str:
    """Return the image of the containers that ``by`` starts. Raises: SpecError without one."""
    if spec.image is None:
        raise SpecError(f"image: {by} starts a container on every node: give image, such as ghcr.io/you/train:1")
    return spec.image


def find_checkpoint_folder(spec: PipelineSpec, *, by: str, taken: Sequence[str] = ()) -> str:
    """Return the folder of checkpoints, at which ``by`` mounts a volume; empty if they are not saved to a folder.

    Raises: SpecError for a folder that would hide system folders of the container, or those ``taken``.
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
            f"checkpoint.url {spec.checkpoint.url}: {by} mounts a volume there: give the absolute path of a folder of "
            "its own, such as /checkpoints, or a storage URL, such as s3://bucket/folder"
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
    """Return the command line of one node of the plan; ``endpoint`` is where the first node listens.

    ``local_address`` is where the other nodes reach this one; empty: torch determines it.
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
    """Return what the script starts, for its first line."""
    nodes = len(plan.nodes)
    return f"{spec.name}: {count_ranks(plan.world_size)} on {nodes} node{'s' if nodes > 1 else ''}, {plan.device}"


def write_left_out(spec: PipelineSpec, *more: str) -> list[str]:
    """Return a comment that names the fields of the spec which only our own jobs use, and ``more`` of them."""
    fields = [
        *(["artifacts"] if spec.artifacts != ARTIFACTS else []),
        *(["rendezvous.silence_s"] if spec.rendezvous.silence_s != SILENCE_S else []),
        *list_unused_in_dev(spec),
        *more,
    ]
    return [f"# Left out, because nothing here uses it: {', '.join(fields)}."] if fields else []


def list_unused_in_dev(spec: PipelineSpec) -> list[str]:
    """Return the fields that a trial run ignores, if training.dev is set: it has three steps and no checkpoint."""
    if not spec.training.dev:
        return []
    given = spec.training.to_fields()
    return [f"training.{name}" for name in _NOT_IN_DEV if name in given] + (["checkpoint"] if spec.checkpoint else [])


def write_begin(name: str) -> list[str]:
    """Return the beginning of a script: it exits at the first error."""
    return [
        "set -e",
        "",
        "fail() {",
        f"  printf '%s\\n' {quote(name + ': ')}\"$1\" >&2",
        "  exit 2",
        "}",
    ]


def list_needed(spec: PipelineSpec) -> list[str]:
    """Return the variables that a node must already have: their values are written nowhere."""
    token = spec.source.git.token if spec.source.git else None
    return list(dict.fromkeys([*_list_for_ranks(spec), *([token] if token else [])]))


def _list_for_ranks(spec: PipelineSpec) -> list[str]:
    return [*spec.secrets, *(name for node in spec.nodes for name in node.env)]


def write_preparation(
    spec: PipelineSpec, plan: Plan, program: JobProgram, *, env: dict[str, str], put: Put = write_file
) -> list[str]:
    """Return lines that fill the job's folder on a node (the shell's ``FOLDER``) and the environment of its ranks."""
    token = spec.source.git.token if spec.source.git else None
    return [
        *map(_need, list_needed(spec)),
        # torchrun expands a $ in the path of its program
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
    fault = f"{name} is not set: export it on this node first; this script does not contain its value"
    return f'[ -n "${{{name}-}}" ] || fail {quote(fault)}'


def write_setup(spec: PipelineSpec, node: Node | None) -> list[str]:
    """Return the user's setup lines, in an ``eval``, and a cd to the folder of the ranks."""
    lines = [*(node.setup if node else ()), *spec.source.setup]
    workdir = node.workdir if node else None
    return [
        *([f"eval {quote(chr(10).join(lines))}"] if lines else []),
        *([f"cd {_source_folder(spec)}"] if not workdir or spec.source.kind in FOLDER_KINDS else []),
        *([f"cd {quote_path(workdir)}"] if workdir else []),
    ]


def hide_gpus(spec: PipelineSpec, node: Node | None) -> list[str]:
    """Hide the GPUs of a node whose ranks run on the CPU, unless the user's env sets the variable."""
    is_hidden = node is not None and node.devices == "cpu" and _GPUS not in spec.env
    return [export(_GPUS, "")] if is_hidden else []


def _source_folder(spec: PipelineSpec) -> str:
    if spec.source.path is not None:
        return quote(os.path.abspath(os.path.expanduser(spec.source.path)))
    git = spec.source.git
    return f"{SOURCE}/{quote(git.folder)}" if git and git.folder else SOURCE


def find_first_node(spec: PipelineSpec) -> tuple[str, int]:
    """Return the address and port of the first node; port 0 on a single node is any free one. Raises: SpecError."""
    settings = spec.rendezvous
    if len(spec.nodes) < 2:
        return settings.endpoint or "localhost", settings.port
    first = spec.nodes[0]
    address = settings.endpoint or first.address
    if address is None and first.host in ("localhost", "127.0.0.1", "::1"):
        raise SpecError(
            f"nodes[0] {first.name}: the other nodes cannot reach it at {first.host}: give nodes[0].address, or "
            "rendezvous.endpoint"
        )
    beside = [node.name for node in spec.nodes[1:] if node.host == first.host and node.port != first.port]
    if address is None and beside:
        raise SpecError(
            f"nodes[0] {first.name}: {beside[0]} has the same host, so both are reached through forwarded ports, and "
            "those lead only to sshd: give nodes[0].address or rendezvous.endpoint, or export akash"
        )
    return address or first.host, settings.port or DEFAULT_PORT
