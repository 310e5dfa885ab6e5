"""Tells one thread that something has changed which live views show; whoever changes it notes that here."""

from __future__ import annotations

import threading


class Changes:
    """Those of one session."""

    def __init__(self) -> None:
        self._noted = threading.Event()

    def note(self) -> None:
        """Something has changed, perhaps; whoever waits looks."""
        if not self._noted.is_set():
            self._noted.set()

    def wait(self, limit_s: float | None) -> bool:
        """Wait until something was noted since ``forget``; False when nothing was in time."""
        return self._noted.wait(limit_s)

    def forget(self) -> None:
        """What was noted is being looked at."""
        self._noted.clear()
