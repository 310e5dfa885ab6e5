"""What is typed into a field, and the value that it stands for: by the type of the field, as on a command line."""

from __future__ import annotations

import json
import shlex
from typing import Any

from ..errors import SpecError
from ..plan.fields import parse_text, read_json
from .form_fields import FieldInfo

__all__ = ["NOTHING", "Typed", "read_typed", "size_of", "write_typed"]

Typed = str | bool  # a box is ticked or not, all else is a text
NOTHING = object()  # no value was given: the default holds


def read_typed(field: FieldInfo, typed: object) -> Any:
    """Return the value that was typed, or NOTHING; a text that is none goes on as it is, for the spec to say why.

    Raises: SpecError where the spec would not know what is wrong with the text.
    """
    if not isinstance(typed, str):
        return NOTHING if typed is None else typed
    if not typed or (not typed.strip() and field.kind not in ("text", "area")):
        return NOTHING
    value = _read(field, typed)
    return NOTHING if value is None else value


def write_typed(field: FieldInfo, value: object) -> Typed:
    """Return what is typed for a value of a document, whatever it is: `read_typed` reads a right one as equal."""
    if field.kind == "flag" and isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value
    if value == [] and field.default_value:
        return "[]"  # nothing would be the default
    text = _write(field, value)
    return text if text is not None and _is_read_back(field, text, value) else json.dumps(value, ensure_ascii=False)


def size_of(typed: object) -> int:
    """Count the characters of all that is typed, as JSON."""
    return len(json.dumps(typed, ensure_ascii=False))


def _read(field: FieldInfo, typed: str) -> Any:
    match field.kind:
        case "words":
            return _read_words(typed)
        case "variables":
            return _read_variables(typed)
        case "lines":
            return typed.split("\n")
        case "list":
            return _parse(field, typed.strip().rstrip(","))
        case "text" | "area" if not field.choices:
            return typed
        case _:
            return _parse(field, typed.strip())


def _parse(field: FieldInfo, typed: str) -> Any:
    try:
        return parse_text(typed, field.annotation, where=field.path)
    except SpecError:
        return typed


def _read_words(typed: str) -> Any:
    if typed.lstrip().startswith("["):
        try:
            return read_json(typed, where="")
        except SpecError:
            pass  # a word that begins so
    try:
        return shlex.split(typed)
    except ValueError as exc:
        raise SpecError(f"{str(exc)[:1].lower()}{str(exc)[1:]}: write the arguments as in a shell") from None


def _read_variables(typed: str) -> Any:
    """Lines with NAME=value."""
    if typed.lstrip().startswith("{"):
        try:
            return read_json(typed, where="")
        except SpecError as exc:
            raise SpecError(f"is no JSON{exc}: write a line NAME=value for each") from None
    found: dict[str, str] = {}
    for number, line in enumerate(typed.split("\n"), 1):
        name, equals, value = line.partition("=")
        if not line.strip():
            continue
        if not equals or not name.strip():
            raise SpecError(f"line {number} is no variable: write NAME=value; a secret goes by its name alone below")
        if name.strip() in found:
            raise SpecError(f"line {number}: {name.strip()[:60]} stands twice: leave out one")
        found[name.strip()] = value
    return found or None


def _write(field: FieldInfo, value: object) -> str | None:
    """The way people write it; None where there is none."""
    if isinstance(value, list | tuple):
        if not all(type(each) in (str, int) for each in value):
            return None
        texts = [str(each) for each in value]
        return {"words": shlex.join, "lines": "\n".join}.get(field.kind, ", ".join)(texts)
    if isinstance(value, dict):
        return "\n".join(f"{name}={each}" for name, each in value.items())
    return None if value is None or isinstance(value, bool) else repr(value)


def _is_read_back(field: FieldInfo, text: str, value: object) -> bool:
    try:
        found = read_typed(field, text)
    except SpecError:
        return False
    return found is not NOTHING and json.dumps(found) == json.dumps(value)
