"""A pipeline as a Slurm batch script: sbatch submits it, and srun runs it on each node, where it execs torchrun."""

from __future__ import annotations

import re

from ..errors import SpecError
from ..plan import Plan
from ..spec import PipelineSpec
from .alike import check_alike, list_chosen_there, write_on_node
from .job_script import ENDPOINT, FIRST, FOLDER, NODE, describe, list_image, write_begin, write_left_out
from .shell import hide_breaks, quote

__all__ = ["export"]

_OPTION = re.compile(r"[A-Za-z0-9._:,@%/+-]{1,200}")
_TIME = re.compile(
    r"[0-9]{1,9}(?::[0-9]{1,2}){0,2}|[0-9]{1,9}-[0-9]{1,2}(?::[0-9]{1,2}){0,2}|UNLIMITED|INFINITE", re.IGNORECASE
)


def export(spec: PipelineSpec, plan: Plan, *, time: str = "", partition: str = "", account: str = "") -> str:
    """Return a batch script. Slurm chooses the nodes; the spec gives their number and what each has.

    ``time``, ``partition`` and ``account`` are options of sbatch. Raises: SpecError for a spec that Slurm cannot run.
    """
    ranks, node = check_alike(spec, plan, by="Slurm")
    if time and not _TIME.fullmatch(time):
        raise SpecError(f"--time {time!r}: give minutes, HH:MM:SS or DAYS-HH:MM:SS")
    given = {"time": time, "partition": partition, "account": account}
    for name, value in given.items():
        if value and not _OPTION.fullmatch(value):
            raise SpecError(f"--{name} {value!r}: give a value that sbatch accepts, without spaces")
    needed = "--gpus-per-node" if plan.device == "cuda" else "--cpus-per-task"
    lines = [
        "#!/bin/bash",
        f"# {describe(spec, plan)}: sbatch {spec.name}.sbatch",
        *write_left_out(spec, *list_image(spec), *list_chosen_there(spec)),
        f"#SBATCH --job-name={spec.name}",
        f"#SBATCH --nodes={len(plan.nodes)}",
        "#SBATCH --ntasks-per-node=1",
        f"#SBATCH {needed}={ranks}",
        "#SBATCH --output=%x-%j.out",
        *(f"#SBATCH --{name}={value}" for name, value in given.items() if value),
        *write_begin(spec.name),
        "",
        "on_node() {",
        f"{NODE}=$SLURM_NODEID",  # read here, as the environment of the ranks may set another value
        f'{FOLDER}="$PWD"/{quote(spec.name)}-$SLURM_JOB_ID.job/${NODE}',
        *write_on_node(spec, plan, ranks=ranks, node=node, endpoint=f'"${ENDPOINT}"'),
        "}",
        "",
        'if [ "${1-}" = node ]; then',
        "  on_node </dev/null",
        "fi",
        *_find_first_node(spec),
        # every node reads this script from stdin, so no shared folder is needed
        # without --export=ALL, SBATCH_EXPORT=NONE would leave the nodes without its variables and PATH
        f'exec srun --export=ALL --kill-on-bad-exit=1 {needed}={ranks} /bin/bash -s node <"$0"',
    ]
    return hide_breaks(lines)


def _find_first_node(spec: PipelineSpec) -> list[str]:
    settings = spec.rendezvous
    host = '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'
    if settings.endpoint:
        host = quote(f"[{settings.endpoint}]" if ":" in settings.endpoint else settings.endpoint)
    port = str(settings.port) if settings.port else "$((20000 + SLURM_JOB_ID % 10000))"
    unknown = "scontrol lists no node of this job: start it with sbatch, or give rendezvous.endpoint"
    return [
        f"{FIRST}={host}",
        f'[ -n "${FIRST}" ] || fail {quote(unknown)}',
        f'export {ENDPOINT}="${FIRST}":{port}',
    ]
