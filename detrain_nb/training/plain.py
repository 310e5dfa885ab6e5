"""Exact conversion of Python values to JSON and back, for a checkpoint's values; reading executes nothing."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ..errors import SpecError, WireError
from ..values import add_keys
from ..wire import count_values, without_collections

_MARK = "$"  # begins the only key of an object that represents a value that JSON lacks
_MOST_BYTES = 1 << 20  # of a tensor among other values, which is stored as text


def to_json(value: Any, where: str) -> Any:
    """Convert numbers, text, lists, tuples, dicts, sets, bytes, dtypes and small tensors to JSON values.

    ``where`` begins the error. Raises: SpecError for any other type, and for a tensor of more than 1 MiB.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"$float": str(value)}
    if isinstance(value, dict):
        return _dict_to_json(value, where)
    if isinstance(value, (list, tuple, set, frozenset)):
        items = [to_json(item, f"{where}[{index}]") for index, item in enumerate(value)]
        return items if isinstance(value, list) else {"$tuple" if isinstance(value, tuple) else "$set": items}
    if isinstance(value, (bytes, bytearray)):
        return {"$bytes": bytes(value).hex()}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if type(value) is Tensor or type(value) is torch.nn.Parameter:
        return _tensor_to_json(value.detach(), where)
    if type(value).__module__ == "numpy" and getattr(value, "ndim", None) == 0:
        return to_json(value.item(), where)
    raise SpecError(
        f"{where}: a {type(value).__name__} cannot be saved in a checkpoint: use numbers, text, lists, dicts or tensors"
    )


def _dict_to_json(value: dict[Any, Any], where: str) -> Any:
    if isinstance(value, Counter):
        return {"$counter": [[to_json(key, where), count] for key, count in value.items()]}
    if all(isinstance(key, str) and not key.startswith(_MARK) for key in value):
        return {key: to_json(item, f"{where}[{key!r}]") for key, item in value.items()}
    return {"$dict": [[to_json(key, where), to_json(item, f"{where}[{key!r}]")] for key, item in value.items()]}


def _tensor_to_json(value: Tensor, where: str) -> Any:
    if value.nbytes > _MOST_BYTES:
        raise SpecError(f"{where}: a tensor of {value.nbytes} bytes is too large here: the limit is {_MOST_BYTES}")
    raw = bytes(value.cpu().contiguous().reshape(-1).view(torch.uint8).tolist())
    return {"$tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), raw.hex()]}


def from_json(value: Any) -> Any:
    """Convert back what `to_json` returned. Raises: ValueError for what it cannot have returned."""
    if isinstance(value, list):
        return [from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    mark = next(iter(value), "")
    if len(value) != 1 or not mark.startswith(_MARK):
        return {key: from_json(item) for key, item in value.items()}
    try:
        return _READ[mark](value[mark])
    except (KeyError, TypeError, AttributeError, RuntimeError) as exc:
        raise ValueError(f"{mark!r} has an invalid value: {exc}") from exc


def parse_json(text: bytes, *, most_values: int) -> Any:
    """Parse JSON that others may have written.

    The text must be UTF-8: `json` guesses the encoding of bytes, and UTF-16 or UTF-32 can hide values from the count.
    Raises: ValueError for invalid JSON or more than ``most_values`` values, RecursionError for too deep nesting.
    """
    if count_values(text, most=most_values) > most_values:
        raise ValueError(f"it has more than {most_values:,} values")
    with without_collections():
        return json.loads(text.decode())


def _read_pairs(pairs: list[Any]) -> dict[Any, Any]:
    made: dict[Any, Any] = {}
    items = [from_json(item) for _, item in pairs]
    _add([from_json(key) for key, _ in pairs], lambda some, at: made.update(zip(some, items[at : at + len(some)])))
    return made


def _read_set(elements: list[Any]) -> set[Any]:
    made: set[Any] = set()
    _add([from_json(element) for element in elements], lambda some, _: made.update(some))
    return made


def _add(keys: list[Any], add: Callable[[list[Any], int], object]) -> None:
    """Add keys or elements. Raises: ValueError for those chosen to collide in a hash table, which would take hours."""
    try:
        add_keys(keys, add)
    except WireError as exc:
        raise ValueError(str(exc)) from exc


def _read_dtype(name: str) -> torch.dtype:
    found = vars(torch).get(name)  # getattr would trigger torch's lazy imports
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name!r} is not a dtype")
    return found


def _read_tensor(parts: list[Any]) -> Tensor:
    name, shape, text = parts
    raw = torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)
    return raw.view(_read_dtype(name)).reshape(shape)


_READ: dict[str, Any] = {
    "$float": float,
    "$tuple": lambda items: tuple(from_json(item) for item in items),
    "$set": _read_set,
    "$bytes": bytes.fromhex,
    "$dtype": _read_dtype,
    "$tensor": _read_tensor,
    "$dict": _read_pairs,
    "$counter": lambda pairs: Counter(_read_pairs(pairs)),
}
