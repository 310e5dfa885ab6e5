"""The frame of every magic: an error shows as one line, or as what the ranks raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from IPython.core.error import UsageError

from ..errors import CellSyntaxError, DetrainError, JobError, SpecError
from .options import HelpShown
from .stops import told_when_interrupted

PROG = "%job"  # prefix of the job commands that an error names
T = TypeVar("T")


def guard(prog: str, act: Callable[[], T]) -> T | None:
    """Run ``act``: print help, show a bad line or an interrupt as one line, and raise what the ranks raised."""
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
