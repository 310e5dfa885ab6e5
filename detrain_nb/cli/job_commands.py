"""`detrain-nb jobs ...`, `detrain-nb run SPEC` and `detrain-nb doctor`: parse, call, print."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..errors import DetrainError, SpecError
from ..node.job.terms import COMMAND_LIMIT_S, GRACE_S
from ..text import CopyProgress

if TYPE_CHECKING:
    from ..jobs import Job
    from ..spec import PipelineSpec

__all__ = ["add_doctor", "add_job_commands", "execute_on_nodes", "read_spec", "run_spec", "split_command"]

_OK, _FAILED = 0, 1
_JOB = "the id of a job, its beginning, or a name: the newest job of that name"


def add_job_commands(commands: Any) -> None:
    """Add `jobs` and what can be done with them to the parser's commands."""
    group = commands.add_parser("jobs", help="scripts that run detached on all nodes: submit, follow, stop, fetch")
    actions = group.add_subparsers(metavar="ACTION", required=True)
    _add_submit_and_looks(actions)
    _add_acts(actions)
    check = _add(actions, "check", _check, "say what is wrong with a spec, without starting anything")
    add_spec(check)
    check.add_argument(
        "--on-nodes", action="store_true", help="ask the nodes: the doctor, torch, libraries, free disk, the port"
    )


def add_doctor(commands: Any) -> None:
    """Add `doctor` to the parser's commands."""
    doctor = commands.add_parser("doctor", help="can these hosts train together, and what to do if not")
    doctor.add_argument("nodes", metavar="NODES", help="a nodes file, or hosts as in alice@gpu1,gpu2")
    doctor.add_argument("--bandwidth", action="store_true", help="measure it too, between the hosts and to here")
    doctor.add_argument("--fix", action="store_true", help="make our folder on the hosts, closed to others")
    doctor.add_argument("--save", action="store_true", help="write what was measured into the nodes file")
    doctor.set_defaults(act=_doctor)


