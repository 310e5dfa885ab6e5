"""What the user of a session should know and no cell has said."""

from __future__ import annotations

from .running.settings import SlotsOnly
from .state.session_state import SessionState

__all__ = ["SessionNews"]


class SessionNews(SlotsOnly):
    """What the user of a session should know and no cell has said."""

    __slots__ = ("_state",)

    def __init__(self, state: SessionState) -> None:
        self._state = state

    @property
    def notices(self) -> tuple[str, ...]:
        """What no cell has said: output that was lost, a full disk, a start that was cold."""
        return self._state.notices.all

    def pop_notices(self) -> list[str]:
        """Take the notices away: whoever asks shows them."""
        return self._state.notices.pop()

    def pop_losses(self) -> str:
        """What is to be said of ranks that ended since the last cell, and what to do; empty when there is nothing."""
        return self._state.pop_losses()
