"""The lines of ``%job`` and ``%%torchrun``: their options, the fields of a spec that they set, the command to run."""

from __future__ import annotations

import argparse
import re
from typing import Any

from ..node.job.terms import COMMAND_LIMIT_S, GRACE_S
from ..plan.fields import take_fields
from .options import LineParser, not_empty, not_negative, positive, seconds, seconds_or_0, whole

__all__ = ["job_parser", "parse_job_line", "parse_torchrun_line", "torchrun_parser"]

_SPEC_COMMANDS = ("submit", "check")
_COMMAND = re.compile(r"(?:^|\s)--(?:\s|$)")  # what begins a command
_JOB_HELP = "an id, what it begins with, or a name: the newest job of that name"
_FIELDS = "--SECTION.FIELD VALUE sets a field of the spec, as --training.epochs 2."


def parse_job_line(line: str) -> tuple[LineParser, argparse.Namespace]:
    """``args.fields`` are words that set fields of the spec, ``args.shell_line`` is what stands behind ``--``.

    Raises: UsageError, HelpShown.
    """
    parser = job_parser()
    before, shell_line = line, ""
    if line.split(maxsplit=1)[:1] == ["exec"] and (found := _COMMAND.search(line)):
        before, shell_line = line[: found.start()], line[found.end() :].strip()  # as it is: a shell reads it
    words = parser.split_line(before)
    fields: list[str] = []
    if words and words[0] in _SPEC_COMMANDS:
        fields, words = take_fields(words)
    args = parser.parse_words(words)
    args.fields, args.shell_line = fields, shell_line
    return parser, args


def parse_torchrun_line(line: str) -> argparse.Namespace:
    """``args.arguments`` are the script's: all from the first word that is no option, or behind ``--``.

    Raises: UsageError, HelpShown.
    """
    parser = torchrun_parser()
    words, own = parser.split_line(line), []
    if "--" in words:
        words, own = words[: words.index("--")], words[words.index("--") + 1 :]
    fields, words = take_fields(words)
    args = parser.parse_words(words)
    args.fields, args.arguments = fields, [*args.arguments, *own]
    return args


def job_parser() -> LineParser:
    """``%job COMMAND``."""
    parser = LineParser(prog="%job", description="Jobs: scripts that run to their end on all nodes, detached.")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=LineParser)
    _add_submit_and_looks(commands)
    _add_acts(commands)
    check = commands.add_parser("check", epilog=_FIELDS, help="what is wrong with a spec, and its plan")
    _add_spec(check)
    check.add_argument(
        "--on-nodes", action="store_true", help="ask the nodes: the doctor, torch, libraries, free disk, the port"
    )
    return parser


def torchrun_parser() -> LineParser:
    """``%%torchrun``."""
    parser = LineParser(
        prog="%%torchrun",
        description="Run the cell as a script under torchrun on all nodes, detached: a job, see %job --help.",
        epilog=_FIELDS,
    )
    parser.add_argument("--spec", metavar="SPEC", help="a spec: all but what is run comes from there")
    _add_name_and_nodes(parser)
    parser.add_argument("-n", dest="count", type=positive, metavar="N", help="how many ranks on each node")
    parser.add_argument("--out", metavar="NAME", help="put the job into this variable of the notebook")
    _add_follow(parser)
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENTS", help="the script's; also behind --")
    return parser


