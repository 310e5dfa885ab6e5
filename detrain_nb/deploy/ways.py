"""This machine as one node of several: at which address the others reach it, and whether all reach each other.

Hosts are commonly beside each other in one network. The notebook's machine often is not: it reaches them, and a router
or a firewall keeps them from reaching it. So nothing is launched there before each node has connected to each other.
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

ADVICE = f"put a host first that all nodes reach, and leave {THIS_MACHINE} out"
_ONE_LEASE = (
    "a process group needs these ways, on all ports, and a forwarded port is none of them: take nodes of one lease or "
    "network, or start a session without a group (--no-init)"
)
_BETWEEN_HOSTS = "a firewall between them has to let TCP through, on all ports above 1023"
_WITHIN_S = 3.0
_SLACK_S = 20.0
_MOST_NAMED = 6
_LONGEST_FAULT = 200
_TOKEN_BYTES = 16

_MissingWay: TypeAlias = tuple[Transport, Transport, str, str]  # from where, to where, at which address, and why


def settle_addresses(transports: Sequence[Transport], *, may_be_apart: bool = False) -> bool:
    """See that the nodes, which have all been reached, can be reached by each other: before anything is launched.

    Where this machine is one of several it gets its ``address`` and ``interface`` now. Then, and where a node is
    reached through a forwarded port, all ways are gone once; returns False where one is missing and they
    ``may_be_apart``.
    Raises: LaunchError where one would be reached at an address that means another machine elsewhere, or is not.
    """
    settle_here(transports)
    addresses = [transport.address for transport in transports]
    local = [label(each) for each in transports if ipaddress.ip_address(each.address).is_loopback]
    if local and len(local) < len(transports):
        raise LaunchError(f"the other nodes cannot reach {local[0]} at a loopback address: name an address of its own")
    if len(transports) == 1 or not any(each.is_this_machine or each.is_forwarded for each in transports):
        return True
    if may_be_apart:
        return not _find_missing_ways(transports, addresses)
    check_ways(transports, addresses)
    return True


def settle_here(transports: Sequence[Transport]) -> None:
    """Give this machine its address beside the others, which have been reached. Raises: LaunchError."""
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
    """The address from which this machine reaches ``other``, an address too, and its interface; or the ``node``'s own.

    ``reached_from`` is this machine's own end of a connection to the other: where ``other`` is only what that one says,
    it would choose the interface on which this machine listens. Nothing is sent. Raises: LaunchError.
    """
    source = reached_from
    if not source and (node is None or not node.address):
        try:
            with socket.socket(socket.AF_INET6 if ":" in other else socket.AF_INET, socket.SOCK_DGRAM) as asked:
                asked.connect((other, 9))  # of UDP: the kernel only looks for a route
                source = asked.getsockname()[0]
        except OSError as exc:
            raise LaunchError(f"this machine has no way to {other} ({exc.strerror}): {ADVICE}") from exc
    have = [(name, address) for name, address in list_addresses()]
    return choose_address(node or Node(host=THIS_MACHINE), have, reached_at=source, peer_address=source)


def check_ways(
    transports: Sequence[Transport],
    addresses: Sequence[str],
    *,
    within_s: float = _WITHIN_S,
    slack_s: float = _SLACK_S,
) -> None:
    """Have each node connect once to each other, at the address in its place of ``addresses``, within ``within_s``.

    For a moment each of them listens on a port of that address that the system picks. ``slack_s``: for a node to come
    so far that it listens, and to answer.
    Raises: LaunchError with a line for each way that there is not, which names both ends; DetrainError.
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
    """As `check_ways`, but returns what is missing. Raises: LaunchError where no node came to listen; DetrainError."""
    meeting = _Meeting(transports, addresses, within_s=within_s, slack_s=slack_s)
    missing: list[_MissingWay] = [
        (transports[source], transports[target], addresses[target], fault)
        for source, faults in enumerate(on_every(transports, meeting.look))
        for target, fault in faults.items()
    ]
    if meeting.is_broken and not missing:
        raise LaunchError(f"the nodes did not come to listen for each other within {within_s + slack_s:g} s: try again")
    return missing


class _Meeting:
    """Nodes that listen for a moment, all of them, while each connects to each other; ``look`` is the part of one."""

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
        """Some did not come so far in time."""
        return self._barrier.broken

    def look(self, node: Transport, stop: Stop, _: OnProgress) -> dict[int, str]:
        """Which other nodes one does not reach, by number, and why."""
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
            return {}  # another node has failed, and says why; or none has come so far in time
        except BaseException:
            self._barrier.abort()
            raise
        return {other: fault for other, fault in zip(others, faults) if fault}


def _describe_missing(missing: Sequence[_MissingWay]) -> str:
    """A line for each way that there is not; then what to do."""
    lines = [
        f"{label(source)} does not reach {label(target)} at {at}: {fault}" for source, target, at, fault in missing
    ]
    more = [f"and {len(lines) - _MOST_NAMED} more ways"] if len(lines) > _MOST_NAMED else []
    ends = [end for source, target, *_ in missing for end in (source, target)]
    is_forwarded = any(end.is_forwarded for end in ends)
    advice = ADVICE if any(end.is_this_machine for end in ends) else _ONE_LEASE if is_forwarded else _BETWEEN_HOSTS
    return "\n".join([*lines[:_MOST_NAMED], *more, advice])


def _as_port(said: object) -> int:
    if type(said) is not int or not 0 < said < 1 << 16:
        raise Untrue(f"{clean(said)[:40]!r} is no port")
    return said


def _as_faults(said: object, *, count: int) -> list[str]:
    if not isinstance(said, list) or len(said) != count or not all(isinstance(fault, str) for fault in said):
        raise Untrue(f"what it says of the ways to {count} nodes cannot be read")
    return [clean(fault)[:_LONGEST_FAULT] for fault in said]
