"""Limits of every document: its size, depth and types."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date, time

from ..errors import SpecError
from ..storage import shown

MOST_BYTES = 1_000_000
MOST_LEVELS = 100
MOST_VALUES = 100_000
# Control characters and direction marks, which would show a reader something else than the content.
_TURNS = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
TOO_LARGE = f"larger than {MOST_BYTES // 1_000_000} MB: shorten it"
TOO_DEEP = f"nested more than {MOST_LEVELS} levels deep: nest it less"
TOO_MANY = f"has more than {MOST_VALUES} values: shorten it"


def check_size(text: str) -> None:
    if len(text.encode("utf-8", "surrogatepass")) > MOST_BYTES:
        raise SpecError(TOO_LARGE)


@dataclass(frozen=True)
class _Place:
    """The place of a value, formatted only for an error, as many values may share a long prefix."""

    above: _Place | None = None
    step: str | int = ""
    level: int = 0

    def __str__(self) -> str:
        steps: list[str] = []
        place: _Place | None = self
        while place is not None and place.above is not None:
            steps.append(f"[{place.step}]" if isinstance(place.step, int) else f".{shown(place.step, most=60)}")
            place = place.above
        return "".join(reversed(steps)).removeprefix(".")


def check_values(content: object) -> None:
    """Check that a document can hold the content. Raises: SpecError, also for a value that contains itself."""
    todo: list[tuple[object, _Place]] = [(content, _Place())]
    num_values = num_chars = 0
    while todo:
        value, place = todo.pop()
        num_values += 1
        num_chars += len(value) if isinstance(value, str) else 0  # before writing them takes minutes
        if num_chars > MOST_BYTES:
            raise SpecError(TOO_LARGE)
        below: Iterator[tuple[str | int, object]] = iter(())
        if type(value) is dict:
            for key in value:
                if fault := _find_fault(key) if type(key) is str else f"{_show(key)} is not a string: quote it":
                    raise SpecError(put_place(str(place), f"the key {fault}"))
            below = iter(value.items())
        elif type(value) in (list, tuple):
            below = iter(enumerate(value))  # type: ignore[arg-type]  # it is one of these
        elif fault := _find_fault(value):
            raise SpecError(put_place(str(place), fault))
        for step, item in below:
            if place.level == MOST_LEVELS:
                raise SpecError(TOO_DEEP)
            if num_values + len(todo) >= MOST_VALUES:
                raise SpecError(TOO_MANY)
            todo.append((item, _Place(place, step, place.level + 1)))


def _find_fault(value: object) -> str:
    if type(value) is str:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            return f"{_show(value)} cannot be encoded in UTF-8"
    elif type(value) is int:  # no repr() of it, which raises for a long one
        return "" if -(1 << 63) <= value < 1 << 63 else "a number of more than 64 bits"
    elif type(value) is float:
        return "" if math.isfinite(value) else f"{value} is not a finite number"
    elif isinstance(value, date | time):
        return f"{value.isoformat()} is a date or a time, which is not allowed: quote it to make it a string"
    elif value is not None and type(value) is not bool:
        return f"{_show(value)} is of type {type(value).__name__}, which is not allowed: quote it to make it a string"
    return ""


def _show(value: object) -> str:
    return shown(repr(value), most=60)


def put_place(where: str, fault: str) -> str:
    return f"{where}: {fault}" if where else fault


def say_twice(name: str) -> str:
    return f"duplicate key {_show(name)}: remove one of the two"


def say_syntax(text: str) -> str:
    """Format the message of a standard library parser in our style: first letter in lower case."""
    return shown(text[:1].lower() + text[1:])


def write_visible(text: str) -> str:
    """Escape invisible characters of a document, where they occur in double quotes only."""
    return _TURNS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def float_text(value: float) -> str:
    """Format a float with a point, as YAML 1.1 reads ``1e+16`` as a string."""
    text = repr(value)
    return text if "." in text else text.replace("e", ".0e")
