"""Forms that edit a spec, and live views of a session, a job or a plan, in a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .actions import Refused, action
from .live_view import LiveView, Settled

if TYPE_CHECKING:
    from ..session.session import Session

__all__ = ["LiveView", "Refused", "Settled", "action", "vars"]


def vars(session: Session, names: str | Iterable[str] = (), *, ranks: Any = None) -> LiveView:
    """Show the variables of a session's ranks, whether the ranks agree, and a look into each; see Session.variables.

    Raises: SpecError, or what ended the session.
    """
    from .vars_view import VarsView

    wanted = [names] if isinstance(names, str) else list(names)
    return VarsView(session, wanted, ranks, first=session.variables(wanted, ranks=ranks))
