"""Parsers of the magics' lines: options, help texts, and errors of one line."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import re
import shlex
import sys
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn

from IPython.core.error import UsageError

from ..deploy.kept import LONGEST_WARM_S
from ..options.parser import OptionParser, not_empty, number, whole
from ..plan import MOST_RANKS
from ..session.running.asked import LONGEST_S
from ..session.running.start import LARGEST_SEED


class HelpShown(Exception):
    """The help text, raised as an exception when a line contains ``--help``."""


class LineParser(OptionParser):
    """A parser of a line of a notebook; its errors are IPython's UsageError, which shows as one line."""

    def __init__(self, *, has_lists: bool = False, **options: Any) -> None:
        """Create a parser; with ``has_lists`` spaces next to a comma are ignored, as its values are names and ranks."""
        super().__init__(add_help=False, **options)
        self._has_lists = has_lists
        self.add_argument("-h", "--help", action=_ShowHelp, help="show this text")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message} ({self.prog} --help)")

    def split_line(self, line: str) -> list[str]:
        """Split a line into words as a shell does, without its comment. Raises: UsageError."""
        try:
            return shlex.split(_without_comment(line))
        except ValueError as exc:
            raise UsageError(f"{self.prog}: {exc}: {line}") from exc

    def parse_line(self, line: str) -> argparse.Namespace:
        """Parse a line. Raises: UsageError, HelpShown."""
        return self.parse_words(self.split_line(line))

    def parse_words(self, words: list[str]) -> argparse.Namespace:
        """Parse the words of a line. Raises: UsageError, HelpShown."""
        if self._has_lists:
            words = _joined_at_commas(words)
        if self._subparsers is not None and words and words[0] in _OPTIONS_OF_COMMANDS:
            first = next(iter(self._subparsers._group_actions[0].choices or ["COMMAND"]))
            self.error(f"{words[0]} must follow a subcommand: {self.prog} {first} {words[0]}")
        return self.parse_args(words)


def _joined_at_commas(words: list[str]) -> list[str]:
    """Join ``a, b`` to ``a,b``: one list of names or ranks."""
    joined: list[str] = []
    for word in words:
        if joined and not word.startswith("-") and (joined[-1].endswith(",") or word.startswith(",")):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def _without_comment(line: str) -> str:
    """Return the part of a line before a ``#`` that begins a word outside of quotes."""
    for found in re.finditer(r"(?:^|\s)#", line):
        with contextlib.suppress(ValueError):  # this # is inside quotes
            shlex.split(line[: found.start()])
            return line[: found.start()]
    return line


class _ShowHelp(argparse.Action):
    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, **options)

    def __call__(self, parser: argparse.ArgumentParser, *args: object) -> NoReturn:
        raise HelpShown(parser.format_help())


