"""A pipeline as a shell script: each node runs it with the node's name, and it execs torchrun."""

from __future__ import annotations

from ..launch import NodeLaunch
from ..plan import Plan
from ..spec import Node, PipelineSpec
from .job_script import (
    FOLDER,
    NODE,
    JobProgram,
    describe,
    find_first_node,
    hide_gpus,
    launch_on,
    list_image,
    read_program,
    write_begin,
    write_left_out,
    write_preparation,
    write_setup,
)
from .shell import export as export_variable
from .shell import quote, quote_command

__all__ = ["export"]


def export(spec: PipelineSpec, plan: Plan) -> str:
    """Return the script to run on every node, as ``sh mnist.sh gpu1``; on a single node without the name.

    Raises: SpecError for a spec that such a script cannot run.
    """
    program = read_program(spec, plan)
    endpoint = find_first_node(spec)
    launches = [
        launch_on(spec, plan, program, node_rank=node_rank, endpoint=endpoint) for node_rank in range(len(plan.nodes))
    ]
    nodes = [spec.nodes[index] if spec.nodes else None for index in range(len(plan.nodes))]
    lines = [
        "#!/bin/sh",
        *_head(spec, plan),
        *write_left_out(spec, *list_image(spec)),
        *write_begin(spec.name),
        "",
        *_choose_node(plan),
        f'{FOLDER}="$PWD"/{quote(spec.name)}.job/${NODE}',
        *write_preparation(spec, plan, program, env=launches[0].env),
        "",
        f'case "${NODE}" in',
        *(
            line
            for index, launch in enumerate(launches)
            for line in _case(spec, plan, nodes[index], program, launch, index)
        ),
        "esac",
    ]
    return "\n".join(lines) + "\n"


def _head(spec: PipelineSpec, plan: Plan) -> list[str]:
    names = [node.name for node in plan.nodes if node.name]
    what = f"# {describe(spec, plan)}."
    if len(names) < 2:
        return [what, "# It needs Python with torch, and creates the job's folder in the current directory."]
    address, port = find_first_node(spec)
    return [
        f"{what} On each node, at about the same time, run:",
        *(f"#   sh {spec.name}.sh {name}" for name in names),
        f"# Each needs Python with torch, and must reach {names[0]} at {address}, port {port}.",
        "# The script creates the job's folder in the current directory.",
    ]


def _choose_node(plan: Plan) -> list[str]:
    names = [node.name or "localhost" for node in plan.nodes]
    if len(names) == 1:
        return [f"{NODE}=0"]
    return [
        'case "${1-}" in',
        *(f"'{name}' | {index}) {NODE}={index} ;;" for index, name in enumerate(names)),
        f"*) fail {quote('give the name of this node, one of ' + ', '.join(names))} ;;",
        "esac",
    ]


def _case(
    spec: PipelineSpec, plan: Plan, node: Node | None, program: JobProgram, launch: NodeLaunch, node_rank: int
) -> list[str]:
    gpus = plan.nodes[node_rank].gpus
    return [
        f"{node_rank})",
        *([export_variable("CUDA_VISIBLE_DEVICES", ",".join(map(str, gpus)))] if gpus is not None else []),
        *hide_gpus(spec, node),
        *write_setup(spec, node),
        f"exec {quote_command(launch.argv, below=program.below)}",
        ";;",
    ]
