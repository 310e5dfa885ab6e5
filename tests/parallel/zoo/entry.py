"""An entry of the zoo: a model, always with the same values, and its inputs for a number of rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

Inputs = Callable[[int], dict[str, Any]]


@dataclass(frozen=True)
class Entry:
    """A model of the zoo: ``make`` builds it, ``inputs`` returns its arguments for a batch of so many rows.

    ``optimizer``: its name in torch.optim; AdamW does not support sparse gradients. ``keeps_statistics``: BatchNorms
    stay in training mode. ``close``: the relative tolerance for all numbers.
    """

    make: Callable[[], nn.Module]
    inputs: Inputs
    optimizer: str = "AdamW"
    keeps_statistics: bool = False
    close: float = 5e-5

    def model(self) -> nn.Module:
        """Return a new model, with the same values each time; it draws no random numbers.

        None of its parameters is all zeros, which would hide errors.
        """
        torch.manual_seed(0)
        model = self.make().train()
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.is_floating_point() or parameter.is_complex():
                    noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                    parameter.add_(0.05 * noise)
        for module in model.modules():
            _without_chance(module)
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and not self.keeps_statistics:
                module.eval()
        return model


def _without_chance(module: nn.Module) -> None:
    """Set the probability of every dropout in a module to 0."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        module.p = 0.0
    for holder in (module, getattr(module, "config", None)):
        for name, value in list(vars(holder).items()) if hasattr(holder, "__dict__") else []:
            if "drop" in name and isinstance(value, float) and not name.startswith("_"):
                setattr(holder, name, 0.0)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def tokens(rows: int, length: int = 8, below: int = 96) -> Tensor:
    return torch.randint(3, below, (rows, length), generator=torch.Generator().manual_seed(2))


def padding(rows: int, length: int = 8) -> Tensor:
    """Return an attention mask whose first row is padded in its second half."""
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[0, length // 2 :] = 0
    return mask


def on(device: str, values: Any) -> Any:
    """Return arguments of a model with their tensors on ``device``."""
    return tree_map(lambda each: each.to(device) if isinstance(each, Tensor) else each, values)


def float_leaves(output: Any) -> list[Tensor]:
    """Return the float and complex tensors in a model's output."""
    leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
    return [leaf for leaf in leaves if leaf.is_floating_point() or leaf.is_complex()]
