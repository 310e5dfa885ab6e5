"""What every document may hold: how much, how deep, of which types."""

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
# What controls a terminal, or turns the writing: a reader would see something else than what stands there.
_TURNS = re.compile("[\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
TOO_LARGE = f"larger than {MOST_BYTES // 1_000_000} MB: give less"
TOO_DEEP = f"has more than {MOST_LEVELS} levels: give fewer"
TOO_MANY = f"has more than {MOST_VALUES} values: give fewer"


def check_size(text: str) -> None:
    if len(text.encode("utf-8", "surrogatepass")) > MOST_BYTES:
        raise SpecError(TOO_LARGE)


@dataclass(frozen=True)
class _Place:
    """Where a value stands; written only when something is wrong there: there may be many values below a long name."""

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
    """Raises: SpecError for what a document cannot hold, or too much of it; a value that holds itself is too deep."""
    todo: list[tuple[object, _Place]] = [(content, _Place())]
    num_values = num_chars = 0
    while todo:
        value, place = todo.pop()
        num_values += 1
        num_chars += len(value) if isinstance(value, str) else 0  # before it takes minutes to write them
        if num_chars > MOST_BYTES:
            raise SpecError(TOO_LARGE)
        below: Iterator[tuple[str | int, object]] = iter(())
        if type(value) is dict:
            for key in value:
                if fault := _find_fault(key) if type(key) is str else f"{_show(key)} is no text: put it in quotes":
                    raise SpecError(put_place(str(place), f"the name {fault}"))
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
            return f"{_show(value)} is a text that UTF-8 cannot write"
    elif type(value) is int:  # of a long one, repr() raises
        return "" if -(1 << 63) <= value < 1 << 63 else "a number of more than 64 bits"
    elif type(value) is float:
        return "" if math.isfinite(value) else f"{value} is no finite number"
    elif isinstance(value, date | time):
        return f"{value.isoformat()} is a date or a time, which cannot stand here: a text stands in quotes"
    elif value is not None and type(value) is not bool:
        return f"{_show(value)} is of type {type(value).__name__}: put it in quotes, as a text"
    return ""


def _show(value: object) -> str:
    return shown(repr(value), most=60)


def put_place(where: str, fault: str) -> str:
    return f"{where}: {fault}" if where else fault


def say_twice(name: str) -> str:
    return f"{_show(name)} stands twice in one object: leave out one"


def say_syntax(text: str) -> str:
    """What a parser of the standard library says, as an error of ours begins."""
    return shown(text[:1].lower() + text[1:])


def write_visible(text: str) -> str:
    """Write in the text of a document, where these stand in double quotes alone, what no reader sees."""
    return _TURNS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def float_text(value: float) -> str:
    """With a point: YAML 1.1 takes ``1e+16`` for a text."""
    text = repr(value)
    return text if "." in text else text.replace("e", ".0e")
