"""The configuration of Accelerate, as Accelerate itself reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import DistributedType

from detrain_nb.errors import SpecError
from detrain_nb.formats import export_spec
from detrain_nb.spec import PipelineSpec

FOUR = {"host": "a", "devices": [0, 1, 2, 3]}


def _spec(*nodes: dict[str, Any], **fields: Any) -> PipelineSpec:
    source = {"script_text": "print()\n"}
    return PipelineSpec.from_dict({"name": "train", "source": source, "nodes": nodes, **fields})


def _load(spec: PipelineSpec, folder: Path, **options: str) -> tuple[Any, Any]:
    """Return the configuration as Accelerate reads it, and the arguments that its launcher makes of it."""
    path = folder / "train.yaml"
    path.write_text(export_spec(spec, "accelerate", options=options))
    args, defaults, _ = _validate_launch_command(
        launch_command_parser().parse_args(["--config_file", str(path), "train.py"])
    )
    assert defaults.to_dict() == load_config_from_file(str(path)).to_dict()
    return load_config_from_file(str(path)), args


def test_shards_on_two_nodes_of_gpus(tmp_path: Path) -> None:
    spec = _spec(
        {**FOUR, "address": "10.0.0.1"},
        {**FOUR, "host": "b"},
        parallelism={"precision": "bf16", "activations": "full", "compile": True},
        rendezvous={"port": 77},
    )
    read, args = _load(spec, tmp_path, node="b")
    assert read.distributed_type == DistributedType.FSDP and read.mixed_precision == "bf16"
    assert (read.num_machines, read.num_processes, read.machine_rank) == (2, 8, 1)
    assert (read.main_process_ip, read.main_process_port, read.rdzv_backend) == ("10.0.0.1", 77, "static")
    assert read.dynamo_config == {"dynamo_backend": "INDUCTOR"}
    assert args.use_fsdp and str(args.fsdp_version) == "2" and args.fsdp_activation_checkpointing
    assert not args.use_parallelism_config and args.gpu_ids == "0,1,2,3"


def test_axes_are_those_of_the_mesh(tmp_path: Path) -> None:
    kinds = {"dp_replicate": DistributedType.MULTI_GPU, "dp_shard": DistributedType.FSDP}
    for axis, kind in kinds.items():
        read, args = _load(_spec(FOUR, parallelism={"dp_shard": 1, axis: 4}), tmp_path)
        assert read.distributed_type == kind and not args.use_parallelism_config
    read, args = _load(_spec(FOUR, parallelism={"dp_replicate": 2, "dp_shard": 2}), tmp_path)
    assert args.use_parallelism_config
    assert (args.parallelism_config_dp_replicate_size, args.parallelism_config_dp_shard_size) == (2, 2)
    read, args = _load(_spec(FOUR, parallelism={"tp": 2}), tmp_path)
    assert (args.parallelism_config_dp_shard_size, args.parallelism_config_tp_size) == (2, 2)


def test_ranks_on_the_cpu(tmp_path: Path) -> None:
    spec = _spec({"host": "a"}, {"host": "b"}, parallelism={"dp_replicate": -1, "dp_shard": 1})
    read, _ = _load(spec, tmp_path, node="1")
    assert read.distributed_type == DistributedType.MULTI_CPU and read.use_cpu
    assert (read.num_processes, read.machine_rank, read.main_process_ip) == (2, 1, "a")
    read, _ = _load(_spec({"host": "a"}), tmp_path)
    assert read.distributed_type == DistributedType.NO and read.num_processes == 1


def test_what_the_script_has_to_read_itself_stands_in_a_comment() -> None:
    spec = _spec(
        {**FOUR, "workdir": "/x"},
        training={"steps": 10, "seed": 1},
        env={"A": "b"},
        parallelism={"activations": "selective"},
    )
    told = (
        "# Left out, because Accelerate has no setting for it: parallelism.activations, training.steps, training.seed, "
    )
    (line,) = (line for line in export_spec(spec, "accelerate").splitlines() if line.startswith("# Left out"))
    assert line.startswith(told) and {"source.script_text", "nodes.workdir", "env"} <= {
        *line[:-1].split(": ")[1].split(", ")
    }


REFUSED: dict[str, tuple[dict[str, Any], dict[str, str], str]] = {
    "a pipeline": ({"nodes": [FOUR], "parallelism": {"pp": 2}}, {}, "^parallelism.pp 2: .*: give 1"),
    "shards on the CPU": ({"nodes": [{"host": "a", "ranks": 2}]}, {}, "^parallelism.dp_shard 2: .* dp_replicate -1"),
    "ranks that differ": (
        {"nodes": [FOUR, {"host": "b", "devices": [0]}]},
        {},
        "a has 4 ranks on cuda, b has 1 on cuda",
    ),
    "restarts": ({"nodes": [FOUR], "rendezvous": {"max_restarts": 1}}, {}, "^rendezvous: .*: leave out max_restarts"),
    "no such node": ({"nodes": [FOUR]}, {"node": "1"}, "^--node '1': give the name of a node, one of a, or its index"),
    "a first node that nobody reaches": (
        {"nodes": [{**FOUR, "host": "localhost"}, {**FOUR, "host": "b"}]},
        {},
        r"^nodes\[0\] localhost: the other nodes cannot reach it",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_accelerate_cannot_be_told_is_refused_with_one_line(case: str) -> None:
    fields, options, message = REFUSED[case]
    with pytest.raises(SpecError, match=message) as caught:
        export_spec(_spec(**fields), "accelerate", options=options)
    assert "\n" not in str(caught.value)
