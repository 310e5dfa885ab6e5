"""Other numbers than an example has: what is multiplied by a zero, or not at all by a one, is not seen in a proof."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..writes import writes_undone
from .proof_runs import Call, Run

__all__ = ["fill_buffers", "other_numbers", "small_buffers", "written_buffers"]

_MOST = 1024  # elements of a buffer that is a count, or a few
_LEAST, _STEP = 0.37, 0.06  # neither 0 nor 1, and each another one


def other_numbers(call: Call) -> tuple[Call, list[str]]:
    """``call`` with other floats, as Python has them or in tensors of one element; and those that were there."""
    replaced: list[str] = []

    def other(leaf: Any) -> Any:
        is_one = isinstance(leaf, Tensor) and leaf.numel() == 1 and leaf.is_floating_point() and not leaf.is_meta
        if type(leaf) is not float and not is_one:
            return leaf
        was = float(leaf)
        if not math.isfinite(was):
            return leaf
        made = _LEAST + _STEP * len(replaced)
        made += _STEP / 2 if math.isclose(made, was) else 0.0
        replaced.append(f"{was:g}")
        return torch.full_like(leaf, made, requires_grad=leaf.requires_grad) if is_one else made

    found: Call = tree_map(other, call)
    return found, replaced


def small_buffers(module: nn.Module) -> list[str]:
    """By name; those of torch's own BatchNorm, of which it is known what they do, left out."""
    known = {
        id(buffer)
        for part in module.modules()
        if isinstance(part, nn.modules.batchnorm._NormBase)
        for buffer in part.buffers(recurse=False)
    }
    return [
        name
        for name, buffer in module.named_buffers()
        if buffer.is_floating_point()
        and buffer.layout == torch.strided
        and 0 < buffer.numel() <= _MOST
        and id(buffer) not in known
    ]


def written_buffers(whole: nn.Module, names: Collection[str], reference: Run) -> set[str]:
    """Of ``names`` those that a pass without gradients writes into, or puts another in the place of."""
    before = {name: whole.get_buffer(name) for name in names}
    with torch.no_grad(), writes_undone([*before.values()]) as written:
        reference.again(whole).look()
        found = {name for name, buffer in before.items() if whole.get_buffer(name) is not buffer}
    return found | {name for name, buffer in before.items() if any(buffer is each for each in written)}


def fill_buffers(module: nn.Module, names: Collection[str]) -> None:
    """Give the buffers of ``names`` other values."""
    generator = torch.Generator().manual_seed(3)
    for name in names:
        buffer = module.get_buffer(name)
        with torch.no_grad():
            buffer.copy_(_LEAST + _STEP * torch.rand(buffer.shape, generator=generator))
