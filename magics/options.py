"""The lines of the magics: their options, their help, and what is wrong with them in one line."""

from __future__ import annotations

import argparse
import os
import shlex
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

from IPython.core.error import UsageError


class HelpShown(Exception):
    """``--help`` was asked for; the text is the message."""


class LineParser(argparse.ArgumentParser):
    """argparse for a line of a notebook: an error is IPython's UsageError, of which one line is shown."""

    def __init__(self, **options: Any) -> None:
        super().__init__(add_help=False, allow_abbrev=False, **options)
        self.add_argument("-h", "--help", action=_ShowHelp, help="show this text")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message} ({self.prog} --help)")

    def parse_line(self, line: str) -> argparse.Namespace:
        """Raises: UsageError, HelpShown."""
        try:
            words = shlex.split(line)
        except ValueError as exc:
            raise UsageError(f"{self.prog}: {exc}: {line}") from exc
        return self.parse_args(words)


class _ShowHelp(argparse.Action):
    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> NoReturn:
        raise HelpShown(parser.format_help())


@dataclass(frozen=True)
class Settings:
    """What ``%distributed config`` sets, for all cells of this notebook."""

    output: str = "live"  # live, or final: the canonical form alone, at the end
    merge: str = "same"
    max_lines: int = 5_000
    max_chars: int = 200_000
    timeout: float = 0.0  # seconds; 0 is none

    @classmethod
    def from_env(cls) -> Settings:
        """The defaults, with ``DETRAIN_NB_OUTPUT``."""
        output = os.environ.get("DETRAIN_NB_OUTPUT")
        return cls().changed(f"output={output}") if output else cls()

    def changed(self, assignment: str) -> Settings:
        """The settings after ``KEY=VALUE``. Raises: UsageError."""
        key, equals, text = assignment.partition("=")
        kinds = {f.name: type(getattr(self, f.name)) for f in fields(self)}
        if not equals or key not in kinds:
            raise UsageError(f"%distributed config: {assignment!r}: give KEY=VALUE with KEY one of {', '.join(kinds)}")
        if key in _CHOICES and text not in _CHOICES[key]:
            raise UsageError(f"%distributed config: {key} is one of {', '.join(_CHOICES[key])}, not {text!r}")
        try:
            value = kinds[key](text)
        except ValueError:
            value = -1
        if isinstance(value, (int, float)) and value < 0:
            raise UsageError(f"%distributed config: {key} is a number, 0 or more, not {text!r}")
        return replace(self, **{key: value})

    def __str__(self) -> str:
        return "\n".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))


_CHOICES = {"output": ("live", "final"), "merge": ("same", "all", "rank0")}


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} ranks: a session needs at least 1")
    return number


def _not_negative(text: str) -> int:
    number = int(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is less than 0; 0 is no limit")
    return number


def _seconds(text: str) -> float:
    number = float(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text} seconds: give more than 0")
    return number


def _variable(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r}: give KEY=VALUE")
    return key, value


_positive.__name__ = _not_negative.__name__ = _seconds.__name__ = "number"
_RANKS_HELP = "ranks like 0,2 or 0-3 or -1 (the last) or all"


def cell_parser(prog: str = "%%distributed") -> LineParser:
    """``%%distributed``, and ``%%rank`` whose ranks come first."""
    parser = LineParser(
        prog=prog, description="Run the cell on every rank of the session, and start one where none runs."
    )
    if prog == "%%rank":
        parser.add_argument("ranks", metavar="RANKS", help=_RANKS_HELP)
    else:
        parser.add_argument("-n", dest="count", type=_positive, metavar="N", help="how many ranks to start")
        parser.add_argument("-r", "--ranks", metavar="RANKS", help=f"run on these only: {_RANKS_HELP}")
    parser.add_argument(
        "--merge",
        choices=_CHOICES["merge"],
        help="when it has ended: lines that ranks printed identically once (same), each rank's (all), the first rank's",
    )
    parser.add_argument("--timeout", type=_seconds, metavar="S", help="stop the cell after S seconds")
    parser.add_argument("--out", metavar="NAME", help="put the CellResult into this variable of the notebook")
    parser.add_argument("--quiet", action="store_true", help="show nothing; the log and --out have it all")
    parser.add_argument("--max-lines", type=_not_negative, metavar="N", help="show at most N lines; 0 is no limit")
    return parser


def session_parser() -> LineParser:
    """``%distributed COMMAND``."""
    parser = LineParser(
        prog="%distributed", description="The session of this notebook: ranks that keep their variables."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=LineParser)
    _add_start(commands.add_parser("start", help="start ranks"))
    commands.add_parser("status", help="where every rank is")
    commands.add_parser("stop", help="end the ranks and all they started")
    again = commands.add_parser("restart", help="end the ranks and start as many anew, with the same options")
    again.add_argument("-n", dest="count", type=_positive, metavar="N", help="how many ranks")
    commands.add_parser("list", help="the sessions of this user on this machine")
    config = commands.add_parser("config", help="show the settings, or change one")
    config.add_argument("assignment", nargs="?", metavar="KEY=VALUE")
    log = commands.add_parser("log", help="show a cell's output again, whole")
    log.add_argument(
        "--cell",
        type=int,
        metavar="N",
        help="the number in its prompt; -1 is the last that printed (default)",
        default=-1,
    )
    log.add_argument("--rank", dest="ranks", metavar="RANKS", help=_RANKS_HELP)
    return parser


def _add_start(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-n", dest="count", type=_positive, metavar="N", help="how many; default: the GPUs, else 2")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--backend", metavar="NAME", help="of the process group; default gloo, with NCCL on GPUs")
    parser.add_argument("--name", metavar="NAME", help="the session's name; default: the notebook's")
    parser.add_argument("--no-init", action="store_true", help="make no process group")
    parser.add_argument("--env", type=_variable, action="append", default=[], metavar="K=V", help="for the ranks")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="rank r is seeded with N + r")
    parser.add_argument(
        "--start", choices=("fork", "exec"), default="fork", help="fork: torch is imported once; exec: plain torchrun"
    )


def pull_parser() -> LineParser:
    """``%pull``."""
    parser = LineParser(prog="%pull", description="Bring variables of the ranks into the notebook.")
    parser.add_argument("names", metavar="NAME[,NAME...]")
    parser.add_argument("-r", "--ranks", metavar="RANKS", help=f"{_RANKS_HELP}; one rank gives the value itself")
    parser.add_argument("--as", dest="new_name", metavar="NEW", help="the variable's name in the notebook")
    return parser


def push_parser() -> LineParser:
    """``%push``."""
    parser = LineParser(prog="%push", description="Set variables on the ranks to the notebook's values.")
    parser.add_argument("names", metavar="NAME[,NAME...]")
    parser.add_argument("-r", "--ranks", metavar="RANKS", help=_RANKS_HELP)
    return parser
