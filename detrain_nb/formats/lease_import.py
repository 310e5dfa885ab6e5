"""An Akash lease's status as nodes; spec/lease.py parses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..spec.lease import WAYS, find_way, is_lease, list_tables, nodes_from_lease
from ..storage import shown
from .imported import Foreign, Imported, Importer
from .reading import NO_FIELD, Steps, name_places, write_steps

__all__ = ["LEASE"]

_COUNTS = ("available", "total", "replicas", "updated_replicas", "ready_replicas", "available_replicas")
_ONE = "a node is one container: set the count of its service to 1 in the SDL"
_OWN_ADDRESS = "is not used, as the service has its own address"


def _is_one(foreign: Foreign) -> bool:
    return is_lease(foreign.document)


def _read(foreign: Foreign) -> Imported:
    nodes = nodes_from_lease(foreign.content, where=foreign.name)
    places = ((write_steps(steps), reason) for steps, reason in _list_left_out(foreign.content))
    return Imported("lease", nodes=nodes, left_out=tuple(name_places(places)))


def _list_left_out(content: Any) -> Iterator[tuple[Steps, str]]:
    """Yield the places in parsed leases for which nodes have no field, with the reason."""
    for number, lease in enumerate(content if isinstance(content, list) else [content]):
        at: Steps = (number,) if isinstance(content, list) else ()
        tables = list_tables(lease)
        yield from (((*at, key), NO_FIELD) for key in lease if key not in tables)
        for table, services in tables.items():
            for service, said in services.items():
                way = find_way(service, tables)
                found = _list_ways(table, service, said or [], way) if table in WAYS else _list_state(service, said)
                yield from (((*at, table, service, *steps), reason) for steps, reason in found)


def _list_state(service: str, said: Any) -> Iterator[tuple[Steps, str]]:
    if not isinstance(said, dict):
        yield from [((), NO_FIELD)] if said else []
        return
    for key, value in said.items():
        if key in _COUNTS:
            yield from [((key,), _ONE)] if value not in (None, 1) else []
        elif value not in (None, "", []) and (key, value) != ("name", service):
            yield (key,), NO_FIELD


def _list_ways(table: str, service: str, said: list[Any], way: tuple[str, int] | None) -> Iterator[tuple[Steps, str]]:
    chosen, number = way or ("", 0)
    if said and chosen == "ips" != table:
        yield (), _OWN_ADDRESS
        return
    names = WAYS[table]
    if others := [entry.get(names[1]) for index, entry in enumerate(said) if (table, index) != way]:
        ports = ", ".join(shown(str(port), most=20) for port in others)
        yield (), f"a node has only one port, that of sshd; not used: {ports}"
    if chosen == table:
        unread = {key: value for key, value in said[number].items() if key not in names}
        yield from (((number, *steps), reason) for steps, reason in _list_state(service, unread))


LEASE = Importer(_is_one, _read, "the status of an Akash lease")
