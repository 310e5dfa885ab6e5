"""Values that a module keeps from one pass to the next, and which of them a pass has changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..undo import own_attributes
from ..writes import has_own_memory

Kept = Tensor | float


def copies_of_kept(module: nn.Module) -> dict[str, Kept]:
    """Copy buffers, and tensors and floats in attributes or one level deep in dicts and lists, by name."""
    kept = _kept(module)
    return {name: each.detach().clone() if isinstance(each, Tensor) else each for name, each in kept}


def kept_tensors(module: nn.Module) -> list[Tensor]:
    return [each for _, each in _kept(module) if isinstance(each, Tensor)]


def changed(before: Mapping[str, Kept], after: Mapping[str, Kept]) -> list[str]:
    """Return the names of values that are new or have changed."""
    return [name for name, each in after.items() if name not in before or not is_close(before[name], each, tolerance=0)]


def is_close(found: Kept | None, expected: Kept | None, *, tolerance: float) -> bool:
    """Compare relative to the largest number in ``expected``; infinities and NaNs must be equal in both."""
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        numbers = [each for each in (found, expected) if isinstance(each, float)]
        is_nan = len(numbers) == 2 and all(map(math.isnan, numbers))
        return len(numbers) == 2 and (is_nan or math.isclose(*numbers, rel_tol=tolerance, abs_tol=1e-12))
    if found.shape != expected.shape or found.is_complex() != expected.is_complex():
        return False
    if tolerance == 0 and found.dtype == expected.dtype:
        return torch.equal(found, expected) or bool(((found == expected) | (found.isnan() & expected.isnan())).all())
    found, expected = (torch.view_as_real(each) if each.is_complex() else each for each in (found, expected))
    found, expected = found.double(), expected.double()
    scale = float(expected.nan_to_num(0, 0, 0).abs().max()) if expected.numel() else 0.0
    return torch.allclose(found, expected, rtol=0, atol=tolerance * scale + 1e-12, equal_nan=True)


def _kept(module: nn.Module) -> Iterator[tuple[str, Kept]]:
    for owner, part in module.named_modules():
        for key, value in {**part._buffers, **own_attributes(part)}.items():
            for name, each in _entries(f"{owner}.{key}" if owner else key, value):
                is_tensor = isinstance(each, Tensor) and not isinstance(each, nn.Parameter)
                if type(each) is float or (is_tensor and has_own_memory(each)):
                    yield name, each


def _entries(name: str, value: Any) -> list[tuple[str, Any]]:
    if isinstance(value, dict):
        return [(f"{name}[{key!r}]", each) for key, each in value.items()]
    if isinstance(value, (list, tuple)):
        return [(f"{name}[{place}]", each) for place, each in enumerate(value)]
    return [(name, value)]
