"""The states of the random number generators of this process, kept and set again."""

from __future__ import annotations

import random
import struct
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

STATES = ("python", "python_rest", "torch", "numpy", "numpy_rest", "cuda")  # what `random_state` may have

_NUMBERS = 624  # of the generator of Python and of numpy
_REST_OF_TORCH = slice(8, 24)  # behind the seed
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
    _require_gauss(gauss)
    if "numpy" in state:
        _require_numpy_rest(*state["numpy_rest"])
    random.setstate((version, tuple(state["python"].tolist()), gauss))
    of_torch = _as_bytes(state["torch"])
    _require_torch_rest(of_torch)
    torch.set_rng_state(of_torch)
    if "numpy" in state and "numpy" in sys.modules:
        numbers = sys.modules["numpy"].array(state["numpy"].tolist(), dtype="uint32")
        sys.modules["numpy"].random.set_state((_GENERATOR, numbers, *state["numpy_rest"]))
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(_as_bytes(state["cuda"]))


def set_seed(seed: int) -> None:
    """Seed Python, numpy where it is imported, and torch, on the CPU and on every GPU."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def _require_numpy_rest(place: Any, has_gauss: Any, gauss: Any) -> None:
    """numpy looks at none of it: with a place behind its numbers it reads memory of others as random numbers, or ends.

    Raises: ValueError.
    """
    if type(place) is not int or not 0 <= place <= _NUMBERS or type(has_gauss) is not int or has_gauss not in (0, 1):
        raise ValueError("no state of numpy's generator")
    _require_gauss(gauss)


def _require_torch_rest(state: Tensor) -> None:
    """Torch does not look whether as many numbers are left as there are from the next one on, and reads behind them.

    How the bytes lie: CPUGeneratorImplStateLegacy in ATen/CPUGeneratorImpl.cpp. Raises: ValueError.
    """
    if state.dtype != torch.uint8 or state.dim() != 1 or len(state) < _REST_OF_TORCH.stop:
        raise ValueError("no state of torch's generator")
    left, _, following = struct.unpack("=iiQ", bytes(state[_REST_OF_TORCH].tolist()))
    if not 1 <= left <= _NUMBERS or left + following > _NUMBERS + 1:
        raise ValueError("no state of torch's generator")


def _require_gauss(gauss: Any) -> None:
    """The number that comes next, where one was made with the last. Raises: ValueError."""
    if gauss is not None and not isinstance(gauss, float):
        raise ValueError("no number that a generator has kept")


def _as_bytes(state: Tensor) -> Tensor:
    return state.to(torch.uint8)
