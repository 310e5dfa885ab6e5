"""A small GPT learns to sort digits: it reads six of them, and continues with the same six in order.

Its blocks are the stages of a pipeline over all ranks, trained by a Trainer with its own score. At the end rank 0 reads
the saved file and sorts some digits alone.

torchrun --nproc_per_node=2 main.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
import common
import transformer

from detrain_nb import parallel as par
from detrain_nb import training

DIGITS = 6


class GPT(nn.Module):
    """Model that maps the digits so far to ten logits for each: how likely each digit comes next."""

    def __init__(self, width: int = 64, layers: int = 4) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(10, width), nn.Embedding(2 * DIGITS, width)
        self.blocks = nn.ModuleList(transformer.Block(width, heads=4, is_causal=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model() -> GPT:
    return GPT()


def make_data(samples: int) -> tuple[TensorDataset, TensorDataset]:
    """Return rows to train with, and 1,000 others to test: digits, then the same sorted; targets are shifted by one."""
    numbers = torch.randperm(10**DIGITS, generator=torch.Generator().manual_seed(0))[: samples + 1000]
    digits = numbers[:, None] // 10 ** torch.arange(DIGITS) % 10
    rows = torch.cat([digits, digits.sort(1).values], 1)
    inputs, targets = rows[:, :-1], rows[:, 1:].clone()
    targets[:, : DIGITS - 1] = -100  # the digits to sort cannot be predicted
    return TensorDataset(inputs[1000:], targets[1000:]), TensorDataset(inputs[:1000], targets[:1000])


class SortTrainer(training.Trainer):
    """Trainer whose score is the share of completely sorted rows."""

    def score(self, output: Tensor, target: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        is_right = (output.argmax(-1) == target) | (target == -100)
        return {"sorted": (is_right.all(1).sum(), torch.tensor(len(target)))}


def sort(model: GPT, digits: list[int]) -> list[int]:
    """Generate one digit after another, each from all digits before it."""
    with torch.no_grad():
        for _ in range(DIGITS):
            digits = [*digits, int(model(torch.tensor([digits]))[0, -1].argmax())]
    return digits[DIGITS:]


def main() -> None:
    parser = common.Parser(__doc__)
    parser.set_defaults(epochs=3, batch_size=64, split_size=4, lr=2e-3, samples=10_000, model_name="sorter")
    args = parser.get_args()
    with common.process_group(args):
        train, test = make_data(args.samples)
        training.set_seed(0)
        model = par.parallelize(
            make_model(),
            par.make_mesh(pp=-1, device_type=args.device.type),
            example_inputs=train[:16][0],
            loss=common.TokenLoss(),
            schedule="1F1B",
            num_microbatches=args.split_size,
            device=args.device,
        )
        loader = DataLoader(train, args.batch_size, shuffle=True)
        trainer = SortTrainer(
            model,
            train=loader,
            evaluate=DataLoader(test, 500),
            epochs=args.epochs,
            optimizer="adamw",
            optimizer_options={"lr": args.lr},
            scheduler="cosine",
            scheduler_options={"warmup_steps": args.epochs * len(loader) // 10},
            clip=1.0,
            callbacks=[common.Report(args.report)],
            show_progress=False,
        )
        common.save(model, trainer.fit().evaluations[-1], args)
    if args.rank == 0:  # the process group is closed: rank 0 is alone now
        alone = make_model()
        training.import_safetensors(f"{args.model_name}.safetensors", alone)
        digits = [3, 1, 4, 1, 5, 9]
        print(f"{digits} sorted: {sort(alone, digits)}")


if __name__ == "__main__":
    main()