@dataclass(frozen=True)
class Settings:
    """The settings of ``%distributed config``, which hold for all cells of this notebook."""

    output: str = "live"  # live; or final: only the canonical form, at the end
    merge: str = "same"
    max_lines: int = 5_000
    max_chars: int = 200_000
    timeout: float = 0.0  # seconds; 0 means no limit
    hang: float = 5.0  # seconds that a rank waits for others before the cell reports it
    board: str = "off"  # auto: the first long cell of a session shows its board
    check: str = "off"  # on: ranks compare every collective before they start it
    warm: float = 600.0  # seconds that nodes keep torch imported after a stop, for the next start; 0 means never

    @classmethod
    def from_env(cls) -> Settings:
        """Return the defaults with ``DETRAIN_NB_OUTPUT`` and ``DETRAIN_NB_WARM``; report and ignore invalid values."""
        settings = cls()
        for key in ("output", "warm"):
            variable = f"DETRAIN_NB_{key.upper()}"
            if value := os.environ.get(variable):
                try:
                    settings = settings.changed(f"{key}={value}", of=variable)
                except UsageError as exc:
                    print(f"{exc}; {key}={getattr(settings, key)} is used instead", file=sys.stderr)
        return settings

    def changed(self, assignment: str, *, of: str = "%distributed config") -> Settings:
        """Return the settings after ``KEY=VALUE``; errors name ``of`` as its source. Raises: UsageError."""
        key, equals, text = assignment.partition("=")
        kinds = {f.name: type(getattr(self, f.name)) for f in fields(self)}
        if not equals or key not in kinds:
            raise UsageError(f"{of}: {assignment!r}: give KEY=VALUE with KEY one of {', '.join(kinds)}")
        if key in _CHOICES and text not in _CHOICES[key]:
            raise UsageError(f"{of}: {key} must be one of {', '.join(_CHOICES[key])}, not {text!r}")
        try:
            value = kinds[key](text)
        except ValueError:
            value = -1
        if isinstance(value, (int, float)) and not 0 <= value < math.inf:
            raise UsageError(f"{of}: {key} must be a number, 0 or more, not {text!r}")
        most = _MOST_SHOWN if isinstance(value, int) else LONGEST_S
        if not isinstance(value, str) and value > most and key != "warm":
            raise UsageError(f"{of}: {key} must be at most {most:.0f}, not {text!r}")
        if key == "warm" and value > LONGEST_WARM_S:
            raise UsageError(f"{of}: {key} must be at most {LONGEST_WARM_S:.0f} seconds (one day), not {text!r}")
        return replace(self, **{key: value})

    def __str__(self) -> str:
        return "\n".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))


_MOST_SHOWN = 10**9  # lines or characters
_CHOICES = {
    "output": ("live", "final"),
    "merge": ("same", "all", "rank0"),
    "board": ("off", "auto"),
    "check": ("off", "on"),
}


def setting_candidates(word: str) -> list[str]:
    """Return the completions of ``KEY=VALUE``: the keys, and after ``KEY=`` its choices."""
    key, equals, _ = word.partition("=")
    found = (
        [f"{f.name}=" for f in fields(Settings)] if not equals else [f"{key}={each}" for each in _CHOICES.get(key, ())]
    )
    return [each for each in found if each.startswith(word)]


def _seed(text: str) -> int:
    number = whole(text)
    if abs(number) > LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"{number} is out of range: give a number from -2**62 to 2**62")
    return number


def positive(text: str) -> int:
    number = whole(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} ranks: give 1 or more")
    if number > MOST_RANKS:
        raise argparse.ArgumentTypeError(f"{number} ranks: give at most {MOST_RANKS:,}")
    return number


def not_negative(text: str) -> int:
    number = whole(text)
    if number < 0:
        raise argparse.ArgumentTypeError(f"{number} is less than 0; 0 means no limit")
    if number > _MOST_SHOWN:
        raise argparse.ArgumentTypeError(f"{number} is more than {_MOST_SHOWN}; 0 means no limit")
    return number


def seconds(text: str) -> float:
    if not 0 < number(text) <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text} seconds: give more than 0, at most {LONGEST_S:.0f}")
    return number(text)


def seconds_or_0(text: str) -> float:
    if not 0 <= number(text) <= LONGEST_S:
        raise argparse.ArgumentTypeError(f"{text} seconds: give 0 or more, at most {LONGEST_S:.0f}")
    return number(text)


