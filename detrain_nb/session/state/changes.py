"""A signal to one thread that something has changed that live views show."""

from __future__ import annotations

import threading


class Changes:
    """The changes of one session."""

    def __init__(self) -> None:
        self._noted = threading.Event()

    def note(self) -> None:
        """Note that something may have changed; wakes the thread that waits."""
        if not self._noted.is_set():
            self._noted.set()

    def wait(self, limit_s: float | None) -> bool:
        """Wait until something was noted since ``forget``; returns False after ``limit_s``."""
        return self._noted.wait(limit_s)

    def forget(self) -> None:
        """Forget the changes noted so far; the caller handles them now."""
        self._noted.clear()
