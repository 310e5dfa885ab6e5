"""Names of pipeline files: plain names, which cannot lead out of a folder."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from ..errors import SpecError
from ..plan.names import MOST_NAME_CHARS, NAME_RULE
from ..spec.words import is_job_name
from ..text import show

__all__ = ["SUFFIX", "check_name", "free_name"]

SUFFIX = ".toml"


def check_name(name: str) -> str:
    """Return the name of a pipeline, without the suffix of a file. Raises: SpecError."""
    stem = name.removesuffix(SUFFIX)
    if not is_job_name(stem):
        raise SpecError(f"name {show(name)}: give {NAME_RULE}, such as mnist-2")
    return stem


def free_name(wanted: str, is_taken: Callable[[str], bool]) -> str:
    """Return ``wanted``, or ``wanted-2``, ``wanted-3``, ...: the first that is not taken."""
    if not is_taken(wanted):
        return wanted
    base, dash, number = wanted.rpartition("-")
    if not (dash and base and number.isdecimal() and number.isascii() and len(number) < 6):
        base = wanted
    for count in itertools.count(2):
        end = f"-{count}"
        name = base[: MOST_NAME_CHARS - len(end)] + end
        if not is_taken(name):
            return name
    raise AssertionError("there is always a next number")
