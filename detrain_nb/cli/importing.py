"""`detrain-nb import`: a file of another tool, or a command line of torchrun, as a spec."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ..documents import SUFFIXES
from ..errors import SpecError
from ..options.jobs import add_import_options

__all__ = ["add_import", "import_from"]


def add_import(commands: Any) -> None:
    """Add `import` to the parser's commands."""
    parser = commands.add_parser(
        "import",
        help="read a file of another tool, or a command line of torchrun, as a spec",
        description="Read a file of another tool as a spec, or as a nodes file where it has nodes alone. What neither "
        "can hold is named on the standard error, with the reason. Nothing of the file is run.",
        epilog="Example: %(prog)s -o train.toml -- torchrun --nproc-per-node 2 train.py --lr 3",
        bare="a command line stands behind --, as in: import -- {}",
    )
    add_import_options(parser)
    kinds = [suffix.removeprefix(".") for suffix in SUFFIXES if suffix != ".yml"]
    parser.add_argument("--as", dest="printed_as", choices=kinds, default="yaml", help="how to print it, default yaml")
    parser.set_defaults(act=import_from)


def import_from(args: argparse.Namespace) -> int:
    """Import the file that is named, or the command behind ``--``; print it, or write it."""
    from ..documents import format_document  # these take their time, and few commands need them
    from ..formats import import_command, import_file, write_import

    if bool(args.command) == (args.file is not None):
        raise SpecError("give a file, or a command line behind --: import -- torchrun train.py")
    imported = import_command(args.command) if args.command else import_file(args.file, kind=args.kind)
    for line in imported.left_out:
        print(f"detrain-nb: left out: {line}", file=sys.stderr)
    if args.output is None:
        print(format_document(imported.to_dict(), f".{args.printed_as}"), end="")
    else:
        print(write_import(imported, args.output), file=sys.stderr)
    return 0