def _variable(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise argparse.ArgumentTypeError(f"{text!r}: give KEY=VALUE")
    return key, value


_MEANT_NODES, _MEANT_RANKS = "did you mean --nodes {}?", "did you mean -r {}?"
_NEED_COMMAS = "separate names by commas; ranks must follow -r"
# Options of subcommands that users type before the subcommand, where they have no meaning.
_OPTIONS_OF_COMMANDS = ("-n", "--nodes", "--device", "--backend", "--name", "--fresh", "--env", "--seed")
_RANKS_HELP = "ranks such as 0,2 or 0-3, -1 (the last), all, or the name of a host"


def cell_parser(prog: str = "%%distributed") -> LineParser:
    """Return the parser of ``%%distributed``, or of ``%%rank``, whose first argument is the ranks."""
    parser = LineParser(
        prog=prog,
        description="Run the cell on the ranks of the session, or on some of them; start a session if none is running.",
        bare=_MEANT_RANKS if prog != "%%rank" else "separate several ranks by commas, as in 0,2",
        has_lists=True,
    )
    if prog == "%%rank":
        parser.add_argument("ranks", metavar="RANKS", help=_RANKS_HELP)
    else:
        parser.add_argument("-n", dest="count", type=positive, metavar="N", help="number of ranks to start")
        _add_force(parser)
        parser.add_argument("-r", "--ranks", metavar="RANKS", help=f"run the cell on these ranks only: {_RANKS_HELP}")
    parser.add_argument(
        "--merge",
        choices=_CHOICES["merge"],
        help="output after the cell has finished: lines that ranks printed identically shown once (same), "
        "the lines of each rank (all), or those of the first rank (rank0)",
    )
    parser.add_argument("--timeout", type=seconds, metavar="S", help="stop the cell after S seconds")
    parser.add_argument("--out", metavar="NAME", help="store the CellResult in this variable of the notebook")
    parser.add_argument("--quiet", action="store_true", help="show no output; the log and --out still have all of it")
    parser.add_argument("--max-lines", type=not_negative, metavar="N", help="show at most N lines; 0 means no limit")
    return parser


def session_parser() -> LineParser:
    """Return the parser of ``%distributed COMMAND``."""
    parser = LineParser(
        prog="%distributed", description="The session of this notebook: ranks that keep their variables."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=LineParser)
    _add_start(commands.add_parser("start", help="start ranks", bare=_MEANT_NODES))
    commands.add_parser("status", help="show the host, device and state of every rank")
    commands.add_parser(
        "board", help="a live view of the ranks: activity and load, with buttons to stop, interrupt and restart"
    )
    commands.add_parser("where", help="show which line, stack and collective each rank is in")
    variables = commands.add_parser(
        "vars", bare=_MEANT_RANKS, help="list the variables of the ranks and show which values differ"
    )
    variables.add_argument(
        "names", nargs="*", metavar="VARIABLE", help="only these variables; patterns such as grad_* are allowed"
    )
    variables.add_argument("-r", "--ranks", "--rank", dest="ranks", metavar="RANKS", help=_RANKS_HELP)
    stop = commands.add_parser("stop", help="stop the ranks and all processes that they started")
    stop.add_argument("name", nargs="?", metavar="NAME", help="stop this session instead of the notebook's own")
    _add_cold(stop)
    again = commands.add_parser(
        "restart", bare=_MEANT_RANKS, help="stop the ranks and start the same number again, with the same options"
    )
    which = again.add_mutually_exclusive_group()
    which.add_argument("-n", dest="count", type=positive, metavar="N", help="start N ranks instead")
    which.add_argument(
        "-r", "--ranks", metavar="RANKS", help="restart only these; the other ranks keep their variables"
    )
    _add_cold(again)
    _add_force(again)
    again.add_argument(
        "--env",
        type=_variable,
        action="append",
        default=[],
        metavar="K=V",
        help="environment variable, in addition to those of the start",
    )
    commands.add_parser("shrink", help="after a node was lost: form one group of the remaining ranks")
    interrupt = commands.add_parser(
        "interrupt", bare=_MEANT_RANKS, help="stop the running cells, as the stop button does"
    )
    who = interrupt.add_mutually_exclusive_group()
    who.add_argument(
        "-r",
        "--ranks",
        metavar="RANKS",
        help="only raise KeyboardInterrupt on these ranks; ranks that wait for them keep waiting",
    )
    who.add_argument("--kill", metavar="RANKS", help="replace these ranks by new ones; their variables are lost")
    replay = commands.add_parser(
        "replay", bare="did you mean --cells {}?", help="run earlier cells again on ranks that lost their variables"
    )
    replay.add_argument("-r", "--ranks", metavar="RANKS", required=True, help=_RANKS_HELP)
    replay.add_argument(
        "--cells",
        metavar="CELLS",
        help="cells such as 1-4,7; default: cells that use no other rank, and the imports and definitions of the rest",
    )
    attach = commands.add_parser("attach", help="attach to a running session and show the output that was missed")
    attach.add_argument(
        "name", nargs="?", metavar="NAME", help="the session; default: this notebook's, or the only one that is known"
    )
    attach.add_argument(
        "--nodes", metavar="NODES", help="the nodes it runs on, if it was not started from this machine"
    )
    attach.add_argument("--steal", action="store_true", help="take the session from the notebook that holds it")
    attach.add_argument(
        "--without", metavar="OTHERS", default="", help="nodes to leave out, separated by commas; their ranks are lost"
    )
    commands.add_parser("detach", help="release the session; its ranks keep running for a later attach")
    commands.add_parser("list", help="list this user's sessions on this machine")
    put = commands.add_parser("put", help="copy files and folders to the nodes")
    put.add_argument("paths", type=not_empty, nargs="+", metavar="FILE")
    put.add_argument("--to", metavar="FOLDER", help="target folder; default: the working directory of the ranks")
    get = commands.add_parser("get", help="copy files and folders from the nodes, into one folder per node")
    get.add_argument(
        "paths",
        type=not_empty,
        nargs="+",
        metavar="REMOTE",
        help="relative paths start at the working directory of the ranks",
    )
    get.add_argument("--to", metavar="FOLDER", help="target folder; default: the current one")
    for copy in (put, get):
        copy.add_argument("--nodes", metavar="NAMES", help="only these nodes of the session, separated by commas")
    data = commands.add_parser("data", help="check that every node has the same files")
    data.add_argument(
        "check", choices=("check",), help="compare the number of files, their size, and the content of a sample"
    )
    data.add_argument("path", type=not_empty, metavar="PATH")
    doctor = commands.add_parser(
        "doctor", bare=_MEANT_NODES, help="check that hosts can train together, and show what to do if not"
    )
    doctor.add_argument("--nodes", metavar="NODES", help="a nodes file or hosts; default: the nodes of the session")
    doctor.add_argument(
        "--bandwidth", action="store_true", help="also measure the bandwidth between the hosts and to this machine"
    )
    doctor.add_argument("--speed", action="store_true", help="also measure how fast a rank of each host computes")
    doctor.add_argument(
        "--fix",
        action="store_true",
        help="create detrain_nb's folder on the hosts, private to the user; print the commands for all other problems",
    )
    doctor.add_argument(
        "--save", action="store_true", help="measure bandwidth and speed, and write them to the nodes file"
    )
    form = commands.add_parser(
        "nodes", help="a form of the nodes: edit, import, test and save them, and start the session on them"
    )
    form.add_argument(
        "file",
        nargs="?",
        type=not_empty,
        metavar="NODES_FILE",
        help="a nodes file; default: the nodes on which a form started this notebook's session",
    )
    config = commands.add_parser("config", help="show the settings, or change one")
    config.add_argument("assignment", nargs="?", metavar="KEY=VALUE")
    log = commands.add_parser("log", bare="did you mean --cell {}?", help="show the complete output of a cell again")
    which = log.add_mutually_exclusive_group()
    which.add_argument(
        "--cell",
        type=whole,
        metavar="CELL",
        help="the number in its prompt; default: the last cell that ran; -1: the last that printed, -2: the one before",
    )
    which.add_argument("--list", action="store_true", help="list the cells that ran, with their numbers")
    log.add_argument("--follow", action="store_true", help="keep showing output until the cell finishes")
    log.add_argument("-r", "--ranks", "--rank", dest="ranks", metavar="RANKS", help=_RANKS_HELP)
    return parser


def _add_cold(parser: argparse.ArgumentParser) -> None:
    cold = "also stop the process that keeps torch imported for the next start (config warm=SECONDS)"
    parser.add_argument("--cold", action="store_true", help=cold)


def _add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="allow more ranks than the machine has room for")


