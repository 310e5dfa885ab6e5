"""Forms that edit a spec, and live views of a session, a job or a plan, in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .actions import Refused, action
from .live_view import LiveView, Settled

if TYPE_CHECKING:
    from ..jobs import Job
    from .job_view import JobView
    from .nodes_view import Given, NodesView, Starter

__all__ = ["LiveView", "Refused", "Settled", "action", "job", "nodes"]


def job(job: Job | str) -> JobView:
    """A live view of a job: give it, its id, what that begins with, or a name. Raises: JobError where there is none."""
    from ..jobs import find_job
    from .job_view import JobView

    return JobView(find_job(job) if isinstance(job, str) else job)


def nodes(nodes: Given = None, *, start: Starter | None = None) -> NodesView:
    """Nodes as a form: edited, imported from ~/.ssh/config, tested, saved as a nodes file, started as a session.

    ``nodes`` is the path of a nodes file, or a list of `detrain_nb.spec.Node`. The view's ``nodes`` is the list as it
    is now, and raises SpecError while something in it is wrong; assigning shows others. ``start`` gets the nodes
    and who follows the start, and returns the session; by default the view keeps it as ``session``.
    Raises: SpecError where the file cannot be read.
    """
    from .nodes_view import NodesView, start_session

    return NodesView(nodes, start=start or start_session)
