"""Lock on the name of a job that is being submitted on this machine; a process that is killed releases it."""

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
    """Hold the lock on a job name: no other process of this user on this machine submits it now. Raises: JobError."""
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
    """Check that a process is submitting a job of that name; None if unknown, e.g. if it is on another machine."""
    if os.name != "posix":
        return None
    path = _lock_file(name)
    try:
        lock = take_lock(path)
    except OSError:  # no process of this machine has ever locked the name
        return None
    if lock is None:
        return True
    _remove(path, lock)  # left by a process that was killed
    return False


def _lock_file(name: str) -> Path:
    return runtime_folder() / f"{_PREFIX}{name}"


def _remove(path: Path, lock: int) -> None:
    """Remove the file while locked: a process that takes the lock checks that the file still exists."""
    path.unlink(missing_ok=True)
    os.close(lock)
