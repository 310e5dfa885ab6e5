"""The lines of ``%job`` and ``%%torchrun``: their options, the fields of a spec that they set, the command to run."""

from __future__ import annotations

import argparse
import re

from ..options.jobs import FIELDS, SPEC_COMMANDS, add_follow, add_job_commands, add_name_and_nodes, add_one_job
from ..options.parser import OptionParser
from ..plan.fields import take_fields
from .given_spec import SPEC
from .options import LineParser, not_negative, positive

__all__ = ["job_parser", "parse_job_line", "parse_torchrun_line", "torchrun_parser"]

_COMMAND = re.compile(r"(?:^|\s)--(?:\s|$)")  # begins a command


def parse_job_line(line: str) -> tuple[LineParser, argparse.Namespace]:
    """Parse a line: ``args.fields`` are words that set spec fields, ``args.shell_line`` is the text after ``--``.

    Raises: UsageError, HelpShown.
    """
    parser = job_parser()
    before, shell_line = line, ""
    if line.split(maxsplit=1)[:1] == ["exec"] and (found := _COMMAND.search(line)):
        before, shell_line = line[: found.start()], line[found.end() :].strip()  # unchanged, as a shell parses it
    words = parser.split_line(before)
    fields: list[str] = []
    if words and words[0] in SPEC_COMMANDS:
        fields, words = take_fields(words)
    args = parser.parse_words(words)
    args.fields, args.shell_line = fields, shell_line
    return parser, args


def parse_torchrun_line(line: str) -> argparse.Namespace:
    """Parse a line: ``args.arguments``, the script's, begin at the first word that is not an option, or after ``--``.

    Raises: UsageError, HelpShown.
    """
    parser = torchrun_parser()
    words, own = parser.split_line(line), []
    if "--" in words:
        words, own = words[: words.index("--")], words[words.index("--") + 1 :]
    fields, words = take_fields(words, has_whole=False)  # the script may have options of the same names
    args = parser.parse_words(words)
    args.fields, args.arguments = fields, [*args.arguments, *own]
    return args


def job_parser() -> LineParser:
    """Return the parser of ``%job COMMAND``."""
    parser = LineParser(
        prog="%job",
        description="Jobs: scripts that run to completion on all nodes, detached from the notebook.",
        epilog="Example: %(prog)s submit train.toml --follow. %(prog)s? shows more.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    added = add_job_commands(commands, spec=SPEC)
    for name in ("submit", "logs", "attach", "restart"):
        _add_max_lines(added[name])
    for name in ("submit", "restart"):
        _add_view(added[name])
    words = "a live view of a job: progress, curves, logs, model, and buttons to stop and restart it"
    add_one_job(commands, "view", words)
    return parser


def torchrun_parser() -> LineParser:
    """Return the parser of ``%%torchrun``."""
    parser = LineParser(
        prog="%%torchrun",
        description="Run the cell as a script under torchrun on all nodes, as a detached job (see %job --help).",
        epilog=FIELDS,
    )
    parser.add_argument("--spec", metavar="SPEC", help="take everything but the script from this spec")
    add_name_and_nodes(parser)
    parser.add_argument("-n", dest="count", type=positive, metavar="N", help="number of ranks per node")
    parser.add_argument("--out", metavar="NAME", help="store the job in this variable of the notebook")
    add_follow(parser)
    _add_view(parser)
    _add_max_lines(parser)
    parser.add_argument(
        "arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="arguments of the script; also after --"
    )
    return parser


def _add_view(parser: OptionParser) -> None:
    parser.add_argument("--view", action="store_true", help="show a live view of the job; the cell does not wait")


def _add_max_lines(parser: OptionParser) -> None:
    parser.add_argument("--max-lines", type=not_negative, metavar="N", help="show at most N lines; 0 means no limit")
