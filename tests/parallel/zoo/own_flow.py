"""Models written by hand with unusual control flow: it depends on values, on shapes or on earlier calls."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .entry import Entry, draw, padding, tokens


def mlp(width: int = 16, wider: int = 32) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, wider), nn.GELU(), nn.Linear(wider, width))


class Stack(nn.Module):
    """Blocks in sequence between two layers; subclasses add what is special."""

    def __init__(self, count: int = 4, width: int = 16) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, width), nn.ModuleList(mlp(width) for _ in range(count))
        self.last = nn.Linear(width, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(x)
        return result


class OuterResidual(Stack):
    """The skip connection is in the outer forward, as in every model of a course."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = x + block(x)
        result: Tensor = self.last(x)
        return result


class PreNorm(Stack):
    """The skip connection goes around a norm and a block, both called by the outer forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm, block in zip(self.norms, self.blocks):
            x = x + block(norm(x))
        result: Tensor = self.last(x)
        return result


class ByValue(Stack):
    """A value decides whether a block's output is negated."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) if float(x.detach().sum()) > -1e9 else -block(x)
        result: Tensor = self.last(x)
        return result


class ByShape(Stack):
    """Shortens long inputs."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        while x.shape[1] > 4:
            x = x[:, ::2] + 1
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(x.flatten(1, -2) if x.dim() > 3 else x)
        return result


class Halts(Stack):
    """Repeats one block until all rows are large enough, at most three times."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks[:2]:
            x = block(x)
        for _ in range(3):
            if bool((x.detach().norm(dim=-1) > 3).all()):
                break
            x = x + self.blocks[2](x)
        result: Tensor = self.last(self.blocks[3](x))
        return result


