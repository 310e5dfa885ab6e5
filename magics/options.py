"""The lines of the magics: their options, their help, and what is wrong with them in one line."""

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
    """``--help`` was asked for; the text is the message."""


class LineParser(OptionParser):
    """The parser of a line of a notebook: an error is IPython's UsageError, of which one line is shown."""

    def __init__(self, *, has_lists: bool = False, **options: Any) -> None:
        """``has_lists``: it takes names and ranks alone, where blanks beside a comma mean nothing."""
        super().__init__(add_help=False, **options)
        self._has_lists = has_lists
        self.add_argument("-h", "--help", action=_ShowHelp, help="show this text")

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self.prog}: {message} ({self.prog} --help)")

    def split_line(self, line: str) -> list[str]:
        """The words of a line, as a shell has them, without a comment. Raises: UsageError."""
        try:
            return shlex.split(_without_comment(line))
        except ValueError as exc:
            raise UsageError(f"{self.prog}: {exc}: {line}") from exc

    def parse_line(self, line: str) -> argparse.Namespace:
        """Raises: UsageError, HelpShown."""
        return self.parse_words(self.split_line(line))

    def parse_words(self, words: list[str]) -> argparse.Namespace:
        """Raises: UsageError, HelpShown."""
        if self._has_lists:
            words = _joined_at_commas(words)
        if self._subparsers is not None and words and words[0] in _OPTIONS_OF_COMMANDS:
            first = next(iter(self._subparsers._group_actions[0].choices or ["COMMAND"]))
            self.error(f"{words[0]} stands behind a command: {self.prog} {first} {words[0]}")
        return self.parse_args(words)


def _joined_at_commas(words: list[str]) -> list[str]:
    """``a, b`` is ``a,b``: one list of names, or of ranks."""
    joined: list[str] = []
    for word in words:
        if joined and not word.startswith("-") and (joined[-1].endswith(",") or word.startswith(",")):
            joined[-1] += word
        else:
            joined.append(word)
    return joined


def _without_comment(line: str) -> str:
    """What stands before a ``#`` that begins a word, outside of quotes."""
    for found in re.finditer(r"(?:^|\s)#", line):
        with contextlib.suppress(ValueError):  # a quotation is open there
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
    """What ``%distributed config`` sets, for all cells of this notebook."""

    output: str = "live"  # live, or final: the canonical form alone, at the end
    merge: str = "same"
    max_lines: int = 5_000
    max_chars: int = 200_000
    timeout: float = 0.0  # seconds; 0 is none
    hang: float = 5.0  # seconds that a rank waits for others before the cell says so
    board: str = "off"  # auto: a session's first long cell shows its board
    check: str = "off"  # on: ranks compare every collective before they begin it
    warm: float = 600.0  # seconds that nodes keep torch imported after a stop, for the next start; 0 is not at all

    @classmethod
    def from_env(cls) -> Settings:
        """The defaults, with ``DETRAIN_NB_OUTPUT`` and ``DETRAIN_NB_WARM``. A wrong one is named and left out."""
        settings = cls()
        for key in ("output", "warm"):
            variable = f"DETRAIN_NB_{key.upper()}"
            if value := os.environ.get(variable):
                try:
                    settings = settings.changed(f"{key}={value}", of=variable)
                except UsageError as exc:
                    print(f"{exc}; {key}={getattr(settings, key)} holds", file=sys.stderr)
        return settings

    def changed(self, assignment: str, *, of: str = "%distributed config") -> Settings:
        """The settings after ``KEY=VALUE``, which ``of`` says. Raises: UsageError."""
        key, equals, text = assignment.partition("=")
        kinds = {f.name: type(getattr(self, f.name)) for f in fields(self)}
        if not equals or key not in kinds:
            raise UsageError(f"{of}: {assignment!r}: give KEY=VALUE with KEY one of {', '.join(kinds)}")
        if key in _CHOICES and text not in _CHOICES[key]:
            raise UsageError(f"{of}: {key} is one of {', '.join(_CHOICES[key])}, not {text!r}")
        try:
            value = kinds[key](text)
        except ValueError:
            value = -1
        if isinstance(value, (int, float)) and not 0 <= value < math.inf:
            raise UsageError(f"{of}: {key} is a number, 0 or more, not {text!r}")
        most = _MOST_SHOWN if isinstance(value, int) else LONGEST_S
        if not isinstance(value, str) and value > most and key != "warm":
            raise UsageError(f"{of}: {key} is at most {most:.0f}, not {text!r}")
        if key == "warm" and value > LONGEST_WARM_S:
            raise UsageError(f"{of}: {key} is at most {LONGEST_WARM_S:.0f} seconds, a day, not {text!r}")
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
    """What ``KEY=VALUE`` may become: the keys, and behind one what it is chosen from."""
    key, equals, _ = word.partition("=")
    found = (
        [f"{f.name}=" for f in fields(Settings)] if not equals else [f"{key}={each}" for each in _CHOICES.get(key, ())]
    )
    return [each for each in found if each.startswith(word)]


