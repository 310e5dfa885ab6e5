"""Records of a model's state, to the last bit: comparing two shows what a call has left behind."""

from __future__ import annotations

import hashlib
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

Look = dict[str, Any]

_MOST_DEEP = 5
_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, type, types.ModuleType)


def look_at(model: nn.Module, *others: Any) -> Look:
    """Return all that the modules hold, by path: attributes, hooks, containers, values of tensors; and ``others``."""
    found: Look = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for key, value in vars(module).items():
            _note(found, f"{name or 'model'}.{key}", value, 0)
        found[f"{name or 'model'} has"] = sorted(vars(module))
    for index, value in enumerate(others):
        _note(found, f"other {index}", value, 0)
    return found


def first_difference(before: Look, after: Look) -> str:
    """Return where two records differ, or "" if they are equal."""
    for path in [*before, *(path for path in after if path not in before)]:
        was, now = before.get(path, "nothing"), after.get(path, "nothing")
        if was != now:
            return f"{path}: {_short(was)} before, {_short(now)} now"
    return ""


def _note(found: Look, path: str, value: Any, depth: int) -> None:
    found[path] = type(value).__qualname__
    if isinstance(value, Tensor):
        found[path] = _look_of(value)
    elif isinstance(value, nn.Module):
        found[path] = id(value)
    elif value is None or isinstance(value, (bool, int, float, complex, str, bytes, torch.dtype, torch.device)):
        found[path] = repr(value)
    elif isinstance(value, _FUNCTIONS) or depth == _MOST_DEEP:
        found[path] = f"{type(value).__qualname__} {id(value)}" if isinstance(value, _FUNCTIONS) else found[path]
    elif isinstance(value, Mapping):
        found[f"{path} has"] = list(map(_key, value))
        for key, each in value.items():
            _note(found, f"{path}[{_key(key)}]", each, depth + 1)
    elif isinstance(value, (list, tuple)):
        found[f"{path} has"] = len(value)
        for index, each in enumerate(value):
            _note(found, f"{path}[{index}]", each, depth + 1)
    elif isinstance(value, (set, frozenset)):
        found[f"{path} has"] = sorted(map(_key, value))
    elif hasattr(value, "__dict__"):
        for key, each in vars(value).items():
            _note(found, f"{path}.{key}", each, depth + 1)


def _key(key: Any) -> str:
    return repr(key) if isinstance(key, (str, int, float, tuple)) else f"{type(key).__qualname__} {id(key)}"


def _look_of(tensor: Tensor) -> tuple[Any, ...]:
    plain = tensor.detach()
    values = "none"
    if (
        plain.device.type in ("cpu", "cuda")
        and type(tensor) in (Tensor, nn.Parameter)
        and plain.layout is torch.strided
    ):
        raw = plain.cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b""
        values = hashlib.sha1(raw).hexdigest()
    hooks = len(tensor._backward_hooks or ())
    return (
        type(tensor).__qualname__,
        tuple(tensor.shape),
        tensor.dtype,
        tensor.device.type,
        tensor.requires_grad,
        tensor.grad is not None,
        hooks,
        values,
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 100 else f"{text[:97]}..."
