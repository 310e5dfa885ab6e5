"""Forms that edit a spec, and live views of a session, a job or a plan, in a notebook."""

from __future__ import annotations

from .actions import Refused, action
from .live_view import LiveView, Settled

__all__ = ["LiveView", "Refused", "Settled", "action"]
