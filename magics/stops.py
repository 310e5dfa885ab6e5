"""The stop button, pressed in a magic that runs no cell: one line says what was interrupted, and what is left of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import DetrainError, SessionError

NOTHING_RUNS = "nothing of it runs on"  # of a start


@contextmanager
def told_when_interrupted(what: str, left: str = "") -> Iterator[None]:
    """In here a stop becomes an error of one line, with what is ``left``, unless it says so itself.

    Raises: SessionError.
    """
    try:
        yield
    except KeyboardInterrupt as exc:
        if isinstance(exc, DetrainError):  # it says more
            raise
        left = str(exc) or left
        raise SessionError(f"{what} was interrupted{f': {left}' if left else ''}") from None
