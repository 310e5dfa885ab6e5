"""The form of a pipeline, without a page: what is typed, what the spec says of it, and the last spec that was right.

from detrain_nb.pipelines import SpecForm

form = SpecForm({"name": "train"})
form.edit("source.script", "train.py")
form.errors, form.spec
"""

from __future__ import annotations

import copy
import itertools
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import DetrainError, SpecError
from ..plan.fields import nearest
from ..spec import Finding, PipelineSpec
from ..spec.findings import findings_of
from ..text import show
from .draft import (
    Path,
    field_of,
    format_path,
    get_at,
    make_document,
    make_draft,
    parse_path,
    set_at,
)
from .form_fields import FIELDS, NODE_FIELDS
from .typed import Typed

__all__ = ["FieldConflict", "SpecForm"]

_MOST_CHARS = 500_000  # of one text: a script
_MOST_CHARS_IN_ALL = 4_000_000  # as JSON; a file has 1 MB at most, and all of it is read again at each edit
_MOST_ROWS = 1_000  # of nodes that are added by hand
_MOST_CONFLICTS = 200


@dataclass(frozen=True)
class FieldConflict:
    """A field was changed elsewhere before an edit of it came, which was not applied: ``mine`` is that edit.

    ``theirs`` is what stands there; None where the node of the field was removed. ``editor`` is who made the edit.
    """

    path: str
    theirs: Typed | None
    mine: Typed
    editor: str
    revision: int


