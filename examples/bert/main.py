"""A small BERT learns to fill in words of the Python language reference, which is part of every Python.

The ranks are replicas with shards of the model (FSDP), or a pipeline of --pp stages, or both. With --checkpoint, an
interrupted run continues from its last checkpoint. The result is a folder for transformers' from_pretrained.

torchrun --nproc_per_node=2 main.py
torchrun --nproc_per_node=2 main.py --pp=2 --checkpoint=checkpoints
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertForMaskedLM

sys.path.insert(0, str(Path(__file__).parents[1]))
import common

from detrain_nb import parallel as par
from detrain_nb import training

UNKNOWN, MASK, LENGTH, VOCABULARY = 0, 1, 32, 2000


def make_model() -> BertForMaskedLM:
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=LENGTH,
        initializer_range=0.1,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForMaskedLM(config)


def make_words() -> Tensor:
    """Return the text in rows of ``LENGTH`` words, each as its number in the vocabulary."""
    words = re.findall(r"\w+|[^\w\s]", " ".join(topics[name] for name in sorted(topics)).lower())
    known = ["[UNK]", "[MASK]", *(word for word, _ in Counter(words).most_common(VOCABULARY - 2))]
    number = {word: index for index, word in enumerate(known)}
    ids = torch.tensor([number.get(word, UNKNOWN) for word in words])
    return ids[: len(ids) // LENGTH * LENGTH].view(-1, LENGTH)


def hide(rows: Tensor, seed: int) -> TensorDataset:
    """Select 15 % of the words: 8 in 10 become [MASK], 1 any word, 1 stays. Only these words are targets."""
    generator = torch.Generator().manual_seed(seed)
    chance, kind = (torch.rand(rows.shape, generator=generator) for _ in range(2))
    is_hidden = (chance < 0.15) & (rows != UNKNOWN)
    others = torch.randint(2, VOCABULARY, rows.shape, generator=generator)
    inputs = torch.where(is_hidden & (kind < 0.8), MASK, torch.where(is_hidden & (kind > 0.9), others, rows))
    return TensorDataset(inputs, torch.where(is_hidden, rows, -100))


class WordLoss(common.TokenLoss):
    """Token loss of the outputs of transformers' models."""

    def forward(self, output: Any, target: Tensor) -> Tensor:
        return super().forward(output.logits, target)


class BertTrainer(training.Trainer):
    """Trainer whose accuracy is that of the hidden words."""

    def score(self, output: Any, target: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        return super().score(output.logits, target)


def main() -> None:
    parser = common.Parser(__doc__)
    parser.add_argument("--pp", type=int, default=1, help="stages; the other ranks are replicas, in shards")
    parser.add_argument("--checkpoint", help="a folder, or any URL: saved to, and gone on from")
    parser.set_defaults(epochs=2, batch_size=32, lr=3e-3, model_name="bert")
    args = parser.get_args()
    with common.process_group(args):
        rows = make_words()
        rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]
        train, test = hide(rows[300:][: args.samples].repeat(4, 1), seed=1), hide(rows[:300], seed=2)
        training.set_seed(0)
        model = par.parallelize(
            make_model(),
            par.make_mesh(pp=args.pp, dp_shard=-1, device_type=args.device.type),
            example_inputs=train[:2][0],
            loss=WordLoss(),
            num_microbatches=args.split_size if args.pp > 1 else 1,
            device=args.device,
        )
        loader = DataLoader(train, args.batch_size, shuffle=True)
        trainer = BertTrainer(
            model,
            train=loader,
            evaluate=DataLoader(test, 100),
            epochs=args.epochs,
            optimizer="adamw",
            optimizer_options={"lr": args.lr},
            scheduler="linear",
            scheduler_options={"warmup_steps": len(loader) // 5},
            clip=1.0,
            checkpoint=args.checkpoint,
            save_every=100 if args.checkpoint else None,
            callbacks=[common.Report(args.report)],
            show_progress=False,
        )
        result = trainer.fit()
        training.export_safetensors(args.model_name, model)
        if args.rank == 0:
            print(f"saved {args.model_name}: {result}")


if __name__ == "__main__":
    main()
