"""What Akash says of a lease, as nodes; how one is read is in spec/lease.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..spec.lease import SSH_PORT, is_lease, nodes_from_lease
from ..storage import shown
from .imported import Foreign, Imported, Importer
from .reading import NO_FIELD

__all__ = ["LEASE"]

_TABLES = {  # what lease-status prints of each service
    "services": "name available total uris observed_generation replicas updated_replicas ready_replicas "
    "available_replicas",
    "forwarded_ports": "host port externalPort proto name",
    "ips": "IP Port ExternalPort Protocol",
}


def _is_one(foreign: Foreign) -> bool:
    return is_lease(foreign.document)


def _read(foreign: Foreign) -> Imported:
    nodes = nodes_from_lease(foreign.content, where=foreign.name)
    return Imported(
        "lease", nodes=nodes, left_out=(*_list_other_ports(foreign.content), *_list_unknown(foreign.content))
    )


def _list_other_ports(content: Any) -> Iterator[str]:
    """Name those that no node has a use for, of leases that were read."""
    for number, lease in enumerate(content if isinstance(content, list) else [content]):
        at = f"[{number}]." if isinstance(content, list) else ""
        for service, ways in (lease.get("forwarded_ports") or {}).items():
            found = ways if isinstance(ways, list) else []  # a service with an address of its own needs none of them
            ports = [way.get("port") for way in found if isinstance(way, dict)]
            if others := ", ".join(shown(str(port), most=20) for port in ports if port != SSH_PORT):
                yield f"{at}forwarded_ports.{service}: a node has sshd's port alone, {SSH_PORT}, and not {others}"


def _list_unknown(content: Any) -> Iterator[str]:
    """Name what lease-status does not print."""
    for number, lease in enumerate(content if isinstance(content, list) else [content]):
        at = f"[{number}]." if isinstance(content, list) else ""
        yield from (f"{at}{shown(key, most=60)}: {NO_FIELD}" for key in lease if key not in _TABLES)
        for table, known in _TABLES.items():
            for service, said in (lease.get(table) or {}).items():
                entries = [each for each in (said if isinstance(said, list) else [said]) if isinstance(each, dict)]
                for key in dict.fromkeys(key for each in entries for key in each if key not in known.split()):
                    yield f"{at}{table}.{service}.{shown(key, most=60)}: {NO_FIELD}"


LEASE = Importer(_is_one, _read, "what Akash says of a lease")
