"""The commands about jobs and specs, the same in a notebook and in a shell; each front adds what is its own.

What a number may be says who is given it: here it is only read.
"""

from __future__ import annotations

from typing import Any

from ..node.job.terms import COMMAND_LIMIT_S, GRACE_S
from ..plan.targets import CHOICES, GPUS, KINDS, OPTIONS, TARGETS, as_typed
from .parser import OptionParser, not_empty, number, whole

__all__ = [
    "FIELDS",
    "SPEC_COMMANDS",
    "add_export_options",
    "add_follow",
    "add_import_options",
    "add_job_commands",
    "add_name_and_nodes",
    "add_one_job",
]

FIELDS = "--SECTION.FIELD VALUE sets a field of the spec, as --training.epochs 2, --artifacts VALUE one at its top."
SPEC_COMMANDS = ("submit", "check")  # these take fields
_NUM_LISTED = 50
_JOB = "its id, what that begins with, or a name: the newest job of that name"


def add_job_commands(commands: Any, *, spec: str) -> dict[str, OptionParser]:
    """Add all of them; returns their parsers. ``spec``: what may stand for one."""
    parsers = _add_those_with_a_spec(commands, spec)
    parsers["list"] = _add(commands, "list", "the newest jobs; nodes of those that are not over have 3 s to answer")
    parsers["list"].add_argument(
        "--limit", type=whole, default=_NUM_LISTED, metavar="N", help="how many, default %(default)s"
    )
    parsers["show"] = add_one_job(commands, "show", "how a job is: its nodes, its plan, the last metrics")
    parsers["logs"] = logs = add_one_job(commands, "logs", "what a job has printed", "train -f --tail 20 --node gpu1")
    logs.add_argument("-f", "--follow", action="store_true", help="go on to its end; an interrupt leaves the job")
    logs.add_argument("--tail", type=whole, metavar="N", help="of what there is only the last N lines of each rank")
    logs.add_argument("--node", type=not_empty, metavar="NODE", help="of one node, by its name or number")
    logs.add_argument("--rank", type=whole, metavar="R", help="of one rank")
    logs.add_argument("--torchrun", action="store_true", help="what torchrun says, too")
    parsers["attach"] = add_one_job(commands, "attach", "follow what a job prints to its end; fails where the job does")
    parsers["stop"] = stop = add_one_job(commands, "stop", "end all ranks of a job")
    stop.add_argument(
        "--grace", type=number, default=GRACE_S, metavar="S", help="seconds until SIGKILL, default %(default)g"
    )
    parsers["restart"] = add_one_job(
        commands, "restart", "stop a job if it runs, and submit its spec again as a new job"
    )
    add_follow(parsers["restart"])
    return parsers | _add_what_it_leaves(commands)


def _add_those_with_a_spec(commands: Any, spec: str) -> dict[str, OptionParser]:
    submit = _add(
        commands,
        "submit",
        "start the job of a spec; it goes on when you leave",
        "train.toml --nodes gpu1,gpu2 --follow",
    )
    check = _add(
        commands, "check", "what is wrong with a spec, and its plan; nothing is started", "train.toml --on-nodes"
    )
    for parser in (submit, check):
        parser.epilog = f"{FIELDS} {parser.epilog}"
        parser.add_argument("spec", metavar="SPEC", help=spec)
        add_name_and_nodes(parser)
    add_follow(submit)
    submit.add_argument("--dry-run", action="store_true", help="say what would run where, and which files would travel")
    check.add_argument(
        "--on-nodes", action="store_true", help="ask the nodes: the doctor, torch, libraries, free disk, the port"
    )
    return {"submit": submit, "check": check}


