"""A small network as a pipeline of two stages, and a master that has no stage.

torchrun --nproc_per_node=3 main.py --gpu=0_0_0 --epochs=2 --batch_size=40 --lr=0.001 --model_name=m
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
    args = common.Parser(__doc__).get_args(has_master=True)
    with common.process_group(args):
        data = common.fashion_mnist(args.samples)
        torch.manual_seed(0)
        model = par.parallelize(
            make_model(),
            common.pipeline_mesh(args),
            example_inputs=torch.zeros(1, 1, 28, 28),
            loss=nn.functional.cross_entropy,
            schedule="1F1B",
            num_microbatches=args.split_size,
            device=args.device,
        )
        common.train(model, data, args)


if __name__ == "__main__":
    main()
