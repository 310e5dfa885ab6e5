"""The stop button in a magic that runs no cell: one line names what was interrupted, and what is left of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import DetrainError, SessionError

NOTHING_RUNS = "none of its processes are left"  # of a start


@contextmanager
def told_when_interrupted(what: str, left: str = "") -> Iterator[None]:
    """Turn an interrupt into an error of one line that names what is ``left``, unless the interrupt has a text.

    Raises: SessionError.
    """
    try:
        yield
    except KeyboardInterrupt as exc:
        if isinstance(exc, DetrainError):  # it has more details
            raise
        left = str(exc) or left
        raise SessionError(f"{what} was interrupted{f': {left}' if left else ''}") from None
