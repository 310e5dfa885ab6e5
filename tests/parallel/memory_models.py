"""Models for the memory tests: how to make each one, its inputs, its target and its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .models import GPT
from .tensor_models import MODELS, Llama

Example = tuple[nn.Module, Any, Any, Callable[..., Tensor]]


def token_loss(logits: Any, targets: Tensor) -> Tensor:
    logits = logits if isinstance(logits, Tensor) else logits.logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate queries or keys by their position in the sequence."""
    a, b = x.float().chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1).type_as(x)


class Llama3Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, hidden: int) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = heads, kv_heads, width // heads
        self.wq, self.wo = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.wk, self.wv = (nn.Linear(width, kv_heads * self.head_dim, bias=False) for _ in range(2))
        self.w1, self.w3 = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(hidden, width, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normed = self.norm1(x)
        q = turned(self.wq(normed).view(batch, length, self.n_heads, -1), cos, sin)
        k = turned(self.wk(normed).view(batch, length, self.n_kv_heads, -1), cos, sin)
        v = self.wv(normed).view(batch, length, self.n_kv_heads, -1)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        k, v = (each.repeat_interleave(self.n_heads // self.n_kv_heads, 1) for each in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        x = x + self.wo(attended.reshape(batch, length, -1))
        normed = self.norm2(x)
        return x + self.w2(F.silu(self.w1(normed)) * self.w3(normed))


class Llama3(nn.Module):
    """Meta's Llama 3; its table of positions is a plain attribute that stays on the CPU."""

    def __init__(
        self, width: int, layers: int, heads: int, kv_heads: int, hidden: int, *, length: int, vocabulary: int = 128256
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Llama3Block(width, heads, kv_heads, hidden) for _ in range(layers))
        self.norm, self.output = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.cos, self.sin = (torch.ones(length, width // heads // 2, device="cpu") for _ in range(2))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x, self.cos[: tokens.shape[1]], self.sin[: tokens.shape[1]])
        logits: Tensor = self.output(self.norm(x))
        return logits


class ResBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class ResNet(nn.Module):
    """Two rows of blocks; the images get smaller and wider between them."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.early = nn.ModuleList(ResBlock(width) for _ in range(5))
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.late = nn.ModuleList(ResBlock(2 * width) for _ in range(2))
        self.head = nn.Linear(2 * width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.early:
            x = block(x)
        x = self.down(x)
        for block in self.late:
            x = block(x)
        result: Tensor = self.head(x.mean((2, 3)))
        return result


def _tokens(rows: int, length: int = 16) -> Tensor:
    return torch.randint(0, 96, (rows, length), generator=torch.Generator().manual_seed(1))


def _bert() -> Example:
    model, _ = MODELS["Bert"]()
    return model, {"input_ids": _tokens(2)}, _tokens(2), token_loss


EXAMPLES: dict[str, Callable[[], Example]] = {
    "gpt": lambda: (GPT(layers=6), _tokens(2), _tokens(2), token_loss),
    "gpt, many classes": lambda: (GPT(layers=6, vocabulary=997), _tokens(2), _tokens(2), token_loss),
    "llama": lambda: (Llama(layers=6), _tokens(4), _tokens(4), token_loss),
    "bert": _bert,
    "resnet": lambda: (ResNet(), torch.randn(4, 3, 16, 16), torch.zeros(4, dtype=torch.long), F.cross_entropy),
}