def _seed(text: str) -> int:
    number = whole(text)
    if abs(number) > LARGEST_SEED:
        raise argparse.ArgumentTypeError(f"{number}: give a number from -2**62 to 2**62")
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
        raise argparse.ArgumentTypeError(f"{number} is less than 0; 0 is no limit")
    if number > _MOST_SHOWN:
        raise argparse.ArgumentTypeError(f"{number} is more than {_MOST_SHOWN}; 0 is no limit")
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
_NEED_COMMAS = "several names have commas between them, ranks stand behind -r"
# Said before any command, where they mean nothing.
_OPTIONS_OF_COMMANDS = ("-n", "--nodes", "--device", "--backend", "--name", "--fresh", "--env", "--seed")
_RANKS_HELP = "ranks like 0,2 or 0-3 or -1 (the last) or all, or a host's name"


def cell_parser(prog: str = "%%distributed") -> LineParser:
    """``%%distributed``, and ``%%rank`` whose ranks come first."""
    parser = LineParser(
        prog=prog,
        description="Run the cell on every rank of the session, and start one where none runs.",
        bare=_MEANT_RANKS if prog != "%%rank" else "several ranks have commas between them, as in 0,2",
        has_lists=True,
    )
    if prog == "%%rank":
        parser.add_argument("ranks", metavar="RANKS", help=_RANKS_HELP)
    else:
        parser.add_argument("-n", dest="count", type=positive, metavar="N", help="how many ranks to start")
        _add_force(parser)
        parser.add_argument("-r", "--ranks", metavar="RANKS", help=f"run on these only: {_RANKS_HELP}")
    parser.add_argument(
        "--merge",
        choices=_CHOICES["merge"],
        help="when it has ended: lines that ranks printed identically once (same), each rank's (all), the first rank's",
    )
    parser.add_argument("--timeout", type=seconds, metavar="S", help="stop the cell after S seconds")
    parser.add_argument("--out", metavar="NAME", help="put the CellResult into this variable of the notebook")
    parser.add_argument("--quiet", action="store_true", help="show nothing; the log and --out have it all")
    parser.add_argument("--max-lines", type=not_negative, metavar="N", help="show at most N lines; 0 is no limit")
    return parser


