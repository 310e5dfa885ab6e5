"""An argparse parser whose errors are one line with advice, and converters for the values of options."""

from __future__ import annotations

import argparse
import difflib
import shlex
from collections.abc import Iterable
from typing import Any

__all__ = ["OptionParser", "not_empty", "number", "whole"]


class OptionParser(argparse.ArgumentParser):
    """Parser with one-line errors; each front end overrides ``error``."""

    def __init__(self, *, bare: str = "leave it out", **options: Any) -> None:
        """Create a parser; ``bare`` is the advice for a surplus word, which replaces its ``{}``."""
        super().__init__(allow_abbrev=False, **options)
        self._bare = bare

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; unknown ones are an error of the subcommand that they were given to."""
        known, left = super().parse_known_args(args, namespace)
        if left:
            self.error(self._describe_unknown(left))
        return known, left

    def _describe_unknown(self, words: list[str]) -> str:
        for word in words:
            if word.startswith("-"):
                option = word.partition("=")[0]
                return f"unknown option {option}{_advice(option, self._option_string_actions)}"
        return f"unexpected argument {words[0]!r}: {self._bare.format(shlex.quote(words[0]))}"

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"unknown command {value!r}{_advice(value, action.choices)}")
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
    """Suggest what to write instead of ``word``: similar names, or else all known ones."""
    known = [name for name in known if is_short or name != "-h"]
    near = difflib.get_close_matches(word, known, n=2, cutoff=0.7)
    if near and not is_short:
        return f": did you mean {' or '.join(near)}?"
    return f": {'give one of' if is_short else 'choose from'} {', '.join(known)}"


def not_empty(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("a name must not be empty")
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
