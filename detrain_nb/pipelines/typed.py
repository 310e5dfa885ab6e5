"""The input of a field and the value that it stands for, by the type of the field, as on a command line."""

from __future__ import annotations

import json
import shlex
from typing import Any

from ..errors import SpecError
from ..plan.fields import parse_text, read_json
from .form_fields import FieldInfo

__all__ = ["NOTHING", "Typed", "read_typed", "size_of", "write_typed"]

Typed = str | bool  # a bool for a checkbox, a text for all else
NOTHING = object()  # no value was given, so the default holds


def read_typed(field: FieldInfo, typed: object) -> Any:
    """Return the typed value, or NOTHING; an invalid text is returned unchanged, for the spec to explain.

    Raises: SpecError if the spec could not explain what is wrong with the text.
    """
    if not isinstance(typed, str):
        return NOTHING if typed is None else typed
    if not typed or (not typed.strip() and field.kind not in ("text", "area")):
        return NOTHING
    value = _read(field, typed)
    return NOTHING if value is None else value


def write_typed(field: FieldInfo, value: object) -> Typed:
    """Return the input for any value of a document; `read_typed` reads a valid value back as equal."""
    if field.kind == "flag" and isinstance(value, bool):
        return value
    if isinstance(value, str):
        return value
    if value == [] and field.default_value:
        return "[]"  # an empty input would mean the default
    text = _write(field, value)
    return text if text is not None and _is_read_back(field, text, value) else json.dumps(value, ensure_ascii=False)


def size_of(typed: object) -> int:
    """Count the characters of input as JSON."""
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
            pass  # it is a word that begins with [
    try:
        return shlex.split(typed)
    except ValueError as exc:
        raise SpecError(f"{str(exc)[:1].lower()}{str(exc)[1:]}: write the arguments as in a shell") from None


def _read_variables(typed: str) -> Any:
    """Read lines of NAME=value."""
    if typed.lstrip().startswith("{"):
        try:
            return read_json(typed, where="")
        except SpecError as exc:
            raise SpecError(f"is not JSON{exc}: write one NAME=value per line") from None
    found: dict[str, str] = {}
    for number, line in enumerate(typed.split("\n"), 1):
        name, equals, value = line.partition("=")
        if not line.strip():
            continue
        if not equals or not name.strip():
            raise SpecError(
                f"line {number} is not a variable: write NAME=value; for a secret only its name, in the field below"
            )
        if name.strip() in found:
            raise SpecError(f"line {number}: {name.strip()[:60]} appears twice: remove one")
        found[name.strip()] = value
    return found or None


def _write(field: FieldInfo, value: object) -> str | None:
    """Write a value the way people do; None if there is no such way."""
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