def _add_start(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes",
        metavar="NODES",
        help="a nodes file, or [user@]host[:port],...; localhost is this machine; default: only this machine",
    )
    how_many = "number of ranks, with --nodes per node; default: one per GPU; without GPUs 2, with --nodes 1"
    parser.add_argument("-n", dest="count", type=positive, metavar="N", help=how_many)
    _add_force(parser)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument(
        "--backend", metavar="NAME", help="backend of the process group; default: gloo, with NCCL on GPUs"
    )
    parser.add_argument(
        "--name", type=not_empty, metavar="NAME", help="name of the session; default: derived from the notebook's"
    )
    parser.add_argument(
        "--fresh", action="store_true", help="first stop the session of this name that an earlier kernel left"
    )
    parser.add_argument(
        "--no-sync",
        action="store_true",
        help="do not copy changed files of the notebook's folder to the nodes",
    )
    parser.add_argument(
        "--project",
        type=not_empty,
        metavar="FOLDER",
        help="a parent of the notebook's folder; nodes get a copy of all of it",
    )
    parser.add_argument("--no-init", action="store_true", help="create no process group")
    parser.add_argument(
        "--env", type=_variable, action="append", default=[], metavar="K=V", help="environment variable of the ranks"
    )
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="rank r is seeded with N + r")
    parser.add_argument(
        "--linger",
        type=seconds_or_0,
        metavar="S",
        help="seconds that the ranks keep running without the notebook; default: 600",
    )
    parser.add_argument(
        "--group-timeout",
        type=seconds,
        metavar="S",
        help="seconds that a collective waits for another rank; default on several nodes: 600",
    )
    parser.add_argument(
        "--start",
        choices=("fork", "exec"),
        default="fork",
        help="fork: import torch once and fork the ranks (fast); exec: plain torchrun, if code fails after a fork",
    )


