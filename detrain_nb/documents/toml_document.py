"""Documents in TOML, read by the standard library, which has no writer, so the writer is here."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from ..errors import SpecError
from ..storage import shown
from .content import float_text, say_syntax, write_visible

_MOST_DOTS = 20  # in a key: tomllib needs memory and time quadratic in its parts
# Strings and comments, which may contain dots; separators of keys; a dot.
_TOKEN = re.compile(
    r"""\"{3}(?:[^\\]|\\.?)*?(?:"{3,5}|\Z)|'{3}.*?(?:'{3,5}|\Z)|"(?:[^"\\\n]|\\.)*"?|'[^'\n]*'?|\#[^\n]*|[\n=,.]""",
    re.DOTALL,
)
_FAULT = re.compile(r"(.*) \(at (?:line (\d+), column (\d+)|end of document)\)", re.DOTALL)
_BARE_KEY = re.compile(r"[A-Za-z0-9_-]+")


def read(text: str) -> Any:
    """Parse a document. Raises: SpecError, RecursionError."""
    num_dots = 0
    for token in _TOKEN.finditer(text):
        num_dots = 0 if token[0] in ("\n", "=", ",") else num_dots + (token[0] == ".")
        if num_dots > _MOST_DOTS:
            line = text.count("\n", 0, token.start()) + 1
            raise SpecError(f"line {line}: a key has more than {_MOST_DOTS} dots: nest it less")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as exc:
        if match := _FAULT.fullmatch(str(exc)):
            place = f"line {match[2]}, column {match[3]}" if match[2] else "at the end"
            raise SpecError(f"{place}: {say_syntax(match[1])}") from None
        raise SpecError(say_syntax(str(exc))) from None


def write(table: Mapping[str, Any]) -> str:
    return "\n".join(_blocks(table, ()))


def _blocks(table: Mapping[str, Any], path: tuple[str, ...], *, header: str = "") -> Iterator[str]:
    """Yield the text of a table and of each of its sub-tables, to be joined by blank lines."""
    is_flat = len(path) >= _MOST_DOTS // 2
    tables = {key: value for key, value in table.items() if type(value) is dict and not is_flat}
    lists = {
        key: value
        for key, value in table.items()
        if type(value) in (list, tuple) and value and all(type(item) is dict for item in value) and not is_flat
    }
    own = [
        f"{_key(key)} = {_value(value, key)}\n"
        for key, value in table.items()
        if key not in tables and key not in lists
    ]
    if own or header.startswith("[[") or not (tables or lists):
        yield "".join([f"{header}\n" if header else "", *own])
    for key, value in tables.items():
        below = (*path, _key(key))
        yield from _blocks(value, below, header=f"[{'.'.join(below)}]")
    for key, items in lists.items():
        below = (*path, _key(key))
        for item in items:
            yield from _blocks(item, below, header=f"[[{'.'.join(below)}]]")


def _key(key: str) -> str:
    return key if _BARE_KEY.fullmatch(key) else _text(key)


def _text(text: str) -> str:
    return write_visible(json.dumps(text, ensure_ascii=False))


def _value(value: Any, key: str) -> str:
    if value is None:
        raise SpecError(f"{shown(key, most=60)}: TOML has no null: omit the key, or use JSON or YAML")
    if type(value) is dict:
        return "{" + ", ".join(f"{_key(name)} = {_value(item, name)}" for name, item in value.items()) + "}"
    if type(value) in (list, tuple):
        return "[" + ", ".join(_value(item, key) for item in value) + "]"
    if type(value) is str and "\n" in value:  # over several lines: it may be a script
        quote = '\\"' if '"""' in value or value.endswith('"') else '"'
        lines = [_text(line)[1:-1].replace('\\"', quote) for line in value.split("\n")]
        return '"""\n' + "\n".join(lines) + '"""'
    if type(value) is str:
        return _text(value)
    return float_text(value) if type(value) is float else json.dumps(value)
