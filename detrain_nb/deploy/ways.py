"""This machine as one of several nodes: its address for the others, and a check that all nodes reach each other.

Hosts commonly share a network. The notebook's machine often does not: it reaches the hosts, while a router or firewall
keeps them from reaching it. So nothing is launched until each node has connected once to each other node.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import threading
from collections.abc import Sequence
from typing import TypeAlias

from ..copying.json_lines import Untrue, clean
from ..errors import LaunchError
from ..node.ssh.addresses import list_addresses
from ..spec.node import THIS_MACHINE, Node
from ..transport import Transport
from .files import OnProgress, Patience, Stop, label, on_every, open_talk
from .node_facts import choose_address

__all__ = ["ADVICE", "address_beside", "check_ways", "settle_addresses", "settle_here"]

ADVICE = f"list a host first that all nodes reach, and leave {THIS_MACHINE} out"
_ONE_LEASE = (
    "a process group needs direct connections between nodes on all ports, which forwarded ports do not provide: use "
    "nodes of one lease or network, or start a session without a group (--no-init)"
)
_BETWEEN_HOSTS = "firewalls between the nodes must allow TCP on all ports above 1023"
_WITHIN_S = 3.0
_SLACK_S = 20.0
_MOST_NAMED = 6
_LONGEST_FAULT = 200
_TOKEN_BYTES = 16

_MissingWay: TypeAlias = tuple[Transport, Transport, str, str]  # source, target, address of the target, fault


def settle_addresses(transports: Sequence[Transport], *, may_be_apart: bool = False) -> bool:
    """Check, before anything is launched, that the nodes can reach each other; all have been reached from here.

    If this machine is one of several nodes, it gets its ``address`` and ``interface`` now. In that case, and if a node
    is reached through a forwarded port, each node connects once to each other node.
    Returns False when a connection failed and ``may_be_apart`` is set.
    Raises: LaunchError when some nodes, but not all, have a loopback address, or when a connection failed.
    """
    settle_here(transports)
    addresses = [transport.address for transport in transports]
    local = [label(each) for each in transports if ipaddress.ip_address(each.address).is_loopback]
    if local and len(local) < len(transports):
        raise LaunchError(
            f"the other nodes cannot reach {local[0]} at a loopback address: set its address to one that they reach"
        )
    if len(transports) == 1 or not any(each.is_this_machine or each.is_forwarded for each in transports):
        return True
    if may_be_apart:
        return not _find_missing_ways(transports, addresses)
    check_ways(transports, addresses)
    return True


def settle_here(transports: Sequence[Transport]) -> None:
    """Set the address of this machine among several nodes, which have been reached. Raises: LaunchError."""
    others = [transport for transport in transports if not transport.is_this_machine]
    for transport in transports:
        if transport.is_this_machine and others:
            try:
                transport.address, transport.interface = address_beside(
                    others[0].address, transport.node, reached_from=others[0].reached_from
                )
            except LaunchError as exc:
                raise LaunchError(f"{label(transport)}: {exc}") from exc


def address_beside(other: str, node: Node | None = None, *, reached_from: str = "") -> tuple[str, str]:
    """Return the address from which this machine reaches the address ``other``, and its interface.

    An address that ``node`` sets takes precedence. ``reached_from`` is this machine's end of a connection to the other
    node; it is used because an untrusted node that chose ``other`` would choose the interface on which we listen.
    Nothing is sent.
    Raises: LaunchError when there is no route, or the address is not on this machine.
    """
    source = reached_from
    if not source and (node is None or not node.address):
        try:
            with socket.socket(socket.AF_INET6 if ":" in other else socket.AF_INET, socket.SOCK_DGRAM) as asked:
                asked.connect((other, 9))  # UDP: the kernel only looks up the route
                source = asked.getsockname()[0]
        except OSError as exc:
            raise LaunchError(f"this machine has no route to {other} ({exc.strerror}): {ADVICE}") from exc
    have = [(name, address) for name, address in list_addresses()]
    return choose_address(node or Node(host=THIS_MACHINE), have, reached_at=source, peer_address=source)


def check_ways(
    transports: Sequence[Transport],
    addresses: Sequence[str],
    *,
    within_s: float = _WITHIN_S,
    slack_s: float = _SLACK_S,
) -> None:
    """Have each node connect once to each other node within ``within_s`` seconds.

    ``addresses[i]`` is the address of ``transports[i]``; the node briefly listens there, on a port that the OS picks.
    ``slack_s``: additional seconds for a node to start listening, and to answer.
    Raises: LaunchError with a line for each failed connection, which names both ends; DetrainError when a node fails.
    """
    if missing := _find_missing_ways(transports, addresses, within_s=within_s, slack_s=slack_s):
        raise LaunchError(_describe_missing(missing))


def _find_missing_ways(
    transports: Sequence[Transport],
    addresses: Sequence[str],
    *,
    within_s: float = _WITHIN_S,
    slack_s: float = _SLACK_S,
) -> list[_MissingWay]:
    """Return the failed connections of `check_ways`. Raises: LaunchError when nodes did not listen; DetrainError."""
    meeting = _Meeting(transports, addresses, within_s=within_s, slack_s=slack_s)
    missing: list[_MissingWay] = [
        (transports[source], transports[target], addresses[target], fault)
        for source, faults in enumerate(on_every(transports, meeting.look))
        for target, fault in faults.items()
    ]
    if meeting.is_broken and not missing:
        raise LaunchError(f"the nodes did not listen for each other within {within_s + slack_s:g} s: try again")
    return missing


class _Meeting:
    """Meeting of nodes that all listen briefly while each connects to each other; ``look`` is one node's part."""

    def __init__(
        self, transports: Sequence[Transport], addresses: Sequence[str], *, within_s: float, slack_s: float
    ) -> None:
        self._numbers = {id(transport): number for number, transport in enumerate(transports)}
        self._addresses = addresses
        self._tokens = [secrets.token_hex(_TOKEN_BYTES) for _ in transports]
        self._ports = [0] * len(transports)
        self._within_s = within_s
        self._patience = Patience(silence_s=within_s + slack_s, answer_s=within_s + slack_s)
        self._barrier = threading.Barrier(len(transports))

    @property
    def is_broken(self) -> bool:
        """True when some nodes did not start listening in time."""
        return self._barrier.broken

    def look(self, node: Transport, stop: Stop, _: OnProgress) -> dict[int, str]:
        """Return the other nodes that ``node`` cannot reach: the reason by node number."""
        number, limit_s = self._numbers[id(node)], self._patience.answer_s
        others = [other for other in self._numbers.values() if other != number]
        try:
            with stop.watch(self._barrier.abort), open_talk(node, stop=stop, patience=self._patience) as talk:
                talk.say("meet", address=self._addresses[number], token=self._tokens[number])
                self._ports[number] = _as_port(talk.hear("listening").get("port"))
                self._barrier.wait(limit_s)
                peers = [(self._addresses[other], self._ports[other], self._tokens[other]) for other in others]
                talk.say("reach", peers=peers, within_s=self._within_s)
                faults = _as_faults(talk.hear("reached").get("faults"), count=len(others))
                self._barrier.wait(limit_s)
                talk.say("done")
                talk.flush()
        except threading.BrokenBarrierError:
            return {}  # another node has failed and reports why, or a node took too long (see is_broken)
        except BaseException:
            self._barrier.abort()
            raise
        return {other: fault for other, fault in zip(others, faults) if fault}


def _describe_missing(missing: Sequence[_MissingWay]) -> str:
    """Return a line for each failed connection, then what to do."""
    lines = [
        f"{label(source)} does not reach {label(target)} at {at}: {fault}" for source, target, at, fault in missing
    ]
    more = [f"and {len(lines) - _MOST_NAMED} more failed connections"] if len(lines) > _MOST_NAMED else []
    ends = [end for source, target, *_ in missing for end in (source, target)]
    is_forwarded = any(end.is_forwarded for end in ends)
    advice = ADVICE if any(end.is_this_machine for end in ends) else _ONE_LEASE if is_forwarded else _BETWEEN_HOSTS
    return "\n".join([*lines[:_MOST_NAMED], *more, advice])


def _as_port(said: object) -> int:
    if type(said) is not int or not 0 < said < 1 << 16:
        raise Untrue(f"{clean(said)[:40]!r} is not a port")
    return said


def _as_faults(said: object, *, count: int) -> list[str]:
    if not isinstance(said, list) or len(said) != count or not all(isinstance(fault, str) for fault in said):
        raise Untrue(f"invalid report of the connections to {count} nodes")
    return [clean(fault)[:_LONGEST_FAULT] for fault in said]
