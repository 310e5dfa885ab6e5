"""The nodes of a form: rows that are added, moved, removed and brought back, edited in several pages, read, saved."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..documents import read_text
from ..errors import SpecError
from ..session.output.safe_output import one_line
from ..spec.node import THIS_MACHINE, Node
from ..spec.nodes_file import read_nodes, write_nodes
from ..storage import locate
from ..text import count_of
from .actions import Refused
from .node_drafts import FIELDS, Checked, Draft, check, describe_faults, num_ranks

__all__ = ["MOST_NODES", "NodeForm"]

MOST_NODES = 256
_MOST_FAULTS = 50  # are told
_NOT_KEPT = "; another program may have written it"


@dataclass
class _File:
    """The file that the rows were read from, or saved to last: what was in it then, and which nodes that is."""

    path: str = ""
    digest: str = ""
    nodes: tuple[Node, ...] = ()


@dataclass
class _Undo:
    """What the last removal took away, or what was there before all rows were replaced."""

    words: str
    removed: Draft | None = None
    index: int = 0
    before: tuple[list[Draft], _File] | None = None


class NodeForm:
    """The rows of a form, each a `Draft`; its methods may be called in any thread. ``revision`` counts the changes."""

    def __init__(self) -> None:
        self.revision = 0
        self._rows: list[Draft] = []
        self._file = _File()
        self._undo: _Undo | None = None
        self._changing = threading.RLock()

    # ---- what it is

    def nodes(self) -> list[Node]:
        """Raises: SpecError with a line for each fault."""
        with self._changing:
            checked = check(self._rows)
            faults = describe_faults(self._rows, checked)
        if faults:
            raise SpecError("\n".join(faults[:_MOST_FAULTS]))
        return [node for node in checked.nodes if node is not None]

    def by_row(self) -> dict[int, Node | None]:
        """The node of each row, None where it cannot be one."""
        with self._changing:
            return dict(zip((row.id for row in self._rows), check(self._rows).nodes))

    @property
    def path(self) -> str:
        return self._file.path

    def told(self) -> dict[str, Any]:
        """All of it, as plain JSON."""
        with self._changing:
            checked = check(self._rows)
            rows = [_tell(row, errors) for row, errors in zip(self._rows, checked.errors)]
            counts = [num_ranks(node) if node else None for node in checked.nodes]
            return {
                "rows": rows,
                "revision": self.revision,
                "num_ranks": sum(filter(None, counts)) if all(counts) else None,
                "twins": list(checked.twins),
                "file": one_line(self._file.path),
                "is_changed": self._is_changed(checked),
                "undo": self._undo.words if self._undo else "",
            }

    def _is_changed(self, checked: Checked) -> bool:
        return bool(self._file.path) and checked.nodes != self._file.nodes

    # ---- what changes it

    def replace(self, nodes: Iterable[Node], *, words: str = "", file: tuple[str, str] | None = None) -> None:
        """Have other rows; ``words`` let it be undone; ``file``: the path and the text that they were read from."""
        nodes = tuple(nodes)
        _check_room(len(nodes))
        with self._changing:
            before = (self._rows, self._file)
            self._undo = _Undo(words, before=before) if words and self._rows else None
            self._rows = [Draft.of(node) for node in nodes]
            self._file = _File(file[0], _digest(file[1]), nodes) if file else _File()
            self.revision += 1

    def append(self, nodes: Iterable[Node]) -> list[int]:
        drafts = [Draft.of(node) for node in nodes]
        with self._changing:
            _check_room(len(self._rows) + len(drafts))
            return [self._insert(draft) for draft in drafts]

    def add(self) -> int:
        """An empty row at the end; returns its number."""
        with self._changing:
            return self._insert(Draft())

    def duplicate(self, row: int) -> int:
        with self._changing:
            index = self._index(row)
            return self._insert(self._rows[index].copy(), index + 1)

    def remove(self, row: int) -> None:
        with self._changing:
            index = self._index(row)
            removed = self._rows.pop(index)
            self._undo = _Undo(f"{removed.label} was removed.", removed, index)
            self.revision += 1

    def move(self, row: int, by: int) -> None:
        """Raises: Refused where it is the first, or the last, already."""
        with self._changing:
            index = self._index(row)
            if not 0 <= index + by < len(self._rows):
                raise Refused(f"{self._rows[index].label} is {'first' if by < 0 else 'last'} already")
            self._rows.insert(index + by, self._rows.pop(index))
            self.revision += 1

    def undo(self) -> int | None:
        """Bring back what was removed or replaced last; returns the row that came back, if it is one."""
        with self._changing:
            undo, self._undo = self._undo, None
            if undo is None:
                raise Refused("there is nothing to undo")
            if undo.removed is not None:
                return self._insert(undo.removed, min(undo.index, len(self._rows)))
            if undo.before is not None:
                self._rows, self._file = undo.before
            self.revision += 1
            return None

    def edit(self, row: int, field: str, text: str, *, seen: int) -> int:
        """Take what was typed into a field whose last change, as far as the page knew, was at revision ``seen``.

        What was typed elsewhere meanwhile is not written over: ``text`` is kept beside it, to be chosen. A row that was
        removed meanwhile takes it, too, and has it when it is brought back; Refused says so. Returns what the page has
        seen now.
        """
        with self._changing:
            undo = self._undo
            if undo is not None and undo.removed is not None and undo.removed.id == row:
                label = undo.removed.label
                undo.removed.texts[field] = text
                raise Refused(f"{label} was removed meanwhile: Undo brings it back with what you typed")
            draft = self._rows[self._index(row)]
            self.revision += 1
            is_same = draft.texts.get(field, "") == text
            if draft.changed.get(field, 0) > seen and not is_same:
                draft.other[field] = text
                return seen
            draft.texts[field] = text
            draft.changed[field] = self.revision
            draft.other.pop(field, None)
            return self.revision

    def choose(self, row: int, field: str, *, takes_other: bool) -> int:
        """Of two texts of a field, take the one that came later, or keep the one that is there."""
        with self._changing:
            draft = self._rows[self._index(row)]
            other = draft.other.pop(field, None)
            self.revision += 1
            if takes_other and other is not None:
                draft.texts[field] = other
                draft.changed[field] = self.revision
            return self.revision

    def _insert(self, draft: Draft, index: int | None = None) -> int:
        _check_room(len(self._rows) + 1)
        self._rows.insert(len(self._rows) if index is None else index, draft)
        self.revision += 1
        return draft.id

    def _index(self, row: int) -> int:
        for index, draft in enumerate(self._rows):
            if draft.id == row:
                return index
        raise Refused("this node was removed meanwhile, or the list was replaced")

    # ---- files

    def open(self, path: str, *, is_added: bool) -> int:
        """Read a nodes file, instead of what is there or ``is_added`` to it. Returns how many. Raises: SpecError."""
        full = _full(path)
        text = read_text(locate(full))
        nodes = read_nodes(full)
        if is_added:
            self.append(nodes)
        else:
            count = count_of(len(self._rows), "node")
            self.replace(
                nodes,
                words=f"{count} gave way to those of {one_line(path)}.",
                file=(path, text),
            )
        return len(nodes)

    def save(self, path: str, *, over: str = "") -> dict[str, str]:
        """Write all of it to a nodes file.

        Where the file would be written over that is not as it was read, or that was not read, nothing is written, and
        ``ask`` says why; the same call with ``over`` as it is returned writes it. Raises: SpecError.
        """
        nodes = self.nodes()
        full = _full(path)
        there = _digest(text) if (text := _text_of(full)) is not None else ""
        is_ours = there == self._file.digest and full == _full(self._file.path or path) and bool(self._file.path)
        if there and not is_ours and over != there:
            is_same_file = bool(self._file.path) and full == _full(self._file.path)
            why = f"has changed since it was read{_NOT_KEPT}" if is_same_file else "is there already"
            return {"ask": f"{one_line(path)} {why}.", "over": there}
        is_kept = write_nodes(full, nodes, before=f"{full}.before" if there and _is_nodes_file(full) else None)
        with self._changing:
            self._file = _File(path, _digest(_text_of(full) or ""), tuple(nodes))
        shown = one_line(path)
        kept = f"; as it was it is {shown}.before" if is_kept else ""
        return {"said": f"{shown} has {count_of(len(nodes), 'node')}{kept}"}


def two_ranks_here() -> Node:
    return Node(host=THIS_MACHINE, ranks=2)


def _tell(row: Draft, errors: Mapping[str, str]) -> dict[str, Any]:
    return {
        "id": row.id,
        "label": row.label,
        "where": row.where,
        "offers": row.offers,
        "texts": {name: row.texts.get(name, "") for name in FIELDS},
        "changed": dict(row.changed),
        "other": dict(row.other),
        "errors": dict(errors),
    }


def _check_room(number: int) -> None:
    if number > MOST_NODES:
        raise Refused(f"a form has at most {MOST_NODES} nodes: write a nodes file")


def _full(path: str) -> str:
    return os.path.abspath(os.path.expanduser(path))


def _text_of(path: str) -> str | None:
    """None where there is no such file. Raises: SpecError."""
    return read_text(locate(path)) if Path(path).exists() else None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def _is_nodes_file(path: str) -> bool:
    try:
        read_nodes(path)
    except SpecError:
        return False
    return True


def as_nodes(given: str | os.PathLike[str] | Sequence[Node]) -> tuple[Sequence[Node], tuple[str, str] | None]:
    """Nodes, and the path and text of the file that they are read from, if they are. Raises: SpecError."""
    if isinstance(given, str | os.PathLike):
        path = os.fspath(given)
        text = read_text(locate(_full(path)))
        return read_nodes(_full(path)), (path, text)
    nodes = list(given)
    if wrong := [node for node in nodes if not isinstance(node, Node)]:
        raise SpecError(f"nodes {wrong[0]!r:.80}: give the path of a nodes file, or a list of detrain_nb.spec.Node")
    return nodes, None
