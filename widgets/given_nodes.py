"""Nodes from a file that the user names: a nodes file, or a file of another tool that lists nodes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from ..documents import SUFFIXES, read_text
from ..errors import SpecError
from ..formats.importing import find_kind, import_text
from ..session.output.safe_output import one_line
from ..spec.node import Node
from ..spec.nodes_file import read_nodes
from ..storage import locate

__all__ = ["GivenNodes", "full_path", "read_given_nodes"]


@dataclass(frozen=True)
class GivenNodes:
    """Nodes of a file, the path as it was given, and the parts of the file that do not fit into nodes."""

    path: str
    text: str
    nodes: tuple[Node, ...]
    kind: str = ""  # of the other tool; empty for a nodes file
    left_out: tuple[str, ...] = ()


def read_given_nodes(path: str) -> GivenNodes:
    """Read the nodes of the file at ``path``. Raises: SpecError with the place in the file."""
    place = Path(full_path(path))
    text = read_text(locate(place))
    if not (kind := find_kind(text, name=place.name)):
        if place.suffix.lower() not in SUFFIXES:
            others = "lease, hostfile, ssh_config or node_configs.json"
            raise SpecError(f"{one_line(place.name)} is neither a nodes file ({', '.join(SUFFIXES)}) nor a {others}")
        return GivenNodes(path, text, read_nodes(place))
    found = import_text(text, name=place.name, kind=kind)
    nodes = found.spec.nodes if found.spec else found.nodes
    if not nodes:
        raise SpecError(f"{one_line(place.name)} ({kind}) contains no nodes")
    return GivenNodes(path, text, tuple(nodes), kind, found.left_out)


def full_path(path: str) -> str:
    """Return the absolute path, with ``~`` expanded."""
    return os.path.abspath(os.path.expanduser(path))
