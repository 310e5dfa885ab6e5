"""`detrain-nb jobs ...`, `detrain-nb run SPEC` and `detrain-nb doctor`: parse, call, print."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import shlex
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from ..errors import DetrainError, JobError, SpecError
from ..options import jobs as options
from ..text import CopyProgress

if TYPE_CHECKING:
    from ..jobs import Job
    from ..spec import PipelineSpec

__all__ = [
    "OF_JOB",
    "PROG",
    "SPEC",
    "add_doctor",
    "add_job_commands",
    "execute_on_nodes",
    "read_spec",
    "run_spec",
    "split_command",
]

PROG = "detrain-nb jobs"  # prefix of the job commands that a text names
OF_JOB = (
    "the exit status is that of the job, 1 if it has none, and 130 after an interrupt, which leaves the job running"
)
_STATUSES = {
    **dict.fromkeys(("submit", "restart"), f"With --follow {OF_JOB}."),
    "attach": f"{OF_JOB[0].upper()}{OF_JOB[1:]}.",
    "exec": "The exit status is the largest of all nodes: 124 for one that timed out, 255 for one not reached.",
}
_IS_IT_THERE = f"{PROG} list shows whether it is running"
_OK, _FAILED = 0, 1
SPEC = "a .json, .toml or .yaml file, its URL, or a Python script"


def add_job_commands(commands: Any) -> None:
    """Add `jobs` and its actions to the parser's commands."""
    group = commands.add_parser(
        "jobs", help="submit, follow, stop and fetch jobs: scripts that run detached on all nodes"
    )
    actions = group.add_subparsers(metavar="ACTION", required=True)
    acts = {
        "submit": _submit,
        "check": _check,
        "list": _list,
        "show": _show,
        "logs": _logs,
        "attach": _attach,
        "stop": _stop,
        "restart": _restart,
        "fetch": _fetch,
        "exec": execute_on_nodes,
        "rm": _remove,
    }
    for name, parser in options.add_job_commands(actions, spec=SPEC).items():
        parser.set_defaults(act=acts[name])
        parser.epilog = " ".join(filter(None, [parser.epilog, _STATUSES.get(name)])) or None


def add_doctor(commands: Any) -> None:
    """Add `doctor` to the parser's commands."""
    doctor = commands.add_parser("doctor", help="check whether hosts can train together, and what to do if not")
    doctor.add_argument("nodes", metavar="NODES", help="a nodes file, or hosts such as alice@gpu1,gpu2")
    doctor.add_argument(
        "--bandwidth", action="store_true", help="also measure the bandwidth between the hosts and to here"
    )
    doctor.add_argument("--speed", action="store_true", help="also measure how fast a rank of each host computes")
    doctor.add_argument("--fix", action="store_true", help="create detrain_nb's folder on the hosts, private to you")
    doctor.add_argument("--save", action="store_true", help="measure bandwidth and speed, write them to the nodes file")
    doctor.set_defaults(act=_doctor)


def split_command(argv: Sequence[str]) -> tuple[list[str], list[str], list[str]]:
    """Split a command line into its words, its spec fields (``--training.epochs 2``) and the command after ``--``."""
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
    """Read the spec that the line names, with the fields that the line sets."""
    from ..spec import PipelineSpec

    named = [f"--{field}={text}" for field in ("name", "nodes") if (text := getattr(args, field, None)) is not None]
    try:
        spec = PipelineSpec.load(args.spec)
    except SpecError:
        from ..formats.importing import explain_no_spec

        if said := explain_no_spec(args.spec):
            raise SpecError(said) from None
        raise
    spec = spec.with_overrides(PipelineSpec.parse_overrides([*args.fields, *named]))
    return spec if (count := getattr(args, "n", None)) is None else spec.with_ranks(count)


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
    with _told_when_interrupted(_IS_IT_THERE), _progress() as say:
        job = submit(spec, file=args.spec, storage=args.storage, on_progress=say, ask_passphrase=_ask_passphrase)
    _say_begun(job)
    return job


def _say_begun(job: Job) -> None:
    for notice in job.notices:
        print(f"detrain-nb: note: {notice}", file=sys.stderr)
    print(f"job {job.id} is running: {PROG} logs -f {job.id} follows it", file=sys.stderr)


def _follow(job: Job) -> int:
    """Show the output of a job to its end; an interrupt ends only this, not the job."""
    with (
        _told_when_interrupted(
            f"job {job.id} keeps running: {PROG} attach {job.id} follows it again, {PROG} stop {job.id} stops it"
        ),
        _shown_live() as show,
    ):
        status = job.attach(**show)
    if status.exit_code != 0 or not status.is_over:
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
    which = {"node": args.node, "rank": args.rank, "torchrun": args.torchrun, "tail": args.tail}
    if args.follow:
        with _told_when_interrupted(f"job {job.id} keeps running"), _shown_live() as show:
            job.logs(**which, follow=True, **show)
    else:
        with _told_when_interrupted("the output is incomplete"):
            job.logs(**which, on_line=_print_line)
    return _OK


