"""A form of nodes, read from a nodes file or a notebook and saved as a nodes file."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..documents import read_text
from ..errors import SpecError
from ..pipelines.draft_form import DraftForm, build_node
from ..pipelines.form_fields import NODE_FIELDS
from ..pipelines.names import free_name
from ..session.output.safe_output import one_line
from ..spec import Finding
from ..spec.node import Node
from ..spec.nodes_file import find_twins, read_nodes, write_nodes
from ..storage import locate
from ..text import count_of
from .draft_facts import describe_draft, describe_nodes, errors_by_key, num_ranks
from .given_nodes import GivenNodes, full_path, read_given_nodes

__all__ = ["NodeForm"]

_MOST_FAULTS = 50  # that are reported
_NOT_KEPT = "; another program may have written it"


@dataclass(frozen=True)
class _File:
    """The file that the rows were last read from or saved to: its content then, and the nodes in it."""

    path: str = ""
    digest: str = ""
    nodes: tuple[Node, ...] = ()


class NodeForm(DraftForm):
    """A draft of nodes alone; `spec.Node` validates each."""

    _origin: _File

    def __init__(self) -> None:
        super().__init__({})
        self._origin = _File()

    def nodes(self) -> list[Node]:
        """Return the nodes of the form. Raises: SpecError with a line for each error."""
        with self.lock:
            faults = [line for _, line in self.faults()]
            nodes = self.nodes_by_key().values()
        if faults:
            raise SpecError("\n".join(faults[:_MOST_FAULTS]))
        return [node for node in nodes if node is not None]

    def faults(self) -> list[tuple[str, str]]:
        """Return the errors: the path of each field, with its node's key, and a line that names both."""
        named = {f"nodes[{key}]": told["label"] for key, told in describe_nodes(self).items()}
        faults = []
        for path, said in errors_by_key(self).items():
            node, _, field = path.partition(".")
            where = ", ".join(filter(None, [named.get(node), NODE_FIELDS[field].title if field else ""]))
            faults.append((path, f"{where}: {said}" if where else said))
        return faults

    def told(self) -> dict[str, Any]:
        """Return the form as plain JSON."""
        with self.lock:
            nodes = [*self.nodes_by_key().values()]
            counts = [num_ranks(node) if node else None for node in nodes]
            return {
                **describe_draft(self),
                "faults": self.faults(),
                "num_ranks": sum(filter(None, counts)) if all(counts) else None,
                "file": one_line(self._origin.path),
                "is_changed": bool(self._origin.path) and tuple(nodes) != self._origin.nodes,
            }

    def _judge(self, *, is_read: bool) -> Iterable[Finding]:
        built = [build_node(row) for row in self._document.get("nodes", ())]
        found = [
            Finding(f"nodes[{place}].{each.field}".removesuffix("."), each.text)
            for place, (_, faults) in enumerate(built)
            for each in faults
        ]
        return found or [Finding("nodes", line) for line in find_twins([node for node, _ in built if node])]

    # ---- files

    def replace(self, given: str | os.PathLike[str] | GivenNodes | Sequence[Node], *, words: str = "") -> None:
        """Replace all nodes by those of a file or a list; ``words`` offer to undo it. Raises: SpecError."""
        if isinstance(given, str | os.PathLike):
            given = read_given_nodes(os.fspath(given))
        if isinstance(given, GivenNodes):
            origin = _File() if given.kind else _File(given.path, _digest(given.text), given.nodes)
            self.replace_nodes(given.nodes, words=words, origin=origin)
            return
        nodes = tuple(given)
        if wrong := [node for node in nodes if not isinstance(node, Node)]:
            raise SpecError(
                f"{wrong[0]!r:.80} is not a Node: give a list of detrain_nb.spec.Node or the path of a nodes file"
            )
        self.replace_nodes(nodes, words=words, origin=_File())

    def save(self, path: str, *, over: str = "") -> dict[str, str]:
        """Write the nodes to a nodes file.

        A file that has changed since it was read, or was not read, is not overwritten: ``ask`` in the result says why.
        The same call with the returned ``over`` overwrites it. Raises: SpecError.
        """
        nodes = self.nodes()
        full, origin = full_path(path), self._origin
        there = _digest(text) if (text := _text_of(full)) is not None else ""
        is_same_file = bool(origin.path) and full == full_path(origin.path)
        if there and over != there and not (is_same_file and there == origin.digest):
            why = f"has changed since it was read{_NOT_KEPT}" if is_same_file else "already exists"
            return {"ask": f"{one_line(path)} {why}.", "over": there}
        file = Path(full)
        before = free_name(f"{file.name}.before", lambda name: os.path.lexists(file.with_name(name)))
        is_kept = write_nodes(full, nodes, before=file.with_name(before) if there and _is_nodes_file(full) else None)
        with self.lock:
            self._origin = _File(path, _digest(_text_of(full) or ""), tuple(nodes))
        self._tell()
        kept = f"; the previous file is {one_line(os.path.join(os.path.dirname(path), before))}" if is_kept else ""
        return {"said": f"{one_line(path)} has {count_of(len(nodes), 'node')}{kept}"}


def _text_of(path: str) -> str | None:
    """Return the text of a file; None if there is no such file. Raises: SpecError."""
    return read_text(locate(path)) if os.path.exists(path) else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _is_nodes_file(path: str) -> bool:
    try:
        read_nodes(path)
    except SpecError:
        return False
    return True
