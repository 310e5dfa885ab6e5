"""%pipeline: what a spec would do, what is wrong with it, and how it looks as somebody else's file."""

from __future__ import annotations

import argparse
import shlex
from typing import Any

from IPython.core.error import UsageError
from IPython.core.magic import Magics, line_magic, magics_class

from ..errors import DetrainError, SpecError
from ..formats import export_spec
from ..plan import Plan
from ..plan.fields import split_overrides
from ..spec import PipelineSpec
from ..storage import locate
from .options import HelpShown, LineParser

_SLURM = ("time", "partition", "account")


@magics_class
class PipelineMagics(Magics):
    """They need no session, and start nothing."""

    @line_magic
    def pipeline(self, line: str) -> Plan | None:
        """A spec in a file, or in a variable: what it would do.

        %pipeline plan SPEC | check SPEC
        %pipeline export torchrun|slurm SPEC [--output FILE] [--gpus N] [--time T] [--partition P] [--account A]

        --SECTION.FIELD VALUE sets a field of the spec, as --training.epochs 2.
        """
        try:
            return self._run(line)
        except HelpShown as shown:
            print(shown)
        except SpecError as exc:
            raise UsageError(str(exc)) from None
        except DetrainError as exc:
            raise exc.with_traceback(None) from None
        return None

    def _run(self, line: str) -> Plan | None:
        try:
            fields, words = split_overrides(shlex.split(line), is_ours=lambda name: "." in name)
        except ValueError as exc:
            raise UsageError(f"%pipeline: {exc}: {line}") from exc
        args = pipeline_parser().parse_args(words or ["--help"])
        if args.command is None:
            raise UsageError("%pipeline: no command: give plan, check or export (%pipeline --help)")
        spec = self._read_spec(args.spec, fields)
        if args.command == "plan":
            return spec.plan()
        if args.command == "check":
            print("\n".join(map(str, spec.check())) or f"{args.spec}: nothing is wrong with it")
        else:
            _export(spec, args)
        return None

    def _read_spec(self, where: str, fields: dict[str, str | None]) -> PipelineSpec:
        named = self.shell.user_ns.get(where) if self.shell and where.isidentifier() else None
        spec = named if isinstance(named, PipelineSpec) else PipelineSpec.load(where)
        words = [f"--{field}" if text is None else f"--{field}={text}" for field, text in fields.items()]
        return spec.with_overrides(PipelineSpec.parse_overrides(words))


def _export(spec: PipelineSpec, args: argparse.Namespace) -> None:
    text = export_spec(spec, args.format, gpus=args.gpus, options={name: getattr(args, name) for name in _SLURM})
    if args.output is None:
        print(text, end="")
    else:
        locate(args.output).write(text.encode("utf-8"))
        print(f"wrote {args.output}")


def pipeline_parser() -> LineParser:
    """``%pipeline COMMAND``."""
    parser = LineParser(prog="%pipeline", description="What a spec would do; nothing is started.")
    commands: Any = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=LineParser)
    _add_spec(commands.add_parser("plan", help="which rank is where, and what of the pipeline it has"))
    _add_spec(commands.add_parser("check", help="what is wrong with it, as far as that is known without its nodes"))
    export = commands.add_parser("export", help="write it as a shell script for torchrun, or a batch script for Slurm")
    export.add_argument("format", metavar="FORMAT", help="torchrun or slurm")
    _add_spec(export)
    export.add_argument("--output", metavar="FILE", help="where to write it; default: it is printed")
    export.add_argument("--gpus", type=int, default=0, metavar="N", help="how many a node has that names no devices")
    for name in _SLURM:
        export.add_argument(f"--{name}", metavar=name.upper(), help="of Slurm, as sbatch takes it")
    return parser


def _add_spec(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="a .json, .toml or .yaml file, its URL, or a variable")
