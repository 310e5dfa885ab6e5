"""Forms that edit a spec, and live views of a session, a job or a plan, in a notebook."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..errors import DetrainError
from .actions import Refused, action
from .displays import Settled
from .live_view import LiveView

if TYPE_CHECKING:
    from ..jobs import Job
    from ..session.session import Session
    from .board_view import BoardView
    from .console_view import ConsoleView
    from .job_view import JobView
    from .nodes_view import Given, NodesView, Starter
    from .plan_view import PlanView

__all__ = ["LiveView", "Refused", "Settled", "action", "board", "console", "job", "nodes", "plan", "vars"]

_ASK_LIMIT_S = 3.0  # for how a job is: its view asks on


def board(session: Session | None = None) -> BoardView:
    """Show the ranks of a session live: what each does and uses, who waits for whom; and stop, interrupt, restart.

    None: the session of this notebook. Raises: SessionError where there is none.
    """
    from .board_view import BoardView

    return BoardView(session or _session_here())


def console(folder: str | os.PathLike[str] = "pipelines") -> ConsoleView:
    """My Pipelines: the specs in ``folder``, which is beside the notebook, and those opened lately."""
    from ..pipelines import MyPipelines
    from .console_view import ConsoleView

    return ConsoleView(MyPipelines(folder))


def job(job: Job | str) -> JobView:
    """A live view of a job: give it, its id, what that begins with, or a name. Raises: JobError where there is none."""
    from ..jobs import find_job
    from .job_view import JobView

    found = find_job(job) if isinstance(job, str) else job
    if not found.last_known().is_over:  # else its plain form may say that a job runs which nobody has asked after
        with contextlib.suppress(DetrainError):
            found.status(limit_s=_ASK_LIMIT_S)
    return JobView(found)


def nodes(nodes: Given = None, *, start: Starter | None = None) -> NodesView:
    """Nodes as a form: edited, imported from ~/.ssh/config, tested, saved as a nodes file, started as a session.

    ``nodes`` is the path of a nodes file, or a list of `detrain_nb.spec.Node`. The view's ``nodes`` is the list as it
    is now, and raises SpecError while something in it is wrong; assigning shows others. ``start`` gets the nodes
    and who follows the start, and returns the session; by default the view keeps it as ``session``.
    Raises: SpecError where the file cannot be read.
    """
    from .nodes_view import NodesView, start_session

    return NodesView(nodes, start=start or start_session)


def vars(session: Session | None = None, names: str | Iterable[str] = (), *, ranks: Any = None) -> LiveView:
    """Show the variables of a session's ranks, whether the ranks agree, and a look into each; see Session.variables.

    None: the session of this notebook. Raises: SpecError, or what ended the session; SessionError where there is none.
    """
    from .vars_view import VarsView

    session = session or _session_here()
    wanted = [names] if isinstance(names, str) else list(names)
    return VarsView(session, wanted, ranks, first=session.variables(wanted, ranks=ranks))


def plan(*parts: object) -> PlanView:
    """Show how a model is split: layers by time and memory, stages, the timeline of a step, what ranks hold.

    ``parts``: what ``par.describe_plan`` returns, as it was pulled from a rank; JSON of it, or the path of a file with
    it; a partition, a timeline, a dry run; or several of these. Torch need not be here. Raises: SpecError.
    """
    from .plan_view import PlanView, read_plan

    return PlanView(read_plan(*parts))


def _session_here() -> Session:
    from .. import current_session

    return current_session()
