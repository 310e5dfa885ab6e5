"""The commands: parse, act; every failure is one line and an exit status."""

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

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # a disk, or what the user may have of it
_WRONG_USE = 2  # what a signal ended has 128 + its number, as in a shell


def main(argv: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    words, fields, command = split_command(sys.argv[1:] if argv is None else argv)
    parser = _command_parser()
    args = parser.parse_args(words)
    if fields and not hasattr(args, "spec"):
        parser.error(f"{fields[0]}: only a command with a spec takes its fields")
    if command and args.act not in (execute_on_nodes, import_from):
        parser.error(f"-- {command[0]}: only import and jobs exec take a command")
    args.fields, args.command = fields, command
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character is no reason to stop
    try:
        status: int = args.act(args)
        sys.stdout.flush()
    except BrokenPipeError:  # as of | head, which has what it wanted
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain at its end
        return 128 + SIGPIPE
    except OSError as exc:
        if exc.errno not in _FULL:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"detrain-nb: not all could be written: {exc.strerror}", file=sys.stderr)
        return FAILED
    except DetrainError as exc:
        if isinstance(exc, JobError):
            exc.prog = PROG
        print(f"detrain-nb: {exc}", file=sys.stderr)
        return _WRONG_USE if isinstance(exc, SpecError) else FAILED
    except KeyboardInterrupt:  # before there was a kernel, or after
        if argv is None:  # the process ends: a second one would show where that was
            _ignore_interrupts()
        return 128 + signal.SIGINT
    return status


def _ignore_interrupts() -> None:
    """One that came meanwhile is raised in here: signal() looks for it before it changes anything."""
    with contextlib.suppress(KeyboardInterrupt):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)


class _Parser(OptionParser):
    """What is wrong with a command line is one line, and an exit status."""

    def error(self, message: str) -> NoReturn:
        self.exit(_WRONG_USE, f"{self.prog}: {message} ({self.prog} --help)\n")


def _command_parser() -> _Parser:
    parser = _Parser(
        prog="detrain-nb",
        description="Train PyTorch models from notebooks, on many machines.",
        epilog="The exit status is 0, 1 where something failed, 2 for a wrong command or spec, 130 by an interrupt; "
        "some commands have more, which their own --help says.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    run = commands.add_parser(
        "run",
        help="execute a notebook, or the job of a spec or script, its output appearing here as it comes",
        description="Execute a notebook in its own folder, with this Python, or submit a spec, or a script, as a "
        "job and follow it to its end. What is printed appears here as it comes.",
        epilog=f"{FIELDS} Of a notebook the exit status is 0, or 1 where a cell fails. Of a spec {OF_JOB}.",
    )
    run.add_argument("spec", metavar="FILE", help="a notebook, .ipynb; a spec, .json, .toml or .yaml; a script, .py")
    run.add_argument("-n", type=whole, metavar="N", help="how many ranks on each node of a spec or script")
    run.add_argument("--output", type=Path, metavar="PATH", help="the executed notebook; default: NAME.executed.ipynb")
    run.add_argument("--timeout", type=number, metavar="S", help="end when a cell takes longer than S seconds")
    run.add_argument("--kernel", metavar="NAME", help="a Jupyter kernel by name, instead of this Python")
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
    from ..deploy.known import known_sessions  # it takes its time, and nothing else here needs it

    lines = [
        f"{name}  {known}  {known.own_end}; kill {known.pid} ends {'its ranks here' if known.nodes[1:] else 'it'}"
        for name, known in known_sessions().items()
        if known.pid
    ]
    print("\n".join(lines) or "no session runs on this machine")
    return 0


def _is_kept(path: Path) -> bool:
    """It is another user's, in a folder where only its owner can replace it, as in /tmp."""
    if os.name != "posix":
        return False
    try:
        state, folder = path.lstat(), path.parent.stat()
    except OSError:
        return False
    may_replace = os.geteuid() in (0, state.st_uid, folder.st_uid)
    return bool(folder.st_mode & stat.S_ISVTX) and not may_replace


def _run(args: argparse.Namespace) -> int:
    from ..documents import SUFFIXES  # it takes its time, and few commands need it

    is_spec = args.spec.lower().endswith((*SUFFIXES, ".py"))
    of_others = ("output", "timeout", "kernel") if is_spec else ("name", "nodes", "storage", "n")
    if given := [option for option in of_others if getattr(args, option) is not None]:
        kinds = ("notebooks", "a spec") if is_spec else ("specs", "a notebook")
        option = f"--{given[0]}" if len(given[0]) > 1 else f"-{given[0]}"
        raise SpecError(f"{option} is for {kinds[0]}, and {args.spec} is {kinds[1]}: leave it out")
    if is_spec:
        return run_spec(args)
    if args.fields:
        raise SpecError(f"{args.fields[0]}: {args.spec} is no spec: it has no fields to set")
    if args.timeout is not None and not args.timeout > 0:
        raise SpecError(f"timeout {args.timeout:g} s: give more than 0")
    args.notebook = Path(args.spec)
    notebook = read_notebook(args.notebook, is_any_kernel=args.kernel is not None)
    mode = args.notebook.stat().st_mode
    output: Path = args.output or args.notebook.with_name(f"{args.notebook.stem}.executed.ipynb")
    if not (output.parent.is_dir() and os.access(output.parent, os.W_OK)) or output.is_dir() or _is_kept(output):
        raise SpecError(f"{output}: cannot be written: give another place with --output")
    run = NotebookRun(
        notebook,
        folder=args.notebook.absolute().parent,
        # The name of its session comes from here. The executed notebook's path: the other may be open in Jupyter.
        # nobody comes back to the ranks of a run that was killed
        env={**os.environ, "DETRAIN_NB_NOTEBOOK": str(output.absolute()), "DETRAIN_NB_LINGER": "0"},
        kernel=args.kernel,
        timeout_s=args.timeout,
    )
    status = asyncio.run(run.execute())
    save(notebook, output, mode=mode)
    if run.failure:
        run.terminal.say(f"detrain-nb: {run.failure}", is_error=True)
    run.terminal.say(f"executed notebook{', as far as it came' if status else ''}: {output}")
    run.terminal.say(summary(notebook))
    run.terminal.leave()
    return status
