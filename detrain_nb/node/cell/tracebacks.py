"""The report of an error: its text, and those lines of its traceback that are the user's."""

from __future__ import annotations

import builtins
import linecache
import os
import sys
import traceback
from typing import Any

from ...errors import SessionError
from ..system import own_files

_LONGEST_CHAIN = 20
_MOST_PARTS = 20  # of a group of errors
_GROUP: Any = getattr(builtins, "BaseExceptionGroup", ())
_END_FRAMES = 12  # of a long traceback, shown from either end
_AFTER_EXIT = "the cell ends here; the rank keeps its variables"
_OUR_PACKAGE = os.path.join(own_files.PACKAGE, "")


def describe_error(error: BaseException) -> str:
    """Format the traceback and the text of an error, as lines."""
    return "\n".join([*user_traceback(error), error_summary(error), ""])


def error_summary(error: BaseException) -> str:
    """Return the last line of a traceback."""
    message = error_message(error)
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def error_message(error: BaseException) -> str:
    """Return the text of an error, even if a user's class fails to make one."""
    try:
        if isinstance(error, SystemExit):
            return f"{'' if error.code is None else f'{error.code}: '}{_AFTER_EXIT}"
        return "\n".join([str(error), *map(str, getattr(error, "__notes__", ()))])
    except Exception as exc:  # noqa: BLE001  anything may be in a user's __str__
        return f"<no text: {type(exc).__name__} in __str__>"


def user_traceback(error: BaseException, *, is_own_code_enough: bool = False) -> list[str]:
    """Return the lines of a traceback that are the user's: cells, own files, and the innermost frame wherever it is.

    Causes, and the errors of a group, come first. With ``is_own_code_enough``, omit them and frames of libraries.
    """
    chain = chain_of(error)
    if is_own_code_enough:  # an interrupt may come after the user's code has raised: that error has the line
        return next((own for step in chain if (own := _own_traceback(step, is_own_code_enough=True))), [])
    lines: list[str] = []
    for cause, effect in zip(reversed(chain), reversed(chain[:-1])):
        link = "caused" if effect.__cause__ is cause else "was being handled before"
        lines += [*_own_traceback(cause), error_summary(cause), f"  ... which {link}:"]
    parts = _parts_of(error)
    for number, part in enumerate(parts, 1):
        lines += [*_own_traceback(part), error_summary(part), f"  ... which is {number} of {len(parts)} in a group:"]
    return lines + _own_traceback(error)


def chain_of(error: BaseException) -> list[BaseException]:
    """Return an error, its cause, and so on; the chain may be a ring."""
    chain = [error]
    while len(chain) < _LONGEST_CHAIN:
        last = chain[-1]
        cause = last.__cause__ or (None if last.__suppress_context__ else last.__context__)
        if cause is None or any(cause is known for known in chain):
            break
        chain.append(cause)
    return chain


def _parts_of(error: BaseException) -> list[BaseException]:
    """Return the errors of a group, nested groups included. Python 3.10 has no groups."""
    found: list[BaseException] = []
    left = [error]
    while left and len(found) < _MOST_PARTS:
        first = left.pop(0)
        parts = getattr(first, "exceptions", ()) if isinstance(first, _GROUP) else ()
        left[:0] = parts
        found += [] if parts or first is error else [first]
    return found


def _own_traceback(error: BaseException, *, is_own_code_enough: bool = False) -> list[str]:
    """Return the user's lines of the traceback of one error, without its causes."""
    if isinstance(error, SyntaxError) and error.text:
        marker = " " * max(0, (error.offset or 1) - 1) + "^"
        place = f"  {_place(error.filename or '?')}, line {error.lineno}"
        return [place, f"    {error.text.rstrip()}", f"    {marker}"]
    frames = _frames(error)
    is_own_code_enough |= isinstance(error, (SessionError, SystemExit))  # frames of libraries do not help
    is_own_code_enough |= isinstance(error, KeyboardInterrupt) and not any(_is_users(f[0]) for f in frames)
    lines: list[str] = []
    shown = [f for f in frames if _is_users(f[0]) or f is frames[-1] and not is_own_code_enough]
    for index, (filename, line, function, source) in enumerate(shown):
        if _END_FRAMES <= index < len(shown) - _END_FRAMES:  # endless recursion
            if index == _END_FRAMES:
                lines.append(f"  ... {len(shown) - 2 * _END_FRAMES} more")
            continue
        lines.append(f"  {_place(filename)}, line {line}, in {function}")
        if source:
            lines.append(f"    {source}")
    return lines


def _frames(error: BaseException) -> list[tuple[str, int, str, str]]:
    frames = []
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        line = number or code.co_firstlineno  # an interrupt can come at code without a line number
        frames.append((code.co_filename, line, code.co_name, linecache.getline(code.co_filename, line).strip()))
    first = next((i for i, frame in enumerate(frames) if frame[0].startswith("<cell ")), 0)
    while len(frames) > first + 1 and frames[-1][0].startswith(own_files.ON_NODE):
        frames.pop()  # interrupts and refusals are raised in our own functions
    return frames[first:]  # frames above the cell are IPython's and ours


def _place(filename: str) -> str:
    return filename.strip("<>") if filename.startswith("<cell ") else filename


def _is_users(filename: str) -> bool:
    if filename.startswith("<cell ") or filename in ("<timed exec>", "<magic-timeit>"):
        return True
    library = (sys.prefix, sys.base_prefix, _OUR_PACKAGE, "<")
    return not filename.startswith(library) and "site-packages" not in filename
