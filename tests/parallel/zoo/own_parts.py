"""Models written by hand with unusual parts: hooks, buffers, dtypes, parameters of every kind."""

from __future__ import annotations

import threading
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, weight_norm

from .entry import Entry, draw, tokens
from .own_flow import Stack, mlp, numbers


class ParameterHooks(Stack):
    """Hooks of some parameters change their gradients: doubled, clipped, zeroed."""

    def __init__(self) -> None:
        super().__init__()
        self.first.weight.register_hook(lambda gradient: 2 * gradient)
        self.blocks[1][0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        self.last.bias.register_hook(torch.zeros_like)


class AccumulateHooks(Stack):
    """A hook runs after a gradient has been accumulated."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in (self.first.weight, self.last.weight):
            parameter.register_post_accumulate_grad_hook(_negate)


def _negate(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.neg_()


class ModuleHooks(Stack):
    """Hooks of modules change inputs, outputs, and gradients in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        self.blocks[1].register_forward_hook(lambda module, args, output: output + 0.25)
        self.blocks[2].register_forward_hook(lambda module, args, kwargs, output: output * 0.5, with_kwargs=True)
        self.blocks[3].register_full_backward_hook(lambda module, given, taken: tuple(2 * each for each in given))
        self.last.register_full_backward_pre_hook(lambda module, taken: tuple(3 * each for each in taken))


class Extracts(Stack):
    """A hook keeps a block's output, which the model uses at its end."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        self.blocks[2].register_forward_hook(lambda module, args, output: self.kept.update(middle=output))

    def forward(self, x: Tensor) -> Tensor:
        result = super().forward(x)
        return result + self.kept.pop("middle")[..., :6]


class Sparse(nn.Module):
    """An embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.blocks = nn.Embedding(96, 16, sparse=True), nn.ModuleList(mlp() for _ in range(4))
        self.last = nn.Linear(16, 6)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(x)
        return result


class MaxNorm(Sparse):
    """An embedding that renormalises the rows that it looks up, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(96, 16, max_norm=0.7)


class Bag(Sparse):
    """Means over rows of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingBag(96, 16)  # type: ignore[assignment]


class Scalars(Stack):
    """Scalar parameters: a gate for every block, and a temperature next to another parameter of the model itself."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.shift = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.ones(6))
        self.gates = nn.ParameterList(torch.tensor(0.5) for _ in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for gate, block in zip(self.gates, self.blocks):
            x = block(x) * gate
        result: Tensor = self.last(x) * self.temperature.exp() + self.shift
        return result


class Complex(Stack):
    """Layers of complex numbers between real ones, as in models of waves."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(9, 9, dtype=torch.complex64) / 9)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = torch.fft.irfft(torch.fft.rfft(x) @ self.weight, n=16)
            return result

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList((mlp(), Complex.Layer(), Complex.Layer(), mlp()))


class MixedDtypes(Stack):
    """One block computes in bfloat16, one in float64, the others in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].bfloat16()
        self.blocks[2].double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x.to(block[0].weight.dtype)).float()
        result: Tensor = self.last(x)
        return result


class MixedInside(Stack):
    """Bfloat16 blocks with float32 norms and a float64 factor, followed by a float64 norm."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layers = nn.LayerNorm(16), mlp().bfloat16()
            self.factor = nn.Parameter(torch.ones(16, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = x + (self.factor * self.layers(self.norm(x).bfloat16())).float()
            return result

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.end = nn.ModuleList(MixedInside.Block() for _ in range(4)), nn.LayerNorm(16).double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(self.end(x.double()).float())
        return result


class WeightOutside(Stack):
    """The model itself also uses weights of its layers."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x) + F.linear(x, block[0].weight.T @ block[0].weight)
        result: Tensor = self.last(x) * self.last.weight.norm()
        return result


class RunningBuffers(Stack):
    """Updates a running mean itself, and subtracts it in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Tensor
        self.count: Tensor
        self.register_buffer("mean", torch.zeros(16))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.register_buffer("scale", torch.ones(16), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 1)), 0.1)
                self.count += 1
        else:
            x = x - self.mean
        for block in self.blocks:
            x = block(x) * self.scale
        result: Tensor = self.last(x)
        return result


class ReplacesBuffer(RunningBuffers):
    """Replaces a buffer by a new tensor in each training step."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        result: Tensor = super().forward(x - self.mean.mean())
        return result


class Statistics(Stack):
    """BatchNorms whose statistics change in training."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(8) for _ in self.blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for norm, block in zip(self.norms, self.blocks):
            x = norm(block(x))
        result: Tensor = self.last(x)
        return result


class CountsAcross(Stack):
    """One BatchNorm runs after each of two blocks, and passes are counted at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.passes: Tensor
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.blocks[0](self.first(x)))
        x = self.norm(self.blocks[1](x))
        for block in self.blocks[2:]:
            x = block(x)
        result: Tensor = self.last(x)
        self.passes += int(self.training)
        return result


class Recurrent(nn.Module):
    """Batch-first recurrent layers in sequence, between linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gru = nn.Linear(8, 16), nn.GRU(16, 16, batch_first=True)
        self.lstm = nn.LSTM(16, 16, num_layers=2, batch_first=True, bidirectional=True)
        self.middle, self.rnn, self.last = nn.Linear(32, 16), nn.RNN(16, 16, batch_first=True), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.gru(self.first(x))
        x, _ = self.lstm(x)
        x, _ = self.rnn(self.middle(x))
        result: Tensor = self.last(x)
        return result


class Packed(nn.Module):
    """A recurrent layer over packed rows of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.gru, self.last = nn.Linear(8, 16), nn.GRU(16, 16, batch_first=True), nn.Linear(16, 6)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.first(x), lengths, batch_first=True, enforce_sorted=False)
        _, state = self.gru(packed)
        result: Tensor = self.last(state[-1])
        return result


class Cells(nn.Module):
    """A Python loop over a recurrent cell."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cell, self.last = nn.Linear(8, 16), nn.LSTMCell(16, 16), nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        state, found = None, []
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
            found.append(state[0])
        result: Tensor = self.last(torch.stack(found, 1))
        return result


class Lora(nn.Module):
    """Frozen layers, each with a small trained one next to it."""

    class Layer(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base = base.requires_grad_(False)
            self.a, self.b = nn.Linear(base.in_features, 4, bias=False), nn.Linear(4, base.out_features, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.base(x) + 2 * self.b(self.a(x))
            return result

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(96, 16).requires_grad_(False)
        layers = [(nn.Linear(16, 32), nn.Linear(32, 16)) for _ in range(4)]
        self.blocks = nn.ModuleList(nn.Sequential(Lora.Layer(up), nn.ReLU(), Lora.Layer(down)) for up, down in layers)
        self.last = nn.Linear(16, 6).requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        result: Tensor = self.last(x)
        return result


class FrozenStart(Stack):
    """The first half is frozen, and runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        for part in (self.first, self.blocks[0], self.blocks[1]):
            part.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.blocks[1](self.blocks[0](self.first(x)))
        result: Tensor = self.last(self.blocks[3](self.blocks[2](x)))
        return result


class WeightNorm(Stack):
    """Parametrized weights: two with a weight norm, one orthogonal."""

    def __init__(self) -> None:
        super().__init__()
        for block in (self.blocks[0], self.blocks[1]):
            parametrizations.weight_norm(block[0])
        parametrizations.orthogonal(self.blocks[3][0])


class OldWeightNorm(Stack):
    """The older weight norm of torch: a hook computes the weight before each forward."""

    def __init__(self) -> None:
        super().__init__()
        import warnings

        with warnings.catch_warnings(action="ignore"):
            weight_norm(self.blocks[2][0])


class SpectralNorm(Stack):
    """Its buffers change in every training forward."""

    def __init__(self) -> None:
        super().__init__()
        parametrizations.spectral_norm(self.blocks[1][0])


class InContainers(nn.Module):
    """Modules in a ModuleDict, and again in a plain list and a plain dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"first": nn.Linear(8, 16), "last": nn.Linear(16, 6)})
        self.levels = nn.ModuleDict({name: nn.ModuleList(mlp() for _ in range(2)) for name in ("low", "high")})
        self.order = [("low", self.levels["low"]), ("high", self.levels["high"])]
        self.table = {"again": self.levels["low"][0]}

    def forward(self, x: Tensor) -> Tensor:
        x = self.parts["first"](x)
        for _, level in self.order:
            for block in level:  # type: ignore[attr-defined]
                x = block(x)
        result: Tensor = self.parts["last"](self.table["again"](x))
        return result


class Hidden(Stack):
    """Tensors in a plain list, which neither torch nor an optimizer sees."""

    def __init__(self) -> None:
        super().__init__()
        self.biases = [torch.full((16,), 0.1 * index) for index in range(4)]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for bias, block in zip(self.biases, self.blocks):
            x = block(x) + bias
        result: Tensor = self.last(x)
        return result


class NoCopy(Stack):
    """Holds objects that deepcopy does not support: a lock, a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.numbers = threading.Lock(), (number for number in range(3))

    def forward(self, x: Tensor) -> Tensor:
        with self.lock:
            return super().forward(x)


class Compiled(Stack):
    """Blocks wrapped by torch.compile, with a back end that compiles nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(torch.compile(block, backend="eager") for block in self.blocks)  # type: ignore[misc]


class CompiledInside(Stack):
    """The same with the ``compile`` method of modules."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.compile(backend="eager")


class OwnFunction(Stack):
    """A function with a backward pass of its own."""

    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, x: Tensor) -> Tensor:
            return x * 2

        @staticmethod
        def backward(context: Any, *gradients: Tensor) -> Tensor:
            return gradients[0] * 5

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = OwnFunction.Scale.apply(block(x))
        result: Tensor = self.last(x)
        return result


class Attended(nn.Module):
    """torch's own attention and encoder layers, with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.attention = nn.Linear(8, 16), nn.MultiheadAttention(16, 4, batch_first=True)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 4, 32, 0.0, batch_first=True, norm_first=True) for _ in range(2)
        )
        self.last = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        mask = torch.triu(torch.full((x.shape[1], x.shape[1]), -torch.inf), 1)
        x, _ = self.attention(x, x, x, attn_mask=mask, need_weights=False)
        for layer in self.layers:
            x = layer(x, src_mask=mask)
        result: Tensor = self.last(x)
        return result