def _attach(args: argparse.Namespace) -> int:
    return _follow(_find(args.job))


def _stop(args: argparse.Namespace) -> int:
    print(_find(args.job).stop(grace_s=args.grace))
    return _OK


def _restart(args: argparse.Namespace) -> int:
    with _told_when_interrupted(_IS_IT_THERE), _progress() as say:
        job = _find(args.job).restart(on_progress=say)
    _say_begun(job)
    return _follow(job) if args.follow else _OK


def _fetch(args: argparse.Namespace) -> int:
    with _told_when_interrupted("run the same command again to copy what is missing"), _progress() as say:
        bar = CopyProgress("fetch", say)
        fetched = _find(args.job).fetch(
            args.patterns or None, args.to, anyway=args.anyway, replace=args.replace, on_progress=bar
        )
    print(fetched)
    return _OK


def execute_on_nodes(args: argparse.Namespace) -> int:
    """Run the command after ``--`` on all nodes; return the worst exit status."""
    from ..deploy.chosen_nodes import transports_to
    from ..jobs import execute

    if (args.job is None) == (args.nodes is None):
        raise SpecError("jobs exec: give either a job or --nodes")
    if not args.command:
        raise SpecError("jobs exec: no command was given: write it after --, as in jobs exec JOB -- nvidia-smi")
    command = args.command[0] if len(args.command) == 1 else shlex.join(args.command)
    with _told_when_interrupted("the command was stopped on all nodes"):
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
        raise SpecError("jobs rm: give jobs, or --older-than DAYS")
    failed = False
    for job in [_find(wanted) for wanted in args.jobs]:  # an unknown job is an error before any is removed
        job.remove(anyway=args.anyway)
        print(f"removed {job.id}")
    if args.older_than is not None:

        def tell(job: str, failure: DetrainError | None) -> None:
            nonlocal failed
            if isinstance(failure, JobError):
                failure.prog = PROG
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
    print("\n".join(map(str, findings)) or f"{args.spec}: no faults found")
    if worst(findings) == "error":
        return _FAILED
    with contextlib.suppress(SpecError):  # it fits only on nodes with GPUs, as a warning says
        print(spec.plan())
    return _OK


def _doctor(args: argparse.Namespace) -> int:
    from ..doctor import examine, fix
    from ..documents import SUFFIXES
    from ..spec.nodes_file import write_nodes

    if args.save and not args.nodes.endswith(SUFFIXES):
        raise SpecError("doctor: --save writes to a nodes file: give one instead of hosts")
    with _progress() as say:
        wanted = {name: getattr(args, name) or args.save for name in ("bandwidth", "speed")}
        report = examine(args.nodes, **wanted, on_progress=say, ask_passphrase=_ask_passphrase)
    print(report)
    if args.fix:
        print(fix(report))
    if args.save:
        before = f"{args.nodes}.before"
        is_kept = write_nodes(args.nodes, report.measured_nodes(), before=before)
        print(f"the measurements are in {args.nodes}" + f"; its earlier version is {before}" * is_kept)
    return _OK if report.is_ok else _FAILED


# ---- what they share


def _find(wanted: str | None) -> Job:
    """Find a job; without a name the last one submitted, whose id is printed."""
    from ..jobs import find_job

    job = find_job(wanted, ask_passphrase=_ask_passphrase)
    if wanted is None:
        print(f"detrain-nb: job {job.id} was submitted last", file=sys.stderr)
    return job


def _print_line(line: object) -> None:
    print(line, flush=True)


@contextlib.contextmanager
def _shown_live() -> Iterator[dict[str, Any]]:
    """Yield the callbacks that show a followed job, as keyword arguments of ``attach`` and ``logs``."""
    from .job_terminal import JobTerminal

    terminal = JobTerminal(sys.stdout)
    try:
        yield {"on_line": terminal.take, "on_piece": terminal.on_piece}
    finally:
        terminal.finish()


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """Yield a function that redraws one line on a terminal; elsewhere it prints nothing."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return

    def draw(text: str) -> None:
        columns = shutil.get_terminal_size().columns - 1  # a longer text would wrap, and its first line would stay
        print(f"\r\x1b[K{text[:columns]}", end="", file=sys.stderr, flush=True)

    try:
        yield draw
    finally:
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _told_when_interrupted(left: str) -> Iterator[None]:
    """Print ``left``, the state after an interrupt, unless the interrupt has a text of its own."""
    try:
        yield
    except KeyboardInterrupt as exc:
        print(f"\ndetrain-nb: interrupted: {str(exc) or left}", file=sys.stderr)
        raise


def _ask_passphrase(path: str) -> str | None:
    """Ask for a passphrase; None without a terminal that can hide the input."""
    with contextlib.suppress(EOFError, getpass.GetPassWarning), warnings.catch_warnings():
        warnings.simplefilter("error", getpass.GetPassWarning)
        return getpass.getpass(f"passphrase of {path}: ") or None
    return None
