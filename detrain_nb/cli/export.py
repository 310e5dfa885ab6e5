"""`detrain-nb export`: a spec as a file of another tool."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..options.jobs import FIELDS, add_export_options
from ..plan.targets import OPTIONS, TARGETS
from .job_commands import SPEC, read_spec

__all__ = ["add_export"]


def add_export(commands: Any) -> None:
    """Add `export` to the parser's commands."""
    parser = commands.add_parser(
        "export",
        help="write a spec as a file of another tool",
        description="Write a spec as a file that runs without detrain_nb: "
        + ", ".join(f"{name} is {target.about}" for name, target in TARGETS.items())
        + ".",
        epilog=FIELDS,
    )
    add_export_options(parser, spec=SPEC)
    parser.set_defaults(act=_export)


def _export(args: argparse.Namespace) -> int:
    from ..formats import check_export, export_spec, write_export  # slow to import, and few commands need it

    spec = read_spec(args)
    options = {name: getattr(args, name) for name in OPTIONS}
    text = export_spec(spec, args.format, gpus=args.gpus, options=options)
    for finding in check_export(spec, gpus=args.gpus):
        print(f"detrain-nb: {finding}", file=sys.stderr)
    if args.output is None:
        print(text, end="")
        return 0
    print(write_export(text, args.output), file=sys.stderr)
    return 0
