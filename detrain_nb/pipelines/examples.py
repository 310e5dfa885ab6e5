"""Example pipelines: whole documents whose scripts need nothing but torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["EXAMPLES", "Example"]

_SCRIPT = """\
# A small network tells two spirals apart. The spec defines how it is parallelized: see job_spec().
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from detrain_nb import job_spec, training
from detrain_nb import parallel as par


def spirals(count: int) -> TensorDataset:
    turn = torch.linspace(0.5, 10, count).repeat(2)
    kind = torch.arange(2).repeat_interleave(count)
    angle = turn + kind * torch.pi
    points = torch.stack([turn * angle.cos(), turn * angle.sin()], dim=1) / 10
    return TensorDataset(points, kind)


def make_model() -> nn.Sequential:
    layers = [nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)]
    return nn.Sequential(*layers)


def main() -> None:
    job = job_spec()
    axes, how = job.parallelism, job.training
    dist.init_process_group()
    training.set_seed(how.seed)
    model = par.parallelize(
        make_model(),
        par.make_mesh(pp=axes.pp, dp_replicate=axes.dp_replicate, dp_shard=axes.dp_shard, tp=axes.tp),
        example_inputs=torch.zeros(job.batch.micro_size, 2),
        loss=nn.functional.cross_entropy,
        schedule=axes.schedule,
        num_microbatches=axes.microbatches,
    )
    trainer = training.Trainer(
        model,
        train=DataLoader(spirals(512), job.batch.replica_size, shuffle=True),
        evaluate=DataLoader(spirals(512), job.batch.replica_size),
        steps=how.steps,
        optimizer=how.optimizer,
        optimizer_options={"lr": how.learning_rate},
        seed=how.seed,
        show_progress=False,
    )
    print(f"trained {trainer.fit()}")
    training.export_safetensors("model.safetensors", model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
"""


@dataclass(frozen=True)
class Example:
    """An example pipeline: its texts, what it ``needs`` in a few words, and its document, for `MyPipelines.add`."""

    name: str
    title: str
    description: str
    axes: tuple[tuple[str, int], ...]
    needs: str
    data: Mapping[str, Any]


def _make(name: str, title: str, description: str, needs: str, *, nodes: list[dict[str, Any]], **axes: int) -> Example:
    data = {
        "name": name,
        "description": description,
        "artifacts": ["model.safetensors"],
        "source": {"script_text": _SCRIPT},
        "parallelism": {**axes, **({"microbatches": 4} if "pp" in axes else {})},
        "training": {"steps": 200, "batch_size": 256, "learning_rate": 0.02},
        "nodes": nodes,
    }
    return Example(name, title, description, tuple(axes.items()), needs, data)


EXAMPLES = (
    _make(
        "two-copies",
        "Two copies, this machine",
        "Two spirals with two replicas on the CPU. Nothing to set up.",
        "less than 1 min",
        nodes=[{"host": "localhost", "devices": "cpu", "ranks": 2}],
        dp_replicate=2,
    ),
    _make(
        "two-stages",
        "Two stages, two hosts",
        "A network in two stages on two SSH hosts: enter their names.",
        "needs 2 nodes",
        nodes=[{"host": "gpu1", "ranks": 1}, {"host": "gpu2", "ranks": 1}],
        pp=2,
    ),
    _make(
        "four-shards",
        "One model over four GPUs",
        "Parameters and optimizer state in four shards, with FSDP2.",
        "needs 4 GPUs",
        nodes=[{"host": "localhost", "devices": [0, 1, 2, 3]}],
        dp_shard=4,
    ),
)
