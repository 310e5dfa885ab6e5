"""Tab and Shift+Tab: the ranks answer in the body of a %%distributed cell, options and values on a magic's line.

The kernel's own completion knows only the notebook's names, and a matcher suppresses them only if it finds something,
so the kernel's two methods are wrapped instead.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any, TypeVar

from IPython.core.error import UsageError
from IPython.utils.tokenutil import token_at_cursor

from ..errors import SpecError
from ..plan.targets import OPTIONS, TARGETS, as_typed
from ..session.session import Session
from .candidates import Candidates
from .job_options import job_parser, torchrun_parser
from .notebook import replace_methods
from .options import HelpShown, broadcast_parser, cell_parser, pull_parser, push_parser, session_parser
from .pipeline import pipeline_parser

_Answer = TypeVar("_Answer")

_CELL_MAGICS = ("%%distributed", "%%rank")
_WORD = re.compile(r"(?:\\.|[^\s\\])+")  # a space in a name is escaped by a backslash
_LINE_PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "%distributed": session_parser,
    "%pull": pull_parser,
    "%push": push_parser,
    "%broadcast": broadcast_parser,
    "%job": job_parser,
    "%pipeline": pipeline_parser,
    "%%torchrun": torchrun_parser,
}


def route_to_ranks(ipython: Any, session: Callable[[], Session | None]) -> Callable[[], None]:
    """Wrap the kernel's completion and inspection; returns the undo."""
    kernel = getattr(ipython, "kernel", None)
    if kernel is None:
        return lambda: None
    complete, inspect = kernel.do_complete, kernel.do_inspect
    candidates = Candidates(session, ipython)

    def do_complete(code: str, cursor_pos: int) -> Any:
        start = _body_start(code, cursor_pos)
        found_here = _on_line(code[:cursor_pos], candidates) if start is None else None
        if found_here is not None:
            matches, word = found_here
            return _reply(matches, cursor_pos - len(word), cursor_pos)
        running = session()
        if start is None or running is None:
            return complete(code, cursor_pos)
        found = _of_its_ranks(code, lambda ranks: running.ranks.complete(code[start:], cursor_pos - start, ranks=ranks))
        if found is None:
            return _reply([], cursor_pos, cursor_pos)
        return _reply(found.matches, found.start + start, found.end + start, found.types)

    def do_inspect(code: str, cursor_pos: int, detail_level: int = 0, omit_sections: Any = ()) -> Any:
        running = session()
        if running is None or _body_start(code, cursor_pos) is None:
            return inspect(code, cursor_pos, detail_level, omit_sections)
        name = token_at_cursor(code, cursor_pos)
        text = _of_its_ranks(code, lambda ranks: running.ranks.inspect(name, detail_level, ranks=ranks))
        return {"status": "ok", "found": bool(text), "data": {"text/plain": text} if text else {}, "metadata": {}}

    return replace_methods(kernel, do_complete=do_complete, do_inspect=do_inspect)


def _of_its_ranks(code: str, ask: Callable[[str | None], _Answer]) -> _Answer | None:
    """Query only the ranks that the cell is for, as other nodes must not see its code."""
    prog, _, line = code.partition("\n")[0].strip().partition(" ")
    try:
        return ask(cell_parser(prog).parse_line(line).ranks)
    except (UsageError, HelpShown, SpecError):  # the line names no existing ranks
        return None


def _body_start(code: str, position: int) -> int | None:
    """Return where the body of a cell for the ranks begins, if ``position`` is in it."""
    first, newline, _ = code.partition("\n")
    is_ours = first.split(maxsplit=1)[:1] and first.split(maxsplit=1)[0] in _CELL_MAGICS
    return len(first) + 1 if is_ours and newline and position > len(first) else None


def _on_line(before: str, candidates: Candidates) -> tuple[list[str], str] | None:
    """Return the completions of the last word on the line of a magic of detrain_nb, and that word.

    None on other lines, which the notebook completes.
    """
    line = before.rpartition("\n")[2].lstrip()
    prog, space, rest = line.partition(" ")
    if not space or prog not in _CELL_MAGICS and prog not in _LINE_PARSERS:
        return None
    words = _WORD.findall(rest)
    word = words.pop() if words and rest.endswith(words[-1]) else ""
    parser: argparse.ArgumentParser = _LINE_PARSERS[prog]() if prog in _LINE_PARSERS else cell_parser(prog)
    commands = next((a.choices for a in parser._actions if isinstance(a, argparse._SubParsersAction)), None)
    if commands is not None:
        if not words:
            return sorted(command for command in commands if command.startswith(word)), word
        command = words.pop(0)
        if command not in commands:
            return [], word
        parser = commands[command]
    option, equals, value = word.partition("=")
    if equals and option in parser._option_string_actions:
        values = _values(parser._option_string_actions[option], value, candidates, words)
        return [f"{option}={found}" for found in values or []], word
    action = _next_action(parser, words)
    if action is not None and action.option_strings:
        return _values(action, word, candidates, words) or [], word
    names = [max(each.option_strings, key=len) for each in parser._actions if each.option_strings]  # the long forms
    if any(each.dest == "format" for each in parser._actions):
        names = [name for name in names if name not in _of_other_formats(words)]
    options = sorted(name for name in names if name.startswith(word))
    if word.startswith("--") and any(each.dest == "spec" for each in parser._actions):
        options += candidates.of("FIELD", word) or []
    if word.startswith("-"):
        return options, word
    if action is not None and action.dest == "names":
        values = candidates.of("NAMES HERE" if prog == "%push" else "NAMES THERE", word)
    else:
        values = _values(action, word, candidates, words)
    return [*(values or []), *options], word


def _of_other_formats(words: list[str]) -> set[str]:
    """Return the export options that the format among ``words`` does not have."""
    target = next((TARGETS[word] for word in words if word in TARGETS), None)
    others = set(OPTIONS) - set(target.options) if target else set[str]()
    return {as_typed(name) for name in others}


def _next_action(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Action | None:
    """Return the action that takes a word after ``words``: an option, or the next positional argument."""
    option, place = None, 0
    for word in words:
        if option is not None:
            option = None  # that was its value
        elif word in parser._option_string_actions:
            action = parser._option_string_actions[word]
            option = action if action.nargs is None else None
        elif not word.startswith("-"):
            place += 1
    places = [action for action in parser._actions if not action.option_strings]
    if places and places[-1].nargs in ("*", "+"):
        place = min(place, len(places) - 1)
    return option or (places[place] if place < len(places) else None)


def _values(action: argparse.Action | None, word: str, candidates: Candidates, before: list[str]) -> list[str] | None:
    """Return values that begin with ``word``, after the words ``before``; None if none are known."""
    if action is None:
        return None
    if action.choices is not None:
        return sorted(str(choice) for choice in action.choices if str(choice).startswith(word))
    is_session = action.dest == "name" and not action.option_strings
    return candidates.of("SESSION" if is_session else str(action.metavar), word, before)


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
