"""Nodes of a file that somebody names: a nodes file, or a file of another tool that has nodes."""

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
    """What was read: by the path that was given, and what of the file no node can hold."""

    path: str
    text: str
    nodes: tuple[Node, ...]
    kind: str = ""  # of the other tool; of a nodes file none
    left_out: tuple[str, ...] = ()


def read_given_nodes(path: str) -> GivenNodes:
    """Read them. Raises: SpecError with the place in the file."""
    place = Path(full_path(path))
    text = read_text(locate(place))
    if not (kind := find_kind(text, name=place.name)):
        if place.suffix.lower() not in SUFFIXES:
            others = "and no lease, hostfile, ssh_config or node_configs.json"
            raise SpecError(f"{one_line(place.name)} is no nodes file ({', '.join(SUFFIXES)}), {others}")
        return GivenNodes(path, text, read_nodes(place))
    found = import_text(text, name=place.name, kind=kind)
    nodes = found.spec.nodes if found.spec else found.nodes
    if not nodes:
        raise SpecError(f"{one_line(place.name)} is of the kind {kind}, and has no nodes")
    return GivenNodes(path, text, tuple(nodes), kind, found.left_out)


def full_path(path: str) -> str:
    """Return the path on this machine: ``~`` is the home."""
    return os.path.abspath(os.path.expanduser(path))
