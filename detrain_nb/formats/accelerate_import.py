"""The Hugging Face Accelerate configuration that `accelerate config` writes, as a spec."""

from __future__ import annotations

import re

from ..plan import MOST_RANKS
from ..storage import shown
from ..text import count_of
from .imported import MOST_NODES, Foreign, Imported, Importer
from .reading import NO_FIELD, Part, Whole

__all__ = ["ACCELERATE_CONFIG"]

_SCRIPT = "train.py"
_KINDS = ("NO", "MULTI_CPU", "MULTI_GPU", "FSDP", "DEEPSPEED", "MEGATRON_LM")
_WITHOUT_EFFECT = {  # the default values of these keys
    "compute_environment": ("LOCAL_MACHINE",),
    "debug": (False,),
    "downcast_bf16": ("no", False),
    "enable_cpu_affinity": (False,),
    "main_training_function": ("main",),
    "rdzv_backend": ("static", "c10d"),
    "same_network": (True,),
    "tpu_env": ([],),
    "tpu_use_cluster": (False,),
    "tpu_use_sudo": (False,),
}


def _is_one(foreign: Foreign) -> bool:
    content = foreign.document
    return isinstance(content, dict) and (
        "compute_environment" in content or {"distributed_type", "num_processes"} <= content.keys()
    )


def _read(foreign: Foreign) -> Imported:
    whole = Whole(foreign)
    whole.fields["name"] = whole.name_after()
    whole.put("source.script", _SCRIPT)
    whole.notes.append(f"source: the file names no script: replace {_SCRIPT} with its path")
    for key in whole:
        if whole.look(key) in (*_WITHOUT_EFFECT.get(key, ()), {}):
            whole.take(key)
    kind = whole.text("distributed_type", "NO").upper()
    if kind not in _KINDS:
        raise whole.fault(
            "distributed_type", f"{shown(kind, most=60)} has no counterpart in a spec: give one of {', '.join(_KINDS)}"
        )
    _read_nodes(whole, is_cpu=whole.flag("use_cpu") or kind == "MULTI_CPU", is_alone=kind == "NO")
    _read_axes(whole, kind)
    _read_precision(whole)
    return whole.imported("accelerate")


