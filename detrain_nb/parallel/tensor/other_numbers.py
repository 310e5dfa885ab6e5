"""Numbers that differ from the example's: a proof does not see what is multiplied by zero, or left alone by a one.

Nor does it see the other side of a threshold, so a small, a large and a negative number are tried.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Collection, Iterator
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..writes import writes_undone
from .copies import copied
from .proof_runs import Call, Run

_MOST = 1024  # elements of a buffer that may hold counts
_LEAST, _STEP = 0.37, 0.06  # neither 0 nor 1, and all different
_STEPS = 1, 1000  # added to whole numbers
_DEEP = 3  # levels of nested dataclasses


def other_calls(call: Call) -> Iterator[tuple[Call, list[str]]]:
    """Yield ``call`` with other numbers, and the replaced ones: floats, also in tensors of one element, and zeros.

    Calls that the model fails with do not count.
    """
    for other in (*map(_other_float, _OTHERS), _one_for_zero):
        replaced: list[str] = []
        made: Call = tree_map(lambda leaf: _with_other(leaf, other, replaced, _DEEP), call)  # noqa: B023 - at once
        if replaced:
            yield made, replaced


def small_buffers(module: nn.Module) -> list[str]:
    """Return the names of small buffers; those of torch's own BatchNorm, whose behaviour is known, are left out."""
    known = {
        id(buffer)
        for part in module.modules()
        if isinstance(part, nn.modules.batchnorm._NormBase)
        for buffer in part.buffers(recurse=False)
    }
    return [
        name
        for name, buffer in module.named_buffers()
        if not buffer.is_complex()
        and buffer.layout == torch.strided
        and 0 < buffer.numel() <= _MOST
        and id(buffer) not in known
    ]


def written_buffers(whole: nn.Module, names: Collection[str], reference: Run) -> set[str]:
    """Return which of ``names`` a pass without gradients writes into or replaces."""
    before = {name: whole.get_buffer(name) for name in names}
    with torch.no_grad(), writes_undone([*before.values()]) as written:
        reference.again(whole).look()
        found = {name for name, buffer in before.items() if whole.get_buffer(name) is not buffer}
    return found | {name for name, buffer in before.items() if any(buffer is each for each in written)}


def other_modules(module: nn.Module, names: Collection[str]) -> Iterator[tuple[nn.Module, list[str]]]:
    """Yield copies with other values in the buffers ``names``, and which: floats, then counts and booleans."""
    floats = [name for name in names if module.get_buffer(name).is_floating_point()]
    others = [name for name in names if name not in floats]
    if floats:
        generator = torch.Generator().manual_seed(3)
        yield _filled(module, floats, lambda each: _LEAST + _STEP * torch.rand(each.shape, generator=generator)), floats
    has_counts = any(module.get_buffer(name).dtype != torch.bool for name in others)
    for step in (_STEPS if has_counts else _STEPS[:1]) if others else ():
        yield _filled(module, others, lambda each: _counted_on(each, step)), others  # noqa: B023 - at once


def _filled(module: nn.Module, names: Collection[str], fill: Callable[[Tensor], Tensor]) -> nn.Module:
    made = copied(module)
    with torch.no_grad():
        for name in names:
            buffer = made.get_buffer(name)
            buffer.copy_(fill(buffer))
    return made


def _counted_on(buffer: Tensor, step: int) -> Tensor:
    return ~buffer if buffer.dtype == torch.bool else buffer + min(step, torch.iinfo(buffer.dtype).max // 2)


Other = Callable[[Any, int], Any]  # from a leaf and the number of replacements so far; None keeps the leaf


def _with_other(leaf: Any, other: Other, replaced: list[str], depth: int) -> Any:
    """Return the leaf or a replacement; a dataclass is copied with replacements in its fields."""
    if depth and dataclasses.is_dataclass(leaf) and not isinstance(leaf, (type, dict, nn.Module)):
        fields = {each.name: getattr(leaf, each.name, None) for each in dataclasses.fields(leaf)}
        changed = {key: _with_other(each, other, replaced, depth - 1) for key, each in fields.items()}
        changed = {key: each for key, each in changed.items() if each is not fields[key]}
        made = copy.copy(leaf) if changed else leaf
        for key, each in changed.items():
            object.__setattr__(made, key, each)  # it may be frozen
        return made
    found = other(leaf, len(replaced))
    if found is None:
        return leaf
    replaced.append(f"{float(leaf):g}")
    return found


def _one_for_zero(leaf: Any, _: int) -> Any:
    return 1 if type(leaf) is int and leaf == 0 else None


def _other_float(make: Callable[[float, float], float]) -> Other:
    def other(leaf: Any, place: int) -> Any:
        is_one = isinstance(leaf, Tensor) and leaf.numel() == 1 and leaf.is_floating_point() and not leaf.is_meta
        if not (is_one or _is_float(leaf)) or not math.isfinite(float(leaf)):
            return None
        was = float(leaf)
        made = make(_LEAST + _STEP * place, was)
        made += _STEP / 2 if math.isclose(made, was) else 0.0
        return torch.full_like(leaf, made, requires_grad=leaf.requires_grad) if is_one else type(leaf)(made)

    return other


def _is_float(leaf: Any) -> bool:
    is_of_numpy = type(leaf).__module__ == "numpy" and isinstance(leaf, Real) and not isinstance(leaf, Integral)
    return type(leaf) is float or is_of_numpy


_OTHERS: tuple[Callable[[float, float], float], ...] = (  # small, large and negative numbers, from the original
    lambda number, was: number,
    lambda number, was: 100 * number + 2 * abs(was),
    lambda number, was: -number,
)
