"""Tab and Shift+Tab in the body of a %%distributed cell are answered by the ranks, on its first line by its options.

The kernel's own completion knows only the notebook's names, and a matcher suppresses them only when it found something;
so the kernel's two methods are wrapped instead.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from IPython.utils.tokenutil import token_at_cursor

from ..session.session import Session
from .options import cell_parser, pull_parser, push_parser, session_parser

_CELL_MAGICS = ("%%distributed", "%%rank")
_LINE_PARSERS = {"%distributed": session_parser, "%pull": pull_parser, "%push": push_parser}


def route_to_ranks(ipython: Any, session: Callable[[], Session | None]) -> Callable[[], None]:
    """Wrap the kernel's completion and inspection; returns what undoes it."""
    kernel = getattr(ipython, "kernel", None)
    if kernel is None:
        return lambda: None
    complete, inspect = kernel.do_complete, kernel.do_inspect

    def do_complete(code: str, cursor_pos: int) -> Any:
        start = _body_start(code, cursor_pos)
        options = _options(code[:cursor_pos]) if start is None else None
        if options is not None:
            word = code[:cursor_pos].split()[-1] if not code[:cursor_pos].endswith(" ") else ""
            return _reply(sorted(o for o in options if o.startswith(word)), cursor_pos - len(word), cursor_pos)
        running = session()
        if start is None or running is None:
            return complete(code, cursor_pos)
        found = running.complete(code[start:], cursor_pos - start)
        if found is None:
            return _reply([], cursor_pos, cursor_pos)
        return _reply(found.matches, found.start + start, found.end + start, found.types)

    def do_inspect(code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        running = session()
        if running is None or _body_start(code, cursor_pos) is None:
            return inspect(code, cursor_pos, detail_level, omit_sections)
        text = running.inspect(token_at_cursor(code, cursor_pos), detail_level)
        return {"status": "ok", "found": bool(text), "data": {"text/plain": text} if text else {}, "metadata": {}}

    kernel.do_complete, kernel.do_inspect = do_complete, do_inspect

    def undo() -> None:
        kernel.do_complete, kernel.do_inspect = complete, inspect

    return undo


def _body_start(code: str, position: int) -> int | None:
    """Where the body of a cell for the ranks begins, when ``position`` is in it."""
    first, newline, _ = code.partition("\n")
    is_ours = first.split(maxsplit=1)[:1] and first.split(maxsplit=1)[0] in _CELL_MAGICS
    return len(first) + 1 if is_ours and newline and position > len(first) else None


def _options(before: str) -> list[str] | None:
    """What may stand next on the line of a magic of ours; None where the line is not one."""
    line = before.rpartition("\n")[2].lstrip()
    prog, space, rest = line.partition(" ")
    if not space:
        return None
    if prog in _CELL_MAGICS:
        return _names(cell_parser(prog))
    if prog not in _LINE_PARSERS:
        return None
    parser: argparse.ArgumentParser = _LINE_PARSERS[prog]()
    commands = next((a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)
    if commands is None:
        return _names(parser) if rest.rpartition(" ")[2].startswith("-") else None
    command, has_command, _ = rest.partition(" ")
    if not has_command:
        return list(commands)
    return _names(commands[command]) if command in commands else []


def _names(parser: argparse.ArgumentParser) -> list[str]:
    """The options of a parser, each once, by its long name where it has one."""
    return [max(action.option_strings, key=len) for action in parser._actions if action.option_strings]


def _reply(matches: list[str], start: int, end: int, types: list[str] | None = None) -> dict[str, Any]:
    described = [
        {"text": match, "start": start, "end": end, "type": kind}
        for match, kind in zip(matches, types or ["option"] * len(matches), strict=False)
    ]
    return {
        "status": "ok",
        "matches": matches,
        "cursor_start": start,
        "cursor_end": end,
        "metadata": {"_jupyter_types_experimental": described},
    }
