"""Entry point of `detrain-nb`: parses a command and runs it; every failure is one line and an exit status."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import os
import signal
import stat
import sys
from pathlib import Path
from typing import NoReturn

from .. import __version__
from ..errors import DetrainError, JobError, SpecError
from ..options.jobs import FIELDS, add_name_and_nodes
from ..options.parser import OptionParser, number, whole
from .export import add_export
from .importing import add_import, import_from
from .job_commands import OF_JOB, PROG, add_doctor, add_job_commands, execute_on_nodes, run_spec, split_command
from .notebook_file import read_notebook, save, summary
from .notebook_run import FAILED, SIGPIPE, NotebookRun

__all__ = ["main"]

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the disk is full, or a quota or size limit is reached
_WRONG_USE = 2  # after a signal the exit status is 128 + its number, as in a shell


def main(argv: list[str] | None = None) -> int:
    """Run a command line, by default that of the process; return the exit status."""
    words, fields, command = split_command(sys.argv[1:] if argv is None else argv)
    parser = _command_parser()
    args = parser.parse_args(words)
    if fields and not hasattr(args, "spec"):
        parser.error(f"{fields[0]}: only a command with a spec accepts spec fields")
    if command and args.act not in (execute_on_nodes, import_from):
        parser.error(f"-- {command[0]}: only import and jobs exec accept a command")
    args.fields, args.command = fields, command
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a character that the terminal lacks must not stop the command
    try:
        status: int = args.act(args)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader, such as head, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else Python reports an error at exit
        return 128 + SIGPIPE
    except OSError as exc:
        if exc.errno not in _FULL:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"detrain-nb: output is incomplete: {exc.strerror}", file=sys.stderr)
        return FAILED
    except DetrainError as exc:
        if isinstance(exc, JobError):
            exc.prog = PROG
        print(f"detrain-nb: {exc}", file=sys.stderr)
        return _WRONG_USE if isinstance(exc, SpecError) else FAILED
    except KeyboardInterrupt:  # before a kernel has started, or after it has exited
        if argv is None:  # the process exits; a second interrupt would print a traceback
            _ignore_interrupts()
        return 128 + signal.SIGINT
    return status


def _ignore_interrupts() -> None:
    """Ignore SIGINT; signal() first raises a pending interrupt, which is suppressed here."""
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Parser(OptionParser):
    """A parser that reports an error as one line and exits with status 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(_WRONG_USE, f"{self.prog}: {message} ({self.prog} --help)\n")


def _command_parser() -> _Parser:
    parser = _Parser(
        prog="detrain-nb",
        description="Train PyTorch models from notebooks, on many machines.",
        epilog="The exit status is 0 for success, 1 for a failure, 2 for an invalid command or spec, 130 after an "
        "interrupt; some commands have others, listed in their --help.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    run = commands.add_parser(
        "run",
        help="run a notebook, or the job of a spec or script, and show its output live",
        description="Run a notebook in its own folder, with this Python; or submit a spec or script as a job and "
        "follow it to its end. The output is shown live.",
        epilog=f"{FIELDS} For a notebook the exit status is 0, or 1 if a cell fails. For a spec {OF_JOB}.",
    )
    run.add_argument("spec", metavar="FILE", help="a notebook (.ipynb), a spec (.json, .toml, .yaml) or a script (.py)")
    run.add_argument("-n", type=whole, metavar="N", help="number of ranks per node, of a spec or script")
    run.add_argument("--output", type=Path, metavar="PATH", help="the executed notebook; default: NAME.executed.ipynb")
    run.add_argument("--timeout", type=number, metavar="S", help="stop when a cell takes longer than S seconds")
    run.add_argument("--kernel", metavar="NAME", help="the name of a Jupyter kernel to use instead of this Python")
    add_name_and_nodes(run)
    run.set_defaults(act=_run)
    sessions = commands.add_parser("sessions", help="list the running sessions of this user on this machine")
    sessions.set_defaults(act=_list_sessions)
    add_job_commands(commands)
    add_doctor(commands)
    add_export(commands)
    add_import(commands)
    return parser


def _list_sessions(args: argparse.Namespace) -> int:
    from ..deploy.known import known_sessions  # slow to import, and nothing else here needs it

    lines = [
        f"{name}  {known}  {known.own_end}; kill {known.pid} stops {'its ranks here' if known.nodes[1:] else 'it'}"
        for name, known in known_sessions().items()
        if known.pid
    ]
    print("\n".join(lines) or "no session is running on this machine")
    return 0


def _is_kept(path: Path) -> bool:
    """Return whether a path is another user's, in a sticky folder such as /tmp, where only its owner can replace it."""
    if os.name != "posix":
        return False
    try:
        state, folder = path.lstat(), path.parent.stat()
    except OSError:
        return False
    may_replace = os.geteuid() in (0, state.st_uid, folder.st_uid)
    return bool(folder.st_mode & stat.S_ISVTX) and not may_replace


def _run(args: argparse.Namespace) -> int:
    from ..documents import SUFFIXES  # slow to import, and few commands need it

    is_spec = args.spec.lower().endswith((*SUFFIXES, ".py"))
    of_others = ("output", "timeout", "kernel") if is_spec else ("name", "nodes", "storage", "n")
    if given := [option for option in of_others if getattr(args, option) is not None]:
        kinds = ("notebooks", "a spec") if is_spec else ("specs", "a notebook")
        option = f"--{given[0]}" if len(given[0]) > 1 else f"-{given[0]}"
        raise SpecError(f"{option} is for {kinds[0]}, but {args.spec} is {kinds[1]}: leave it out")
    if is_spec:
        return run_spec(args)
    if args.fields:
        raise SpecError(f"{args.fields[0]}: {args.spec} is not a spec: it has no fields to set")
    if args.timeout is not None and not args.timeout > 0:
        raise SpecError(f"timeout {args.timeout:g} s: give more than 0")
    args.notebook = Path(args.spec)
    notebook = read_notebook(args.notebook, is_any_kernel=args.kernel is not None)
    mode = args.notebook.stat().st_mode
    output: Path = args.output or args.notebook.with_name(f"{args.notebook.stem}.executed.ipynb")
    if not (output.parent.is_dir() and os.access(output.parent, os.W_OK)) or output.is_dir() or _is_kept(output):
        raise SpecError(f"{output}: cannot be written: give another path with --output")
    run = NotebookRun(
        notebook,
        folder=args.notebook.absolute().parent,
        # The session is named after the executed notebook, as the original may be open in Jupyter.
        # No linger: nobody attaches again to the ranks of a run that was killed.
        env={**os.environ, "DETRAIN_NB_NOTEBOOK": str(output.absolute()), "DETRAIN_NB_LINGER": "0"},
        kernel=args.kernel,
        timeout_s=args.timeout,
    )
    status = asyncio.run(run.execute())
    save(notebook, output, mode=mode)
    if run.failure:
        run.terminal.say(f"detrain-nb: {run.failure}", is_error=True)
    run.terminal.say(f"executed notebook{', up to where it stopped' if status else ''}: {output}")
    run.terminal.say(summary(notebook))
    run.terminal.leave()
    return status
