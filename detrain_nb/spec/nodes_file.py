"""Nodes in writing: a file in TOML, JSON or YAML, or ``alice@gpu1,gpu2:2222`` on a command line.

    [defaults]            # for every node that does not set them itself
    user = "alice"

    [[nodes]]
    host = "gpu1"

    [[nodes]]
    host = "gpu2"
    devices = [0, 1]

In JSON and YAML: ``{"defaults": {...}, "nodes": [{...}, {...}]}``, or the list alone. What Akash prints of a lease is a
nodes file, too (lease.py).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from ..documents import SUFFIXES, format_document, parse_content, read_text, suffix_of
from ..errors import SpecError
from ..guarded import can_others_write
from ..storage import locate, replace_file
from .lease import is_lease, name_apart, nodes_from_lease
from .node import OF_HOSTS, THIS_MACHINE, Node, default_name, describe_twice_here, parse_target

_MOST_FAULTS = 20
_IMPORT = "to convert a hostfile or an ssh_config to a nodes file: import {} -o nodes.toml"


def parse_nodes(text: str) -> tuple[Node, ...]:
    """Read nodes from a command line: ``[user@]host[:port]`` or paths of nodes files, separated by commas.

    A path ends like a document (.toml, .json, .yaml) or has a slash. When a host is given with several ports, its nodes
    are named host-port. Raises: SpecError.
    """
    text = text.strip()
    if _is_path(text):
        return _read_files(text)
    try:
        targets = [parse_target(part.strip()) for part in text.split(",")]
    except SpecError as exc:
        raise SpecError(f"nodes {text!r}: {exc}") from None
    times = Counter(target.host for target in targets)
    nodes: list[Node] = []
    faults: list[str] = []
    for target in targets:
        name = default_name(target.host)
        if times[target.host] > 1 and target.port:
            name += f"-{target.port}"
        try:
            nodes.append(Node(host=target.host, user=target.user, port=target.port, name=name))
        except SpecError as exc:
            faults += [f"{line}; in a nodes file you can name it" for line in str(exc).splitlines()]
    _refuse(faults or find_twins(nodes, advice=_PORTS_APART), where=f"nodes {text!r}")
    return tuple(nodes)


def read_nodes(path: str | os.PathLike[str]) -> tuple[Node, ...]:
    """Read a nodes file in the layout above and the format of its suffix. Raises: SpecError with one line per fault."""
    return _make_nodes(_read(path), path)


def write_nodes(
    path: str | os.PathLike[str], nodes: Iterable[Node], *, before: str | os.PathLike[str] | None = None
) -> bool:
    """Write a nodes file, in the format of its suffix, that `read_nodes` reads as equal nodes; whole or not at all.

    It replaces an earlier file, whose comments and ``[defaults]`` are lost; ``before``: where the earlier file is kept,
    if it has any. Returns whether it was kept. Raises: SpecError.
    """
    suffix, is_kept = suffix_of(path), False
    nodes = tuple(nodes)
    _refuse(find_twins(nodes) if nodes else ["no nodes to write"], where=path)
    text = _dump(nodes, suffix)
    target = Path(path)
    try:
        if not can_others_write(target.parent.stat(), target.parent):  # otherwise a link may be theirs
            target = Path(os.path.realpath(path))
        earlier = "" if before is None else read_text(locate(target))
        if before is not None and earlier != _dump(read_nodes(target), suffix):
            replace_file(Path(before), earlier, mode=target.stat().st_mode)
            is_kept = True
        replace_file(target, text)
    except OSError as exc:
        raise SpecError(f"{path}: cannot be written: {exc.strerror}") from exc
    return is_kept


def _is_path(text: str) -> bool:
    return text.lower().endswith(SUFFIXES) or "/" in text


def _read_files(text: str) -> tuple[Node, ...]:
    """Read one file, or several separated by commas; the name of a file may have a comma. Raises: SpecError."""
    parts = [part.strip() for part in text.split(",")]
    if len(parts) == 1 or not all(map(_is_path, parts)) or os.path.exists(os.path.expanduser(text)):
        return read_nodes(Path(os.path.expanduser(text)))
    paths = [Path(os.path.expanduser(part)) for part in parts]
    contents = [_read(path) for path in paths]
    read = [_make_nodes(content, path) for content, path in zip(contents, paths, strict=True)]
    nodes = name_apart(read) if all(map(is_lease, contents)) else tuple(chain(*read))
    _refuse(find_twins(nodes), where=f"nodes {text!r}")
    return nodes


def _read(path: str | os.PathLike[str]) -> Any:
    try:
        suffix = suffix_of(path)
    except SpecError as exc:
        raise SpecError(f"{exc}; {_IMPORT.format(path)}") from None
    return parse_content(read_text(locate(Path(path))), suffix, where=str(path))


def _make_nodes(content: object, path: str | os.PathLike[str]) -> tuple[Node, ...]:
    if is_lease(content):
        return nodes_from_lease(content, where=str(path))
    tables, defaults, faults = _take_apart(content)
    _refuse(faults, where=path)
    _refuse(_build({"host": "any", **defaults})[1], where=f"{path}, defaults")
    nodes: list[Node] = []
    for number, table in enumerate(tables, 1):
        node, lines = _build({**_defaults_for(table, defaults), **table})
        faults += [f"{_label(number, table)}: {line}" for line in lines]
        nodes += [node] if node else []
    _refuse(faults or find_twins(nodes), where=path)
    return tuple(nodes)


def _dump(nodes: Iterable[Node], suffix: str) -> str:
    return format_document({"nodes": [node.to_fields() for node in nodes]}, suffix)


def _take_apart(content: object) -> tuple[list[dict[str, Any]], dict[str, Any], list[str]]:
    """Return the tables of the nodes, the defaults, and what is wrong with the layout."""
    if isinstance(content, list):
        content = {"nodes": content}
    if not isinstance(content, dict):
        return [], {}, ["give a list of nodes"]
    tables, defaults = content.get("nodes"), content.get("defaults", {})
    faults = [f"{name!r} is unknown: give nodes and defaults" for name in content if name not in {"nodes", "defaults"}]
    if not isinstance(defaults, dict):
        faults.append("defaults: give a table of fields, in TOML under [defaults]")
    if not isinstance(tables, list) or not tables or not all(isinstance(table, dict) for table in tables):
        faults.append("nodes: give a list with at least one node, in TOML under [[nodes]] for each")
    return tables, defaults, faults  # type: ignore[return-value]


def _defaults_for(table: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults for a node; those about how to reach a host, and its paths, do not apply to this machine."""
    is_here = table.get("host", defaults.get("host")) == THIS_MACHINE
    return {name: value for name, value in defaults.items() if not (is_here and name in OF_HOSTS)}


