"""Code that a test's ranks run: training steps of a layout, with the live tensor storages counted."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from detrain_nb import parallel as par

from .memory_models import EXAMPLES
from .meshes import mesh_of


class LiveStorages(TorchDispatchMode):
    """Counts, after each operator, the bytes of all storages that operators have made and that are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, weakref.ref[Any]] = {}
        self.most_bytes = 0

    def add(self, tensors: Iterable[Any]) -> None:
        for tensor in tensors:
            storage = (tensor.to_local() if isinstance(tensor, DTensor) else tensor).untyped_storage()
            known = self._live.get(storage._cdata)
            if storage.device.type != "meta" and (known is None or known() is not storage):
                self._live[storage._cdata] = weakref.ref(storage)

    def count(self) -> int:
        storages = [reference() for reference in list(self._live.values())]
        return sum(storage.nbytes() for storage in storages if storage is not None)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        self.add(leaf for leaf in tree_leaves(result) if type(leaf) in (Tensor, torch.nn.Parameter))
        self.most_bytes = max(self.most_bytes, self.count())
        return result


def peak_here(name: str, axes: dict[str, int], **options: Any) -> int:
    """Return the peak of live bytes in the second step, when the optimizer has its state."""
    mesh = mesh_of(**axes)
    model, example, target, loss = EXAMPLES[name]()
    with LiveStorages() as storages:
        laid_out = par.parallelize(model, mesh, example_inputs=example, loss=loss, device="cpu", **options)
        optimizer = torch.optim.AdamW(list(laid_out.parameters()), lr=1e-3)
        count = laid_out.num_microbatches
        repeat = lambda leaf: torch.cat([leaf] * count) if isinstance(leaf, Tensor) else leaf  # noqa: E731
        batch, targets = tree_map(repeat, example), tree_map(repeat, target)
        for module in laid_out.modules:
            storages.add((*module.parameters(), *module.buffers()))
        del model
        for _ in range(2):
            gc.collect()  # free reference cycles, which otherwise go at an arbitrary time
            storages.most_bytes = 0
            laid_out.train_step(batch, targets)
            optimizer.step()
            optimizer.zero_grad()
    return storages.most_bytes


def peaks_here(cases: list[tuple[str, dict[str, int], dict[str, Any]]]) -> list[int]:
    torch.manual_seed(0)
    return [peak_here(name, axes, **options) for name, axes, options in cases]
