"""A pipeline as a script that submits it to Run:ai: one pod per node, and each execs torchrun.

The pods run the exported script itself: it passes its own text as one argument of the command.
"""

from __future__ import annotations

import re

from ..errors import SpecError
from ..plan import Plan
from ..plan.targets import CHOICES
from ..spec import PipelineSpec
from .alike import check_alike, list_chosen_there, list_meeting, write_on_node
from .job_script import (
    DEFAULT_PORT,
    FOLDER,
    NODE,
    describe,
    list_needed,
    write_begin,
    write_left_out,
)
from .kubernetes_words import check_gpus, check_image, check_name, check_needs, check_word
from .shell import MOST_ARGUMENT_BYTES, quote

__all__ = ["export"]

_PVC = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?:/[^\s,:]{1,200}")
_RANKS = re.compile(r"[0-9]{1,5}(,[0-9]{1,5})*")
# The PyTorch operator sets these variables to the first pod; a single pod has none.
_ENDPOINT = f'"${{MASTER_ADDR:-localhost}}:${{MASTER_PORT:-{DEFAULT_PORT}}}"'
_OWN_ADDRESS = '"$(hostname -i | cut -d " " -f 1)"'  # the pod's host name does not resolve on the others
# Kubernetes expands $$ and $(NAME) in an argument: each $ is doubled.
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
    """Return a script that submits the job: with ``cli`` "new" by `runai training`, with "old" by `runai submit`.

    ``pvc`` is CLAIM:/path of an existing volume. ``secret`` is the Kubernetes secret with the secrets of the spec, by
    default the one named as the job. ``log_ranks`` are the local ranks whose lines go to the log of a pod.
    Raises: SpecError for a spec that Run:ai cannot run.
    """
    ranks, node = check_alike(spec, plan, by="Run:ai")
    _check_spec(spec, plan, ranks)
    _check_options(cli=cli, project=project, pvc=pvc, secret=secret, log_ranks=log_ranks, ranks=ranks)
    words = [
        *_name_workload(spec, len(plan.nodes), cli),
        *([f"-p {project}"] if project else []),
        f"-i {check_image(spec, by='Run:ai')}",
        *_ask_for(ranks, plan.device, cli),
        "--backoff-limit 0",  # torchrun restarts the ranks: restarts of pods would multiply that
        "--large-shm",  # torch's data loaders pass batches through it
        *([_mount(pvc)] if pvc else []),
        *(_name_secret(name, secret or spec.name, cli) for name in list_needed(spec)),
        f"--command -- {_ITSELF}",
    ]
    on_node = write_on_node(
        spec,
        plan,
        ranks=ranks,
        node=node,
        endpoint=_ENDPOINT,
        local_address=_OWN_ADDRESS if len(plan.nodes) > 1 and spec.rendezvous.max_restarts else "",
        options=(f"--local-ranks-filter={log_ranks}", "--role=rank", "--tee=3") if log_ranks else (),
    )
    return _write_script(spec, plan, on_node, words, at=pvc.partition(":")[2])


def _write_script(spec: PipelineSpec, plan: Plan, on_node: list[str], words: list[str], *, at: str) -> str:
    lines = [
        "#!/bin/sh",
        f"# {describe(spec, plan)}: sh {spec.name}.sh submits it to Run:ai",
        *write_left_out(spec, *list_chosen_there(spec), *list_meeting(spec)),
        *write_begin(spec.name),
        "",
        "on_node() {",
        f'{NODE}="${{RANK:-0}}"',
        *([f"cd {quote(at)}"] if at else []),  # so the job's files stay on the volume
        f'{FOLDER}="$PWD"/{quote(spec.name)}.job/${NODE}',
        *on_node,
        "}",
        "",
        'if [ "${1-}" = node ]; then',
        "  on_node",
        "fi",
        "exec " + " \\\n  ".join(words),
    ]
    return _check_length("\n".join(lines) + "\n")


def _check_spec(spec: PipelineSpec, plan: Plan, ranks: int) -> None:
    workers = len(plan.nodes) - 1
    check_name(spec.name, longest=f"-worker-{workers - 1}" if workers else "-0-0")
    check_needs(spec)
    check_gpus(ranks, plan.device)


def _check_options(*, cli: str, project: str, pvc: str, secret: str, log_ranks: str, ranks: int) -> None:
    if cli not in CHOICES["cli"]:
        raise SpecError(f'--cli {cli!r}: give "new", for runai training ..., or "old", for runai submit ...')
    check_word("project", project, rule="namespace")  # Run:ai creates the namespace runai-PROJECT for it
    check_word("secret", secret)
    if pvc and not _PVC.fullmatch(pvc):
        raise SpecError(f"--pvc {pvc!r}: give the claim and its mount path, such as my-claim:/mnt/data")
    if log_ranks and not _RANKS.fullmatch(log_ranks):
        raise SpecError(f"--log-ranks {log_ranks!r}: give local ranks, such as 0 or 0,1")
    if log_ranks and (beyond := [rank for rank in log_ranks.split(",") if int(rank) >= ranks]):
        raise SpecError(f"--log-ranks {log_ranks}: a node has local ranks 0 to {ranks - 1}, not {beyond[0]}")


def _name_workload(spec: PipelineSpec, nodes: int, cli: str) -> list[str]:
    """Return the words that submit the workload: of several pods one is the master, the others are workers."""
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
    """Return the option that sets a pod's variable from the secret's key of the same name."""
    return f"--env-secret {name}={secret},key={name}" if cli == "new" else f"-e {name}=SECRET:{secret},{name}"


def _check_length(text: str) -> str:
    if (size := len(text.encode()) + text.count("$")) > MOST_ARGUMENT_BYTES:
        raise SpecError(
            f"source: the script has {size:,} bytes, but Run:ai accepts {MOST_ARGUMENT_BYTES:,} on its command line: "
            "give source.git, or an image that has the script, and source.module or source.path"
        )
    return text
