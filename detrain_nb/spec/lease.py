"""Nodes of a lease on Akash: what ``provider-services lease-status`` prints, for one lease, or a list of several.

    {"services": {"node-0": {"available": 1, ...}, ...},
     "forwarded_ports": {"node-0": [{"host": "provider.org", "port": 2222, "externalPort": 31022, ...}], ...},
     "ips": {"node-0": [{"IP": "203.0.113.7", "Port": 2222, "ExternalPort": 2222, ...}], ...}}

Each service is a node: sshd listens there on port 2222, for the user of the container that sdl/container builds. From
outside it is reached at its own address, if it has one, else through a forwarded port.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ..documents import parse_content
from ..documents.content import put_place
from ..errors import SpecError
from ..plan.names import MOST_NAME_CHARS
from ..storage import shown
from .node import Node
from .words import is_node_name

__all__ = ["SSH_PORT", "USER", "WAYS", "find_way", "is_lease", "list_tables", "name_apart", "nodes_from_lease"]

SSH_PORT, USER = 2222, "trainer"  # as sdl/container has them
_MOST_SERVICES = 1000  # of a lease; an Akash deployment has at most 20
_MOST_FAULTS = 20
_NO_LEASE = "give the output of lease-status"
_NOT_READY = "is not available yet: run lease-status again when it is"
_NO_PORT = f"sshd's port {SSH_PORT} is not forwarded: expose it in the SDL with global: true, or leave the service out"
_NO_TCP = f"sshd needs TCP: expose {SSH_PORT} with proto: tcp in the SDL, or leave the service out"


def is_lease(content: object) -> bool:
    """Return whether ``content`` is what lease-status prints, for one lease or several."""
    first = content[0] if isinstance(content, list) and content else content
    return isinstance(first, dict) and ("forwarded_ports" in first or {"services", "ips"} <= first.keys())


def nodes_from_lease(content: object, *, where: str = "") -> tuple[Node, ...]:
    """Return the nodes of a lease, or of a list of leases, from text or from parsed JSON.

    They are sorted by name, node-2 before node-10, lease after lease. A node whose name is taken by an earlier lease
    gets a name such as node-0-lease2. ``where`` begins each error. Raises: SpecError with the place of each fault.
    """
    if isinstance(content, str):
        content = parse_content(content, ".json", where=where)
    leases = content if isinstance(content, list) else [content]
    faults: list[str] = []
    read = [
        _read_lease(lease, f"[{number}]." if isinstance(content, list) else "", faults)
        for number, lease in enumerate(leases)
    ]
    if not faults and not any(read):
        faults.append("forwarded_ports: no service has one: is this the output of lease-status?")
    if faults:
        more = [f"and {len(faults) - _MOST_FAULTS:,} more"] if len(faults) > _MOST_FAULTS else []
        raise SpecError("\n".join(put_place(where, fault) for fault in [*faults[:_MOST_FAULTS], *more]))
    return name_apart(read)


def name_apart(leases: Iterable[Sequence[Node]]) -> tuple[Node, ...]:
    """Combine the nodes of several leases, each with its own name. Raises: SpecError for one too long."""
    nodes: dict[str, Node] = {}
    for number, lease in enumerate(leases, 1):
        for node in lease:
            name = node.name
            while name in nodes:
                name += f"-lease{number}"
            if len(name) > MOST_NAME_CHARS:
                raise SpecError(f"{node.name}: several leases have this service: shorten its name in one SDL")
            nodes[name] = node.model_copy(update={"name": name})
    return tuple(nodes.values())


def _read_lease(lease: object, at: str, faults: list[str]) -> list[Node]:
    if not isinstance(lease, dict):
        faults.append(f"{at.rstrip('.')}: {_NO_LEASE}" if at else _NO_LEASE)
        return []
    tables = list_tables(lease)
    if odd := [name for name, table in tables.items() if not isinstance(table, dict)]:
        faults += [f"{at}{name}: give a table of services" for name in odd]
        return []
    names = sorted({name for table in tables.values() for name in table}, key=_in_order)
    if len(names) > _MOST_SERVICES:
        faults.append(f"{at}services: {len(names):,} of them: give at most {_MOST_SERVICES:,}")
        return []
    nodes: list[Node] = []
    for name in names:
        try:
            nodes.append(_read_service(name, tables, at))
        except SpecError as exc:
            faults += str(exc).splitlines()
    return nodes


def list_tables(lease: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of a lease that lease-status prints, by name; each is keyed by service."""
    return {name: lease.get(name) or {} for name in ("services", "forwarded_ports", "ips")}


