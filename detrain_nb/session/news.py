"""Notices for the user of a session that belong to no cell."""

from __future__ import annotations

from .running.settings import SlotsOnly
from .state.session_state import SessionState

__all__ = ["SessionNews"]


class SessionNews(SlotsOnly):
    """Notices for the user of a session that belong to no cell."""

    __slots__ = ("_state",)

    def __init__(self, state: SessionState) -> None:
        self._state = state

    @property
    def notices(self) -> tuple[str, ...]:
        """Notices that belong to no cell, oldest first: lost output, a full disk, a cold start, files not sent."""
        return self._state.notices.all

    def pop_notices(self) -> list[str]:
        """Return the notices and forget them; the caller shows them."""
        return self._state.notices.pop()

    def pop_losses(self) -> str:
        """Return a report of ranks that died since the last cell, and what to do; empty when there are none."""
        return self._state.pop_losses()
