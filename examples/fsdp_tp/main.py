"""Tensor parallelism and FSDP at once: layers are cut over two ranks, and each part is sharded over the replicas.

Each replica trains on other images.

torchrun --nproc_per_node=4 main.py --gpu=0_0_0_0 --epochs=2 --batch_size=20 --lr=0.001 --model_name=m
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

from detrain_nb import parallel as par


def make_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(28 * 28, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
    )


def main() -> None:
    args = common.Parser(__doc__).get_args()
    with common.process_group(args):
        data = common.fashion_mnist(args.samples)
        torch.manual_seed(0)
        mesh = par.make_mesh(dp_shard=-1, tp=2, device_type=args.device.type)
        if args.rank == 0:
            print(par.show_mesh(dict(zip(mesh.mesh_dim_names, mesh.shape)), mesh.size()))
        model = par.parallelize(
            make_model(),
            mesh,
            example_inputs=torch.zeros(2, 1, 28, 28),
            loss=nn.functional.cross_entropy,
            device=args.device,
        )
        common.train(model, data, args)


if __name__ == "__main__":
    main()