def _read_service(name: str, tables: Mapping[str, Mapping[str, Any]], at: str) -> Node:
    """Return the node of one service. Raises: SpecError with the place."""
    label = shown(name, most=60)
    if not is_node_name(name):
        raise SpecError(f"{at}services.{label}: is not a valid name of a node")
    said = tables["services"].get(name)
    available = said.get("available", 1) if isinstance(said, dict) else 1
    if type(available) is not int:
        raise SpecError(f"{at}services.{label}.available: give a whole number")
    if available < 1:
        raise SpecError(f"{at}services.{label}: {_NOT_READY}")
    for table, names in WAYS.items():
        entries = tables[table].get(name) or []
        if not isinstance(entries, list):
            raise SpecError(f"{at}{table}.{label}: give a list of ports")
        if odd := [number for number, entry in enumerate(entries) if not isinstance(entry, dict)]:
            raise SpecError(f"{at}{table}.{label}[{odd[0]}]: give a table with {', '.join(names)}")
    way = find_way(name, tables)
    if way is None:
        raise SpecError(f"{at}forwarded_ports.{label}: {_NO_PORT}")
    table, number = way
    place, names = f"{at}{table}.{label}[{number}]", WAYS[table]
    host, _, outside, protocol = (tables[table][name][number].get(field) for field in names)
    if not _is_tcp(protocol):
        raise SpecError(f"{place}.{names[3]}: {_NO_TCP}")
    return _make_node(name, host, outside, place, names)


# A service's own address comes first: the port stays the same there.
WAYS = {"ips": ("IP", "Port", "ExternalPort", "Protocol"), "forwarded_ports": ("host", "port", "externalPort", "proto")}


def find_way(service: str, tables: Mapping[str, Mapping[str, Any]]) -> tuple[str, int] | None:
    """Return the way to a service's sshd, as the name of a table of the lease and the index in it, or None."""
    ways = [
        (table, number, entry.get(names[3]))
        for table, names in WAYS.items()
        for number, entry in enumerate(tables[table].get(service) or [])
        if entry.get(names[1]) == SSH_PORT
    ]
    table, number, _ = min(ways, key=lambda way: not _is_tcp(way[2]), default=("", 0, None))
    return (table, number) if table else None


def _is_tcp(protocol: object) -> bool:
    return protocol is None or (isinstance(protocol, str) and protocol.upper() in ("", "TCP"))


def _make_node(name: str, host: object, port: object, place: str, names: Sequence[str]) -> Node:
    """Return a node, if its host and port are valid. Raises: SpecError."""
    if not isinstance(host, str) or not host:
        raise SpecError(f"{place}.{names[0]}: give a host as text")
    if type(port) is not int or not 1 <= port < 1 << 16:
        raise SpecError(f"{place}.{names[2]}: give a port from 1 to 65535")
    try:
        return Node(name=name, host=host, port=port, user=USER)
    except SpecError as exc:
        raise SpecError("\n".join(f"{place}: {line}" for line in str(exc).splitlines())) from None


def _in_order(name: str) -> list[tuple[str, int, str]]:
    """Return a sort key in which the numbers of a name count as numbers, whatever their length."""
    return [
        ("", len(part.lstrip("0")), part.lstrip("0")) if part.isdigit() else (part, 0, "")
        for part in re.split(r"([0-9]+)", name)
    ]
