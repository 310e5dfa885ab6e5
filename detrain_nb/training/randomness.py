"""The states of the random number generators of this process, kept and set again."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["random_state", "seed_all", "set_random_state"]

_GENERATOR = "MT19937"  # numpy's global one, unless somebody has changed it


def random_state() -> dict[str, Any]:
    """Of Python, of numpy where it is imported, of torch on the CPU and on this rank's GPU where it has used it."""
    version, numbers, gauss = random.getstate()
    found: dict[str, Any] = {
        "python": torch.tensor(numbers),
        "python_rest": [version, gauss],
        "torch": torch.get_rng_state(),
    }
    if "numpy" in sys.modules:
        kind, keys, *rest = sys.modules["numpy"].random.get_state()
        if kind == _GENERATOR:
            found |= {"numpy": torch.tensor(keys.tolist()), "numpy_rest": rest}
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    return found


def set_random_state(state: Mapping[str, Any]) -> None:
    """Raises: ValueError, or what the generators raise, for what is no state of theirs."""
    version, gauss = state["python_rest"]
    random.setstate((version, tuple(state["python"].tolist()), gauss))
    torch.set_rng_state(_as_bytes(state["torch"]))
    if "numpy" in state and "numpy" in sys.modules:
        numbers = sys.modules["numpy"].array(state["numpy"].tolist(), dtype="uint32")
        sys.modules["numpy"].random.set_state((_GENERATOR, numbers, *state["numpy_rest"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_as_bytes(state["cuda"]))


def seed_all(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _as_bytes(state: Tensor) -> Tensor:
    return state.to(torch.uint8)
