"""Facts that a node reports, all untrusted, and the choice of the address at which the other nodes reach it."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import LaunchError, TransportError
from ..spec.node import Node
from .remote_program import as_text

__all__ = ["NodeFacts", "check_same_torch", "choose_address", "is_address"]

_MOST_ADDRESSES = 256
_MOST_NAMED = 8


@dataclass(frozen=True)
class NodeFacts:
    """Checked facts that a node reports about itself; types are checked, values are untrusted."""

    python: str
    python_version: tuple[int, int]
    host: str
    home: str
    cache: str
    have: frozenset[str]
    versions: Mapping[str, str]
    addresses: tuple[tuple[str, str], ...]
    reached_at: str

    @classmethod
    def read(cls, said: Mapping[str, Any]) -> NodeFacts:
        """Check the node's report. Raises: TransportError for missing or invalid fields."""
        try:
            return cls(
                python=as_text(said["python"]),
                python_version=_read_python_version(said["python_version"]),
                host=as_text(said["host"]),
                home=as_text(said["home"]),
                cache=as_text(said["cache"]),
                have=frozenset(map(as_text, said["have"])),
                versions={as_text(name): as_text(version) for name, version in dict(said["versions"]).items()},
                addresses=tuple(
                    (as_text(name), as_text(at))
                    for name, at in said["addresses"][:_MOST_ADDRESSES]
                    if is_address(as_text(at))  # a name would be looked up
                ),
                reached_at=as_text(said["reached_at"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as exc:
            raise TransportError(f"the node's report about itself is invalid: {repr(exc)[:200]}") from exc


def choose_address(
    node: Node, addresses: Sequence[tuple[str, str]], *, reached_at: str, peer_address: str
) -> tuple[str, str]:
    """Return the address at which the other nodes reach ``node``, and the interface that has it.

    ``addresses`` are the node's own, as (interface, address). ``reached_at`` is the node's end of our connection as
    the node reports it, ``peer_address`` that end as seen from here.
    Raises: LaunchError when no interface of the node has the address.
    """
    interfaces = {address: name for name, address in addresses if is_address(address)}
    wanted = node.address or (reached_at if reached_at in interfaces else peer_address)
    for address in _resolve(wanted):
        if address in interfaces:
            return address, interfaces[address]
    have = ", ".join(f"{address} ({name})" for address, name in list(interfaces.items())[:_MOST_NAMED])
    wrong = f"the other nodes would connect to it at {wanted}, but none of its interfaces has that address"
    raise LaunchError(f"{wrong}: set its address to one of {have}")


def check_same_torch(versions: Mapping[str, str]) -> None:
    """Raise LaunchError when the known torch versions, by node name, differ in major or minor version."""
    known = {name: version for name, version in versions.items() if version[:1].isdigit()}
    if len({tuple(version.split(".")[:2]) for version in known.values()}) > 1:
        found = ", ".join(f"{name} {version}" for name, version in known.items())
        raise LaunchError(f"the nodes have different versions of torch ({found}): install the same version on all")


def is_address(text: str) -> bool:
    """Return True for an IP address of a single machine: not unspecified, multicast, broadcast or IPv4-mapped."""
    with contextlib.suppress(ValueError):
        found = ipaddress.ip_address(text)
        is_of_one = not (found.is_unspecified or found.is_multicast or getattr(found, "ipv4_mapped", None))
        return is_of_one and text != "255.255.255.255"
    return False


def _read_python_version(said: Sequence[Any]) -> tuple[int, int]:
    """Return major and minor version. Raises: TypeError, ValueError for anything but a version of Python 3."""
    major, minor = (int(number) for number in said[:2])
    if major != 3 or not 0 <= minor < 100:
        raise ValueError("python_version")
    return major, minor


def _resolve(host: str) -> list[str]:
    """Return the addresses of a host as text; an address is returned as it is."""
    with contextlib.suppress(ValueError):
        return [str(ipaddress.ip_address(host))]
    with contextlib.suppress(OSError, UnicodeError):  # UnicodeError: an invalid name, such as one with a long label
        return list(dict.fromkeys(str(found[4][0]) for found in socket.getaddrinfo(host, None)))
    return []
