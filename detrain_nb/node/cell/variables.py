"""The variables of a rank, and a preview of one of them: answers to the notebook, as plain values that travel.

No code of the user's classes is run, and both are bounded in time, memory and size.
"""

from __future__ import annotations

import fnmatch
import time
import types
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ...errors import DetrainError
from ...wire import AskVariables
from .described import Row, describe
from .preview import preview
from .untouched import is_of, module_of

_MOST_NAME_CHARS = 80
_LONGEST_LOOK_S = 10.0


def answer_about(
    wanted: object,
    namespace: Mapping[Any, object],
    hidden: Mapping[Any, object],
    look_up: Callable[[str], object],
) -> dict[str, Any]:
    """Answer a request of the notebook about the variables in ``namespace``, without those that are ``hidden``.

    ``{"names": PATTERNS, "limit_s": S}`` requests all that match a pattern (no pattern: all); ``{"preview": NAME,
    "limit_s": S}`` a preview of one, which ``look_up`` finds. Raises: DetrainError for anything else; what ``look_up``
    raises.
    """
    if not isinstance(wanted, dict) or not isinstance(limit_s := wanted.get("limit_s"), (int, float)):
        raise DetrainError("this rank does not understand the request about its variables")
    deadline = time.monotonic() + min(float(limit_s), _LONGEST_LOOK_S)
    if isinstance(name := wanted.get("preview"), str):
        value = look_up(name)
        return {**describe(value, deadline=deadline), **preview(value, deadline=deadline)}
    return _describe_all(_own(namespace, hidden), wanted.get("names") or [], deadline)


def _own(namespace: Mapping[Any, object], hidden: Mapping[Any, object]) -> dict[str, object]:
    """Return what the user has defined: nothing imported, predefined, or with a leading ``_``."""
    return {
        name: value
        for name, value in list(namespace.items())
        if type(name) is str
        and name[:1] != "_"
        and not (name in hidden and value is hidden[name])
        and not _is_imported(value, namespace)
    }


def _is_imported(value: object, namespace: Mapping[Any, object]) -> bool:
    """Return whether it is a module, or a function or class not defined in the user's cells."""
    if is_of(value, type):
        return module_of(value) != "__main__"  # type: ignore[arg-type]
    if type(value) is types.FunctionType:
        return value.__globals__ is not namespace
    return is_of(value, types.ModuleType) or is_of(value, types.BuiltinFunctionType)


def _describe_all(own: Mapping[str, object], patterns: Iterable[str], deadline: float) -> dict[str, Any]:
    """Describe all matching variables; those with absurd names, and the last of very many, are only counted."""
    patterns = list(patterns)
    names = [
        name
        for name in sorted(own)
        if len(name) <= _MOST_NAME_CHARS and name.isidentifier() and (not patterns or _fits(name, patterns))
    ]
    left_out = (len(names) if patterns else len(own)) - len(names[: AskVariables.MOST_NAMES])
    rows: dict[str, Row] = {name: describe(own[name], deadline=deadline) for name in names[: AskVariables.MOST_NAMES]}
    return {"rows": rows, "left_out": left_out}


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