def _read_nodes(whole: Whole, *, is_cpu: bool, is_alone: bool) -> None:
    num_nodes = whole.whole_number("num_machines", 1, least=1, most=MOST_NODES)
    is_auto = whole.look("num_processes") in (None, -1) and not is_cpu and not is_alone  # one rank per GPU
    if whole.look("num_processes") == -1:
        whole.take("num_processes")
        num_ranks = num_nodes
    else:
        num_ranks = whole.whole_number("num_processes", num_nodes, least=1, most=MOST_RANKS)
    if is_alone and num_ranks > num_nodes:
        whole.leave("num_processes", "Accelerate starts one process when distributed_type is NO")
        num_ranks = num_nodes
    own = whole.whole_number("machine_rank", 0, most=MOST_NODES)
    if own >= num_nodes:
        raise whole.fault("machine_rank", f"{own}: num_machines is {num_nodes}: give 0 to {num_nodes - 1}")
    if num_ranks % num_nodes:
        raise whole.fault("num_processes", f"{num_ranks}: give a multiple of num_machines, which is {num_nodes}")
    host = whole.text("main_process_ip")
    port = whole.look("main_process_port")
    is_text = isinstance(port, str) and re.fullmatch("[0-9]{1,5}", port)
    whole.carry("main_process_port", "rendezvous.port", int(port) if is_text else None)
    gpus = _read_gpus(whole, 0 if is_auto else num_ranks // num_nodes)
    for index in range(num_nodes):
        node = f"nodes[{index}]"
        whole.put(f"{node}.host", f"node-{index}" if num_nodes > 1 else "localhost")
        if index == own and gpus and not is_cpu:
            whole.put(f"{node}.devices", gpus)
        else:
            if not is_auto:
                whole.put(f"{node}.ranks", num_ranks // num_nodes)
            if is_cpu:
                whole.put(f"{node}.devices", "cpu")
    if host and num_nodes > 1:
        whole.carry("main_process_ip", "nodes[0].host")
    if unknown := [f"node-{index}" for index in range(1 if host else 0, num_nodes) if num_nodes > 1]:
        some = unknown[0] if len(unknown) == 1 else f"{unknown[0]} to {unknown[-1]}"
        whole.notes.append(f"nodes: the file has no host name for {some}: write the real one")


def _read_gpus(whole: Whole, ranks: int) -> list[int]:
    """Return the GPU indices of the file's own node, if there is one per rank; ``ranks`` 0 means one rank per GPU."""
    text = str(whole.look("gpu_ids") if "gpu_ids" in whole else "all")
    if text == "all":
        whole.take("gpu_ids")
    elif re.fullmatch(r"[0-9]{1,3}(?:,[0-9]{1,3}){0,99}", text):
        gpus = [int(index) for index in text.split(",")]
        if len(set(gpus)) == len(gpus) and ranks in (0, len(gpus)):
            whole.take("gpu_ids")
            return gpus
        whole.leave("gpu_ids", f"a node has {count_of(ranks, 'rank')}, and each needs its own GPU")
    else:
        raise whole.fault("gpu_ids", "give all, or indices such as 0,1")
    return []


def _read_axes(whole: Whole, kind: str) -> None:
    axes: dict[str, int] = {}
    sizes = whole.part("parallelism_config")
    for axis in ("dp_replicate", "dp_shard", "tp"):
        if (key := f"parallelism_config_{axis}_size") in sizes:
            axes[axis] = sizes.whole_number(key, 1, least=1, most=MOST_RANKS)
    for axis in ("cp", "sp"):
        if sizes.look(key := f"parallelism_config_{axis}_size") == 1:
            sizes.take(key)
    if kind == "FSDP" and (key := "parallelism_config_cp_size") in sizes and sizes.look(key) != 1:
        sizes.leave(key, "a spec has no such axis: its ranks become shards instead")
        axes["dp_shard"] = -1
    if kind == "MEGATRON_LM":
        megatron = whole.part("megatron_lm_config")
        for axis in ("pp", "tp"):
            axes[axis] = megatron.whole_number(f"megatron_lm_{axis}_degree", 1, least=1, most=MOST_RANKS)
        if "megatron_lm_num_micro_batches" in megatron:
            megatron.carry("megatron_lm_num_micro_batches", "parallelism.microbatches")
    elif kind == "FSDP":
        _read_shards(whole.part("fsdp_config"), axes)
    elif kind == "DEEPSPEED":
        whole.notes.append("distributed_type DEEPSPEED: the ranks of a spec run without DeepSpeed")
    if kind != "FSDP" and "dp_replicate" not in axes and "dp_shard" not in axes:
        axes |= {"dp_replicate": -1, "dp_shard": 1}
    for axis, size in axes.items():
        whole.put(f"parallelism.{axis}", size)


def _read_shards(part: Part, axes: dict[str, int]) -> None:
    strategy = str(part.look("fsdp_sharding_strategy") or "FULL_SHARD").upper()
    if strategy in ("FULL_SHARD", "1"):
        part.take("fsdp_sharding_strategy")
    elif strategy in ("NO_SHARD", "3"):
        part.take("fsdp_sharding_strategy")
        axes |= {"dp_replicate": -1, "dp_shard": 1}
    elif strategy in ("HYBRID_SHARD", "4", "HYBRID_SHARD_ZERO2", "5"):
        part.leave("fsdp_sharding_strategy", "imported as full sharding: give parallelism.dp_replicate and dp_shard")
    if str(part.look("fsdp_activation_checkpointing")).lower() == "true":
        part.take("fsdp_activation_checkpointing")
        part.whole.put("parallelism.activations", "full")
    elif str(part.look("fsdp_activation_checkpointing")).lower() == "false":
        part.take("fsdp_activation_checkpointing")


def _read_precision(whole: Whole) -> None:
    precision = str(whole.look("mixed_precision") or "no").lower()
    if precision == "bf16":
        whole.take("mixed_precision")
        whole.put("parallelism.precision", "bf16")
    elif precision == "no":
        whole.take("mixed_precision")
    else:
        whole.leave("mixed_precision", "a spec has only bf16 and fp32")
    dynamo = whole if "dynamo_backend" in whole else whole.part("dynamo_config")  # older files have it at the top level
    backend = str(dynamo.look("dynamo_backend") or "no").upper()  # YAML reads a bare no as false
    if backend in ("INDUCTOR", "NO"):
        dynamo.take("dynamo_backend")
        if backend == "INDUCTOR":
            whole.put("parallelism.compile", True)
    else:
        dynamo.leave("dynamo_backend", f"ranks compile only with inductor; {NO_FIELD}")


ACCELERATE_CONFIG = Importer(_is_one, _read, "the Accelerate configuration that `accelerate config` writes")
