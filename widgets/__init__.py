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

_ASK_LIMIT_S = 3.0  # for the status of a job; its view keeps asking


def board(session: Session | None = None) -> BoardView:
    """Show the ranks of a session live, with buttons to stop, interrupt and restart them.

    Each rank shows what it is doing, its processor, memory and GPU use, and which ranks it waits for.
    ``session`` None: the session of this notebook. Raises: SessionError when there is none.
    """
    from .board_view import BoardView

    return BoardView(session or _session_here())


def console(folder: str | os.PathLike[str] = "pipelines") -> ConsoleView:
    """Show My Pipelines: the specs in ``folder``, and those opened recently, with a form to edit and run them.

    A relative ``folder`` is resolved against the current folder, which is the notebook's; it is created when something
    is saved.
    """
    from ..pipelines import MyPipelines
    from .console_view import ConsoleView

    return ConsoleView(MyPipelines(folder))


def job(job: Job | str) -> JobView:
    """Show a job live: its nodes, logs, curves and files. ``job``: a Job, its id or the beginning of the id, or a name.

    Its nodes are asked for up to 3 s first, unless it is over. Raises: JobError when there is no such job.
    """
    from ..jobs import find_job
    from .job_view import JobView

    found = find_job(job) if isinstance(job, str) else job
    if not found.last_known().is_over:  # else its plain form may show an outdated state
        with contextlib.suppress(DetrainError):
            found.status(limit_s=_ASK_LIMIT_S)
    return JobView(found)


def nodes(nodes: Given = None, *, start: Starter | None = None) -> NodesView:
    """Show a form that edits nodes, imports them from ~/.ssh/config, tests and saves them, and starts a session.

    ``nodes`` is the path of a nodes file or a list of `detrain_nb.spec.Node`; None: an empty form. The view's property
    ``nodes`` is the present list; reading it raises SpecError while the form has errors, and assigning a list shows
    that list. ``start(nodes, watch)`` starts and returns the session, and reports progress to ``watch``, in place of
    `detrain_nb.Session.start`. The view keeps the session as ``session``.
    Raises: SpecError when the file cannot be read.
    """
    from .nodes_view import NodesView, start_session

    return NodesView(nodes, start=start or start_session)


def vars(session: Session | None = None, names: str | Iterable[str] = (), *, ranks: Any = None) -> LiveView:
    """Show the variables of a session's ranks, whether the ranks agree, and previews; see `Session.variables`.

    ``session`` None: the session of this notebook. ``names``: names or patterns such as ``grad_*``; by default all
    variables. ``ranks``: a number, a list, or text such as ``"0,2-3"``; None: all ranks.
    Raises: SessionError when there is none; SpecError; the error that ended the session.
    """
    from .vars_view import VarsView

    session = session or _session_here()
    wanted = [names] if isinstance(names, str) else list(names)
    return VarsView(session, wanted, ranks, first=session.variables(wanted, ranks=ranks))


def plan(*parts: object) -> PlanView:
    """Show how a model is split: layers by time and memory, stages, the timeline of a step, memory of the ranks.

    ``parts``: a plan that ``par.describe_plan`` returned, its JSON, or the path of a JSON file; a partition, a timeline
    or a dry run; or several of these. This process does not need torch. Raises: SpecError when a part is not a plan.
    """
    from .plan_view import PlanView, read_plan

    return PlanView(read_plan(*parts))


def _session_here() -> Session:
    from .. import current_session

    return current_session()