class LooksBetween(nn.Module):
    """Branches on the sum of squares between two layers; half of the features, as on a tp rank, have a smaller one."""

    class Block(nn.Module):
        def __init__(self, limit: float) -> None:
            super().__init__()
            self.up, self.down, self.limit = nn.Linear(16, 32), nn.Linear(32, 16), limit

        def forward(self, x: Tensor) -> Tensor:
            x = self.up(x)
            if float(x.detach().square().sum()) / len(x) > self.limit:
                x = 0.5 * x
            result: Tensor = self.down(x)
            return result

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 16), nn.ModuleList(LooksBetween.Block(limit) for limit in (400.0, 25.0))
        self.last = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = 4 * self.first(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(x)
        return result


class Twice(Stack):
    """Runs all blocks in sequence, twice."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2):
            for block in self.blocks:
                x = block(x)
        result: Tensor = self.last(x)
        return result


class SharedBlock(Stack):
    """One block under four names."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([self.blocks[0]] * 4)


class SharedWeights(Stack):
    """Separate layers that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block[0].weight = self.blocks[0][0].weight


class InPlace(Stack):
    """Adds, multiplies and activates in place."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
            x += 0.5
            x.mul_(1.1)
            F.relu_(x)
        result: Tensor = self.last(x)
        return result


class WritesInput(Stack):
    """Writes into its input."""

    def forward(self, x: Tensor) -> Tensor:
        x[:, 0] = 0
        return super().forward(x)


class Checkpointed(Stack):
    """Recomputes its blocks in the backward pass with torch.utils.checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        result: Tensor = self.last(x)
        return result


class Reentrant(Stack):
    """Recomputes its blocks with the older, reentrant checkpoint."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        result: Tensor = self.last(x)
        return result


class PartCheckpointed(Stack):
    """Recomputes a function that runs two of its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = checkpoint(lambda y: self.blocks[1](self.blocks[0](y)), x, use_reentrant=False)
        result: Tensor = self.last(self.blocks[3](self.blocks[2](x)))
        return result


class Caches(Stack):
    """Caches tables by size, made by a function and a method; keeps one of its own for the next batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    @functools.lru_cache(maxsize=4)  # noqa: B019 -- models do that
    def positions(self, length: int) -> Tensor:
        return torch.arange(length)[:, None] / length

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None or self.table.shape[0] != x.shape[1]:
            self.table = torch.linspace(0, 1, x.shape[1])[:, None]
        x = self.first(x) + _waves(x.shape[1]) + self.positions(x.shape[1]) + self.table
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(x)
        return result


@functools.lru_cache
def _waves(length: int) -> Tensor:
    return torch.arange(length, dtype=torch.float32).sin()[:, None]


class KeepsLoss(Stack):
    """Blocks keep a loss as an attribute; the model adds these up and returns the sum."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.extra = mlp(), torch.zeros(())

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.body(x)
            self.extra = result.square().mean()
            return result

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(KeepsLoss.Block() for _ in range(4))

    def forward(self, x: Tensor) -> Any:
        result = super().forward(x)
        return {"output": result, "extra": sum(block.extra for block in self.blocks)}


class GivesLoss(Stack):
    """Returns a loss summed over its blocks besides its output."""

    def forward(self, x: Tensor) -> Any:
        x, extra = self.first(x), torch.zeros(())
        for block in self.blocks:
            x = block(x)
            extra = extra + x.square().mean()
        return self.last(x), extra


class Remembers(Stack):
    """Appends to a list in each call, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []
        self.calls = {"count": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.calls["count"] += 1
        self.seen.append(x.detach().mean())
        return super().forward(x)


class ManyInputs(Stack):
    """Takes tokens, a mask that every block uses, and flags; returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(96, 8, padding_idx=0)

    def forward(self, ids: Tensor, *, mask: Tensor, scale: float = 1.0, is_long: bool = False) -> dict[str, Any]:
        x = self.first(self.table(ids) * scale)
        for block in self.blocks:
            x = block(x) * mask[..., None]
        return {"logits": self.last(x), "mask": mask, "is_long": is_long}


class GivesHidden(Stack):
    """Also returns all hidden states."""

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        x, hidden = self.first(x), []
        for block in self.blocks:
            x = block(x)
            hidden.append(x)
        return self.last(x), tuple(hidden)


class Mixture(nn.Module):
    """Routes rows to experts by value; some experts get none."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(16, 4), nn.ModuleList(mlp() for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            weights, chosen = self.gate(x).softmax(-1).max(-1)
            result = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                where = chosen == index
                if where.any():
                    result[where] = expert(x[where]) * weights[where][:, None]
            return x + result

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 16), nn.ModuleList(Mixture.Block() for _ in range(2))
        self.last = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(x)
        return result


def numbers(rows: int) -> dict[str, Any]:
    return {"x": draw(rows, 8, 8)}


OWN_FLOW = {
    "skip outside": Entry(OuterResidual, numbers),
    "norm and skip outside": Entry(PreNorm, numbers),
    "by value": Entry(ByValue, numbers),
    "by shape": Entry(ByShape, numbers),
    "halts": Entry(Halts, numbers),
    "looks between": Entry(LooksBetween, numbers),
    "called twice": Entry(Twice, numbers),
    "shared block": Entry(SharedBlock, numbers),
    "shared weights": Entry(SharedWeights, numbers),
    "in place": Entry(InPlace, numbers),
    "writes its input": Entry(WritesInput, numbers),
    "checkpointed": Entry(Checkpointed, numbers),
    "checkpointed, reentrant": Entry(Reentrant, numbers),
    "checkpointed part": Entry(PartCheckpointed, numbers),
    "caches": Entry(Caches, numbers),
    "keeps a loss": Entry(KeepsLoss, numbers),
    "gives a loss": Entry(GivesLoss, numbers),
    "remembers": Entry(Remembers, numbers),
    "many inputs": Entry(
        ManyInputs, lambda rows: {"ids": tokens(rows), "mask": padding(rows), "scale": 0.5, "is_long": True}
    ),
    "gives hidden states": Entry(GivesHidden, numbers),
    "mixture": Entry(Mixture, numbers),
}
