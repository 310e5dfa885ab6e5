"""What every magic runs in: what goes wrong with it is one line, or what the ranks raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from IPython.core.error import UsageError

from ..errors import CellSyntaxError, DetrainError, JobError, SpecError
from .options import HelpShown
from .stops import told_when_interrupted

PROG = "%job"  # what begins a command about jobs here
T = TypeVar("T")


def guard(prog: str, act: Callable[[], T]) -> T | None:
    """Help is printed; a wrong line is one line, and so is a stop; what the ranks raised fails the cell."""
    try:
        with told_when_interrupted(prog):
            return act()
    except HelpShown as shown:
        print(shown)
    except CellSyntaxError as exc:
        raise exc.with_traceback(None) from None
    except SpecError as exc:
        raise UsageError(str(exc)) from None
    except DetrainError as exc:
        if isinstance(exc, JobError):
            exc.prog = PROG
        raise exc.with_traceback(None) from None
    return None
