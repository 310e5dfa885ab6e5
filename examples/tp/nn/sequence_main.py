"""A transformer that reads an image row by row: between its cut layers each rank has a part of the rows.

torchrun --nproc_per_node=2 sequence_main.py --gpu=0_0 --epochs=4 --batch_size=50 --lr=0.001 --model_name=m
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[2]))
import common
import transformer

from detrain_nb import parallel as par


class RowReader(nn.Module):
    """Model that maps 28 rows of 28 pixels to ten classes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.embed, self.positions = nn.Linear(28, width), nn.Parameter(0.02 * torch.randn(28, width))
        self.blocks = nn.ModuleList(transformer.Block(width, heads=4) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.embed(images.squeeze(1)) + self.positions
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def make_model() -> RowReader:
    return RowReader()


def main() -> None:
    args = common.Parser(__doc__).get_args()
    with common.process_group(args):
        data = common.fashion_mnist(args.samples)
        torch.manual_seed(0)
        model, example = make_model(), torch.zeros(2, 1, 28, 28)
        mesh = par.make_mesh(tp=-1, device_type=args.device.type)
        plan = par.tp_plan(model, example, tp=mesh.size(), sequence_parallel=True)
        if args.rank == 0:
            print(plan)
        model = par.parallelize(
            model,
            mesh,
            example_inputs=example,
            loss=nn.functional.cross_entropy,
            tp=plan,
            sequence_parallel=True,
            device=args.device,
        )
        common.train(model, data, args)


if __name__ == "__main__":
    main()
