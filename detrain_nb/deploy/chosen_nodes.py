"""Transports to the nodes that a user names: by a nodes file, by hosts, or by a session."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, Union

from ..errors import SpecError
from ..transport import Transport
from ..transport.local import LocalTransport
from .questions import Questions

if TYPE_CHECKING:
    from ..spec.node import Node
    from ..transport.ssh import AskPassphrase

__all__ = ["Nodes", "check_session_name", "find_nodes", "nodes_of", "project_of", "read_given", "transports_to"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")

Nodes: TypeAlias = str | os.PathLike[str] | Sequence[Union["Node", Transport]] | Sequence[str] | None


def check_session_name(name: str) -> str:
    """Return ``name``. Raises: SpecError when it is not a valid session name, which also names a folder."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SpecError(
            f"session name {name!r} is invalid: use up to 80 letters, digits, '.', '_' and '-', starting with a letter "
            "or digit"
        )
    return name


def transports_to(
    nodes: Nodes,
    *,
    ask_passphrase: AskPassphrase | None = None,
    meanwhile: Callable[[], None] | None = None,
) -> list[Transport]:
    """Return transports to ``nodes``: a nodes file, hosts as in ``alice@gpu1,gpu2:2222``, or a list of nodes.

    None is this machine, as is ``localhost``, which may be one of several. ``meanwhile``: see `Questions`.

    Raises: SpecError when no node is given, names repeat, or the nodes cannot be read.
    """
    if nodes is None:
        return [LocalTransport()]
    from ..spec.node import describe_twice_here

    if not (nodes := read_given(nodes)):
        raise SpecError("no nodes were given: name a nodes file or hosts")
    questions = Questions(ask_passphrase, meanwhile=meanwhile) if ask_passphrase else None
    transports = [_transport_to(node, questions) for node in nodes]
    names = [transport.name for transport in transports]
    if twice := [name for name in names if names.count(name) > 1]:
        raise SpecError(f"nodes have the same name {twice[0]!r}: give each a name of its own")
    if twice_here := describe_twice_here(nodes_of([each for each in transports if each.is_this_machine])):
        raise SpecError(twice_here)
    return transports


def read_given(nodes: Nodes) -> list[Node | Transport]:
    """Return nodes from a nodes file, or from hosts in a string or list; given nodes are returned as they are.

    Raises: SpecError.
    """
    from ..spec.node import Node
    from ..spec.nodes_file import parse_nodes, read_nodes

    if isinstance(nodes, os.PathLike):
        return list(read_nodes(nodes))
    if isinstance(nodes, str):
        return list(parse_nodes(nodes))
    given: list[object] = list(nodes) if isinstance(nodes, Iterable) else [None]
    if given and all(isinstance(each, str) for each in given):
        return list(parse_nodes(",".join(map(str, given))))
    found = [each for each in given if isinstance(each, (Node, Transport))]
    if len(found) < len(given):
        raise SpecError(
            f"nodes {nodes!r:.80} is invalid: give a nodes file, hosts as in alice@gpu1,gpu2:2222, or a list of nodes"
        )
    return found


def _transport_to(node: Node | Transport, questions: Questions | None) -> Transport:
    from ..spec.node import Node
    from .ssh_node import SshNode

    if isinstance(node, Node) and node.is_this_machine:
        return LocalTransport(node)
    return SshNode(node, questions=questions) if isinstance(node, Node) else node


def nodes_of(transports: Sequence[Transport]) -> tuple[Node, ...]:
    """Return the node descriptions of ``transports``, for those that have one."""
    return tuple(transport.node for transport in transports if transport.node is not None)


def project_of(session: str, folder: str) -> str:
    """Return the project that ``session`` was started with, if ``folder`` is in it; else an empty string."""
    from .known import known_sessions

    known = known_sessions().get(session)
    project = known.started.project if known and known.started else ""
    return project if os.path.isabs(project) and Path(folder).is_relative_to(project) else ""


def find_nodes(session: str, *, ask_passphrase: AskPassphrase | None = None) -> list[Transport]:
    """Return transports to the nodes on which ``session`` was started; to this machine if the session is unknown."""
    from .known import known_sessions

    known = known_sessions().get(session)
    return transports_to(known.nodes if known and known.nodes else None, ask_passphrase=ask_passphrase)