def add_spec(parser: argparse.ArgumentParser) -> None:
    """Add what every command with a spec takes."""
    parser.add_argument("spec", metavar="SPEC", help="a .json, .toml or .yaml file, or its URL")
    parser.add_argument("--name", metavar="NAME", help="the job's name, in place of the spec's")
    parser.add_argument("--nodes", metavar="NODES", help="a nodes file or hosts, in place of the spec's nodes")
    parser.add_argument(
        "--storage", metavar="URL", help="where the source travels by: s3://BUCKET/FOLDER, or a shared folder"
    )
    parser.epilog = "--SECTION.FIELD VALUE sets a field of the spec, as --training.epochs 2"


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Take fields of a spec (``--training.epochs 2``) and what stands behind ``--`` out of a command line."""
    from ..plan.fields import take_fields

    words, command = list(argv), []
    if "--" in words:
        at = words.index("--")
        words, command = words[:at], words[at + 1 :]
    fields, words = take_fields(words)
    return words, fields, command


def run_spec(args: argparse.Namespace) -> int:
    """Submit a spec, follow the job, and return its exit status."""
    return _follow(_submit_job(args))


def read_spec(args: argparse.Namespace) -> PipelineSpec:
    """Read the spec that the line names, with the fields that it sets."""
    from ..spec import PipelineSpec

    named = [f"--{field}={text}" for field in ("name", "nodes") if (text := getattr(args, field, None)) is not None]
    return PipelineSpec.load(args.spec).with_overrides(PipelineSpec.parse_overrides([*args.fields, *named]))


# ---- the commands


def _submit(args: argparse.Namespace) -> int:
    from ..jobs import submit

    if args.dry_run:
        print(submit(read_spec(args), dry_run=True))
        return _OK
    job = _submit_job(args)
    return _follow(job) if args.follow else _OK


def _submit_job(args: argparse.Namespace) -> Job:
    from ..jobs import submit

    spec = read_spec(args)
    with _progress() as say:
        job = submit(spec, storage=args.storage, on_progress=say, ask_passphrase=_ask_passphrase)
    _say_begun(job)
    return job


def _say_begun(job: Job) -> None:
    for notice in job.notices:
        print(f"detrain-nb: note: {notice}", file=sys.stderr)
    print(f"job {job.id} runs: detrain-nb jobs logs -f {job.id}", file=sys.stderr)


def _follow(job: Job) -> int:
    """An interrupt ends only the following."""
    try:
        status = job.attach(_print_line)
    except KeyboardInterrupt:
        print(f"\ndetrain-nb: job {job.id} goes on: detrain-nb jobs attach {job.id}", file=sys.stderr)
        raise
    if status.exit_code != 0 or not status.is_over:
        if status.failed_rank is not None:
            status = replace(status, last_lines=())  # they stand above; those of torchrun do not
        print(f"detrain-nb: {status}", file=sys.stderr)
    return status.exit_status


def _list(args: argparse.Namespace) -> int:
    from ..jobs import jobs

    print(jobs(limit=args.limit))
    return _OK


def _show(args: argparse.Namespace) -> int:
    print(_find(args.job).show())
    return _OK


def _logs(args: argparse.Namespace) -> int:
    job = _find(args.job)
    job.logs(node=args.node, rank=args.rank, torchrun=args.torchrun, follow=args.follow, on_line=_print_line)
    return _OK


def _attach(args: argparse.Namespace) -> int:
    return _follow(_find(args.job))


def _stop(args: argparse.Namespace) -> int:
    print(_find(args.job).stop(grace_s=args.grace))
    return _OK


def _restart(args: argparse.Namespace) -> int:
    with _progress() as say:
        job = _find(args.job).restart(on_progress=say)
    _say_begun(job)
    return _follow(job) if args.follow else _OK


def _fetch(args: argparse.Namespace) -> int:
    with _progress() as say:
        bar = CopyProgress("fetch", say)
        fetched = _find(args.job).fetch(args.pattern or None, args.to, anyway=args.anyway, on_progress=bar)
    print(fetched)
    return _OK


def execute_on_nodes(args: argparse.Namespace) -> int:
    """Run the command behind ``--`` on all nodes; return the worst exit status."""
    from ..deploy.chosen_nodes import transports_to
    from ..jobs import execute

    if (args.job is None) == (args.nodes is None):
        raise SpecError("name a job, or --nodes, whose nodes run the command")
    if not args.command:
        raise SpecError("no command was given: write it after --")
    command = args.command[0] if len(args.command) == 1 else shlex.join(args.command)
    if args.job is not None:
        executed = _find(args.job).execute(command, timeout_s=args.timeout, on_line=_print_line)
    else:
        nodes = transports_to(args.nodes, ask_passphrase=_ask_passphrase)
        executed = execute(nodes, command, timeout_s=args.timeout, on_line=_print_line)
    for node, status in executed.statuses.items():
        if isinstance(status, DetrainError):
            print(f"detrain-nb: {status}", file=sys.stderr)
        elif status and len(executed.statuses) > 1:
            print(f"detrain-nb: {node}: exit {status}", file=sys.stderr)
    return executed.status


def _remove(args: argparse.Namespace) -> int:
    from ..jobs import prune

    if args.older_than is None and not args.jobs:
        raise SpecError("name jobs, or --older-than DAYS")
    failed = False
    for wanted in args.jobs:
        job = _find(wanted)
        job.remove(anyway=args.anyway)
        print(f"removed {job.id}")
    if args.older_than is not None:

        def tell(job: str, failure: DetrainError | None) -> None:
            nonlocal failed
            failed = failed or failure is not None
            print(f"removed {job}" if failure is None else f"kept {job}: {failure}")

        prune(args.older_than, anyway=args.anyway, on_job=tell, ask_passphrase=_ask_passphrase)
    return _FAILED if failed else _OK


def _check(args: argparse.Namespace) -> int:
    from ..jobs import check_here, check_nodes
    from ..spec import worst

    spec = read_spec(args)
    if args.on_nodes:

        def tell(text: str) -> None:
            print(text, file=sys.stderr)

        findings = check_nodes(spec, storage=args.storage, ask_passphrase=_ask_passphrase, on_progress=tell)
    else:
        findings = check_here(spec)
    print("\n".join(map(str, findings)) or f"{args.spec}: nothing is wrong with it")
    if worst(findings) == "error":
        return _FAILED
    with contextlib.suppress(SpecError):  # it fits on nodes with GPUs, as a warning has said
        print(spec.plan())
    return _OK


def _doctor(args: argparse.Namespace) -> int:
    from ..doctor import examine, fix
    from ..documents import SUFFIXES
    from ..spec.nodes_file import write_nodes

    if args.save and not args.nodes.endswith(SUFFIXES):
        raise SpecError("--save writes into the nodes file: give one")
    with _progress() as say:
        bandwidth = args.bandwidth or args.save
        report = examine(args.nodes, bandwidth=bandwidth, on_progress=say, ask_passphrase=_ask_passphrase)
    print(report)
    if args.fix:
        print(fix(report))
    if args.save:
        before = f"{args.nodes}.before"
        is_kept = write_nodes(args.nodes, report.measured_nodes(), before=before)
        print(f"{args.nodes} has what was measured" + f"; as it was it is {before}" * is_kept)
    return _OK if report.is_ok else _FAILED


# ---- what they share


def _find(wanted: str) -> Job:
    from ..jobs import find_job

    return find_job(wanted, ask_passphrase=_ask_passphrase)


def _print_line(line: object) -> None:
    print(line, flush=True)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """One line that is written over, on a terminal; nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return

    def draw(text: str) -> None:
        columns = shutil.get_terminal_size().columns - 1  # what is longer has a second line, which stays
        print(f"\r\x1b[K{text[:columns]}", end="", file=sys.stderr, flush=True)

    try:
        yield draw
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _ask_passphrase(path: str) -> str | None:
    with contextlib.suppress(EOFError):
        return getpass.getpass(f"passphrase of {path}: ") or None
    return None


