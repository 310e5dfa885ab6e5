"""Overrides on a command line, such as ``--training.epochs 2``: the field, and the value by its type."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from types import UnionType
from typing import Any, get_args

from pydantic import BaseModel

from ..errors import SpecError
from ..plan.fields import nearest, read_override, split_overrides
from .nodes_file import parse_nodes


def read_overrides(model: type[BaseModel], words: Sequence[str]) -> dict[str, Any]:
    """Read ``--name value`` and ``--name=value`` from ``words``; a name is a field, or dotted, such as training.epochs.

    Nodes are written as on any command line: ``--nodes gpu1,gpu2``. Lists are separated by commas, or JSON;
    ``--source.arguments`` is split as a shell does, and ``--source.setup`` is lines. Raises: SpecError.
    """
    found, others = split_overrides(words, is_ours=bool)
    if others:
        known = [name for name in model.model_fields if name == others[0].partition(".")[0]]
        advice = f"write --{others[0]}" if known else f"give --field value: {nearest(others[0], model.model_fields)}"
        raise SpecError(f"{others[0]!r} is not an override: {advice}")
    return {name: _read(model, name, text) for name, text in found.items()}


def name_fields(model: type[BaseModel], section: str = "") -> list[str]:
    """Return the names of its fields, or of those in its ``section``, such as source or source.git."""
    fields = _fields_of(model) or {}
    for part in section.split(".") if section else ():
        kind = fields.get(part)
        kinds = get_args(kind) if isinstance(kind, UnionType) else [kind]
        fields = {name: inner for each in kinds for name, inner in (_fields_of(each) or {}).items()}
    return list(fields)


def _read(model: type[BaseModel], name: str, text: str | None) -> Any:
    if name in _WRITTEN and text is not None:
        try:
            return _WRITTEN[name](text)
        except ValueError as exc:
            raise SpecError(f"--{name}: {exc}") from None
    return read_override(name, text, model, fields_of=_fields_of, where="--")


def _fields_of(kind: Any) -> Mapping[str, Any] | None:
    if not (isinstance(kind, type) and issubclass(kind, BaseModel)):
        return None
    return {name: field.annotation for name, field in kind.model_fields.items()}


_WRITTEN: dict[str, Callable[[str], Any]] = {
    "nodes": lambda text: [node.to_fields() for node in parse_nodes(text)],
    "source.arguments": shlex.split,
    "source.setup": str,
}
