"""Refusal of anything that would prompt a user, which a rank does not have; a line says what to do instead."""

from __future__ import annotations

import bdb
import builtins
import code
import functools
import getpass
import pdb
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import IPython
import torch.distributed as dist
from IPython.core.autocall import ExitAutocall

from ...errors import SessionError

_NO_DEBUGGER = (
    "no debugger can run on a rank, which has no terminal: print there; %distributed where shows each rank's line, "
    "%pull fetches its variables; debug a function by calling it in a cell of the notebook"
)


class Exit(ExitAutocall):
    """``exit()`` and ``quit()``, which end the cell, as ``sys.exit()`` does."""

    def __call__(self, code: object = None) -> NoReturn:
        raise SystemExit(code)


def refuse_questions(runner: Any) -> None:
    """Make every prompt in this process fail; debuggers with their own connection are left alone."""
    refused: list[tuple[Any, str, Callable[..., Any]]] = [
        (builtins, "input", _refuse_input),
        (getpass, "getpass", _refuse_password),
        (code, "interact", _refuse_debugger),
        (IPython, "embed", _refuse_debugger),
        (dist, "breakpoint", _refuse_debugger),  # it prompts on one rank, and the others wait for it
        (bdb.Bdb, "set_trace", _refused_without_connection(bdb.Bdb.set_trace)),
        (pdb.Pdb, "interaction", _refused_without_connection(pdb.Pdb.interaction)),
    ]
    for owner, name, instead in refused:
        setattr(owner, name, instead)
    for kind, magic in (("line", "debug"), ("cell", "debug"), ("line", "pdb")):
        runner.magics_manager.magics[kind][magic] = _refuse_debugger


def _refused_without_connection(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def ask(self: Any, *args: Any, **options: Any) -> Any:
        if getattr(self, "stdin", None) is sys.stdin:
            raise SessionError(_NO_DEBUGGER)
        return method(self, *args, **options)

    return ask


def _refuse_debugger(*args: object, **options: object) -> NoReturn:
    raise SessionError(_NO_DEBUGGER)


def _refuse_input(prompt: object = "") -> NoReturn:
    raise EOFError("input() does not work on a rank: ask in a cell of the notebook, then %push the answer")


def _refuse_password(prompt: str = "", stream: object = None) -> NoReturn:
    raise EOFError("getpass() does not work on a rank: ask in a cell of the notebook, then %push the answer")
