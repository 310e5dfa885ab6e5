"""Nodes that another one chooses: they are all the same, and come all at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..errors import SpecError, count_ranks
from ..launch import NodeLaunch, Rendezvous, launch_job
from ..plan import Plan
from ..spec import Node, PipelineSpec
from .job_script import NODE, JobProgram, hide_gpus, read_program, write_preparation, write_setup
from .shell import quote_command

_SAME = ("python", "workdir", "setup")


def check_alike(spec: PipelineSpec, plan: Plan, *, by: str) -> tuple[int, Node | None]:
    """Return how many ranks every node has, and what else they have in common; ``by`` chooses them.

    Raises: SpecError where they differ.
    """
    settings = spec.rendezvous
    if settings.min_nodes is not None or settings.max_nodes is not None:
        raise SpecError(f"rendezvous.min_nodes and max_nodes: {by} gives a job all its nodes at once: leave them out")
    ranks = check_ranks(plan, by=by)
    for node in spec.nodes[1:]:
        if differs := [name for name in _SAME if getattr(node, name) != getattr(spec.nodes[0], name)]:
            raise SpecError(
                f"{by} chooses the nodes: {differs[0]} of {spec.nodes[0].name} and {node.name} differ: give them the "
                "same"
            )
    return ranks, spec.nodes[0] if spec.nodes else None


def check_ranks(plan: Plan, *, by: str) -> int:
    """Return how many ranks every node has. Raises: SpecError where they differ in that, or in the device."""
    first = plan.nodes[0]
    for other in plan.nodes[1:]:
        if len(other.ranks) != len(first.ranks) or other.device != first.device:
            raise SpecError(
                f"{by} gives every node the same: {first.name} has {count_ranks(len(first.ranks))} on {first.device}, "
                f"{other.name} has {len(other.ranks)} on {other.device}: give them the same"
            )
    return len(first.ranks)


def list_chosen_there(spec: PipelineSpec) -> Iterator[str]:
    """What the spec says of nodes and another one chooses: of devices their kind and number count."""
    if any(node.address for node in spec.nodes):
        yield "nodes.address"
    if any(isinstance(node.devices, tuple) for node in spec.nodes):
        yield "the numbers in nodes.devices"


def list_meeting(spec: PipelineSpec) -> Iterator[str]:
    """What the spec says of where the nodes meet, and an operator says instead."""
    if spec.rendezvous.endpoint:
        yield "rendezvous.endpoint"
    if spec.rendezvous.port:
        yield "rendezvous.port"


def fill_in_host(spec: PipelineSpec) -> dict[str, str]:
    """What the shell fills into torchrun's options where ranks may begin anew: the first node hosts the store."""
    if not spec.rendezvous.max_restarts:
        return {}
    return {"--rdzv-conf": f'join_timeout={round(spec.rendezvous.timeout_s)},is_host="$(({NODE} == 0))"'}


def launch_alike(
    spec: PipelineSpec,
    program: JobProgram,
    *,
    nodes: int,
    ranks: int,
    is_told_address: bool,
    options: Sequence[str] = (),
) -> NodeLaunch:
    """Write the command line of every node; the shell fills in which one it is, and where the first one is reached.

    Where it ``is_told_address`` the shell fills in its own, too.
    """
    settings = spec.rendezvous
    rendezvous = Rendezvous(
        "c10d" if settings.max_restarts else "static",
        settings.id or spec.name,
        ("localhost", 0),
        timeout_s=settings.timeout_s,
        max_restarts=settings.max_restarts,
    )
    return launch_job(
        rendezvous,
        program.program,
        nodes=nodes,
        ranks=ranks,
        node_rank=0,
        python=spec.python_of(0),
        local_address="localhost" if is_told_address else "",
        options=options,
    )


def write_on_node(
    spec: PipelineSpec,
    plan: Plan,
    *,
    ranks: int,
    node: Node | None,
    endpoint: str,
    local_address: str = "",
    options: Sequence[str] = (),
) -> list[str]:
    """Write what every node does that finds its number in ``NODE``: it prepares itself, and becomes torchrun.

    ``endpoint`` is where the first node is reached, and ``local_address`` where this one is: words of the shell.
    ``options`` are more of torchrun's own. Raises: SpecError.
    """
    program = read_program(spec, plan)
    is_told = bool(local_address)
    launch = launch_alike(spec, program, nodes=len(plan.nodes), ranks=ranks, is_told_address=is_told, options=options)
    filled = {"--node-rank": f'"${NODE}"', "--rdzv-endpoint": endpoint, "--local-addr": local_address}
    return [
        *write_preparation(spec, plan, program, env=launch.env),
        *hide_gpus(spec, node),
        *write_setup(spec, node),
        f"exec {quote_command(launch.argv, options=filled | fill_in_host(spec), below=program.below)}",
    ]
