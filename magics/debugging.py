"""``%debug`` and ``%pdb on`` after an error of a magic: no code of the notebook can be looked at, and a line says so.

IPython would open its debugger in a frame of ours, and wait for input.
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
    "the error came from ranks, where no debugger can be opened: look at their variables with %%distributed, or bring "
    "them here with %pull; a function can be called, and debugged, in a cell of the notebook"
)
_NOTHING = "there is nothing to debug: the error came from the magic, and not from code that ran in the notebook"


def refuse_debugger(ipython: Any, guard: CodeType) -> Callable[[], None]:
    """Open no debugger after an error that came through ``guard``, which all magics do. Returns what undoes it."""
    usual = ipython.debugger

    def debugger(force: bool = False) -> None:
        words = _why_not(getattr(sys, "last_value", None), guard) if force or ipython.call_pdb else ""
        if words:
            print(words, file=sys.stderr)
        else:
            usual(force=force)

    return replace_methods(ipython, debugger=debugger)


def _why_not(error: BaseException | None, guard: CodeType) -> str:
    """Empty where the debugger has something to show: code of the notebook, or a fault of ours."""
    if not isinstance(error, (DetrainError, UsageError)):
        return ""
    if all(frame.f_code is not guard for frame, _ in traceback.walk_tb(error.__traceback__)):
        return ""
    return _ON_RANKS if isinstance(error, (RankError, RankLost, NodeLost, CellTimeout)) else _NOTHING
