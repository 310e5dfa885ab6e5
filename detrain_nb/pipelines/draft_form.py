"""A form without a page: its input, its editors, their conflicts, and what can be undone."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import SpecError
from ..plan.fields import nearest
from ..spec import Finding, Node
from ..spec.findings import findings_of
from ..text import printable, show
from .draft import Path, field_of, format_path, get_at, make_document, make_draft, parse_path, set_at
from .form_fields import FIELDS, NODE_FIELDS
from .form_review import find_hidden
from .typed import Typed, size_of

__all__ = ["MOST_NODES", "DraftForm", "FieldConflict", "build_node", "label_of"]

MOST_NODES = 256  # in a form; a file may have more
_MOST_CHARS = 500_000  # of one text, such as a script
_MOST_CHARS_IN_ALL = 4_000_000  # as JSON: a file is at most 1 MB, and each edit reads all of it again
_MOST_CONFLICTS, _MOST_UNDOS = 200, 20
_keys = map("n{}".format, itertools.count(1))  # of nodes, unique over all forms and threads


@dataclass(frozen=True)
class FieldConflict:
    """An edit that was not applied, as the field had been changed elsewhere before it: ``mine`` is that edit.

    ``theirs`` is the value now; None if the node of the field was removed. ``editor`` made the edit.
    """

    path: str
    theirs: Typed | None
    mine: Typed
    editor: str
    revision: int


@dataclass(frozen=True)
class _Undo:
    """A removal, described in ``words``; ``bring_back`` reverts it and returns the key of a restored node."""

    words: str
    bring_back: Callable[[], str]
    key: str = ""  # of the node that was removed


class DraftForm:
    """A draft that is edited field by field; no input is lost. A subclass checks it for faults.

    Paths are written as in the errors of a spec: ``training.steps``, ``nodes[0].host``. A node also has a key, which
    stays when others are moved: ``nodes[n3].host``; ``rows`` has the keys in order. Several threads may use a form.
    """

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.lock = threading.RLock()  # hold it to read several values of one state
        self._listeners: list[Callable[[], object]] = []
        self._changed: dict[tuple[str | int, ...], tuple[int, str]] = {}  # by the path with a key: revision, editor
        self._removed: dict[str, tuple[int, Any]] = {}  # by key: the place and the row
        self._conflicts: dict[tuple[str, str], FieldConflict] = {}
        self._undos: list[_Undo] = []
        self._origin: Any = None  # of all nodes; an undo restores it with them
        self.revision = 0
        self.rows: list[str] = []
        self._load(content, "")

    def _judge(self, *, is_read: bool) -> Iterable[Finding]:
        """Return errors and warnings of the document; ``is_read``: all input could be read."""
        raise NotImplementedError

    # ---- state

    @property
    def draft(self) -> dict[str, Any]:
        """A copy of all input."""
        with self.lock:
            return copy.deepcopy(self._draft)

    @property
    def document(self) -> dict[str, Any]:
        """The document that a file would hold, valid or not."""
        with self.lock:
            return copy.deepcopy(self._document)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Errors and warnings, each with the path of its field."""
        return self._findings

    @property
    def errors(self) -> dict[str, str]:
        """Errors by the path of a field; the path is empty for errors of the whole."""
        return self._by_path("error")

    @property
    def warnings(self) -> dict[str, str]:
        """Warnings by the path of a field."""
        return self._by_path("warning")

    @property
    def conflicts(self) -> tuple[FieldConflict, ...]:
        """The edits that were not applied, as another editor had changed the same field."""
        return tuple(self._conflicts.values())

    @property
    def undo_words(self) -> str:
        """What `undo` would bring back, in words; empty if there is nothing."""
        return self._undos[-1].words if self._undos else ""

    def nodes_by_key(self) -> dict[str, Node | None]:
        """Return the node of each row by key; None for a row that is not a valid node."""
        with self.lock:
            return {key: build_node(row)[0] for key, row in zip(self.rows, self._document.get("nodes", ()))}

    def typed(self, path: str) -> Any:
        """Return what is typed into a field; an empty text if nothing is. Raises: SpecError for an unknown field."""
        with self.lock:
            return copy.deepcopy(get_at(self._draft, self._place(path)))

    def key_path(self, path: str) -> str:
        """Return ``path`` with the key of a node in place of its number, which may change. Raises: SpecError."""
        with self.lock:
            return format_path(self._keyed(self._place(path)))

    def on_change(self, call: Callable[[], object]) -> Callable[[], None]:
        """Call ``call`` after each change by any editor; returns the function that ends this."""
        self._listeners.append(call)
        return lambda: self._listeners.remove(call) if call in self._listeners else None

    # ---- input

    def edit(self, path: str, typed: Typed, *, revision: int | None = None, editor: str = "") -> bool:
        """Put input into a field; an empty text clears it, and `True` is a box that is ticked.

        ``revision`` is the revision of the form that the ``editor``, such as a page, has seen. If another editor has
        changed the same field since, the edit is not applied but added to `conflicts`. Returns whether it was applied.
        Raises: SpecError for an unknown field, or a text that is too long.
        """
        _check_typed(path, typed)
        with self.lock:
            done = self._edit(path, typed, revision, editor)
        self._tell()
        return done

    def resolve(self, path: str, *, keep: str, editor: str = "") -> None:
        """Resolve the conflict of a field: ``keep`` "mine" applies the edit, "theirs" drops it. Raises: SpecError."""
        with self.lock:
            conflict = self._conflicts.get((path, editor))
            if conflict is None:
                raise SpecError(f"{show(path)} has no conflict: it was resolved, or never existed")
            if keep == "mine":
                for key in [key for key in self._removed if path.startswith(f"nodes[{key}]")]:
                    self._bring_back(key)
                self._edit(path, conflict.mine, None, editor)  # an error leaves the conflict
            else:
                self._count()
            self._conflicts.pop((path, editor), None)
        self._tell()

    # ---- nodes

    def add_node(self, typed: Mapping[str, Typed] | None = None, *, at: int | None = None) -> str:
        """Add a node at place ``at``, by default at the end; returns its key. Raises: SpecError."""
        for name, each in (typed or {}).items():
            _check_typed(name, each)
            if name not in NODE_FIELDS:
                raise SpecError(f"{show(name)} is not a field of a node: {nearest(name, NODE_FIELDS)}")
        with self.lock:
            _check_room(len(self.rows) + 1)
            _check_size(self._draft, typed)
            key = self._insert(dict(typed or {}), next(_keys), len(self.rows) if at is None else at)
            self._count()
        self._tell()
        return key

    def add_nodes(self, nodes: Iterable[Node]) -> list[str]:
        """Add all of the nodes at the end, or none; returns their keys. Raises: SpecError."""
        with self.lock:
            typed = _type_nodes(nodes, before=len(self.rows))
            keys = [self._insert(row, next(_keys), len(self.rows)) for row in typed]
            self._count()
        self._tell()
        return keys

    def replace_nodes(self, nodes: Iterable[Node], *, words: str = "", origin: Any = None) -> None:
        """Replace all nodes; with ``words``, which describe that, it can be undone. Raises: SpecError."""
        with self.lock:
            typed = _type_nodes(nodes)
            before = self.rows, self._draft.get("nodes", []), self._origin
            undo = _Undo(words, lambda: self._put_nodes(*before))
            self._undos = [*self._undos, undo][-_MOST_UNDOS:] if words and self.rows else []
            self._put_nodes([next(_keys) for _ in typed], typed, origin)
            self._count()
        self._tell()

    def copy_node(self, key: str) -> str:
        """Add a copy of a node below it, without its name; returns the key of the copy. Raises: SpecError."""
        with self.lock:
            place = self._row(key)
            row = self._draft["nodes"][place]
            typed = {name: each for name, each in row.items() if name in NODE_FIELDS and name != "name"}
        return self.add_node(typed, at=place + 1)

    def remove_node(self, key: str) -> None:
        """Remove a node; a later edit of it is a conflict, which can bring it back. Raises: SpecError."""
        with self.lock:
            place = self._row(key)
            self.rows.pop(place)
            row = self._draft["nodes"].pop(place)
            self._removed[key] = place, row
            while len(self._removed) > 1 and size_of(self._removed) > _MOST_CHARS_IN_ALL:
                self._removed.pop(next(iter(self._removed)))
            left = [undo for undo in self._undos if not undo.key or undo.key in self._removed]
            undo = _Undo(f"{label_of(row)} was removed.", lambda: self._bring_back(key), key)
            self._undos = [*left, undo][-_MOST_UNDOS:]
            self._count()
        self._tell()

    def restore_node(self, key: str) -> None:
        """Bring back a removed node to its place. Raises: SpecError if ``key`` was not removed."""
        with self.lock:
            if key not in self._removed:
                raise SpecError(f"{show(key)} is not a removed node")
            self._bring_back(key)
            self._count()
        self._tell()

    def undo(self) -> str:
        """Undo the last removal or replacement; returns the key of a restored node, or "". Raises: SpecError."""
        with self.lock:
            if not self._undos:
                raise SpecError("there is nothing to undo")
            key = self._undos.pop().bring_back()
            self._count()
        self._tell()
        return key

    def move_node(self, key: str, by: int) -> None:
        """Move a node down by ``by`` places, up if it is negative, at most to the ends. Raises: SpecError."""
        with self.lock:
            place = self._row(key)
            to = min(max(0, place + by), len(self.rows) - 1)
            for items in (self.rows, self._draft["nodes"]):
                items.insert(to, items.pop(place))
            self._count()
        self._tell()

    # ---- internals

    def _load(self, data: Mapping[str, Any], editor: str) -> None:
        self._draft = make_draft(data)
        nodes = self._draft.get("nodes")
        self.rows = [next(_keys) for _ in nodes] if isinstance(nodes, list) else []
        self._removed.clear()
        self._conflicts.clear()
        self._undos.clear()
        self._changed.clear()
        self._loaded = self.revision + 1, editor
        self._count()

    def _edit(self, path: str, typed: Typed, revision: int | None, editor: str) -> bool:
        try:
            place = self._place(path)
        except SpecError:
            if not self._is_removed(path) or revision is None:
                raise
            self._note_conflict(FieldConflict(path, None, typed, editor, self.revision))
            return False
        if field_of(place) is None and typed != "":
            raise SpecError(f"{show(path)} is not a field: it can only be removed, by an empty text")
        keyed, there = self._keyed(place), get_at(self._draft, place)
        at, by = self._changed.get(keyed, self._loaded)
        if revision is not None and at > revision and by != editor and there != typed:
            self._note_conflict(FieldConflict(format_path(keyed), there, typed, editor, at))
            return False
        _check_size(self._draft, typed)
        self._conflicts.pop((format_path(keyed), editor), None)
        set_at(self._draft, place, typed)
        self._changed[keyed] = (self.revision + 1, editor)
        self._count()
        return True

    def _note_conflict(self, conflict: FieldConflict) -> None:
        self._conflicts[conflict.path, conflict.editor] = conflict
        while len(self._conflicts) > _MOST_CONFLICTS:
            self._conflicts.pop(next(iter(self._conflicts)))

    def _count(self) -> None:
        """Count a change, and check the whole draft again."""
        self.revision += 1
        self._document, unread = make_document(self._draft)
        judged = [each for each in self._judge(is_read=not unread) if each.field not in unread]
        hidden = find_hidden({"nodes": self._document.get("nodes", [])})
        self._findings = (
            *(Finding(path, said) for path, said in unread.items()),
            *judged,
            *(Finding(path, said, "warning") for path, said in hidden),
        )

    def _by_path(self, severity: str) -> dict[str, str]:
        found: dict[str, list[str]] = {}
        for each in self._findings:
            if each.severity == severity:
                found.setdefault(each.field, []).append(each.text)
        return {path: "; ".join(texts) for path, texts in found.items()}

    def _place(self, path: str) -> Path:
        """Parse a path. Raises: SpecError if it is not a field and has no input."""
        place = parse_path(path, self.rows)
        there = get_at(self._draft, place)
        if field_of(place) is None and (there == "" or isinstance(there, dict) or self._is_of_rows(place)):
            names = NODE_FIELDS if place[:1] == ("nodes",) else FIELDS
            raise SpecError(f"{show(path)} is not a field: {nearest(str(place[-1]), names)}")
        return place

    def _is_of_rows(self, place: Path) -> bool:
        return place[0] == "nodes" and len(place) < 3 and bool(self.rows)

    def _keyed(self, place: Path) -> tuple[str | int, ...]:
        """Replace the number of a node by its key, which stays when others are moved."""
        if len(place) > 1 and place[0] == "nodes" and isinstance(place[1], int) and place[1] < len(self.rows):
            return (f"nodes[{self.rows[place[1]]}]", *place[2:])
        return place

    def _row(self, key: str) -> int:
        if key not in self.rows:
            raise SpecError(f"{show(key)} is not a node of the form: it was removed, or all were replaced")
        return self.rows.index(key)

    def _is_removed(self, path: str) -> bool:
        return any(path.startswith(f"nodes[{key}].") for key in self._removed)

    def _bring_back(self, key: str) -> str:
        self._undos = [undo for undo in self._undos if undo.key != key]
        place, row = self._removed.pop(key)
        return self._insert(row, key, min(place, len(self.rows)))

    def _put_nodes(self, rows: list[str], typed: list[Any], origin: Any) -> str:
        self.rows, self._draft["nodes"], self._origin = rows, typed, origin
        return ""

    def _insert(self, row: Any, key: str, place: int) -> str:
        if not isinstance(self._draft.get("nodes"), list):
            self._draft["nodes"] = []
        self._draft["nodes"].insert(place, row)
        self.rows.insert(place, key)
        return key

    def _tell(self) -> None:
        for call in [*self._listeners]:
            call()


