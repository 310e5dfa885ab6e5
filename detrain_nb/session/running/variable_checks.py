"""Checks of what a rank reports of its variables: wrong types, and more data than a rank sends, are refused."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ...errors import WireError
from ...wire import AskVariables
from ..output.safe_output import one_line, show_hidden, variable_names
from .variable_facts import Layout, Preview, RankVariable

__all__ = ["read_preview", "read_variables"]

_MOST_BYTES = 1 << 60
_MOST_DIMS, _MOST_ROWS, _MOST_COLUMNS, _MOST_BINS = 32, 20, 10, 40
_TEXT_CHARS, _CELL_CHARS, _LONG_CHARS = 200, 120, 5000
_KINDS = ("shard", "copy", "partial")
_FACTS = ("min", "max", "mean", "std")


def read_variables(said: object) -> tuple[dict[str, RankVariable], int]:
    """Return the variables of a rank by name, and the number of those left out. Raises: WireError."""
    fields = _fields(said)
    rows = _fields(fields.get("rows"))
    if len(rows) > AskVariables.MOST_NAMES:
        raise WireError(f"it has {len(rows)} variables, more than {AskVariables.MOST_NAMES}")
    names = variable_names(rows)
    left_out = _whole(fields.get("left_out"), 1 << 31) + len(rows) - len(names)
    return {name: _read_row(_fields(rows[name])) for name in names}, left_out


def read_preview(said: object, *, name: str, rank: int) -> Preview:
    """Return the preview of variable ``name`` that ``rank`` sent. Raises: WireError."""
    fields = _fields(said)
    facts = {key: _text(value) for key, value in _fields(fields.get("facts", {})).items() if key in _FACTS}
    return Preview(
        name,
        rank,
        _read_row(fields),
        tuple(_list(fields.get("columns", []), _text, _MOST_COLUMNS)),
        tuple(tuple(row) for row in _list(fields.get("rows", []), _read_cells, _MOST_ROWS)),
        _long_text(fields.get("text", "")),
        _text(fields.get("note", "")),
        facts,
        _whole(fields.get("nans", 0)),
        _whole(fields.get("infinite", 0)),
        tuple(_list(fields.get("bins", []), _whole, _MOST_BINS)),
        _whole(fields.get("sampled", 0)),
        fields.get("travels", True) is not False,
    )


def _read_row(row: Mapping[str, Any]) -> RankVariable:
    size, shape, local = row.get("bytes"), row.get("shape"), row.get("local")
    digest = row.get("digest")
    if not isinstance(digest, str) or len(digest) > 32 or not all(char in "0123456789abcdef" for char in digest):
        raise WireError("a variable has no valid checksum")
    return RankVariable(
        _text(row.get("type")),
        _text(row.get("value")),
        None if shape is None else tuple(_list(shape, _whole, _MOST_DIMS)),
        _text(row.get("dtype")),
        _text(row.get("device")),
        None if size is None else _whole(size),
        digest,
        row.get("is_sample") is True,
        _text(row.get("why")),
        None if local is None else tuple(_list(local, _whole, _MOST_DIMS)),
        None if row.get("layout") is None else _read_layout(_fields(row["layout"])),
    )


def _read_layout(layout: Mapping[str, Any]) -> Layout:
    mesh = tuple(_list(layout.get("mesh"), _whole, _MOST_DIMS))
    placements = tuple(_list(layout.get("placements"), _text, _MOST_DIMS))
    kinds = tuple(_list(layout.get("kinds"), _text, _MOST_DIMS))
    at = None if layout.get("at") is None else tuple(_list(layout["at"], _whole, _MOST_DIMS))
    is_whole = len(mesh) == len(placements) == len(kinds) and (at is None or len(at) == len(mesh))
    if not is_whole or not set(kinds) <= set(_KINDS) or math.prod(mesh) > 1 << 31:
        raise WireError("a DTensor has an invalid mesh or placement")
    return Layout(mesh, placements, kinds, at)


def _read_cells(row: object) -> list[str]:
    return _list(row, lambda cell: _text(cell, _CELL_CHARS), _MOST_COLUMNS)


def _fields(value: object) -> Mapping[str, Any]:
    if type(value) is not dict or not all(isinstance(key, str) for key in value):
        raise WireError("a dict with str keys is missing")
    return value


def _list(value: object, read: Callable[[Any], Any], most: int) -> list[Any]:
    if not isinstance(value, (list, tuple)) or len(value) > most:
        raise WireError(f"a list is missing or longer than {most}")
    return [read(item) for item in value]


def _text(value: object, most: int = _TEXT_CHARS) -> str:
    if not isinstance(value, str):
        raise WireError(f"a text is a {type(value).__name__}, not a str")
    return one_line(value, most_chars=most)


def _long_text(value: object) -> str:
    if not isinstance(value, str):
        raise WireError(f"a text is a {type(value).__name__}, not a str")
    return show_hidden(value[:_LONG_CHARS])


def _whole(value: object, most: int = _MOST_BYTES) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise WireError(f"a number is not an integer from 0 to {most}")
    return value