def _build(fields: Mapping[str, Any]) -> tuple[Node | None, list[str]]:
    try:
        return Node(**fields), []
    except SpecError as exc:
        return None, str(exc).splitlines()


def _label(number: int, table: Mapping[str, Any]) -> str:
    known = [text for text in (table.get("name"), table.get("host")) if isinstance(text, str) and text.isprintable()]
    return f"node {number} ({known[0]})" if known else f"node {number}"


_PORTS_APART = "leave out one, or give each its own port"
NAMES_APART = "give each its own name; list a machine once, with ranks = N for several ranks"


def find_twins(nodes: Sequence[Node], *, advice: str = NAMES_APART) -> list[str]:
    """Return a fault for each set of nodes that have one name, or are one machine, with ``advice``."""
    if twice := describe_twice_here(nodes):
        return [twice]
    numbers: dict[str, list[str]] = {}
    for number, node in enumerate(nodes, 1):
        numbers.setdefault(node.name, []).append(str(number))
    twins = {name: " and ".join(found) for name, found in numbers.items() if len(found) > 1}
    return [f"nodes {found} have the same name {name!r}: {advice}" for name, found in twins.items()]


def _refuse(faults: list[str], *, where: object) -> None:
    """Raise one SpecError for ``faults``, each prefixed with ``where``; without faults do nothing."""
    if faults:
        more = [f"and {len(faults) - _MOST_FAULTS} more"] if len(faults) > _MOST_FAULTS else []
        raise SpecError("\n".join([f"{where}: {fault}" for fault in faults[:_MOST_FAULTS]] + more))
