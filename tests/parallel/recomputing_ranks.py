"""What the ranks of a test do: a training step whose operators are counted, and what lies in memory before its backward
pass; blocks that are compiled.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import mixed_ranks
import torch
from meshes import mesh_of
from models import GPT
from on_ranks import TokenLoss, made, tokens
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from detrain_nb import parallel as par


class Watch(TorchDispatchMode):
    """Counts what runs, and knows which memory that was made meanwhile is still there."""

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
    """How often a batch runs matrix products and GELU of the four blocks, and bytes kept when the loss is there."""
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


def compile_blocks(axes: dict[str, int], *, compile: bool) -> tuple[dict[str, float], int, int]:
    """How far training is from the whole model's; the frames that were compiled for it, and the graphs."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    found = mixed_ranks.train(axes, compile=compile)
    return found, counters["frames"]["ok"], counters["stats"]["unique_graphs"]
