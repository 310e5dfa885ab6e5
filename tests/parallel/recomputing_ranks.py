"""Code that a test's ranks run: a training step with counted operators and live bytes, and compiled blocks."""

from __future__ import annotations

from collections import Counter
from typing import Any

import mixed_ranks
import torch
import torch.nn.functional as F
from meshes import mesh_of
from models import GPT
from on_ranks import TokenLoss, made, tokens
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from detrain_nb import parallel as par


class Watch(TorchDispatchMode):
    """Counts the operators that run, and knows which memory that they made is still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = Counter[str]()
        self.kept_bytes = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.ops[func.overloadpacket.__name__] += 1
        for leaf in tree_leaves(result):
            if type(leaf) is Tensor:
                storage = leaf.untyped_storage()
                self._made[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return result

    def look(self) -> None:
        self.kept_bytes = sum(size for ref, size in self._made.values() if not ref.expired())


def step(axes: dict[str, int], activations: str) -> dict[str, int]:
    """Count the matrix products and GELUs that four blocks run for a batch, and the bytes kept at the loss."""
    watch, loss = Watch(), TokenLoss()

    def watched(output: Tensor, target: Tensor) -> Tensor:
        result = loss(output, target)
        watch.look()
        return result

    model = par.parallelize(
        made(GPT(layers=4)), mesh_of(**axes), example_inputs=tokens(2, 1), loss=watched,
        activations=activations, num_microbatches=2 if "pp" in axes else 1, schedule="GPipe", device="cpu",
    )  # fmt: skip
    model.train_step(tokens(8, 1), tokens(8, 2))
    with watch:
        model.train_step(tokens(8, 1), tokens(8, 2))
    return {"products": watch.ops["addmm"], "gelu": watch.ops["gelu"], "bytes": watch.kept_bytes}


class Writing(nn.Module):
    """Its blocks keep statistics, counts and a list of past calls, and compute with them."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.norm, self.down = nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 8)
            self.register_buffer("count", torch.zeros(()))
            self.register_buffer("average", torch.zeros(8))
            self.steps, self.seen = 0, list[int]()

        def forward(self, x: Tensor) -> Tensor:
            if self.training:
                self.count += 1
                self.average = self.average.lerp(x.detach().mean(0), 0.5)
                self.steps += 1
                self.seen.append(self.steps)
            scaled = x * self.count.clone() / (1 + len(self.seen)) * (1 + 0.1 * self.steps)
            result: Tensor = x + self.down(self.norm(self.up(scaled - self.average)).tanh())
            return result

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def write(axes: dict[str, int], activations: str) -> float:
    """Return the differences of parameters, buffers and counts from the whole model's, after two steps of each."""
    model, whole = made(Writing()), made(Writing())
    count, data = 2 if "pp" in axes else 1, torch.randn(8, 8, generator=torch.Generator().manual_seed(1))
    laid_out = par.parallelize(
        model, mesh_of(**axes), example_inputs=data[:4], loss=F.mse_loss, activations=activations,
        num_microbatches=count, schedule="GPipe", device="cpu",
    )  # fmt: skip
    optimizers = [torch.optim.SGD(list(each.parameters()), lr=0.1) for each in (laid_out, whole)]
    for _ in range(2):
        laid_out.train_step(data, -data)
        parts = data.chunk(count)
        for part in parts:
            (F.mse_loss(whole(part), -part) / count).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found = {name: each for module in laid_out.modules for name, each in module.state_dict().items()}
    expected = whole.state_dict()
    apart = [float((full(each) - expected[name]).abs().max()) for name, each in found.items()]
    for module in laid_out.modules:
        for name, part in module.named_modules():
            if isinstance(part, Writing.Block) and next(part.parameters(), None) is not None:
                apart.append(abs(part.steps - whole.get_submodule(name).steps))
    return max(apart)


def full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def compile_blocks(axes: dict[str, int], *, compile: bool) -> tuple[dict[str, float], int, int]:
    """Return the differences from training the whole model, the number of compiled frames and that of graphs."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    found = mixed_ranks.train(axes, compile=compile)
    return found, counters["frames"]["ok"], counters["stats"]["unique_graphs"]
