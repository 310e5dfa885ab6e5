"""Kinds of arguments that a model is called with: for kinds unlike the example's, its code may take another path."""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import itertools
import warnings
from collections.abc import Iterator, Mapping
from numbers import Number
from typing import Any

import torch
from torch import Tensor, nn

_SHOWN = 40  # characters of a string
_MOST = 300  # values in the containers of one argument
_DEEP = 8


@dataclasses.dataclass(frozen=True)
class _Kind:
    """The kind of a value; ``parts``: kinds of the values inside, by how they are accessed.

    ``is_sequence``: entries beyond the known ones are ignored.
    """

    text: str
    parts: Mapping[str, _Kind] = dataclasses.field(default_factory=dict)
    is_sequence: bool = False


class KnownKinds:
    """Kinds in the example that a tensor plan was proved with; numbers, shapes and lengths are left out."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        try:
            self._signature: inspect.Signature | None = inspect.signature(model.forward)
        except (TypeError, ValueError):  # for a function in C
            self._signature = None
        self._known = self._kinds_of(args, kwargs)
        self._told: set[tuple[str, str]] = set()

    def warn_of_others(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Warn of arguments that the example did not have, or had of another kind, once for each kind.

        This is not an error: the most common case, a mask instead of None, hardly ever breaks the plan. Arguments
        that the batch lacks, such as labels, are ignored.
        """
        for name, kind in self._kinds_of(args, kwargs).items():
            for where, known, found in _differences(name, self._known.get(name, self._default_of(name)), kind):
                if (where, found) in self._told:
                    continue
                self._told.add((where, found))
                had = f"{where}={known}" if known else f"example inputs without {where}"
                warnings.warn(
                    f"the tensor plan was proved with {had}, but this batch has {where}={found}: make the plan with "
                    "example inputs of that kind, or compare with the whole model",
                    stacklevel=5,
                )

    def _default_of(self, name: str) -> _Kind | None:
        """Return the kind of an omitted argument's default, if known."""
        known = self._signature.parameters.get(name) if self._signature is not None else None
        return None if known is None or known.default is inspect.Parameter.empty else _kind_of(known.default)

    def _kinds_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, _Kind]:
        named: dict[str, Any] = {**{f"argument {place}": each for place, each in enumerate(args)}, **kwargs}
        if self._signature is not None:
            try:
                named = dict(self._signature.bind_partial(*args, **kwargs).arguments)
            except TypeError:  # the call of the model raises a better error
                return {}
            for parameter in self._signature.parameters.values():
                if parameter.kind is parameter.VAR_KEYWORD:
                    named |= named.pop(parameter.name, {})
        return {name: _kind_of(value) for name, value in named.items()}


def _differences(name: str, known: _Kind | None, found: _Kind) -> Iterator[tuple[str, str, str]]:
    """Yield where two kinds differ, with both texts; values that differ as a whole are not compared further."""
    if known is None:
        if found.text != str(None):
            yield name, "", found.text
    elif known.text != found.text:
        yield name, known.text, found.text
    else:
        for key, each in found.parts.items():
            if key in known.parts or not found.is_sequence:
                yield from _differences(name + key, known.parts.get(key), each)


def _kind_of(value: Any) -> _Kind:
    return _kind_with_parts(value, itertools.count(), _DEEP)


def _kind_with_parts(value: Any, count: Iterator[int], depth: int) -> _Kind:
    text, parts, is_sequence = f"a {type(value).__name__}", dict[str, Any](), False
    if isinstance(value, Mapping):
        text, parts = "a dict", {f"[{key!r}]": each for key, each in itertools.islice(value.items(), _MOST)}
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        parts = {f".{key}": each for key, each in zip(value._fields, value)}
    elif isinstance(value, (list, tuple)):
        is_sequence = True
        text = "a list" if isinstance(value, list) else "a tuple"
        parts = {f"[{place}]": each for place, each in enumerate(value[:_MOST])}
    elif dataclasses.is_dataclass(value) and not isinstance(value, (type, nn.Module)):
        parts = {f".{each.name}": getattr(value, each.name, None) for each in dataclasses.fields(value)}
    else:
        return _Kind(_text_of(value))
    kinds = {}
    for key, each in parts.items() if depth else ():
        if next(count) >= _MOST:
            break
        kinds[key] = _kind_with_parts(each, count, depth - 1)
    return _Kind(text, kinds, is_sequence)


def _text_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return _text_of_tensor(value)
    if value is None or isinstance(value, bool) or _is_bool_of_numpy(value):
        return str(value)
    if isinstance(value, (str, bytes)):
        plain: str | bytes = value.value if isinstance(value, enum.Enum) else value
        return repr(plain) if len(plain) <= _SHOWN else f"{plain[:_SHOWN]!r}..."
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, Number):
        return "a number"
    if isinstance(value, (set, frozenset)):
        return f"a set of {', '.join(sorted(set(map(_text_of, itertools.islice(value, _MOST))))) or 'nothing'}"
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, functools.partial):
        return _text_of(value.func)
    name = getattr(value, "__qualname__", None) if callable(value) else None
    return name if isinstance(name, str) else f"a {type(value).__name__}"


def _text_of_tensor(tensor: Tensor) -> str:
    if tensor.dtype == torch.bool:
        return "a tensor of bools"
    return "a tensor" if tensor.is_floating_point() or tensor.is_complex() else "a tensor of whole numbers"


def _is_bool_of_numpy(value: Any) -> bool:
    return type(value).__module__ == "numpy" and type(value).__name__ in ("bool", "bool_")
