"""Documents that people write in JSON, TOML or YAML, chosen by the suffix, at a path or a URL.

The result is plain: dicts with string keys, lists, strings, 64-bit integers, finite floats, booleans, None. Its size is
limited before it costs time or memory. What not every format can hold (dates, NaN, duplicate keys, the tags, anchors
and aliases of YAML) is refused with its place, except None, which only TOML cannot write.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from ..errors import SpecError
from ..storage import Location, locate, named_errors, shown
from . import json_document, toml_document, yaml_document
from .content import MOST_BYTES, TOO_DEEP, TOO_LARGE, check_size, check_values, put_place

__all__ = [
    "SUFFIXES",
    "format_document",
    "parse_content",
    "parse_document",
    "read_content",
    "read_document",
    "read_text",
    "suffix_of",
    "write_document",
]

SUFFIXES = (".json", ".toml", ".yaml", ".yml")


def suffix_of(where: str | os.PathLike[str]) -> str:
    """Return the suffix of a path or a URL, which selects the format. Raises: SpecError for an unknown one."""
    name = os.fsdecode(where)
    if "://" in name:  # the rest of a URL may be secret
        name = name.partition("?")[0].rpartition("/")[2]
    suffix = PurePath(name).suffix.lower()
    if suffix not in SUFFIXES:
        raise SpecError(f"{shown(name)}: the name must end in one of {', '.join(SUFFIXES)}")
    return suffix


def read_document(where: str | os.PathLike[str]) -> dict[str, Any]:
    """Read a document at a path or a URL of fsspec. Raises: SpecError with the file and the place in it."""
    return _only_fields(read_content(where), locate(where).name)


def read_content(where: str | os.PathLike[str]) -> Any:
    """Read the content of a document, which may be a list. Raises: SpecError."""
    location = locate(where)
    return parse_content(read_text(location), suffix_of(where), where=location.name)


def read_text(location: Location) -> str:
    """Read a text file of limited size. Raises: SpecError."""
    with named_errors(location.name, "read", kind_of=lambda exc: SpecError), location.open() as file:
        data: bytes = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise SpecError(f"{location.name}: {TOO_LARGE}")
    try:
        return data.decode("utf-8-sig")  # Windows editors begin files with a byte order mark
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise SpecError(f"{location.name}: line {line}: is not UTF-8: save the file as UTF-8") from None


def parse_document(text: str, suffix: str, *, where: str = "") -> dict[str, Any]:
    """Parse a document that is a table of fields; errors begin with ``where``. Raises: SpecError."""
    return _only_fields(parse_content(text, suffix, where=where), where)


def parse_content(text: str, suffix: str, *, where: str = "") -> Any:
    """Parse the content of a document, which may be a list. Raises: SpecError."""
    read = _READERS[_known(suffix)]
    try:
        check_size(text)
        content = read(text.removeprefix("\ufeff"))
        check_values(content)
    except RecursionError:
        raise SpecError(put_place(where, TOO_DEEP)) from None
    except SpecError as exc:
        raise SpecError(put_place(where, str(exc))) from None
    except ValueError:  # int() of more digits than Python takes
        raise SpecError(put_place(where, "a number has too many digits")) from None
    return content


def write_document(where: str | os.PathLike[str], data: Mapping[str, Any]) -> None:
    """Write a document atomically to a path or a URL of fsspec. Raises: SpecError, DetrainError."""
    location = locate(where)
    location.write(format_document(data, suffix_of(where), where=location.name).encode("utf-8"))


def format_document(data: Mapping[str, Any], suffix: str, *, where: str = "") -> str:
    """Format a document that `parse_document` reads as equal data. Raises: SpecError, also for None in TOML."""
    write = _WRITERS[_known(suffix)]
    content = dict(data)
    try:
        check_values(content)
        text = write(content)
        check_size(text)
    except SpecError as exc:
        raise SpecError(put_place(where, str(exc))) from None
    return text


def _known(suffix: str) -> str:
    if suffix.lower() not in SUFFIXES:
        raise SpecError(f"{suffix!r} is not a document format: give one of {', '.join(SUFFIXES)}")
    return suffix.lower()


def _only_fields(content: object, where: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise SpecError(put_place(where, 'must be a table of named fields, such as {"name": "mnist"} in JSON'))
    return content


_READERS: Mapping[str, Callable[[str], Any]] = {
    ".json": json_document.read,
    ".toml": toml_document.read,
    ".yaml": yaml_document.read,
    ".yml": yaml_document.read,
}
_WRITERS: Mapping[str, Callable[[dict[str, Any]], str]] = {
    ".json": json_document.write,
    ".toml": toml_document.write,
    ".yaml": yaml_document.write,
    ".yml": yaml_document.write,
}
