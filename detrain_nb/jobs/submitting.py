"""Who submits a job of some name on this machine right now: a lock, which a process that is killed lets go."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..agents import runtime_folder
from ..errors import JobError
from ..locks import take_lock

__all__ = ["is_being_submitted", "submitting"]

_PREFIX = ".submitting-"


@contextlib.contextmanager
def submitting(name: str) -> Iterator[None]:
    """No other process of this user and machine submits a job of that name meanwhile. Raises: JobError."""
    if os.name != "posix":
        yield
        return
    path = _lock_file(name)
    lock = take_lock(path, is_new=True)
    if lock is None:
        raise JobError(f"a job named {name!r} is being submitted by another process: wait for it, or give another name")
    try:
        yield
    finally:
        _remove(path, lock)


def is_being_submitted(name: str) -> bool | None:
    """Whether a process is at it; None where that is not known, as of one on another machine."""
    if os.name != "posix":
        return None
    path = _lock_file(name)
    try:
        lock = take_lock(path)
    except OSError:  # nobody on this machine ever has
        return None
    if lock is None:
        return True
    _remove(path, lock)  # of one that was killed
    return False


def _lock_file(name: str) -> Path:
    return runtime_folder() / f"{_PREFIX}{name}"


def _remove(path: Path, lock: int) -> None:
    """While it is held: who takes a lock looks whether it is still in its place."""
    path.unlink(missing_ok=True)
    os.close(lock)
