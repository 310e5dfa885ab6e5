"""Forms that edit a spec, and live views of a session, a job or a plan, in a notebook."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .actions import Refused, action
from .live_view import LiveView, Settled

if TYPE_CHECKING:
    from .console_view import console

__all__ = ["LiveView", "Refused", "Settled", "action", "console"]

_HOMES = {"console": ".console_view"}


def __getattr__(name: str) -> Any:
    """Import a view when it is asked for."""
    from importlib import import_module

    if name in _HOMES:
        return getattr(import_module(_HOMES[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
