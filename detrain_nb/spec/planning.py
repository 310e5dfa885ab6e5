"""What a spec makes of its nodes: the plan of its ranks, the spec that a script reads, the arguments it is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import SpecError
from ..plan import NodeOffer, Plan, plan_pipeline
from ..plan.fields import build
from ..plan.job import JobNode, JobSpec
from ..plan.pipeline import lay_out
from ..text import name_some
from .pipeline_fields import PipelineFields

_RANKS_HERE = 2  # on the CPU, where no node is named


def plan_spec(spec: PipelineFields, *, gpus: Mapping[str, int | Sequence[int]]) -> Plan:
    """Number the ranks; ``gpus`` are how many a node has, by its name, or their indices.

    A node that it does not name has the GPUs that the spec asks for. Raises: SpecError.
    """
    names = [node.name for node in spec.nodes] or [""]
    if unknown := [name for name in gpus if name not in names]:
        raise SpecError(f"gpus are given of {unknown[0]!r}, which is no node: there are {', '.join(names)}")
    found = {name: tuple(range(each)) if isinstance(each, int) else tuple(each) for name, each in gpus.items()}
    offers = [
        NodeOffer(
            node.name,
            found.get(node.name, node.devices if isinstance(node.devices, tuple) else ()),
            devices=node.devices,
            ranks=node.ranks,
        )
        for node in spec.nodes
    ]
    if not offers:
        here = found.get("", ())
        offers = [NodeOffer("", here, ranks=None if here else _RANKS_HERE)]
    try:
        return plan_pipeline(
            offers,
            device="auto",
            backend=None,
            axes=spec.parallelism.axes,
            batch_size=spec.training.batch_size,
            microbatches=spec.parallelism.microbatches,
            schedule=spec.parallelism.schedule,
        )
    except SpecError as exc:
        if unless := describe_unknown_gpus(spec, gpus):
            raise SpecError(f"{exc}; unless {unless}") from None
        raise


def find_rounds_that_do_not_fit(spec: PipelineFields, plan: Plan) -> dict[int, str]:
    """Return each number of nodes that an elastic job may have and that its axes or batch do not fit, and why.

    Nothing is said of nodes that differ in their ranks, or whose GPUs nobody has counted.
    """
    misfits: dict[int, str] = {}
    sizes = {len(node.ranks) for node in plan.nodes}
    if len(sizes) == 1 and not describe_unknown_gpus(spec, {}):
        there = len(plan.nodes)
        for count in range(spec.rendezvous.fewest(there), min(there, (spec.rendezvous.max_nodes or there) + 1)):
            try:
                lay_out(
                    count * max(sizes),
                    axes=spec.parallelism.axes,
                    batch_size=spec.training.batch_size,
                    microbatches=spec.parallelism.microbatches,
                    schedule=spec.parallelism.schedule,
                )
            except SpecError as exc:
                misfits[count] = str(exc)
    return misfits


def describe_unknown_gpus(spec: PipelineFields, gpus: Mapping[str, object]) -> str:
    """``nodes a, b have GPUs``: those that have a rank for each, however many; empty where all is known."""
    if not spec.nodes:
        return "" if "" in gpus else "this machine has GPUs"
    names = [
        node.name for node in spec.nodes if node.devices == "auto" and node.ranks is None and node.name not in gpus
    ]
    several = len(names) > 1
    return f"node{'s' * several} {name_some(names)} {'have' if several else 'has'} GPUs" if names else ""


def resolve_job(spec: PipelineFields, plan: Plan) -> JobSpec:
    """Return what a script reads with `job_spec`: the spec with every axis and batch size as a number.

    Where fewer nodes may do, axes and microbatches stay as they were given: each round has its own.
    """
    data: dict[str, Any] = spec.model_dump(
        mode="json", include={"name", "description", "training", "data", "model", "checkpoint", "artifacts"}
    )
    if data["checkpoint"] and data["checkpoint"]["keep"] == "all":
        data["checkpoint"]["keep"] = None
    data["nodes_vary"] = spec.rendezvous.fewest(len(plan.nodes)) < len(plan.nodes)
    data["parallelism"] = spec.parallelism.model_dump(mode="json")
    if not data["nodes_vary"]:
        data["parallelism"] |= dict(plan.mesh.axes if plan.mesh else {})
        if plan.batch:
            data["parallelism"]["microbatches"] = plan.batch.microbatches
    nodes = [JobNode(node.name, node.ranks) for node in plan.nodes]
    job: JobSpec = build(JobSpec, data, where="spec")
    return job.on(nodes, batch=plan.batch).for_dev()


def program_arguments(spec: PipelineFields, plan: Plan) -> tuple[str, ...]:
    """Return the arguments of the program; in the style of DeTrain its flags stand behind the user's.

    ``--gpu`` has 1 for each rank on a GPU and 0 for the others, ``--batch_size`` is that of a replica, and
    ``--split_size`` the number of microbatches, which its help calls the number of parts.
    """
    if spec.source.argument_style == "plain":
        return spec.source.arguments
    training = spec.training
    flags: dict[str, Any] = {
        "--gpu": "_".join(str(int(rank in plan.cuda_ranks)) for rank in range(plan.world_size)),
        "--epochs": 1 if training.dev else training.epochs,
        "--batch_size": plan.batch.replica_size if plan.batch else None,
        "--lr": training.learning_rate,
        "--model_name": spec.name,
        "--split_size": plan.batch.microbatches if plan.batch else spec.parallelism.microbatches,
    }
    return (*spec.source.arguments, *(f"{flag}={value}" for flag, value in flags.items() if value is not None))
