"""The job that the console shows below itself, live: one at a time, on all its pages."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from ..jobs import Job
from ..session.output.safe_output import one_line
from .job_view import JobView


class ShownJob:
    """The view of a job, which pages show by its widget id."""

    def __init__(self, on_state: Callable[[], object]) -> None:
        """``on_state`` is called when the shown job has changed its state or was replaced by its restart."""
        self._on_state = on_state
        self._changing = threading.Lock()
        self._view: JobView | None = None

    def show(self, job: Job) -> None:
        """Show ``job`` instead of the previous one."""
        self._replace(JobView(job, on_state=self._on_state))

    def close(self) -> None:
        """Show no job."""
        self._replace(None)

    def describe(self) -> dict[str, Any] | None:
        """Return what pages need to show the job."""
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