def _add_submit_and_looks(commands: Any) -> None:
    submit = commands.add_parser("submit", epilog=_FIELDS, help="start the job that a spec describes, and return it")
    _add_spec(submit)
    _add_follow(submit)
    submit.add_argument(
        "--dry-run", action="store_true", help="show what would run where, and which files would travel"
    )
    listed = commands.add_parser(
        "list", help="the newest jobs; the nodes of those that are not over have 3 s to answer"
    )
    listed.add_argument("--limit", type=_limit, default=50, metavar="N", help="how many, default 50")
    _add_job(commands, "show", "how a job is: its nodes, its plan, the last metrics")
    logs = _add_job(commands, "logs", "what a job has printed")
    logs.add_argument("-f", "--follow", action="store_true", help="go on showing it until the job ends")
    logs.add_argument("--node", type=not_empty, metavar="NODE", help="of one node, by its name or number")
    logs.add_argument("--rank", type=whole, metavar="R", help="of one rank")
    logs.add_argument("--torchrun", action="store_true", help="what torchrun says, too")
    _add_max_lines(logs)
    attach = _add_job(commands, "attach", "show what a job prints until it ends; fails where the job does")
    _add_max_lines(attach)


def _add_acts(commands: Any) -> None:
    """What is done with a job that there is."""
    stop = _add_job(commands, "stop", "end all ranks of a job")
    stop.add_argument(
        "--grace", type=seconds_or_0, default=GRACE_S, metavar="S", help="until SIGKILL, default %(default)g"
    )
    restart = _add_job(commands, "restart", "stop a job if it runs, submit its spec again, and return the new job")
    _add_follow(restart)
    fetch = _add_job(commands, "fetch", "copy what a job has made to this machine")
    fetch.add_argument(
        "patterns", nargs="*", default=(), metavar="PATTERN", help="as *.pt; default: the artifacts of its spec"
    )
    fetch.add_argument("--to", type=not_empty, default=".", metavar="DIR", help="default: the current one")
    fetch.add_argument("--anyway", action="store_true", help="also of a job that did not succeed, or still runs")
    execute = commands.add_parser(
        "exec", epilog="%job exec JOB -- nvidia-smi | head -5", help="run a shell command on all nodes of a job"
    )
    execute.add_argument("job", nargs="?", metavar="JOB", help=_JOB_HELP)
    execute.add_argument("--nodes", metavar="NODES", help="a nodes file or hosts, in place of a job")
    execute.add_argument(
        "--timeout",
        type=seconds,
        default=COMMAND_LIMIT_S,
        metavar="S",
        help="end it after S seconds, default %(default)g",
    )
    remove = commands.add_parser("rm", help="remove jobs that are over, on their nodes and here")
    remove.add_argument("jobs", nargs="*", metavar="JOB", help=_JOB_HELP)
    remove.add_argument("--older-than", type=_days, metavar="DAYS", help="all that ended more than DAYS ago")
    remove.add_argument("--anyway", action="store_true", help="forget one here whose nodes do not answer")


def _add_job(commands: Any, name: str, words: str) -> LineParser:
    parser: LineParser = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.")
    parser.add_argument("job", metavar="JOB", help=_JOB_HELP)
    return parser


def _add_spec(parser: LineParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="a .json, .toml or .yaml file, its URL, or a variable")
    _add_name_and_nodes(parser)


def _add_name_and_nodes(parser: LineParser) -> None:
    parser.add_argument("--name", type=not_empty, metavar="NAME", help="the job's name")
    parser.add_argument("--nodes", metavar="NODES", help="a nodes file, or [user@]host[:port],...")
    parser.add_argument(
        "--storage", metavar="URL", help="where the source travels by: s3://BUCKET/FOLDER, or a shared folder"
    )


def _add_follow(parser: LineParser) -> None:
    parser.add_argument("-f", "--follow", action="store_true", help="show what it prints until it ends")
    _add_max_lines(parser)


def _add_max_lines(parser: LineParser) -> None:
    parser.add_argument("--max-lines", type=not_negative, metavar="N", help="show at most N lines; 0 is no limit")


def _limit(text: str) -> int:
    if not 1 <= (number := whole(text)) <= 10**9:
        raise argparse.ArgumentTypeError(f"{number} jobs: give 1 or more")
    return number


def _days(text: str) -> float:
    try:
        days = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of days") from None
    if not 0 <= days <= 100_000:
        raise argparse.ArgumentTypeError(f"{text} days: give 0 to 100000")
    return days
