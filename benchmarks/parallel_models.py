"""The models of the parallel benchmark: small, and without anything specific to a library."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """An MLP of four times the width with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.down(F.gelu(self.up(x)))
        return result


class ResidualMlp(nn.Module):
    """A sequence of blocks; a part of it is a model too, and a stage when split by hand."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Attention(nn.Module):
    """Causal attention with a norm before it and a residual connection, followed by a block."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.block = Block(width)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        parts = self.qkv(self.norm(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).reshape(rows, length, width)
        result: Tensor = self.block(x + self.out(mixed))
        return result


class Gpt(nn.Module):
    """A GPT whose head costs as much as several of its layers."""

    def __init__(self, width: int, layers: int, vocabulary: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList(Attention(width, heads=4) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.tokens(x) + self.places(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers:
            x = layer(x)
        result: Tensor = self.head(self.norm(x))
        return result


class Convolutions(nn.Module):
    """Two convolutions with BatchNorm, and a skip connection."""

    def __init__(self, channels: int, wider: int, stride: int) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(channels, wider, 3, stride, 1, bias=False), nn.BatchNorm2d(wider)
        self.second, self.second_norm = nn.Conv2d(wider, wider, 3, 1, 1, bias=False), nn.BatchNorm2d(wider)
        self.skip = nn.Identity() if channels == wider else nn.Conv2d(channels, wider, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        inner = F.relu(self.first_norm(self.first(x)))
        result: Tensor = F.relu(self.second_norm(self.second(inner)) + self.skip(x))
        return result


class ResNet(nn.Module):
    """A ResNet of four pairs of blocks, each with twice the channels and half the size of the previous pair."""

    def __init__(self, channels: int, classes: int = 10) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, channels, 3, 1, 1, bias=False), nn.BatchNorm2d(channels)
        widths = [channels << depth for depth in range(4)]
        pairs = zip([channels, *widths], widths)
        self.layers = nn.Sequential(
            *(
                block
                for before, width in pairs
                for block in (
                    Convolutions(before, width, 1 if before == width else 2),
                    Convolutions(width, width, 1),
                )
            )
        )
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers(F.relu(self.norm(self.stem(x))))
        result: Tensor = self.head(x.mean((2, 3)))
        return result


def first_shard(width: int) -> nn.Sequential:
    """Return the first stage of the MLP in DeTrain's example, of any width."""
    return nn.Sequential(nn.Linear(784, width), nn.ReLU(), nn.Linear(width, width))


def second_shard(width: int) -> nn.Sequential:
    """Return the second stage of that MLP, which returns the classes."""
    return nn.Sequential(nn.ReLU(), nn.Linear(width, 10))