def label_of(row: object) -> str:
    """Return what to call a node by its typed name or host, even if those are invalid."""
    typed = row if isinstance(row, dict) else {}
    texts = (str(typed.get(name, "")).strip() for name in ("name", "host"))
    return printable(next(filter(None, texts), "new node")[:80])


def build_node(row: Any) -> tuple[Node | None, list[Finding]]:
    """Return the node of a row of a document, or its errors by field."""
    try:
        return Node(**row), []
    except SpecError as exc:
        return None, findings_of(exc)
    except TypeError:  # not a table
        return None, [Finding("", "give a table of fields")]


def _type_nodes(nodes: Iterable[Node], *, before: int = 0) -> list[Any]:
    """Return nodes as input; the form has ``before`` nodes already. Raises: SpecError."""
    fields = [node.to_fields() for node in nodes]
    _check_room(before + len(fields))
    typed: list[Any] = make_draft({"nodes": fields})["nodes"]
    return typed


def _check_room(number: int) -> None:
    if number > MOST_NODES:
        raise SpecError(f"a form has at most {MOST_NODES} nodes: write a file instead")


def _check_typed(path: str, typed: object) -> None:
    """Check the type and the length of input. Raises: SpecError."""
    if not isinstance(typed, str | bool):
        raise SpecError(f"{show(path)}: input must be a text, true or false, not {show(typed)}")
    if isinstance(typed, str) and len(typed) > _MOST_CHARS:
        raise SpecError(f"{show(path)}: the text has {len(typed)} characters: give at most {_MOST_CHARS}")


def _check_size(draft: object, typed: object) -> None:
    """Check the size of all input. Raises: SpecError."""
    if typed and size_of([draft, typed]) > _MOST_CHARS_IN_ALL:
        raise SpecError(f"the form would have more than {_MOST_CHARS_IN_ALL:,} characters: a file has at most 1 MB")
