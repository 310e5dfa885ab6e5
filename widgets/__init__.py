"""Forms that edit a spec, and live views of a session, a job or a plan, in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .actions import Refused, action
from .live_view import LiveView, Settled

if TYPE_CHECKING:
    from ..jobs import Job
    from .job_view import JobView

__all__ = ["LiveView", "Refused", "Settled", "action", "job"]


def job(job: Job | str) -> JobView:
    """A live view of a job: give it, its id, what that begins with, or a name. Raises: JobError where there is none."""
    from ..jobs import find_job
    from .job_view import JobView

    return JobView(find_job(job) if isinstance(job, str) else job)
