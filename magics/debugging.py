"""``%debug`` and ``%pdb on`` after an error of a magic: one line explains that there is no notebook code to inspect.

IPython would open its debugger in a frame of detrain_nb and wait for input.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from types import CodeType
from typing import Any

from IPython.core.error import UsageError

from ..errors import CellTimeout, DetrainError, NodeLost, RankError, RankLost
from .notebook import replace_methods

_ON_RANKS = (
    "the error comes from ranks, where no debugger can be opened: inspect their variables with %%distributed, or copy "
    "them here with %pull; to debug a function, call it in a cell of the notebook"
)
_NOTHING = "there is nothing to debug: the error comes from the magic, not from code that ran in the notebook"


def refuse_debugger(ipython: Any, guard: CodeType) -> Callable[[], None]:
    """Open no debugger after an error that passed through ``guard``, as all errors of magics do; returns the undo."""
    usual = ipython.debugger

    def debugger(force: bool = False) -> None:
        words = _why_not(getattr(sys, "last_value", None), guard) if force or ipython.call_pdb else ""
        if words:
            print(words, file=sys.stderr)
        else:
            usual(force=force)

    return replace_methods(ipython, debugger=debugger)


def _why_not(error: BaseException | None, guard: CodeType) -> str:
    """Return why no debugger opens; empty if it can show notebook code, or a bug of detrain_nb."""
    if not isinstance(error, (DetrainError, UsageError)):
        return ""
    if all(frame.f_code is not guard for frame, _ in traceback.walk_tb(error.__traceback__)):
        return ""
    return _ON_RANKS if isinstance(error, (RankError, RankLost, NodeLost, CellTimeout)) else _NOTHING
