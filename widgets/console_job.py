"""The job that the console shows beneath itself, live: one at a time, on all its pages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..jobs import Job
from ..session.output.safe_output import one_line
from .job_view import JobView


class ShownJob:
    """The view of a job, which pages show by its id as a widget."""

    def __init__(self, on_state: Callable[[], object]) -> None:
        """``on_state`` is called when the job that is shown has come into another state, or gave way to its restart."""
        self._on_state = on_state
        self._changing = threading.Lock()
        self._view: JobView | None = None

    def show(self, job: Job) -> None:
        """Show it in the place of the one before, which is shown no more."""
        self._replace(JobView(job, on_state=self._on_state))

    def close(self) -> None:
        """Show none."""
        self._replace(None)

    def describe(self) -> dict[str, Any] | None:
        """What pages have to know to show it."""
        with self._changing:
            if self._view is None:
                return None
            id = one_line(self._view.job.id)
            return {"id": id, "command": f"%job view {id}", "widget": self._view.model_id}

    def _replace(self, view: JobView | None) -> None:
        with self._changing:
            before, self._view = self._view, view
        if before is not None:
            before.close()
