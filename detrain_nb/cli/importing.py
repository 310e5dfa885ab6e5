"""`detrain-nb import`: a file of another tool, or a torchrun command line, as a spec."""

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
        help="read a file of another tool, or a torchrun command line, as a spec",
        description="Read a file of another tool as a spec, or as a nodes file if it has only nodes. What neither "
        "can express is listed on standard error, with the reason. No code of the file is executed.",
        epilog="Example: %(prog)s -o train.toml -- torchrun --nproc-per-node 2 train.py --lr 3",
        bare="a command line must follow --, as in: import -- {}",
    )
    add_import_options(parser)
    kinds = [suffix.removeprefix(".") for suffix in SUFFIXES if suffix != ".yml"]
    parser.add_argument(
        "--as", dest="printed_as", choices=kinds, default="yaml", help="the format to print, default yaml"
    )
    parser.set_defaults(act=import_from)


def import_from(args: argparse.Namespace) -> int:
    """Import the named file, or the command after ``--``; print the result, or write it to a file."""
    from ..documents import format_document  # slow to import, and few commands need them
    from ..formats import import_command, import_file, write_import

    if bool(args.command) == (args.file is not None):
        raise SpecError("give a file, or a command line after --: import -- torchrun train.py")
    imported = import_command(args.command) if args.command else import_file(args.file, kind=args.kind)
    for line in imported.left_out:
        print(f"detrain-nb: left out: {line}", file=sys.stderr)
    if args.output is None:
        print(format_document(imported.to_dict(), f".{args.printed_as}"), end="")
    else:
        print(write_import(imported, args.output), file=sys.stderr)
    return 0
