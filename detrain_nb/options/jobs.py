"""Commands about jobs and specs, the same in a notebook and in a shell; each front end adds its own options.

Numbers are only parsed here; the function that receives one checks its range.
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

FIELDS = "--SECTION.FIELD VALUE sets a field of the spec, e.g. --training.epochs 2; --artifacts VALUE one at the top."
SPEC_COMMANDS = ("submit", "check")  # these take fields
_NUM_LISTED = 50
_JOB = "id, beginning of an id, or name of a job: the newest of that name"


def add_job_commands(commands: Any, *, spec: str) -> dict[str, OptionParser]:
    """Add all commands; return their parsers. ``spec`` is the help text of SPEC."""
    parsers = _add_those_with_a_spec(commands, spec)
    parsers["list"] = _add(commands, "list", "list the newest jobs; nodes of unfinished jobs have 3 s to answer")
    parsers["list"].add_argument(
        "--limit", type=whole, default=_NUM_LISTED, metavar="N", help="number of jobs, default %(default)s"
    )
    parsers["show"] = add_one_job(commands, "show", "show a job: its status, nodes, plan and last metrics")
    parsers["logs"] = logs = add_one_job(commands, "logs", "print a job's output", "train -f --tail 20 --node gpu1")
    logs.add_argument(
        "-f", "--follow", action="store_true", help="follow until the job ends; an interrupt leaves it running"
    )
    logs.add_argument("--tail", type=whole, metavar="N", help="begin with the last N lines of each rank")
    logs.add_argument("--node", type=not_empty, metavar="NODE", help="only the output of one node, by name or number")
    logs.add_argument("--rank", type=whole, metavar="R", help="only the output of one rank")
    logs.add_argument("--torchrun", action="store_true", help="also the output of torchrun itself")
    parsers["attach"] = add_one_job(commands, "attach", "follow a job's output to its end; fails if the job fails")
    parsers["stop"] = stop = add_one_job(commands, "stop", "stop all ranks of a job")
    stop.add_argument(
        "--grace", type=number, default=GRACE_S, metavar="S", help="seconds until SIGKILL, default %(default)g"
    )
    parsers["restart"] = add_one_job(
        commands, "restart", "stop a job if it is running, and submit its spec again as a new job"
    )
    add_follow(parsers["restart"])
    return parsers | _add_what_it_leaves(commands)


def _add_those_with_a_spec(commands: Any, spec: str) -> dict[str, OptionParser]:
    submit = _add(
        commands,
        "submit",
        "start a spec as a job, which keeps running when you leave",
        "train.toml --nodes gpu1,gpu2 --follow",
    )
    check = _add(commands, "check", "check a spec and show its plan, without starting it", "train.toml --on-nodes")
    for parser in (submit, check):
        parser.epilog = f"{FIELDS} {parser.epilog}"
        parser.add_argument("spec", metavar="SPEC", help=spec)
        add_name_and_nodes(parser)
    add_follow(submit)
    submit.add_argument(
        "--dry-run", action="store_true", help="show what would run where, and which files would be copied"
    )
    check.add_argument(
        "--on-nodes", action="store_true", help="also check the nodes: doctor, torch, libraries, free disk, port"
    )
    return {"submit": submit, "check": check}


def _add_what_it_leaves(commands: Any) -> dict[str, OptionParser]:
    fetch = add_one_job(commands, "fetch", "copy files that a job has made to this machine", 'train "*.pt" --to models')
    fetch.add_argument(
        "patterns", nargs="*", default=(), metavar="PATTERN", help='e.g. "*.pt"; default: the artifacts of its spec'
    )
    fetch.add_argument("--to", type=not_empty, default=".", metavar="DIR", help="default: the current folder")
    fetch.add_argument("--anyway", action="store_true", help="even if the job did not succeed or is still running")
    fetch.add_argument("--replace", action="store_true", help="overwrite files here that differ")
    bare = "a command must follow --, as in: exec JOB -- {}"
    execute = _add(
        commands, "exec", "run a shell command on every node of a job, or of --nodes", "train -- nvidia-smi", bare=bare
    )
    execute.add_argument("job", nargs="?", metavar="JOB", help=_JOB)
    execute.add_argument("--nodes", metavar="NODES", help="a nodes file or hosts, instead of a job")
    execute.add_argument(
        "--timeout",
        type=number,
        default=COMMAND_LIMIT_S,
        metavar="S",
        help="kill the command after S seconds, default %(default)g",
    )
    remove = _add(
        commands,
        "rm",
        "remove finished jobs: their folders on the nodes, and their records here",
        "--older-than 30",
    )
    remove.add_argument("jobs", nargs="*", metavar="JOB", help=_JOB)
    remove.add_argument("--older-than", type=number, metavar="DAYS", help="all that ended more than DAYS days ago")
    remove.add_argument("--anyway", action="store_true", help="remove the record even if a node does not answer")
    return {"fetch": fetch, "exec": execute, "rm": remove}


def add_name_and_nodes(parser: OptionParser) -> None:
    """Add the options that replace the spec's name and nodes, and select how its source is copied."""
    _add_in_place(parser)
    parser.add_argument(
        "--storage", metavar="URL", help="copy the source through s3://BUCKET/FOLDER, or a shared folder"
    )


def add_follow(parser: OptionParser) -> None:
    parser.add_argument("-f", "--follow", action="store_true", help="follow the output of the job to its end")


def add_export_options(parser: OptionParser, *, spec: str) -> None:
    """Add the options of an export of a spec."""
    parser.add_argument("format", metavar="FORMAT", help=f"one of {', '.join(TARGETS)}")
    parser.add_argument("spec", metavar="SPEC", help=spec)
    parser.add_argument("-o", "--output", metavar="FILE", help="file to write; default: print it")
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
    """Add the options of an import of another tool's file; a command line to import follows ``--``."""
    parser.add_argument("file", metavar="FILE", nargs="?", help="a file of another tool, at a path or a URL")
    one = f"its kind, one of {', '.join(KINDS)}; default: detected"
    parser.add_argument("--from", dest="kind", default="", choices=KINDS, metavar="KIND", help=one)
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="file to write the spec or the nodes to: .json, .toml or .yaml"
    )


def _add_in_place(parser: OptionParser) -> None:
    parser.add_argument("--name", type=not_empty, metavar="NAME", help="name of the job, instead of the spec's")
    parser.add_argument(
        "--nodes", metavar="NODES", help="a nodes file, or [user@]host[:port],..., instead of the spec's nodes"
    )


def _add(commands: Any, name: str, words: str, example: str = "", **more: Any) -> OptionParser:
    parser: OptionParser = commands.add_parser(name, help=words, description=f"{words[0].upper()}{words[1:]}.", **more)
    parser.epilog = f"Example: %(prog)s {example}" if example else None
    return parser


def add_one_job(commands: Any, name: str, words: str, example: str = "") -> OptionParser:
    """Add a command about one job; return its parser."""
    parser = _add(commands, name, words, example)
    if name == "restart":
        parser.add_argument("job", metavar="JOB", help=_JOB)
    else:
        parser.add_argument("job", nargs="?", metavar="JOB", help=f"{_JOB}; default: the job submitted last from here")
    return parser
