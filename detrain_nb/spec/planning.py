"""What a spec resolves to: the plan of its ranks, the spec that its script reads, the script's arguments."""

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
    """Plan the ranks; ``gpus`` has the number of a node's GPUs, or their indices, by its name.

    A node that is missing in it has the GPUs that the spec requests. Raises: SpecError.
    """
    names = [node.name for node in spec.nodes] or [""]
    if unknown := [name for name in gpus if name not in names]:
        raise SpecError(f"gpus has {unknown[0]!r}, which is not a node: choose from {', '.join(names)}")
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
    """Return the numbers of nodes that an elastic job may have but its axes or batch do not fit, each with the reason.

    The result is empty for nodes with different numbers of ranks, or with unknown numbers of GPUs.
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
    """Return ``nodes a, b have GPUs`` for nodes with a rank for each of an unknown number; empty if all are known."""
    if not spec.nodes:
        return "" if "" in gpus else "this machine has GPUs"
    names = [
        node.name for node in spec.nodes if node.devices == "auto" and node.ranks is None and node.name not in gpus
    ]
    several = len(names) > 1
    return f"node{'s' * several} {name_some(names)} {'have' if several else 'has'} GPUs" if names else ""


def resolve_job(spec: PipelineFields, plan: Plan) -> JobSpec:
    """Return what a script reads with `job_spec`: the spec with every axis and batch size as a number.

    When fewer nodes may run, axes and microbatches stay as they were given: each round resolves its own.
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
    """Return the arguments of the program; in the style of DeTrain its flags follow the user's.

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