def _add_submit_and_looks(actions: Any) -> None:
    submit = _add(
        actions, "submit", _submit, "start the job that a spec describes; it goes on when this shell is closed"
    )
    add_spec(submit)
    submit.add_argument("--follow", "-f", action="store_true", help="print what it prints, to its end; its exit status")
    submit.add_argument("--dry-run", action="store_true", help="say what would run where, and which files would travel")

    listed = _add(actions, "list", _list, "list the newest jobs, and ask the nodes of those that are not over, for 3 s")
    listed.add_argument("--limit", type=_count, default=50, metavar="N", help="how many, default 50")

    _add_job(actions, "show", _show, "how a job is, on every node")
    logs = _add_job(actions, "logs", _logs, "print what a job has printed")
    logs.add_argument("--follow", "-f", action="store_true", help="go on to its end")
    logs.add_argument("--node", metavar="N", help="of one node, by its name or number")
    logs.add_argument("--rank", type=int, metavar="R", help="of one rank")
    logs.add_argument("--torchrun", action="store_true", help="what torchrun says, too")
    _add_job(actions, "attach", _attach, "print what a job prints to its end; return its exit status")


def _add_acts(actions: Any) -> None:
    """What is done with a job that there is."""
    stop = _add_job(actions, "stop", _stop, "end all ranks of a job")
    stop.add_argument(
        "--grace", type=float, default=GRACE_S, metavar="S", help="seconds until SIGKILL, default %(default)g"
    )
    restart = _add_job(actions, "restart", _restart, "stop a job if it runs, and submit its spec again")
    restart.add_argument("--follow", "-f", action="store_true", help="print what it prints, to its end")

    fetch = _add_job(actions, "fetch", _fetch, "fetch what a job has made")
    fetch.add_argument("pattern", nargs="*", metavar="PATTERN", help='as "*.pt"; default: the artifacts of its spec')
    fetch.add_argument("--to", default=".", metavar="DIR", help="the folder to write into; default: this one")
    fetch.add_argument("--anyway", action="store_true", help="also of a job that did not succeed, or still runs")

    execute = _add(
        actions,
        "exec",
        execute_on_nodes,
        "run a shell command on every node of a job, or of --nodes; the worst exit status",
    )
    execute.add_argument("job", nargs="?", metavar="JOB", help=_JOB)
    execute.add_argument("--nodes", metavar="NODES", help="a nodes file or hosts, in place of a job")
    execute.add_argument(
        "--timeout",
        type=float,
        default=COMMAND_LIMIT_S,
        metavar="S",
        help="end it after S seconds, default %(default)g",
    )

    remove = _add(
        actions, "rm", _remove, "remove jobs that are over: their folders on the nodes, and what is known here"
    )
    remove.add_argument("jobs", nargs="*", metavar="JOB", help=_JOB)
    remove.add_argument("--older-than", type=float, metavar="DAYS", help="all that ended more than DAYS ago")
    remove.add_argument("--anyway", action="store_true", help="forget one here whose nodes do not answer")


def _add(actions: Any, name: str, act: Callable[[argparse.Namespace], int], words: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=words, description=f"{words[0].upper()}{words[1:]}."
    )
    parser.set_defaults(act=act)
    return parser


def _add_job(actions: Any, name: str, act: Callable[[argparse.Namespace], int], words: str) -> argparse.ArgumentParser:
    parser = _add(actions, name, act, words)
    parser.add_argument("job", metavar="JOB", help=_JOB)
    return parser


def _count(text: str) -> int:
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text}: give 1 or more")
    return count


_count.__name__ = "number"  # argparse names it when the text is none