def session_parser() -> LineParser:
    """``%distributed COMMAND``."""
    parser = LineParser(
        prog="%distributed", description="The session of this notebook: ranks that keep their variables."
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=LineParser)
    _add_start(commands.add_parser("start", help="start ranks", bare=_MEANT_NODES))
    commands.add_parser("status", help="where every rank is")
    commands.add_parser("board", help="the ranks live: what each does and uses; stop, interrupt, restart by a click")
    commands.add_parser("where", help="for every rank its line, its stack, and the collective it waits in")
    variables = commands.add_parser(
        "vars", bare=_MEANT_RANKS, help="the variables of the ranks, and whether they have the same"
    )
    variables.add_argument("names", nargs="*", metavar="VARIABLE", help="only these, also patterns like grad_*")
    variables.add_argument("-r", "--ranks", "--rank", dest="ranks", metavar="RANKS", help=_RANKS_HELP)
    stop = commands.add_parser("stop", help="end the ranks and all they started")
    stop.add_argument("name", nargs="?", metavar="NAME", help="a session that this notebook does not hold")
    _add_cold(stop)
    again = commands.add_parser(
        "restart", bare=_MEANT_RANKS, help="end the ranks and start as many anew, with the same options"
    )
    which = again.add_mutually_exclusive_group()
    which.add_argument("-n", dest="count", type=positive, metavar="N", help="how many ranks")
    which.add_argument("-r", "--ranks", metavar="RANKS", help="only these, fresh; the others keep their variables")
    _add_cold(again)
    _add_force(again)
    again.add_argument(
        "--env", type=_variable, action="append", default=[], metavar="K=V", help="added to those of the start"
    )
    commands.add_parser("shrink", help="after a node was lost: the ranks that are left become one group")
    interrupt = commands.add_parser(
        "interrupt", bare=_MEANT_RANKS, help="stop the cells that run, as the stop button does"
    )
    who = interrupt.add_mutually_exclusive_group()
    who.add_argument("-r", "--ranks", metavar="RANKS", help="only KeyboardInterrupt on these, which frees nobody")
    who.add_argument("--kill", metavar="RANKS", help="replace these by fresh ones: their variables are lost")
    replay = commands.add_parser(
        "replay", bare="did you mean --cells {}?", help="run earlier cells again, on ranks that lost their variables"
    )
    replay.add_argument("-r", "--ranks", metavar="RANKS", required=True, help=_RANKS_HELP)
    replay.add_argument(
        "--cells",
        metavar="CELLS",
        help="like 1-4,7; default: those that need no other rank, of others the imports and definitions",
    )
    attach = commands.add_parser("attach", help="go on with a session that runs already, and see what was missed")
    attach.add_argument("name", nargs="?", metavar="NAME", help="default: this notebook's, or the only one")
    attach.add_argument("--nodes", metavar="NODES", help="where it runs, if it was not started from this machine")
    attach.add_argument("--steal", action="store_true", help="take it from the notebook that holds it")
    attach.add_argument(
        "--without", metavar="OTHERS", default="", help="nodes to leave out, with commas: their ranks are lost"
    )
    commands.add_parser("detach", help="leave the ranks running, for a later attach")
    commands.add_parser("list", help="the sessions of this user on this machine")
    put = commands.add_parser("put", help="copy files and folders to the nodes")
    put.add_argument("paths", type=not_empty, nargs="+", metavar="FILE")
    put.add_argument("--to", metavar="FOLDER", help="default: where the ranks start")
    get = commands.add_parser("get", help="copy files and folders from the nodes, each node's into a folder of its own")
    get.add_argument(
        "paths", type=not_empty, nargs="+", metavar="REMOTE", help="relative ones from where the ranks start"
    )
    get.add_argument("--to", metavar="FOLDER", help="default: the current one")
    for copy in (put, get):
        copy.add_argument("--nodes", metavar="NAMES", help="only these nodes of the session, with commas")
    data = commands.add_parser("data", help="are the same files on every node?")
    data.add_argument("check", choices=("check",), help="compare count, bytes, and the content of a sample")
    data.add_argument("path", type=not_empty, metavar="PATH")
    doctor = commands.add_parser(
        "doctor", bare=_MEANT_NODES, help="can these hosts train together, and what to do if not"
    )
    doctor.add_argument("--nodes", metavar="NODES", help="a nodes file or hosts; default: those of the session")
    doctor.add_argument("--bandwidth", action="store_true", help="measure it too, between the hosts and to here")
    doctor.add_argument("--speed", action="store_true", help="measure how fast a rank of each is beside the others")
    doctor.add_argument("--fix", action="store_true", help="make our folder there, closed to others; all else is told")
    doctor.add_argument("--save", action="store_true", help="measure all of it, and write it into the nodes file")
    form = commands.add_parser("nodes", help="nodes as a form: edit, import, test, save, and start the session on them")
    form.add_argument(
        "file",
        nargs="?",
        type=not_empty,
        metavar="NODES_FILE",
        help="a nodes file; default: those that a form has started this notebook's session on",
    )
    config = commands.add_parser("config", help="show the settings, or change one")
    config.add_argument("assignment", nargs="?", metavar="KEY=VALUE")
    log = commands.add_parser("log", bare="did you mean --cell {}?", help="show a cell's output again, whole")
    which = log.add_mutually_exclusive_group()
    which.add_argument(
        "--cell",
        type=whole,
        metavar="CELL",
        help="the number in its prompt, default: the last that ran; -1 is the last that printed, -2 the one before",
    )
    which.add_argument("--list", action="store_true", help="the cells that ran, with their numbers")
    log.add_argument("--follow", action="store_true", help="go on showing it until it ends")
    log.add_argument("-r", "--ranks", "--rank", dest="ranks", metavar="RANKS", help=_RANKS_HELP)
    return parser


