"""The plan of a pipeline: ranks on nodes, laid out on a mesh, with the batch of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from .batch import Batch, split_batch
from .mesh import Mesh, resolve_axes
from .nodes import NodeOffer, Plan, plan_nodes
from .stages import StageLayout


def plan_pipeline(
    offers: Sequence[NodeOffer],
    *,
    device: str = "auto",
    backend: str | None = None,
    axes: Mapping[str, int],
    batch_size: int | None = None,
    microbatches: int | None = None,
    schedule: str = "1F1B",
) -> Plan:
    """Plan a pipeline: number the ranks of the nodes, lay them out on ``axes``, and split the batch.

    ``batch_size`` is the number of samples of all replicas together. ``schedule`` is one of ``SCHEDULES``, or a file
    *.csv, whose stages are unknown here.
    Raises: SpecError when the numbers do not fit, with the numbers and what to change.
    """
    plan = plan_nodes(offers, device=device, backend=backend)
    mesh, stages, batch = lay_out(
        plan.world_size,
        axes=axes,
        batch_size=batch_size,
        microbatches=microbatches,
        schedule=schedule,
        nodes=[offer.name for offer in offers],
    )
    return replace(plan, mesh=mesh, batch=batch, stages=stages)


def lay_out(
    world_size: int,
    *,
    axes: Mapping[str, int],
    batch_size: int | None,
    microbatches: int | None,
    schedule: str,
    nodes: Sequence[str] = (),
) -> tuple[Mesh, tuple[tuple[int, ...], ...], Batch | None]:
    """Return the mesh of ``world_size`` ranks, the stages by pp coordinate, and the batch. Raises: SpecError."""
    mesh = Mesh(resolve_axes(axes, world_size, nodes=nodes))
    pipeline_ranks = mesh.axes.get("pp", 1)
    layout = None if schedule.lower().endswith(".csv") else StageLayout(schedule)
    stages: tuple[tuple[int, ...], ...] = ()
    if layout and pipeline_ranks > 1:
        count = layout.num_stages(pipeline_ranks)
        stages = tuple(
            layout.stages_of_rank(place, num_ranks=pipeline_ranks, num_stages=count) for place in range(pipeline_ranks)
        )
        if microbatches is not None:
            layout.require_microbatches(microbatches, num_stages=count, num_ranks=pipeline_ranks)
    batch = None
    if batch_size is not None:
        batch = split_batch(
            batch_size,
            replicas=mesh.replicas,
            microbatches=microbatches,
            stages=layout if stages else None,
            pipeline_ranks=pipeline_ranks,
        )
    return mesh, stages, batch