def _add_what_it_leaves(commands: Any) -> dict[str, OptionParser]:
    fetch = add_one_job(commands, "fetch", "copy what a job has made to this machine", 'train "*.pt" --to models')
    fetch.add_argument(
        "patterns", nargs="*", default=(), metavar="PATTERN", help='as "*.pt"; default: the artifacts of its spec'
    )
    fetch.add_argument("--to", type=not_empty, default=".", metavar="DIR", help="default: the current folder")
    fetch.add_argument("--anyway", action="store_true", help="also of a job that did not succeed, or still runs")
    fetch.add_argument("--replace", action="store_true", help="write over files here that differ, too")
    bare = "a command stands behind --, as in: exec JOB -- {}"
    execute = _add(
        commands, "exec", "run a shell command on every node of a job, or of --nodes", "train -- nvidia-smi", bare=bare
    )
    execute.add_argument("job", nargs="?", metavar="JOB", help=_JOB)
    execute.add_argument("--nodes", metavar="NODES", help="a nodes file or hosts, in place of a job")
    execute.add_argument(
        "--timeout",
        type=number,
        default=COMMAND_LIMIT_S,
        metavar="S",
        help="end it after S seconds, default %(default)g",
    )
    remove = _add(
        commands,
        "rm",
        "remove jobs that are over: their folders on the nodes, and what is known here",
        "--older-than 30",
    )
    remove.add_argument("jobs", nargs="*", metavar="JOB", help=_JOB)
    remove.add_argument("--older-than", type=number, metavar="DAYS", help="all that ended more than DAYS ago")
    remove.add_argument("--anyway", action="store_true", help="forget one here whose nodes do not answer")
    return {"fetch": fetch, "exec": execute, "rm": remove}


def add_name_and_nodes(parser: OptionParser) -> None:
    """What is said in place of a spec's, and how its source travels."""
    _add_in_place(parser)
    parser.add_argument(
        "--storage", metavar="URL", help="where the source travels by: s3://BUCKET/FOLDER, or a shared folder"
    )


def add_follow(parser: OptionParser) -> None:
    parser.add_argument("-f", "--follow", action="store_true", help="show what it prints, to its end")


def add_export_options(parser: OptionParser, *, spec: str) -> None:
    """What an export of a spec takes."""
    parser.add_argument("format", metavar="FORMAT", help=f"one of {', '.join(TARGETS)}")
    parser.add_argument("spec", metavar="SPEC", help=spec)
    parser.add_argument("-o", "--output", metavar="FILE", help="where to write it; default: it is printed")
    parser.add_argument("--gpus", type=whole, default=0, metavar="N", help=GPUS)
    _add_in_place(parser)
    parser.usage = "%(prog)s [-o FILE] [--gpus N] [--OPTION VALUE ...] FORMAT SPEC"
    groups: dict[str, Any] = {}  # by the formats that have these options
    for name, words in OPTIONS.items():
        kinds = ", ".join(kind for kind, target in TARGETS.items() if name in target.options)
        if kinds not in groups:
            groups[kinds] = parser.add_argument_group(f"options of {kinds}")
        told = words.replace("%", "%%")
        words_of = {"choices": CHOICES[name]} if name in CHOICES else {}
        groups[kinds].add_argument(as_typed(name), metavar=name.upper(), help=told, **words_of)


def add_import_options(parser: OptionParser) -> None:
    """What an import of a file of another tool takes; a command line of its own stands behind ``--``."""
    parser.add_argument("file", metavar="FILE", nargs="?", help="a file of another tool, at a path or a URL")
    one = f"what it is, one of {', '.join(KINDS)}; default: found out"
    parser.add_argument("--from", dest="kind", default="", choices=KINDS, metavar="KIND", help=one)
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="where to write the spec, or the nodes: .json, .toml or .yaml"
    )


def _add_in_place(parser: OptionParser) -> None:
    parser.add_argument("--name", type=not_empty, metavar="NAME", help="the job's name, in place of the spec's")
    parser.add_argument(
        "--nodes", metavar="NODES", help="a nodes file, or [user@]host[:port],..., in place of the spec's nodes"
    )


def _add(commands: Any, name: str, words: str, example: str = "", **more: Any) -> OptionParser:
    parser: OptionParser = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.", **more)
    parser.epilog = f"Example: %(prog)s {example}" if example else None
    return parser


def add_one_job(commands: Any, name: str, words: str, example: str = "") -> OptionParser:
    """A command about one job."""
    parser = _add(commands, name, words, example)
    if name == "restart":
        parser.add_argument("job", metavar="JOB", help=_JOB)
    else:
        parser.add_argument(
            "job", nargs="?", metavar="JOB", help=f"{_JOB}; without one the job submitted last from here"
        )
    return parser
