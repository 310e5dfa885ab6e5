"""The jobs of the listed pipelines, queried while a page shows the list."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

from ..errors import DetrainError
from ..pipelines import MyPipelines

__all__ = ["AskedJobs"]

_SHORTEST_GAP_S, _LONGEST_GAP_S = 2.0, 30.0  # between two queries: grows while a job continues


class AskedJobs:
    """A thread that queries the listed jobs while a page is open; ``on_asked`` is called after each query."""

    def __init__(self, pipelines: MyPipelines, on_asked: Callable[[], None]) -> None:
        self._pipelines, self._on_asked = pipelines, on_asked
        self._lock = threading.Lock()
        self._ask_now = threading.Event()
        self._is_shown = False
        self._thread: threading.Thread | None = None

    def follow(self, *, is_shown: bool) -> None:
        """Start or stop the queries."""
        with self._lock:
            self._is_shown = is_shown
            if is_shown and (self._thread is None or not self._thread.is_alive()):
                self._thread = threading.Thread(target=self._ask, name="detrain_nb pipelines", daemon=True)
                self._thread.start()
        self._ask_now.set()

    def ask_now(self) -> None:
        """Query now: a job was started, or the user refreshes."""
        self._ask_now.set()

    def _ask(self) -> None:
        gap_s = _SHORTEST_GAP_S
        while True:
            is_wanted = self._ask_now.wait(gap_s)
            self._ask_now.clear()
            with self._lock:
                if not self._is_shown:
                    self._thread = None
                    return
            with contextlib.suppress(DetrainError):  # from the folder: the list reports it
                goes_on = self._pipelines.ask_after_jobs()
                gap_s = _SHORTEST_GAP_S if is_wanted else min(1.5 * gap_s, _LONGEST_GAP_S)
                gap_s = gap_s if goes_on else _LONGEST_GAP_S
                self._on_asked()
