"""The states of this process's random number generators, saved and restored."""

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
_REST_OF_TORCH = slice(8, 24)  # after the seed
_GENERATOR = "MT19937"  # the kind of numpy's global generator, unless it was replaced


def random_state() -> dict[str, Any]:
    """Return the states of Python, numpy if imported, torch on the CPU, and torch on this rank's GPU if in use."""
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
    """Restore what `random_state` returned. Raises: ValueError, or the generators' errors, for an invalid state."""
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
    """Check what numpy does not: with a position past its numbers it would read foreign memory, or crash.

    Raises: ValueError.
    """
    if type(place) is not int or not 0 <= place <= _NUMBERS or type(has_gauss) is not int or has_gauss not in (0, 1):
        raise ValueError("invalid state of numpy's generator")
    _require_gauss(gauss)


def _require_torch_rest(state: Tensor) -> None:
    """Check what torch does not: with more numbers left than follow the next one, it would read past its numbers.

    Layout of the bytes: CPUGeneratorImplStateLegacy in ATen/CPUGeneratorImpl.cpp. Raises: ValueError.
    """
    if state.dtype != torch.uint8 or state.dim() != 1 or len(state) < _REST_OF_TORCH.stop:
        raise ValueError("invalid state of torch's generator")
    left, _, following = struct.unpack("=iiQ", bytes(state[_REST_OF_TORCH].tolist()))
    if not 1 <= left <= _NUMBERS or left + following > _NUMBERS + 1:
        raise ValueError("invalid state of torch's generator")


def _require_gauss(gauss: Any) -> None:
    """Check the spare number of a generator that makes two at a time, or None. Raises: ValueError."""
    if gauss is not None and not isinstance(gauss, float):
        raise ValueError("the spare number of a generator is not a float")


def _as_bytes(state: Tensor) -> Tensor:
    return state.to(torch.uint8)
