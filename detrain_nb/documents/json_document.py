"""Documents in JSON, read by the standard library; duplicate keys are refused."""

from __future__ import annotations

import json
import re
from typing import Any

from ..errors import SpecError
from .content import say_syntax, say_twice, write_visible

_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]', re.DOTALL)


class _Twice(ValueError):
    """A duplicate key in an object."""


def read(text: str) -> Any:
    """Parse a document. Raises: SpecError, RecursionError."""
    try:
        return json.loads(text, object_pairs_hook=_refuse_twice)
    except json.JSONDecodeError as exc:
        if "\0" in text:  # after each letter of UTF-16
            raise SpecError("is not UTF-8: save the file as UTF-8") from None
        raise SpecError(f"line {exc.lineno}, column {exc.colno}: {say_syntax(exc.msg)}") from None
    except _Twice:
        raise SpecError(_find_twice(text)) from None


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build an object, refusing duplicate keys, of which the json module keeps the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Twice
    return found


def _find_twice(text: str) -> str:
    """Return the error for the first duplicate key, with its line; the text is valid JSON up to there."""
    names: list[set[str]] = []
    before = ""
    for token in _TOKEN.finditer(text):
        if token[0] in "{[":
            names.append(set())
        elif token[0] in "}]":
            names.pop()
        elif token[0] == ":":
            name: str = json.loads(before)
            if name in names[-1]:
                return f"line {text.count(chr(10), 0, token.start()) + 1}: {say_twice(name)}"
            names[-1].add(name)
        before = token[0]
    raise AssertionError("no duplicate key")


def write(value: object) -> str:
    return write_visible(json.dumps(value, ensure_ascii=False, allow_nan=False, indent=2)) + "\n"
