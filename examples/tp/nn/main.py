"""A small network whose layers, including the output of ten classes, are cut over all ranks: tensor parallelism.

torchrun --nproc_per_node=2 main.py --gpu=0_0 --epochs=4 --batch_size=50 --lr=0.001 --model_name=m
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2]))
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
        model, example = make_model(), torch.zeros(2, 1, 28, 28)
        mesh = par.make_mesh(tp=-1, device_type=args.device.type)
        plan = par.tp_plan(model, example, tp=mesh.size(), loss_parallel=True)
        if args.rank == 0:
            print(plan)
        model = par.parallelize(
            model,
            mesh,
            example_inputs=example,
            loss=nn.functional.cross_entropy,
            tp=plan,
            loss_parallel=True,
            device=args.device,
        )
        common.train(model, data, args)


if __name__ == "__main__":
    main()
