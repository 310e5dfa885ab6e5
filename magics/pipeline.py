"""%pipeline: the pipelines next to the notebook; the plan of a spec, its faults, its export and import."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class
from IPython.display import display

from ..options.jobs import add_export_options, add_import_options
from ..plan import Plan
from ..plan.fields import take_fields
from ..plan.targets import OPTIONS
from .given_spec import SPEC, read_spec, show_findings
from .guard import guard
from .options import LineParser

if TYPE_CHECKING:
    from ..formats import Imported
    from ..spec import PipelineSpec

_MEANT_COMMAND = "a command line must follow --, as in: import -- {}"


@magics_class
class PipelineMagics(Magics):
    """The magic ``%pipeline``, which needs no session and starts nothing."""

    @line_magic
    def pipeline(self, line: str) -> Plan | Imported | None:
        """Open the pipelines next to the notebook; or plan, check, export or import a spec.

            %pipeline                                        My Pipelines: a list to open, run and create pipelines
            %pipeline console other/                         the same for another folder
            %pipeline plan train.toml                        the node of every rank, and its part of the pipeline
            %pipeline plan train.toml --parallelism.pp 4     the same with another value of a field
            %pipeline check train.toml                       the faults of the spec
            %pipeline export slurm train.toml --output train.sbatch --gpus 8 --time 2:00:00
            %pipeline export torchrun train.toml             a shell script for every node, printed
            %pipeline import node_configs.json -o nodes.toml  a file of another tool as a spec, or as nodes
            %pipeline import -- torchrun -m package.train    a command line as a spec

        None of these starts anything or connects to a node: %job submit train.toml starts a job.
        %pipeline COMMAND --help shows all options.
        """
        return guard("%pipeline", lambda: self._run(line))

    def _run(self, line: str) -> Plan | Imported | None:
        parser = pipeline_parser()
        words, command = _split_command(parser.split_line(line))
        fields, words = take_fields(words)
        args = parser.parse_words(words or ["console"])
        if args.command is None:
            raise UsageError("%pipeline: no command: give console, plan, check, export or import (%pipeline --help)")
        if args.command == "import":
            return _import(args, command)
        if command:
            raise UsageError(f"%pipeline {args.command}: -- {command[0]}: only import takes a command line")
        if args.command == "console":
            _show_console(self.shell, args.folder)
            return None
        named = [f"--{field}={text}" for field in ("name", "nodes") if (text := getattr(args, field, None)) is not None]
        spec = read_spec(self.shell, args.spec, [*fields, *named])
        if args.command == "plan":
            return spec.plan()
        if args.command == "check":
            from ..jobs import check_here

            show_findings(check_here(spec), args.spec)
        else:
            _export(spec, args)
        return None


def _show_console(ipython: Any, folder: str) -> None:
    """Show the pipelines as a page in a notebook, as a text list in a terminal."""
    if not hasattr(ipython, "kernel"):
        from ..pipelines import MyPipelines

        print(MyPipelines(folder).entries())
        return
    from ..widgets import console

    display(console(folder))


def _export(spec: PipelineSpec, args: argparse.Namespace) -> None:
    from ..formats import check_export, export_spec, write_export

    text = export_spec(spec, args.format, gpus=args.gpus, options={name: getattr(args, name) for name in OPTIONS})
    for finding in check_export(spec, gpus=args.gpus):
        print(finding, file=sys.stderr)
    print(text, end="") if args.output is None else print(write_export(text, args.output))


def _split_command(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split words into those before and those after ``--``."""
    end = words.index("--") if "--" in words else len(words)
    return words[:end], words[end + 1 :]


def _import(args: argparse.Namespace, command: Sequence[str]) -> Imported:
    from ..formats import import_command, import_file, write_import

    if bool(command) == (args.file is not None):
        raise UsageError("%pipeline import: give a file, or a command line after --: import -- torchrun train.py")
    imported = import_command(command) if command else import_file(args.file, kind=args.kind)
    if args.output is not None:
        print(write_import(imported, args.output))
    return imported


def pipeline_parser() -> LineParser:
    """Return the parser of ``%pipeline COMMAND``."""
    parser = LineParser(
        prog="%pipeline",
        description="Open the pipelines next to the notebook; or plan, check, export or import a spec.",
        epilog="Example: %(prog)s plan train.toml --training.epochs 2. %(prog)s? shows more.",
    )
    commands: Any = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=LineParser)
    console = commands.add_parser("console", help="list the pipelines of a folder, to open, run and create them")
    console.add_argument("folder", metavar="FOLDER", nargs="?", default="pipelines", help="default: pipelines/")
    plan = commands.add_parser("plan", help="show the node of every rank, and its part of the pipeline")
    check = commands.add_parser("check", help="show the faults of a spec that can be found without its nodes")
    for looked_at in (plan, check):
        looked_at.add_argument("spec", metavar="SPEC", help=SPEC)
    export = commands.add_parser("export", help="write a spec as a file of another tool, such as a Slurm batch script")
    add_export_options(export, spec=SPEC)
    imports = commands.add_parser(
        "import", help="read a file of another tool, or a torchrun command line, as a spec", bare=_MEANT_COMMAND
    )
    add_import_options(imports)
    return parser
