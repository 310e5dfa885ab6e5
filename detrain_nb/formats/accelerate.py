"""A pipeline as the Hugging Face Accelerate configuration of one of its nodes, for `accelerate launch`."""

from __future__ import annotations

from typing import Any

from ..documents import format_document
from ..errors import SpecError
from ..plan import Plan
from ..spec import PipelineSpec
from .alike import check_ranks
from .configuration import axis, write_head
from .job_script import describe, find_first_node

__all__ = ["export"]

_USED = (
    *(f"parallelism.{name}" for name in ("pp", "dp_replicate", "dp_shard", "tp", "compile")),
    *(f"nodes.{name}" for name in ("name", "host", "address", "ranks", "devices")),
    *(f"rendezvous.{name}" for name in ("endpoint", "port")),
)


def export(spec: PipelineSpec, plan: Plan, *, node: str = "") -> str:
    """Return the configuration of the ``node`` with that name or number, by default the first.

    Raises: SpecError for a spec that Accelerate cannot express.
    """
    number = _number_of(node, plan)
    _check(spec, plan)
    kind = _kind(plan)
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "debug": False,
        "distributed_type": kind,
        "machine_rank": number,
        "main_training_function": "main",
        "mixed_precision": "bf16" if spec.parallelism.precision == "bf16" else "no",
        "num_machines": len(plan.nodes),
        "num_processes": plan.world_size,
        "rdzv_backend": "static",
        "same_network": True,
        "use_cpu": plan.device == "cpu",
        **_say_first_node(spec, plan),
        **({"gpu_ids": ",".join(map(str, gpus))} if (gpus := plan.nodes[number].gpus) else {}),
        **({"dynamo_config": {"dynamo_backend": "INDUCTOR"}} if spec.parallelism.compile else {}),
        **({"fsdp_config": _say_shards(spec)} if kind == "FSDP" else {}),
        **_say_mesh(plan),
    }
    told = [
        *(["activations"] if kind == "FSDP" and spec.parallelism.activations == "full" else []),
        *(["precision"] if spec.parallelism.precision == "bf16" else []),  # otherwise the model keeps its own
    ]
    what = f"{describe(spec, plan)}. On node {number}: accelerate launch --config_file {spec.name}.yaml SCRIPT"
    head = write_head(spec, what, used=(*_USED, *(f"parallelism.{name}" for name in told)), by="Accelerate")
    if kind == "MULTI_CPU":
        head.append("# On CPUs Accelerate starts one rank; for several use MPI: add mpirun_config, or run mpirun.")
    return "\n".join(head) + "\n" + format_document(content, ".yaml")


def _number_of(node: str, plan: Plan) -> int:
    names = [each.name or "localhost" for each in plan.nodes]
    if not node or node in names:
        return names.index(node) if node else 0
    if node.isdecimal() and int(node) < len(names):
        return int(node)
    raise SpecError(f"--node {node!r}: give the name of a node, one of {', '.join(names)}, or its index from 0")


def _check(spec: PipelineSpec, plan: Plan) -> None:
    check_ranks(plan, by="Accelerate")
    if (stages := axis(plan, "pp")) > 1:
        raise SpecError(f"parallelism.pp {stages}: Accelerate has no pipeline parallelism: give 1")
    if plan.device == "cpu" and (parts := [name for name in ("dp_shard", "tp") if axis(plan, name) > 1]):
        raise SpecError(
            f"parallelism.{parts[0]} {axis(plan, parts[0])}: Accelerate splits a model only on GPUs: give --gpus "
            "if the nodes have some, else 1, and dp_replicate -1"
        )
    if spec.rendezvous.is_elastic:
        raise SpecError("rendezvous: Accelerate starts ranks only once: leave out max_restarts, min_nodes, max_nodes")


def _kind(plan: Plan) -> str:
    if plan.world_size == 1:
        return "NO"
    if plan.device == "cpu":
        return "MULTI_CPU"
    return "FSDP" if axis(plan, "dp_shard") > 1 else "MULTI_GPU"


def _say_first_node(spec: PipelineSpec, plan: Plan) -> dict[str, Any]:
    address, port = find_first_node(spec)
    if len(plan.nodes) > 1:
        return {"main_process_ip": address, "main_process_port": port}
    return {"main_process_port": port} if port else {}


def _say_shards(spec: PipelineSpec) -> dict[str, Any]:
    return {
        "fsdp_version": 2,
        "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "fsdp_reshard_after_forward": True,
        "fsdp_state_dict_type": "SHARDED_STATE_DICT",
        "fsdp_activation_checkpointing": spec.parallelism.activations == "full",
    }


def _say_mesh(plan: Plan) -> dict[str, Any]:
    """Return the mesh if it needs more than one data-parallel axis, or tensor parallelism."""
    axes = {name: axis(plan, name) for name in ("dp_replicate", "dp_shard", "tp")}
    if axes["tp"] == 1 and 1 in (axes["dp_replicate"], axes["dp_shard"]):
        return {}
    return {"parallelism_config": {f"parallelism_config_{name}_size": size for name, size in axes.items()}}
