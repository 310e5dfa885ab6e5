"""Fields read by their types: dataclasses from JSON, and overrides such as ``--training.epochs 2``.

For classes other than dataclasses, pass ``fields_of``, which returns the fields of a class with their types.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import re
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..errors import SpecError
from ..text import show
from .choices import ONE_OF

FieldsOf = Callable[[Any], Mapping[str, Any] | None]  # the fields of a class with their types; None for other types
_T = TypeVar("_T")
_WHOLE = re.compile(r"[+-]?[0-9](?:_?[0-9]){0,30}")
_ARGUMENTS = "source.arguments"
_AT_THE_TOP = {"artifacts", "checkpoint", "description", "env", "image", "secrets"}
_FLAGS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)


def nearest(name: str, names: Iterable[str], *, before: str = "") -> str:
    """Suggest the closest of ``names`` to an unknown ``name``, prefixed by ``before``, or else list them."""
    there = list(names)
    close = difflib.get_close_matches(name.lower()[:100], there, n=1)
    return f"did you mean {before + close[0]!r}?" if close else f"choose from {', '.join(there)}"


def read_json(text: str, *, where: str) -> Any:
    """Parse JSON that may be invalid or hostile, but is not long. Raises: SpecError."""
    try:
        return json.loads(text, parse_constant=_no_number)
    except RecursionError:
        raise SpecError(f"{where}: nested too deeply") from None
    except ValueError as exc:
        raise SpecError(f"{where}: {exc}") from None


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a number")


# Dataclasses from data


def dataclass_fields(kind: Any) -> Mapping[str, Any] | None:
    """Return the fields of a dataclass with their types; None for any other type."""
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return None
    hints = get_type_hints(kind)
    return {each.name: hints[each.name] for each in dataclasses.fields(kind)}


def build(kind: type[_T], data: object, *, where: str) -> _T:
    """Build a dataclass from parsed JSON, checking every value against its field's type; unknown keys are ignored.

    Raises: SpecError with the field.
    """
    made: _T = _conform(data, kind, where)
    return made


def _conform(value: object, hint: Any, where: str) -> Any:
    hint = _bare(hint)
    if (fields := dataclass_fields(hint)) is not None:
        return _conform_dataclass(value, hint, fields, where)
    origin, inner = get_origin(hint), get_args(hint)
    if _is_union(origin):
        return _conform_to_one(value, hint, where)
    if origin is Literal and any(value == each and type(value) is type(each) for each in inner):
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_conform(each, inner[0], f"{where}[{index}]") for index, each in enumerate(value))
    if origin in (dict, Mapping) and isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return {name: _conform(each, inner[1], f"{where}.{name}") for name, each in value.items()}
    if hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        if abs(value) <= sys.float_info.max:  # an int may be larger than any float
            return float(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    raise SpecError(f"{where} {show(value)}: give {_describe(hint)}")


def _conform_to_one(value: object, hint: Any, where: str) -> Any:
    for kind in _alternatives(hint):
        if dataclass_fields(kind) is not None and isinstance(value, Mapping):
            return _conform(value, kind, where)  # its error names the inner field
        with contextlib.suppress(SpecError):
            return _conform(value, kind, where)
    raise SpecError(f"{where} {show(value)}: give {_describe(hint)}")


def _conform_dataclass(value: object, kind: Any, fields: Mapping[str, Any], where: str) -> Any:
    if not isinstance(value, Mapping):
        raise SpecError(f"{where} {show(value)}: give a table of fields")
    missing = [
        each.name for each in dataclasses.fields(kind) if each.name not in value and each.default is dataclasses.MISSING
    ]
    if missing:
        raise SpecError(f"{where}: {missing[0]} is missing")
    given = {name: _conform(value[name], hint, f"{where}.{name}") for name, hint in fields.items() if name in value}
    return kind(**given)


# Overrides


def split_overrides(words: Sequence[str], *, is_ours: Callable[[str], bool]) -> tuple[dict[str, str | None], list[str]]:
    """Split ``words`` into the options ``--name value`` and ``--name=value`` with ``is_ours(name)``, and all others.

    The value is None when another option, or nothing, follows, except for the script's arguments, which may begin
    with ``--``. After a word ``--`` all words count as others.
    """
    found: dict[str, str | None] = {}
    others: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if word == "--":
            return found, [*others, word, *rest]
        if not word.startswith("--") or not is_ours(name):
            others.append(word)
        elif equals:
            found[name] = value
        else:
            is_value = rest and (name == _ARGUMENTS or not rest[0].startswith("--"))
            found[name] = rest.pop(0) if is_value else None
    return found, others


def take_fields(words: Sequence[str], *, has_whole: bool = True) -> tuple[list[str], list[str]]:
    """Separate the words that set fields of a spec, such as ``--training.epochs 2``; return these, and the others.

    Each field becomes one word. ``has_whole`` includes the top-level fields without a dot, such as ``--artifacts``,
    which are not options of ours.
    """
    fields, others = split_overrides(words, is_ours=lambda name: "." in name or (has_whole and name in _AT_THE_TOP))
    return [f"--{name}" if text is None else f"--{name}={text}" for name, text in fields.items()], others


def read_override(
    name: str, text: str | None, kind: Any, *, fields_of: FieldsOf = dataclass_fields, where: str = ""
) -> Any:
    """Read ``text`` as a value of the field ``name``, such as ``training.epochs``, of the class ``kind``.

    None as ``text`` sets a boolean field to true. Raises: SpecError.
    """
    hint = kind
    told, before = where + name, where
    for part in name.split("."):
        inner = next((each for each in _alternatives(hint) if fields_of(each) is not None), None)
        if inner is not None:
            fields = fields_of(inner) or {}
            if part not in fields:
                raise SpecError(f"{told!r} is not a field: {nearest(part, fields, before=before)}")
            before += f"{part}."
            hint = fields[part]
        elif get_origin(found := _bare(hint)) is dict:
            hint = get_args(found)[1]
        else:
            raise SpecError(f"{told!r} is not a field: {name.rpartition('.')[0]} has no fields")
    if text is None:
        if bool not in _alternatives(hint):
            raise SpecError(f"{told}: no value, give {_describe(hint)}; if it begins with --, write {told}=...")
        return True
    return parse_text(text, hint, where=told)


def parse_text(text: str, hint: Any, *, where: str) -> Any:
    """Read ``text`` as a value of the type ``hint``: a number, true or false, none, a comma-separated list, or JSON.

    Raises: SpecError.
    """
    kinds = _alternatives(hint)
    for kind in sorted(kinds, key=lambda kind: kind is str):  # last, as everything is a str
        found = _read_as(text, kind)
        if found is not _NOTHING:
            return found
    raise SpecError(f"{where} {show(text)}: give {_describe(hint)}")


_NOTHING = object()


def _read_as(text: str, kind: Any) -> Any:
    """Return the value of ``text`` as that kind; ``_NOTHING`` when it is not one."""
    origin = get_origin(kind)
    if kind is str:
        return text
    if kind is type(None):
        return None if text.lower() in ("none", "null") else _NOTHING
    if kind is bool:
        return _FLAGS.get(text.lower(), _NOTHING)
    if kind is int:
        return int(text) if _WHOLE.fullmatch(text) else _NOTHING
    if kind is float:
        return _read_float(text)
    if origin is Literal:
        return next((choice for choice in get_args(kind) if str(choice).lower() == text.lower()), _NOTHING)
    if origin is tuple and not text.lstrip().startswith("["):
        return [_read_item(part.strip(), get_args(kind)[0]) for part in text.split(",")] if text else []
    try:
        return read_json(text, where="")
    except SpecError:
        return _NOTHING


def _read_item(text: str, hint: Any) -> Any:
    found = [value for kind in _alternatives(hint) if (value := _read_as(text, kind)) is not _NOTHING]
    return found[0] if found else text


def _read_float(text: str) -> Any:
    try:
        number = float(text)
    except ValueError:
        return _NOTHING
    return number if math.isfinite(number) else _NOTHING


def set_fields(data: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``data``, a tree of dicts, with the ``values`` of dotted names set and the fields they exclude removed."""
    changed = json.loads(json.dumps(data))
    for name, value in values.items():
        for other in _others_instead(name):
            _table(changed, other).pop(other.rpartition(".")[2], None)
        _table(changed, name)[name.rpartition(".")[2]] = value
    return dict(changed)


def _others_instead(name: str) -> list[str]:
    """Return the fields that exclude the named one, or the one that contains it."""
    for group in ONE_OF:
        if any(name == each or name.startswith(f"{each}.") for each in group):
            return [each for each in group if name != each and not name.startswith(f"{each}.")]
    return []


def _table(data: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the dict that holds the last part of a dotted name, created if missing."""
    for part in name.split(".")[:-1]:
        if not isinstance(data.get(part), dict):
            data[part] = {}
        data = data[part]
    return data


# Types


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _is_union(origin: Any) -> bool:
    return origin in (Union, types.UnionType)


def _alternatives(hint: Any) -> list[Any]:
    hint = _bare(hint)
    if not _is_union(get_origin(hint)):
        return [hint]
    return [found for each in get_args(hint) for found in _alternatives(each)]


def _describe(hint: Any) -> str:
    """Describe the values of a type, for an error."""
    return " or ".join(dict.fromkeys(map(_describe_one, _alternatives(hint))))


def _describe_one(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return ", ".join(map(repr, get_args(kind)))
    if get_origin(kind) is tuple:
        return f"a list, each {_describe(get_args(kind)[0])}"
    known = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", type(None): "none"}
    return known.get(kind, "a table of fields, as JSON")
