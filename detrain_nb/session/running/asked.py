"""Checks of arguments: a value of the wrong type raises SpecError before anything is done."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Mapping
from typing import Any

from ...errors import SpecError

__all__ = [
    "LONGEST_S",
    "check_flag",
    "check_mapping",
    "check_number",
    "check_paths",
    "check_seconds",
    "check_text",
    "check_whole",
    "names_of",
]

LONGEST_S = 1e8  # three years; much larger values overflow a clock of the system or of torch


def names_of(names: str | Iterable[str], what: str = "names") -> list[str]:
    """Return one name or several as a list without duplicates. Raises: SpecError."""
    listed = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else [None]
    if not listed or not all(isinstance(name, str) and name for name in listed):
        raise SpecError(f"{what} {names!r}: give a name, or a list of names")
    return list(dict.fromkeys(map(str, listed)))


def check_text(what: str, value: Any) -> None:
    """Check that ``value`` is a str. Raises: SpecError."""
    if not isinstance(value, str):
        raise SpecError(f"{what} {value!r}: give a str")


def check_flag(what: str, value: Any) -> None:
    """Check that ``value`` is a bool. Raises: SpecError."""
    if not isinstance(value, bool):
        raise SpecError(f"{what} {value!r}: give True or False")


def check_number(what: str, value: Any) -> None:
    """Check that ``value`` is a number. Raises: SpecError."""
    if isinstance(value, bool) or not hasattr(value, "__float__"):  # numpy's numbers have it too
        raise SpecError(f"{what} {value!r}: give a number")


def check_seconds(what: str, value: Any, *, is_more_than_0: bool = False) -> None:
    """Check that ``value`` is a number of seconds in the allowed range. Raises: SpecError."""
    check_number(what, value)
    if not 0 <= value <= LONGEST_S or is_more_than_0 and not value:
        least = "more than 0" if is_more_than_0 else "0 or more"
        raise SpecError(f"{what} {value}: give a number of seconds, {least}, at most {LONGEST_S:.0f}")


def check_whole(what: str, value: Any, *, least: int | None = None) -> int:
    """Return ``value``, which may be an integer of numpy, as an int. Raises: SpecError."""
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise SpecError(f"{what} {value!r}: give a whole number")
    if least is not None and value < least:
        raise SpecError(f"{what} {value}: give a whole number, {least} or more")
    return operator.index(value)


def check_mapping(what: str, value: Any) -> None:
    """Check that ``value`` is a mapping with str keys. Raises: SpecError."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        kind = type(value).__name__  # the values may be secrets, or gigabytes
        raise SpecError(f"{what}: give a dict {{name: value}} with str keys, not {kind}")


def check_paths(paths: Any, what: str = "paths") -> list[str]:
    """Return one path or several as a list of str. Raises: SpecError."""
    is_one = isinstance(paths, (str, os.PathLike))
    listed: list[Any] = [paths] if is_one else list(paths) if isinstance(paths, Iterable) else [None]
    if not all(isinstance(path, (str, os.PathLike)) for path in listed):
        raise SpecError(f"{what} {paths!r}: give a path, or a list of paths")
    return [os.fspath(path) for path in listed]
