"""Ending of agents: those of a running session, and one that has no session yet."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Sequence

from ..copying.json_lines import clean
from ..errors import DetrainError, SessionError, TransportError, behind_ours
from ..transport import Transport
from ..wire import FROM_NODE, Attach, EndSession, FrameReader, Refused, to_frame

__all__ = ["end_agents", "end_unused"]

_END_LIMIT_S = 5.0


def end_agents(transports: Sequence[Transport], session: str, *, holder: str) -> dict[str, DetrainError]:
    """End ``session`` on every node that can be reached; returns the failures by node name.

    The failure is a SessionError on a node that does not run the session.
    Raises: SessionError when nodes refuse, for example because another notebook holds the session; the remaining nodes
    are ended first.
    """
    failures: dict[str, DetrainError] = {}
    refused: list[str] = []
    for transport in transports:
        try:
            sock = transport.connect_agent(session)
        except DetrainError as exc:
            failures[transport.name] = exc
            continue
        try:
            _end_agent(sock, session, holder)
        except TransportError as exc:
            failures[transport.name] = exc
        except SessionError as exc:
            words = str(exc)
            refused.append(words if transport.is_this_machine else f"{transport.name}: {behind_ours(words)}")
        finally:
            transport.wait_for_end(limit_s=_END_LIMIT_S)
    if refused:
        raise SessionError("\n".join(refused))
    return failures


def end_unused(sock: socket.socket) -> None:
    """End an agent that no notebook has attached to."""
    with contextlib.suppress(SessionError, TransportError):  # otherwise it exits by itself, as no notebook attaches
        _end_agent(sock, "", "nobody")


def _end_agent(sock: socket.socket, session: str, holder: str) -> None:
    """Send the end order and wait until the agent hangs up. Raises: SessionError when it refuses, TransportError."""
    reader, deadline = FrameReader(kinds=FROM_NODE), time.monotonic() + _END_LIMIT_S
    try:
        sock.sendall(to_frame(Attach(session, holder)).to_bytes() + to_frame(EndSession()).to_bytes())
        while (left := deadline - time.monotonic()) > 0:
            sock.settimeout(left)
            data = sock.recv(1 << 16)
            if not data:
                return
            for frame in reader.feed(data):
                message = frame.message()
                if isinstance(message, Refused):
                    raise SessionError(clean(message.reason))
    except OSError as exc:
        raise TransportError(f"the agent did not receive the order to exit: {exc}") from exc
    finally:
        sock.close()
    raise TransportError(f"the agent has not exited within {_END_LIMIT_S:g} s")
