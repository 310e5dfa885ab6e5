"""A file lock that a process holds until it closes it or exits."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def take_lock(path: Path, *, is_new: bool = False) -> int | None:
    """Take the lock file at ``path``, created if missing when ``is_new``; None when another process holds it.

    None as well when the file was removed in the meantime, as old locks are. Raises: OSError.
    """
    import fcntl

    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if is_new else 0)
    lock = os.open(path, flags, 0o600)
    with contextlib.suppress(BlockingIOError, FileNotFoundError), contextlib.ExitStack() as on_failure:
        on_failure.callback(os.close, lock)
        if is_new:
            os.fchmod(lock, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(lock), path.lstat()):
            on_failure.pop_all()
            return lock
    return None