class SpecForm:
    """A draft of a pipeline, edited field by field. The spec decides what is right; nothing that is typed is lost.

    Paths are those of the errors of a spec: ``training.steps``, ``nodes[0].host``. A node has a key besides, which
    stays when others are moved: ``nodes[n3].host``; ``rows`` has them in order. Several threads may use it.
    """

    def __init__(self, content: PipelineSpec | Mapping[str, Any] | None = None) -> None:
        self._lock = threading.RLock()
        self._keys = (f"n{number}" for number in itertools.count(1))
        self._listeners: list[Callable[[], object]] = []
        self._changed: dict[tuple[str | int, ...], tuple[int, str]] = {}  # by the path with a key: when, and by whom
        self._removed: dict[str, Any] = {}  # rows, by key
        self._conflicts: dict[tuple[str, str], FieldConflict] = {}
        self.revision = 0
        self.rows: list[str] = []
        self._spec: PipelineSpec | None = None
        self._load(content or {}, "")

    # ---- what it says

    @property
    def spec(self) -> PipelineSpec | None:
        """The last spec that was right; None before there was one. Who sets it has the form show that."""
        return self._spec

    @spec.setter
    def spec(self, spec: PipelineSpec) -> None:
        self.load(spec)

    @property
    def draft(self) -> dict[str, Any]:
        """A copy of all that is typed."""
        with self._lock:
            return copy.deepcopy(self._draft)

    @property
    def document(self) -> dict[str, Any]:
        """What a file of it holds, right or wrong."""
        with self._lock:
            return copy.deepcopy(self._document)

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What is wrong, and what may be, each with the path of its field."""
        return self._findings

    @property
    def errors(self) -> dict[str, str]:
        """What is wrong by the path of a field; empty where it is about the whole."""
        return self._by_path("error")

    @property
    def warnings(self) -> dict[str, str]:
        """What may be wrong, by path."""
        return self._by_path("warning")

    @property
    def is_right(self) -> bool:
        """`spec` is what is typed, and nothing that is known here keeps it from being started."""
        return self._is_spec and not self.errors

    @property
    def conflicts(self) -> tuple[FieldConflict, ...]:
        return tuple(self._conflicts.values())

    def typed(self, path: str) -> Any:
        """What is typed into a field; an empty text where nothing is. Raises: SpecError for no field."""
        with self._lock:
            return copy.deepcopy(get_at(self._draft, self._place(path)))

    def key_path(self, path: str) -> str:
        """The same path with the key of a node in place of its number, for who keeps it. Raises: SpecError."""
        with self._lock:
            return format_path(self._keyed(self._place(path)))

    def on_change(self, call: Callable[[], object]) -> Callable[[], None]:
        """Have ``call`` called after each change, by whom ever; returns what ends that."""
        self._listeners.append(call)
        return lambda: self._listeners.remove(call) if call in self._listeners else None

    # ---- what is done to it

    def load(self, content: PipelineSpec | Mapping[str, Any], *, editor: str = "") -> None:
        """Have the form show a spec, or a document; all that was typed is replaced."""
        with self._lock:
            self._load(content, editor)
        self._tell()

    def edit(self, path: str, typed: Typed, *, revision: int | None = None, editor: str = "") -> bool:
        """Put what was typed into a field; an empty text is nothing, and `True` a box that is ticked.

        ``revision`` is the one of the form that the ``editor``, a page for one, had seen. Where another editor has
        changed that very field since, nothing is done but noted as one of `conflicts`. Returns whether it was done.
        Raises: SpecError for a path that is no field, or a text that is too long.
        """
        _check_typed(path, typed)
        with self._lock:
            done = self._edit(path, typed, revision, editor)
        self._tell()
        return done

    def resolve(self, path: str, *, keep: str, editor: str = "") -> None:
        """End the conflict of a field: ``keep`` "mine" does the edit now, "theirs" drops it. Raises: SpecError."""
        with self._lock:
            conflict = self._conflicts.pop((path, editor), None)
            if conflict is None:
                raise SpecError(f"{show(path)} has no conflict: it was resolved, or there was none")
            if keep == "mine":
                self._bring_back(path)
                self._edit(path, conflict.mine, None, editor)
            else:
                self._count(())
        self._tell()

    def add_node(self, typed: Mapping[str, Typed] | None = None, *, at: int | None = None, editor: str = "") -> str:
        """Add a node, at the end if ``at`` does not say where; returns its key. Raises: SpecError."""
        for name, each in (typed or {}).items():
            _check_typed(name, each)
            if name not in NODE_FIELDS:
                raise SpecError(f"{show(name)} is no field of a node: {nearest(name, NODE_FIELDS)}")
        with self._lock:
            if len(self.rows) >= _MOST_ROWS:
                raise SpecError(f"there are {len(self.rows)} nodes: more than {_MOST_ROWS} stand in a file")
            self._require_room(typed or {})
            key = self._insert(dict(typed or {}), next(self._keys), len(self.rows) if at is None else at)
            self._changed.update({(key, name): (self.revision + 1, editor) for name in (typed or {})})
            self._count(())
        self._tell()
        return key

    def copy_node(self, key: str, *, editor: str = "") -> str:
        """Add a node like that one below it, without its name; returns the key of the new one. Raises: SpecError."""
        with self._lock:
            place = self._row(key)
            row = self._draft["nodes"][place]
            typed = {name: each for name, each in row.items() if name in NODE_FIELDS and name != "name"}
        return self.add_node(typed, at=place + 1, editor=editor)

    def remove_node(self, key: str) -> None:
        """Take a node away; a later edit of it is a conflict, which can bring it back. Raises: SpecError."""
        with self._lock:
            place = self._row(key)
            self._removed[key] = self._draft["nodes"].pop(place)
            while _size_of(self._removed) > _MOST_CHARS_IN_ALL and len(self._removed) > 1:
                self._removed.pop(next(iter(self._removed)))
            self.rows.pop(place)
            self._count(())
        self._tell()

    def restore_node(self, key: str) -> None:
        """Bring back a node that was removed, at the end. Raises: SpecError where none was."""
        with self._lock:
            if key not in self._removed:
                raise SpecError(f"{show(key)} is no node that was removed")
            self._bring_back(f"nodes[{key}]")
            self._count(())
        self._tell()

    def move_node(self, key: str, by: int) -> None:
        """Move a node down, or up where ``by`` is below 0; it stays among the others. Raises: SpecError."""
        with self._lock:
            place = self._row(key)
            to = min(max(0, place + by), len(self.rows) - 1)
            for items in (self.rows, self._draft["nodes"]):
                items.insert(to, items.pop(place))
            self._count(())
        self._tell()

    def to_code(self) -> str:
        """Python that builds and submits the spec. Raises: SpecError where what is typed is none."""
        from .form_code import write_code

        with self._lock:
            if not self._is_spec or self._spec is None:
                faults = "; ".join(f"{path}: {said}" if path else said for path, said in self.errors.items())
                raise SpecError(f"this is no pipeline yet: {faults}")
            return write_code(self._spec)

    # ---- how

    def _load(self, content: PipelineSpec | Mapping[str, Any], editor: str) -> None:
        self._draft = make_draft(content.to_dict() if isinstance(content, PipelineSpec) else content)
        nodes = self._draft.get("nodes")
        self.rows = [next(self._keys) for _ in nodes] if isinstance(nodes, list) else []
        self._removed.clear()
        self._conflicts.clear()
        revision = self.revision + 1
        self._changed.clear()
        self._loaded = revision, editor
        self._count(())

    def _edit(self, path: str, typed: Typed, revision: int | None, editor: str) -> bool:
        try:
            place = self._place(path)
        except SpecError:
            if not self._is_removed(path) or revision is None:
                raise
            self._note_conflict(FieldConflict(path, None, typed, editor, self.revision))
            return False
        if field_of(place) is None and typed != "":
            raise SpecError(f"{show(path)} is no field: it can only be taken away, by an empty text")
        keyed, there = self._keyed(place), get_at(self._draft, place)
        at, by = self._changed.get(keyed, self._loaded)
        if revision is not None and at > revision and by != editor and there != typed:
            self._note_conflict(FieldConflict(format_path(keyed), there, typed, editor, at))
            return False
        self._require_room(typed)
        self._conflicts.pop((format_path(keyed), editor), None)
        set_at(self._draft, place, typed)
        self._changed[keyed] = (self.revision + 1, editor)
        self._count(place)
        return True

    def _require_room(self, typed: object) -> None:
        """Raises: SpecError."""
        if typed != "" and _size_of(self._draft) + _size_of(typed) > _MOST_CHARS_IN_ALL:
            raise SpecError(
                f"what is typed has more than {_MOST_CHARS_IN_ALL:,} characters in all: a file has 1 MB at most"
            )

    def _note_conflict(self, conflict: FieldConflict) -> None:
        self._conflicts[conflict.path, conflict.editor] = conflict
        while len(self._conflicts) > _MOST_CONFLICTS:
            self._conflicts.pop(next(iter(self._conflicts)))

    def _count(self, place: Path) -> None:
        """Something has changed: look at all of it again."""
        self.revision += 1
        self._document, unread = make_document(self._draft)
        found: list[Finding] = [Finding(path, said) for path, said in unread.items()]
        self._is_spec = False
        try:
            spec = PipelineSpec.from_dict(self._document)
            self._is_spec = not unread
            self._spec = spec if self._is_spec else self._spec
            found += spec.check() if self._is_spec else []
        except DetrainError as exc:
            told = findings_of(exc) if isinstance(exc, ValueError) else [Finding("", str(exc))]
            found += [each for each in told if each.field not in unread]
        self._findings = tuple(Finding(self._number(each.field), each.text, each.severity) for each in found)

    def _number(self, field: str) -> str:
        """A check names a node by its name: ``nodes.gpu1.ranks`` is ``nodes[0].ranks``."""
        if not field.startswith("nodes.") or self._spec is None:
            return field
        for place, node in enumerate(self._spec.nodes):
            if field.startswith(f"nodes.{node.name}."):
                return f"nodes[{place}].{field.removeprefix(f'nodes.{node.name}.')}"
        return field

    def _by_path(self, severity: str) -> dict[str, str]:
        found: dict[str, list[str]] = {}
        for each in self._findings:
            if each.severity == severity:
                found.setdefault(each.field, []).append(each.text)
        return {path: "; ".join(texts) for path, texts in found.items()}

    def _place(self, path: str) -> Path:
        """Raises: SpecError for what is no field, and has nothing typed in it."""
        place = parse_path(path, self.rows)
        there = get_at(self._draft, place)
        if field_of(place) is None and (there == "" or isinstance(there, dict) or self._is_of_rows(place)):
            names = NODE_FIELDS if place[:1] == ("nodes",) else FIELDS
            raise SpecError(f"{show(path)} is no field: {nearest(str(place[-1]), names)}")
        return place

    def _is_of_rows(self, place: Path) -> bool:
        return place[0] == "nodes" and len(place) < 3 and bool(self.rows)

    def _keyed(self, place: Path) -> tuple[str | int, ...]:
        """The same with the key of the node, which stays when others are moved."""
        if len(place) > 1 and place[0] == "nodes" and isinstance(place[1], int) and place[1] < len(self.rows):
            return (f"nodes[{self.rows[place[1]]}]", *place[2:])
        return place

    def _row(self, key: str) -> int:
        if key not in self.rows:
            raise SpecError(f"{show(key)} is no node of the form: it was removed")
        return self.rows.index(key)

    def _is_removed(self, path: str) -> bool:
        return any(path.startswith(f"nodes[{key}].") for key in self._removed)

    def _bring_back(self, path: str) -> None:
        """The node of a path, where that was removed."""
        for key in [key for key in self._removed if path.startswith(f"nodes[{key}]")]:
            self._insert(self._removed.pop(key), key, len(self.rows))

    def _insert(self, row: Any, key: str, place: int) -> str:
        if not isinstance(self._draft.get("nodes"), list):
            self._draft["nodes"] = []
        self._draft["nodes"].insert(place, row)
        self.rows.insert(place, key)
        return key

    def _tell(self) -> None:
        for call in [*self._listeners]:
            call()


def _size_of(typed: object) -> int:
    return len(json.dumps(typed, ensure_ascii=False))


def _check_typed(path: str, typed: object) -> None:
    """Raises: SpecError."""
    if not isinstance(typed, str | bool):
        raise SpecError(f"{show(path)}: a text is typed, or true or false, not {show(typed)}")
    if isinstance(typed, str) and len(typed) > _MOST_CHARS:
        raise SpecError(f"{show(path)}: a text of {len(typed)} characters: give at most {_MOST_CHARS}")
