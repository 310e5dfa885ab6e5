"""The jobs of a list of pipelines: asked after while a page shows the list, and each of them as a view."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from ..errors import DetrainError
from ..pipelines import MyPipelines
from .job_view import JobView

__all__ = ["ConsoleJobs"]

_SHORTEST_GAP_S, _LONGEST_GAP_S = 2.0, 30.0  # between two questions: longer while a job goes on


class ConsoleJobs:
    """Asks how the listed jobs are, in a thread that is there while a page is; ``on_asked`` tells what is known."""

    def __init__(self, pipelines: MyPipelines, on_asked: Callable[[], None]) -> None:
        self._pipelines, self._on_asked = pipelines, on_asked
        self._views: dict[str, JobView] = {}
        self._lock = threading.Lock()
        self._ask_now = threading.Event()
        self._is_shown = False
        self._thread: threading.Thread | None = None

    def follow(self, *, is_shown: bool) -> None:
        """Begin to ask, or end it."""
        with self._lock:
            self._is_shown = is_shown
            if is_shown and self._thread is None:
                self._thread = threading.Thread(target=self._ask, name="detrain_nb pipelines", daemon=True)
                self._thread.start()
        self._ask_now.set()

    def ask_now(self) -> None:
        """Ask without waiting: a job was started, or somebody wants to know."""
        self._ask_now.set()

    def view(self, pipeline: Path) -> JobView:
        """Return the live view of the newest job of a pipeline. Raises: JobError where it was never run."""
        job = self._pipelines.last_job(pipeline)
        with self._lock:
            if job.id not in self._views:
                self._views[job.id] = JobView(job)
            return self._views[job.id]

    def close(self) -> None:
        """End the views, and the questions."""
        self.follow(is_shown=False)
        with self._lock:
            views, self._views = [*self._views.values()], {}
        for view in views:
            view.close()

    def _ask(self) -> None:
        gap_s = _SHORTEST_GAP_S
        while True:
            is_wanted = self._ask_now.wait(gap_s)
            self._ask_now.clear()
            with self._lock:
                if not self._is_shown:
                    self._thread = None
                    return
            with contextlib.suppress(DetrainError):  # of the folder: the list says it when it is asked for
                goes_on = self._pipelines.ask_after_jobs()
                gap_s = (
                    min(_SHORTEST_GAP_S if is_wanted else 1.5 * gap_s, _LONGEST_GAP_S) if goes_on else _LONGEST_GAP_S
                )
                self._on_asked()
