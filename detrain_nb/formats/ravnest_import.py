"""Ravnest's node_configs.json, and the files for single nodes that it generates, as nodes."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..documents.content import put_place
from ..errors import SpecError
from ..text import count_of, split_target
from .imported import MOST_NODES, Foreign, Imported, Importer
from .reading import Part, Whole
from .relaxed_json import read_relaxed

__all__ = ["RAVNEST"]

_ITS_PORT = "is for gRPC, but nodes are reached over SSH: give nodes.port if sshd does not listen on 22"
_ITS_SPLIT = "Ravnest's own split of the model, for which a spec has mesh axes"


def _content(foreign: Foreign) -> Any:
    """Return the content, which may have comments as in Ravnest's documentation; None if it is another file."""
    if foreign.suffix not in ("", ".json") or not ('"IP"' in foreign.text or '"node_type"' in foreign.text):
        return None
    try:
        return read_relaxed(foreign.text)[0]
    except SpecError:
        return None


def _is_pool(content: Any) -> bool:
    return isinstance(content, dict) and any(isinstance(each, dict) and "IP" in each for each in content.values())


def _is_one(foreign: Foreign) -> bool:
    content = _content(foreign)
    return _is_pool(content) or (isinstance(content, dict) and {"node_id", "local_host"} <= content.keys())


def _read(foreign: Foreign) -> Imported:
    content, left_open = read_relaxed(foreign.text, where=foreign.name)
    whole = Whole(foreign, content)
    whole.notes += [f"{place}: left open (...)" for place in left_open]
    if "node_id" in whole:
        whole.carry("local_host", "nodes[0].host", whole.text("local_host"))
        whole.leave("local_port", _ITS_PORT)
        for key in whole:
            if key != "local_host":
                whole.leave(key, whole.left.get((key,), _ITS_SPLIT))
        return whole.imported_nodes("ravnest")
    keys = list(whole)
    if not 1 <= len(keys) <= MOST_NODES:
        raise SpecError(put_place(foreign.name, f"has {count_of(len(keys), 'node')}: give 1 to {MOST_NODES:,}"))
    hosts = [_read_node(whole.part(key), f"nodes[{index}]") for index, key in enumerate(keys)]
    times = Counter(hosts)
    for index, key in enumerate(keys):
        if times[hosts[index]] > 1:  # several nodes are on one machine
            whole.put(f"nodes[{index}].name", f"node-{key}")
    return whole.imported_nodes("ravnest")


def _read_node(part: Part, node: str) -> str:
    """Put the settings of one node into the fields of ``node``; returns its host."""
    user, host, port, _ = split_target(part.text("IP"))
    if user is not None or not host:
        raise part.fault("IP", "give an address and a port, such as 10.0.0.5:8080")
    part.carry("IP", f"{node}.host", host)
    if port is not None:
        part.whole.notes.append(f"{part.path}.IP: its port {port[:20]} {_ITS_PORT}")
    benchmarks = part.part("benchmarks")
    benchmarks.carry("ram", f"{node}.memory_gb")
    benchmarks.carry("bandwidth", f"{node}.bandwidth_mbit_s")
    return host


RAVNEST = Importer(_is_one, _read, "Ravnest's node_configs.json, or its nodes/node_*.json")