def pull_parser() -> LineParser:
    """Return the parser of ``%pull``."""
    parser = _variables_parser("%pull", "Copy variables of the ranks into the notebook.")
    parser.add_argument(
        "-r",
        "--ranks",
        metavar="RANKS",
        help=f"{_RANKS_HELP}; one rank gives its value, several give a dict {{rank: value}}",
    )
    parser.add_argument("--as", dest="new_name", metavar="NEW", help="name of the variable in the notebook")
    return parser


def push_parser() -> LineParser:
    """Return the parser of ``%push``."""
    parser = _variables_parser("%push", "Set variables on the ranks to the notebook's values.")
    parser.add_argument("-r", "--ranks", metavar="RANKS", help=_RANKS_HELP)
    return parser


def broadcast_parser() -> LineParser:
    """Return the parser of ``%broadcast``."""
    description = "Copy variables of one rank to others, directly between the ranks."
    together = "variables that refer to each other (model,optimizer) go in one call"
    parser = _variables_parser("%broadcast", description, bare=_MEANT_RANKS, names_help=together)
    parser.add_argument(
        "--from", dest="source", type=whole, default=0, metavar="RANK", help="the source rank; default: 0"
    )
    parser.add_argument("-r", "--ranks", metavar="RANKS", help=f"the target ranks, default all: {_RANKS_HELP}")
    return parser


def _variables_parser(
    prog: str, description: str, *, bare: str = _NEED_COMMAS, names_help: str | None = None
) -> LineParser:
    parser = LineParser(prog=prog, description=description, bare=bare, has_lists=True)
    parser.add_argument("names", metavar="NAME[,NAME...]", help=names_help)
    return parser
