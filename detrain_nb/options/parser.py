"""argparse with errors of one line that say what to write instead, and the types of values that it reads."""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Iterable
from typing import Any

__all__ = ["OptionParser", "not_empty", "number", "whole"]


class OptionParser(argparse.ArgumentParser):
    """A parser for all front ends; each defines its own ``error``."""

    def __init__(self, *, bare: str = "leave it out", **options: Any) -> None:
        """Create a parser; ``bare`` says what to do about a surplus word, which replaces its braces."""
        super().__init__(allow_abbrev=False, **options)
        self._bare = bare

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Report surplus words as an error of the command that they were given to."""
        known, left = super().parse_known_args(args, namespace)
        if left:
            self.error(self._describe_unknown(left))
        return known, left

    def _describe_unknown(self, words: list[str]) -> str:
        for word in words:
            if word.startswith("-"):
                option = word.partition("=")[0]
                return f"{option} is not an option here{_advice(option, self._option_string_actions)}"
        return f"{words[0]!r} is one word too many: {self._bare.format(shlex.quote(words[0]))}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"{value!r} is not a command{_advice(value, action.choices)}")
        name = action.option_strings[-1] if action.option_strings else str(action.dest)
        self.error(f"{name} {value!r}{_advice(value, action.choices, is_short=True)}")

    def _match_argument(self, action: argparse.Action, arg_strings_pattern: str) -> int:
        try:
            return super()._match_argument(action, arg_strings_pattern)
        except argparse.ArgumentError:
            if not action.option_strings:
                raise
            value = action.metavar or "|".join(map(str, action.choices or ["VALUE"]))
            self.error(f"{action.option_strings[-1]} needs a value: {action.option_strings[-1]} {value}")


def _advice(word: str, known: Iterable[str], *, is_short: bool = False) -> str:
    """Return what to write instead of ``word``: similar known words, else all of them."""
    known = [name for name in known if is_short or name != "-h"]
    near = difflib.get_close_matches(word, known, n=2, cutoff=0.7)
    if near and not is_short:
        return f": did you mean {' or '.join(near)}?"
    return f": {'give one of' if is_short else 'choose from'} {', '.join(known)}"


def not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("'' is not a name")
    return text


def whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None


def number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
