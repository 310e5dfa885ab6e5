"""Nodes that a scheduler chooses: all are alike, and all are available at once."""

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
    """Return how many ranks each node has, and the node whose settings all share, None without nodes.

    ``by`` names the scheduler. Raises: SpecError when the nodes differ, or their number may vary.
    """
    settings = spec.rendezvous
    if settings.min_nodes is not None or settings.max_nodes is not None:
        raise SpecError(f"rendezvous.min_nodes and max_nodes: {by} starts all nodes of a job at once: leave them out")
    ranks = check_ranks(plan, by=by)
    for node in spec.nodes[1:]:
        if differs := [name for name in _SAME if getattr(node, name) != getattr(spec.nodes[0], name)]:
            raise SpecError(
                f"{by} chooses the nodes, but {differs[0]} of {spec.nodes[0].name} and {node.name} differ: give both "
                "the same"
            )
    return ranks, spec.nodes[0] if spec.nodes else None


def check_ranks(plan: Plan, *, by: str) -> int:
    """Return how many ranks each node has. Raises: SpecError when nodes differ in that, or in the device."""
    first = plan.nodes[0]
    for other in plan.nodes[1:]:
        if len(other.ranks) != len(first.ranks) or other.device != first.device:
            raise SpecError(
                f"{by} needs nodes that are alike: {first.name} has {count_ranks(len(first.ranks))} on {first.device}, "
                f"{other.name} has {len(other.ranks)} on {other.device}: give both the same"
            )
    return len(first.ranks)


def list_chosen_there(spec: PipelineSpec) -> Iterator[str]:
    """Yield the fields of nodes that the scheduler overrules: of devices it uses only the kind and number."""
    if any(node.address for node in spec.nodes):
        yield "nodes.address"
    if any(isinstance(node.devices, tuple) for node in spec.nodes):
        yield "the indices in nodes.devices"


def list_meeting(spec: PipelineSpec) -> Iterator[str]:
    """Yield the fields of the rendezvous that the operator overrules."""
    if spec.rendezvous.endpoint:
        yield "rendezvous.endpoint"
    if spec.rendezvous.port:
        yield "rendezvous.port"


def fill_in_host(spec: PipelineSpec) -> dict[str, str]:
    """Return the torchrun options that the shell fills in if ranks may restart: the first node hosts the store."""
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
    """Return the command line of every node; the shell fills in its node rank and the first node's endpoint.

    With ``is_told_address`` the shell fills in the node's own address as well.
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
    """Return the lines that every node runs, with its node rank in ``NODE``: they prepare it and exec torchrun.

    ``endpoint`` (of the first node) and ``local_address`` (of this one) are shell words. ``options`` are further
    options of torchrun. Raises: SpecError.
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