def ids(rows: int) -> dict[str, Any]:
    return {"ids": tokens(rows)}


def _chain() -> nn.Module:
    """Return a model of torch's own layers only; one of them is in its list twice."""
    shared = mlp()
    return nn.Sequential(nn.Linear(8, 16), shared, mlp(), shared, nn.Linear(16, 6))


OWN_PARTS = {
    "parameter hooks": Entry(ParameterHooks, numbers),
    "hooks behind accumulation": Entry(AccumulateHooks, numbers),
    "module hooks": Entry(ModuleHooks, numbers),
    "extracting hook": Entry(Extracts, numbers),
    "sparse gradients": Entry(Sparse, ids, optimizer="SGD"),
    "max_norm": Entry(MaxNorm, ids),
    "bag": Entry(Bag, ids),
    "scalar parameters": Entry(Scalars, numbers),
    "complex parameters": Entry(Complex, numbers),
    "mixed dtypes inside": Entry(MixedInside, numbers, close=2e-2),
    "mixed dtypes": Entry(MixedDtypes, numbers, close=2e-2),
    "weight outside": Entry(WeightOutside, numbers),
    "running buffers": Entry(RunningBuffers, numbers),
    "replaced buffer": Entry(ReplacesBuffer, numbers),
    "statistics": Entry(Statistics, numbers, keeps_statistics=True),
    "counts across": Entry(CountsAcross, numbers, keeps_statistics=True),
    "recurrent": Entry(Recurrent, numbers),
    "packed": Entry(Packed, lambda rows: {"x": draw(rows, 8, 8), "lengths": torch.arange(rows) % 5 + 3}),
    "cells": Entry(Cells, numbers),
    "LoRA": Entry(Lora, ids),
    "frozen start": Entry(FrozenStart, numbers),
    "weight norm": Entry(WeightNorm, numbers),
    "weight norm, old": Entry(OldWeightNorm, numbers),
    "spectral norm": Entry(SpectralNorm, numbers),
    "containers": Entry(InContainers, numbers),
    "hidden tensors": Entry(Hidden, numbers),
    "no deepcopy": Entry(NoCopy, numbers),
    "compiled": Entry(Compiled, numbers),
    "compiled inside": Entry(CompiledInside, numbers),
    "own function": Entry(OwnFunction, numbers),
    "attention of torch": Entry(Attended, numbers),
    "a chain": Entry(_chain, lambda rows: {"input": draw(rows, 8, 8)}),
}
