"""Our code and an agent, brought up on a node; used by session."""

from __future__ import annotations

import re
import socket

from .errors import SpecError
from .transport.local import LocalTransport

__all__ = ["bring_up_agent", "check_session_name"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


def check_session_name(name: str) -> str:
    """Return ``name``. Raises: SpecError when it cannot be the name of a session, and so of a folder."""
    if not _NAME.fullmatch(name):
        raise SpecError(
            f"session name {name!r}: use letters, digits, '.', '_' and '-', at most 80, starting with a letter or digit"
        )
    return name


def bring_up_agent(transport: LocalTransport, session: str) -> socket.socket:
    """Start the agent of ``session`` on the node that ``transport`` reaches; return the byte stream to it."""
    return transport.start_agent(check_session_name(session))
