"""Forms that edit a spec, and live views of a session, a job or a plan, in a notebook."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from .actions import Refused, action
from .live_view import LiveView, Settled

if TYPE_CHECKING:
    from .console_view import ConsoleView
    from .nodes_view import Given, NodesView, Starter

__all__ = ["LiveView", "Refused", "Settled", "action", "console", "nodes"]


def console(folder: str | os.PathLike[str] = "pipelines") -> ConsoleView:
    """My Pipelines: the specs in ``folder``, which is beside the notebook, and those opened lately."""
    from ..pipelines import MyPipelines
    from .console_view import ConsoleView

    return ConsoleView(MyPipelines(folder))


def nodes(nodes: Given = None, *, start: Starter | None = None) -> NodesView:
    """Nodes as a form: edited, imported from ~/.ssh/config, tested, saved as a nodes file, started as a session.

    ``nodes`` is the path of a nodes file, or a list of `detrain_nb.spec.Node`. The view's ``nodes`` is the list as it
    is now, and raises SpecError while something in it is wrong; assigning shows others. ``start`` gets the nodes
    and who follows the start, and returns the session; by default the view keeps it as ``session``.
    Raises: SpecError where the file cannot be read.
    """
    from .nodes_view import NodesView, start_session

    return NodesView(nodes, start=start or start_session)
