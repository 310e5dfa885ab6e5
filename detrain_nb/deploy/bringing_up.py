"""The agents of a session on all its nodes: brought up, or connected to; where one fails, none is held."""

from __future__ import annotations

import socket
from collections.abc import Iterable, Sequence

from ..errors import LaunchError, SpecError
from ..plan import split_names
from ..transport import Transport
from .arrivals import End, ended_socket, let_go, on_all
from .chosen_nodes import check_session_name
from .ending import end_unused
from .kept import begin_on_kept

__all__ = ["attach_to_agents", "bring_up_agents", "give_up_agents", "leave_agents"]

_MOST_HOSTS = 8  # are named


def bring_up_agents(transports: Sequence[Transport], session: str) -> list[End]:
    """Start the agent of ``session`` on every node, all at once; return the byte streams to them.

    Raises: LaunchError with a line for every node where it failed, SessionError where such a session runs. None is
    left running then.
    """
    check_session_name(session)
    ends = on_all(transports, lambda transport: _start_agent(transport, session), give_up=end_unused)
    try:
        reached = [end.transport for end in ends]
        _check_same_torch(reached)
        _check_addresses(reached)
    except BaseException:
        give_up_agents(ends)
        raise
    return ends


def _start_agent(transport: Transport, session: str) -> End:
    """On an agent that was kept from the last session there, if it is as good as a fresh one."""
    begun = begin_on_kept(transport, session)
    if isinstance(begun, str):
        return End(transport, transport.start_agent(session), why_cold=begun)
    return End(*begun)


def give_up_agents(ends: Sequence[End]) -> None:
    """End agents that have been brought up and have no session yet."""
    let_go(ends, end_unused)


def leave_agents(ends: Sequence[End]) -> None:
    """Let go of agents that have been connected to; they stay for the next notebook."""
    let_go(ends, socket.socket.close)


def attach_to_agents(transports: Sequence[Transport], session: str, *, without: str | Iterable[str] = ()) -> list[End]:
    """Connect to the agents of ``session``, which run already; return the byte streams to them. Raises as above.

    The first has to be there; another one that is not any more is said to be absent, as are those that are left out.
    """
    check_session_name(session)
    others = [transport.name for transport in transports[1:]]
    left_out = split_names(without) if without else []
    if unknown := [name for name in left_out if name not in others]:
        raise SpecError(
            f"attach without {unknown[0]!r}: {unknown[0]!r} is not one of the nodes that can be left out: "
            f"{', '.join(others[:_MOST_HOSTS]) or 'none, this session has one node'}"
        )

    def connect(transport: Transport) -> End:
        if transport.name in left_out:
            return End(transport, ended_socket(), absent="it was left out")
        return End(transport, transport.connect_agent(session))

    return on_all(transports, connect, give_up=socket.socket.close, attached_to=session)


def _check_addresses(transports: Sequence[Transport]) -> None:
    """Raises: LaunchError when some nodes would be reached at an address that means another machine elsewhere."""
    local = [transport.name for transport in transports if transport.address.startswith("127.")]
    if local and len(local) < len(transports):
        raise LaunchError(f"the other nodes cannot reach {local[0]} at a loopback address: name an address of its own")


def _check_same_torch(transports: Sequence[Transport]) -> None:
    """Raises: LaunchError when nodes have versions of torch that do not work together."""
    versions = {transport.name: transport.torch for transport in transports if transport.torch[:1].isdigit()}
    if len({tuple(version.split(".")[:2]) for version in versions.values()}) > 1:
        found = ", ".join(f"{name} {version}" for name, version in versions.items())
        raise LaunchError(f"the nodes have different versions of torch ({found}): install the same one on all")