def _add_cold(parser: argparse.ArgumentParser) -> None:
    cold = "end the process too that keeps torch imported for the next start (config warm=SECONDS)"
    parser.add_argument("--cold", action="store_true", help=cold)


def _add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--force", action="store_true", help="also more ranks than there is room for")


def _add_start(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nodes",
        metavar="NODES",
        help="a nodes file, or [user@]host[:port],...; localhost is this machine; default: it alone",
    )
    how_many = "how many, on nodes how many on each; default: the GPUs, else 2, on nodes 1"
    parser.add_argument("-n", dest="count", type=positive, metavar="N", help=how_many)
    _add_force(parser)
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--backend", metavar="NAME", help="of the process group; default gloo, with NCCL on GPUs")
    parser.add_argument("--name", type=not_empty, metavar="NAME", help="the session's name; default: the notebook's")
    parser.add_argument("--fresh", action="store_true", help="first end what an earlier kernel has left of it")
    parser.add_argument(
        "--no-sync", action="store_true", help="leave the notebook's folder here; else nodes get what changes in it"
    )
    parser.add_argument("--project", type=not_empty, metavar="FOLDER", help="above the notebook's: nodes get all of it")
    parser.add_argument("--no-init", action="store_true", help="make no process group")
    parser.add_argument("--env", type=_variable, action="append", default=[], metavar="K=V", help="for the ranks")
    parser.add_argument("--seed", type=_seed, default=0, metavar="N", help="rank r is seeded with N + r")
    parser.add_argument(
        "--linger", type=seconds_or_0, metavar="S", help="how long the ranks wait for the notebook to come back; 600"
    )
    parser.add_argument(
        "--group-timeout",
        type=seconds,
        metavar="S",
        help="how long a collective waits for another rank; 600 on several nodes",
    )
    parser.add_argument(
        "--start", choices=("fork", "exec"), default="fork", help="fork: torch is imported once; exec: plain torchrun"
    )


def pull_parser() -> LineParser:
    """``%pull``."""
    parser = _variables_parser("%pull", "Bring variables of the ranks into the notebook.")
    parser.add_argument("-r", "--ranks", metavar="RANKS", help=f"{_RANKS_HELP}; one rank gives the value itself")
    parser.add_argument("--as", dest="new_name", metavar="NEW", help="the variable's name in the notebook")
    return parser


def push_parser() -> LineParser:
    """``%push``."""
    parser = _variables_parser("%push", "Set variables on the ranks to the notebook's values.")
    parser.add_argument("-r", "--ranks", metavar="RANKS", help=_RANKS_HELP)
    return parser


def broadcast_parser() -> LineParser:
    """``%broadcast``."""
    description = "Give ranks the variables of another, directly between them."
    together = "what belongs together (model,optimizer) in one call"
    parser = _variables_parser("%broadcast", description, bare=_MEANT_RANKS, names_help=together)
    parser.add_argument("--from", dest="source", type=whole, default=0, metavar="RANK", help="who has them; default 0")
    parser.add_argument("-r", "--ranks", metavar="RANKS", help=f"who gets them, default all: {_RANKS_HELP}")
    return parser


def _variables_parser(
    prog: str, description: str, *, bare: str = _NEED_COMMAS, names_help: str | None = None
) -> LineParser:
    parser = LineParser(prog=prog, description=description, bare=bare, has_lists=True)
    parser.add_argument("names", metavar="NAME[,NAME...]", help=names_help)
    return parser
