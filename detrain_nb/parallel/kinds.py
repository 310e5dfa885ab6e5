"""What kinds of arguments a model is called with: with others than the example's its code may take another path."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from numbers import Number
from typing import Any

from torch import Tensor, nn

__all__ = ["KnownKinds"]

_SHOWN = 40  # letters of a text


class KnownKinds:
    """Of the example that a tensor plan was proved with: numbers, shapes and lengths are no kinds, texts are."""

    def __init__(self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        try:
            self._signature: inspect.Signature | None = inspect.signature(model.forward)
        except (TypeError, ValueError):  # of a function in C
            self._signature = None
        self._known = self._kinds_of(args, kwargs)
        self._told: set[tuple[str, str]] = set()

    def warn_of_others(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Tell of arguments that the example did not have, or had of another kind, once of each kind.

        No error: with a mask in the place of None, the most usual one, the plan is right as a rule. Those that the
        example had and a batch has not are left out, as labels are.
        """
        for name, kind in self._kinds_of(args, kwargs).items():
            known = self._known.get(name, self._default_of(name))
            if kind != known and (name, kind) not in self._told:
                self._told.add((name, kind))
                had = f"{name}={known}" if known else f"example inputs without {name}"
                warnings.warn(
                    f"the tensor plan was proved with {had}, and this batch has {name}={kind}: make the plan with "
                    "example inputs of that kind, or compare with the whole model",
                    stacklevel=5,
                )

    def _default_of(self, name: str) -> str:
        """Of an argument that was left out; empty where nothing is known."""
        known = self._signature.parameters.get(name) if self._signature is not None else None
        return "" if known is None or known.default is inspect.Parameter.empty else _kind_of(known.default)

    def _kinds_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, str]:
        named: dict[str, Any] = {**{f"argument {place}": each for place, each in enumerate(args)}, **kwargs}
        if self._signature is not None:
            try:
                named = dict(self._signature.bind_partial(*args, **kwargs).arguments)
            except TypeError:  # which the model's own call tells
                return {}
            for parameter in self._signature.parameters.values():
                if parameter.kind is parameter.VAR_KEYWORD:
                    named |= named.pop(parameter.name, {})
        found: dict[str, str] = {}
        for name, value in named.items():
            _add_kinds(name, value, found)
        return found


def _add_kinds(name: str, value: Any, found: dict[str, str]) -> None:
    """Of a dict those of its values, by key."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            _add_kinds(f"{name}[{key!r}]", each, found)
    else:
        found[name] = _kind_of(value)


def _kind_of(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor"
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, str):
        return repr(value if len(value) <= _SHOWN else f"{value[:_SHOWN]}...")
    if isinstance(value, Number):
        return "a number"
    return f"a {type(value).__name__}"
