"""JSON as people write it in documents: names without quotes, comments, <PLACEHOLDERS>, missing or extra commas.

Valid JSON is read as JSON. ``...`` marks what was left open: it has no value, and its place is returned.
Each character is read once, so the time is linear in the length.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from ..documents.content import (
    MOST_LEVELS,
    MOST_VALUES,
    TOO_DEEP,
    TOO_MANY,
    check_size,
    check_values,
    put_place,
    say_syntax,
    say_twice,
)
from ..errors import SpecError
from ..storage import shown
from .reading import write_step

__all__ = ["read_relaxed"]

_TOKEN = re.compile(
    r"""
    (?P<blank> [\s,]++ | (?://|\#) [^\n]*+ | /\* (?:[^*]|\*(?!/))*+ \*/ )
  | (?P<text> "(?:[^"\\\n]|\\.)*+" | '(?:[^'\\\n]|\\.)*+' )
  | (?P<mark> [{}\[\]:] )
  | (?P<open> \.\.\. | … )
  | (?P<bare> <[^<>\n]*+> | [A-Za-z][A-Za-z0-9+.-]*+://[^\s,{}\[\]"']++ | (?:[^\s\x00-\x1f,{}\[\]:"'/<>]|/(?![/*]))++ )
    """,
    re.VERBOSE,
)
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")
_WORDS = {"true": True, "false": False, "null": None}
_ENDS = {"{": "}", "[": "]"}
_AT_END = ("end", "")


def read_relaxed(text: str, *, where: str = "") -> tuple[Any, tuple[str, ...]]:
    """Return the content of a text, and the places where it has ``...``; ``where`` begins each error.

    Raises: SpecError.
    """
    reader = _Reader(text.removeprefix("\ufeff"))
    try:
        check_size(text)
        content = reader.read()
        check_values(content)
    except SpecError as exc:
        raise SpecError(put_place(where, str(exc))) from None
    return content, tuple(reader.left_open)


class _Reader:
    """One pass over a text, one token ahead."""

    def __init__(self, text: str) -> None:
        self.left_open: list[str] = []
        self._text = text
        self._at = 0  # where the token begins
        self._num_values = 0
        self._tokens = self._split()
        self._kind, self._token = _AT_END

    def read(self) -> Any:
        self._step()
        value = self._value("", 0)
        if self._kind != "end":
            raise self._fault(f"{shown(repr(self._token), most=60)} follows the end: leave it out")
        return value

    def _split(self) -> Iterator[tuple[str, str]]:
        end = 0
        while end < len(self._text):
            self._at = end
            found = _TOKEN.match(self._text, end)
            if found is None:
                raise self._fault(f"unexpected or unclosed {self._text[end]!r}")
            end = found.end()
            if found.lastgroup != "blank":
                yield str(found.lastgroup), found[0]
        self._at = end

    def _step(self) -> str:
        """Return the token, and advance to the next one."""
        before = self._token
        self._kind, self._token = next(self._tokens, _AT_END)
        return before

    def _value(self, place: str, level: int) -> Any:
        self._num_values += 1
        if self._num_values > MOST_VALUES:
            raise self._fault(TOO_MANY)
        if level > MOST_LEVELS:
            raise self._fault(TOO_DEEP)
        if self._token in _ENDS and self._kind == "mark":
            return self._fields(place, level) if self._step() == "{" else self._items(place, level)
        if self._kind in ("text", "bare"):
            value = self._text_of() if self._kind == "text" else self._word()
            self._step()
            return value
        raise self._unexpected("give a value")

    def _fields(self, place: str, level: int) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        while not self._is_end("}", place):
            if self._kind not in ("text", "bare"):
                raise self._unexpected("give the name of a field")
            name = self._text_of() if self._kind == "text" else self._token
            if name in fields:
                raise self._fault(say_twice(name))
            self._step()
            if (self._kind, self._token) != ("mark", ":"):
                raise self._unexpected(f"give a colon, and the value of {shown(repr(name), most=60)}")
            self._step()
            below = write_step(place, name)
            if self._kind == "open":
                self.left_open.append(below)
                self._step()
            else:
                fields[name] = self._value(below, level + 1)
        return fields

    def _items(self, place: str, level: int) -> list[Any]:
        items: list[Any] = []
        while not self._is_end("]", place):
            items.append(self._value(write_step(place, len(items)), level + 1))
        return items

    def _is_end(self, end: str, place: str) -> bool:
        """Skip ``...``; skip the ``end`` of an object or a list if it is next, and return whether it was."""
        while self._kind == "open":
            self.left_open.append(place)
            self._step()
        if (self._kind, self._token) != ("mark", end):
            return False
        self._step()
        return True

    def _text_of(self) -> str:
        token = self._token
        if token[0] == "'":
            token = '"' + re.sub(r"""\\(')|(")""", lambda found: found[1] or '\\"', token[1:-1]) + '"'
        try:
            text: str = json.loads(token, strict=False)
        except json.JSONDecodeError as exc:
            raise self._fault(say_syntax(exc.msg)) from None
        return text

    def _word(self) -> Any:
        word = self._token
        if _NUMBER.fullmatch(word) is None:
            return _WORDS.get(word, word)
        try:
            return json.loads(word)
        except ValueError:  # int() limits the number of digits
            raise self._fault("a number has too many digits") from None

    def _unexpected(self, wanted: str) -> SpecError:
        if self._kind == "end":
            return self._fault("unexpected end of the text")
        return self._fault(f"unexpected {shown(repr(self._token), most=60)}: {wanted}")

    def _fault(self, fault: str) -> SpecError:
        before = self._text[: self._at]
        line = before.count("\n") + 1
        return SpecError(f"line {line}, column {len(before) - before.rfind(chr(10))}: {fault}")
