"""A small ResNet as a pipeline of two stages, cut so that the slower stage is as fast as possible, and a master.

torchrun --nproc_per_node=3 main.py --gpu=0_0_0 --epochs=2 --batch_size=40 --lr=0.001 --model_name=m
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
import common

from detrain_nb import parallel as par


class Block(nn.Module):
    """Two convolutions with a skip connection."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, channels, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.skip = nn.Identity() if stride == 1 else nn.Conv2d(channels_in, channels, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.body(x) + self.skip(x))


def make_model() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Block(16, 16, stride=1),
        Block(16, 32, stride=2),
        Block(32, 64, stride=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def main() -> None:
    args = common.Parser(__doc__).get_args(has_master=True)
    with common.process_group(args):
        data = common.fashion_mnist(args.samples)
        torch.manual_seed(0)
        model, mesh = make_model(), common.pipeline_mesh(args)
        example = torch.zeros(max(1, args.batch_size // args.split_size), 1, 28, 28)  # one microbatch
        if args.rank == 1:
            print(par.split(model, example, mesh.size()))
        model = par.parallelize(
            model,
            mesh,
            example_inputs=example,
            loss=nn.functional.cross_entropy,
            schedule="1F1B",
            num_microbatches=args.split_size,
            device=args.device,
        )
        common.train(model, data, args)


if __name__ == "__main__":
    main()
