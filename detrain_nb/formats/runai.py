"""A pipeline as the command that submits it to Run:ai: as many pods as nodes, and each of them becomes torchrun.

The exported script is also what the pods run: it hands itself over, as one argument of the command.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from ..errors import SpecError
from ..plan import Plan
from ..spec import PipelineSpec
from .alike import check_alike, list_chosen_there, write_on_node
from .job_script import (
    DEFAULT_PORT,
    FOLDER,
    NODE,
    describe,
    list_needed,
    need_image,
    write_begin,
    write_left_out,
)
from .shell import quote

__all__ = ["export"]

_LIMIT_BYTES = 120_000  # Linux takes 128 KiB as one argument
_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")
_LABEL = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_PVC = re.compile(r"(?P<claim>[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?):(?P<path>/[^\s,:]{1,200})")
_RANKS = re.compile(r"[0-9]{1,5}(,[0-9]{1,5})*")
# Where the operator of PyTorch jobs says that the first pod is; a pod alone is told nothing.
_ENDPOINT = f'"${{MASTER_ADDR:-localhost}}:${{MASTER_PORT:-{DEFAULT_PORT}}}"'
_OWN_ADDRESS = '"$(hostname -i | cut -d " " -f 1)"'  # the pod's name means nothing to the others
# Kubernetes reads $$ and $(NAME) in an argument: each $ is doubled for it.
_ITSELF = r"""sh -c "$(LC_ALL=C sed 's/\$/$$/g' "$0")" sh node"""


def export(
    spec: PipelineSpec,
    plan: Plan,
    *,
    cli: str = "new",
    project: str = "",
    pvc: str = "",
    secret: str = "",
    log_ranks: str = "",
) -> str:
    """Write a script that submits the job: with the ``cli`` "new" by `runai training`, with "old" by `runai submit`.

    ``pvc`` is CLAIM:/path, a volume that is there. ``secret`` is the Kubernetes secret which has those of the spec, by
    default the one of the job's name. ``log_ranks`` are the local ranks whose lines are in the log of a pod.
    Raises: SpecError for what Run:ai cannot do.
    """
    ranks, node = check_alike(spec, plan, by="Run:ai")
    _check_name(spec, nodes=len(plan.nodes))
    _check_options(cli=cli, project=project, pvc=pvc, secret=secret, log_ranks=log_ranks, ranks=ranks)
    shown = (f"--local-ranks-filter={log_ranks}", "--role=rank", "--tee=3") if log_ranks else ()
    address = _OWN_ADDRESS if spec.rendezvous.max_restarts and len(plan.nodes) > 1 else ""
    words = [
        *_name_workload(spec, len(plan.nodes), cli),
        *([f"-p {project}"] if project else []),
        f"-i {quote(need_image(spec, by='Run:ai'))}",
        *_ask_for(ranks, plan.device, cli),
        "--large-shm",  # loaders of torch hand batches over in it
        *([_mount(pvc)] if pvc else []),
        *(_name_secret(name, secret or spec.name, cli) for name in list_needed(spec)),
        f"--command -- {_ITSELF}",
    ]
    lines = [
        "#!/bin/sh",
        f"# {describe(spec, plan)}: sh {spec.name}.sh submits it to Run:ai",
        *write_left_out(spec, *list_chosen_there(spec), *_list_chosen_there(spec)),
        *write_begin(spec.name),
        "",
        "on_node() {",
        f'{NODE}="${{RANK:-0}}"',
        f'{FOLDER}="$PWD"/{quote(spec.name)}.job/${NODE}',
        *write_on_node(spec, plan, ranks=ranks, node=node, endpoint=_ENDPOINT, local_address=address, options=shown),
        "}",
        "",
        'if [ "${1-}" = node ]; then',
        "  on_node",
        "fi",
        "exec " + " \\\n  ".join(words),
    ]
    return _check_length("\n".join(lines) + "\n")


def _check_name(spec: PipelineSpec, *, nodes: int) -> None:
    """It is the begin of the names of pods."""
    most = 63 - len(f"-worker-{nodes - 2}") if nodes > 1 else 63
    if not _LABEL.fullmatch(spec.name) or len(spec.name) > most:
        raise SpecError(
            f"name {spec.name!r}: Run:ai takes a-z, 0-9 and -, at most {most}, the first a letter and the last no -: "
            "give such a name"
        )


def _check_options(*, cli: str, project: str, pvc: str, secret: str, log_ranks: str, ranks: int) -> None:
    if cli not in ("new", "old"):
        raise SpecError(f'cli {cli!r}: give "new", for runai training ..., or "old", for runai submit ...')
    for name, value in {"project": project, "secret": secret}.items():
        if value and not _NAME.fullmatch(value):
            raise SpecError(f"{name} {value!r}: give a name of Kubernetes: a-z, 0-9, - and .")
    if pvc and not _PVC.fullmatch(pvc):
        raise SpecError(f"pvc {pvc!r}: give the claim and where it is mounted, as my-claim:/mnt/data")
    if log_ranks and not _RANKS.fullmatch(log_ranks):
        raise SpecError(f"log_ranks {log_ranks!r}: give local ranks, as 0 or 0,1")
    if log_ranks and (beyond := [rank for rank in log_ranks.split(",") if int(rank) >= ranks]):
        raise SpecError(f"log_ranks {log_ranks}: a node has the ranks 0 to {ranks - 1}, and no {beyond[0]}")


def _name_workload(spec: PipelineSpec, nodes: int, cli: str) -> list[str]:
    """Of several pods one is called the master, and the others workers."""
    workers = [f"--workers {nodes - 1}"] if nodes > 1 else []
    if cli == "new":
        return [f"runai training {'pytorch ' if workers else ''}submit {spec.name}", *workers]
    return [f"runai {'submit-dist pytorch' if workers else 'submit'} --name {spec.name}", *workers]


def _ask_for(ranks: int, device: str, cli: str) -> list[str]:
    if device == "cuda":
        return [f"-g {ranks}"]
    return [f"{'--cpu-core-request' if cli == 'new' else '--cpu'} {ranks}"]


def _mount(pvc: str) -> str:
    claim, _, path = pvc.partition(":")
    return f"--existing-pvc {quote(f'claimname={claim},path={path}')}"


def _name_secret(name: str, secret: str, cli: str) -> str:
    """Have a pod take a variable from the key of that name."""
    return f"--env-secret {name}={secret},key={name}" if cli == "new" else f"-e {name}=SECRET:{secret},{name}"


def _list_chosen_there(spec: PipelineSpec) -> Iterator[str]:
    if spec.rendezvous.endpoint:
        yield "rendezvous.endpoint"
    if spec.rendezvous.port:
        yield "rendezvous.port"


def _check_length(text: str) -> str:
    if (size := len(text.encode()) + text.count("$")) > _LIMIT_BYTES:
        raise SpecError(
            f"source: the script has {size:,} bytes, and Run:ai takes {_LIMIT_BYTES:,} on its command line: give "
            "source.git, or an image that has the script, and source.module or source.path"
        )
    return text
