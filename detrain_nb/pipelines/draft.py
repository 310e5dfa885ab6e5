"""The input of a form as nested plain JSON, kept even if it is invalid, and the document that it stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..documents.content import check_values
from ..errors import SpecError
from ..spec import PipelineSpec
from ..spec.source import FOLDER_KINDS
from ..text import show
from .form_fields import FIELDS, KIND_PATH, NODE_FIELDS, SOURCE_KINDS, FieldInfo
from .typed import NOTHING, read_typed, write_typed

__all__ = [
    "Path",
    "document_of",
    "field_of",
    "find_kind",
    "format_path",
    "get_at",
    "make_document",
    "make_draft",
    "parse_path",
    "set_at",
]

Path = tuple[str | int, ...]  # ("training", "steps"), ("nodes", 0, "host")
_PATH = re.compile(r"nodes\[([0-9]{1,6}|n[0-9]{1,9})\](?:\.(.+))?", re.DOTALL)


def parse_path(text: str, rows: list[str]) -> Path:
    """Split ``training.steps``, ``nodes[0].host`` or ``nodes[n3].host`` into steps; ``rows`` are the keys of the nodes.

    Raises: SpecError for a node that does not exist.
    """
    if not (match := _PATH.fullmatch(text)):
        if rows and text.startswith("nodes."):
            raise SpecError(f"{show(text)} is not a field: write a field of a node as nodes[0].host")
        return tuple(text.split("."))
    key = match[1]
    place = rows.index(key) if key in rows else int(key) if key.isdigit() else len(rows)
    if place >= len(rows):
        raise SpecError(f"{show(text)}: no such node; the form has {len(rows)}")
    return ("nodes", place, *(match[2].split(".") if match[2] else ()))


def field_of(path: Path) -> FieldInfo | None:
    """Return the field at ``path``, or None."""
    if len(path) == 3 and path[0] == "nodes":
        return NODE_FIELDS.get(str(path[2]))
    return FIELDS.get(".".join(map(str, path)))


def get_at(draft: Any, path: Path) -> Any:
    """Return what is typed at ``path``; an empty text if nothing is."""
    for step in path:
        is_row = isinstance(draft, list) and isinstance(step, int) and step < len(draft)
        if not is_row and not (isinstance(draft, dict) and step in draft):
            return ""
        draft = draft[step]
    return draft


def set_at(draft: dict[str, Any], path: Path, typed: object) -> None:
    """Put ``typed`` at ``path``; an empty text removes the field."""
    table: Any = draft
    for step in path[:-1]:
        there = table[int(step)] if isinstance(table, list) else table.get(step)
        if not isinstance(there, dict | list):
            table[step] = {}
        table = table[step]
    if typed == "":
        table.pop(path[-1], None)
    else:
        table[path[-1]] = typed


def document_of(content: PipelineSpec | Mapping[str, Any]) -> dict[str, Any]:
    """Return ``content`` as the document of a file. Raises: SpecError if it is neither a spec nor a document."""
    if isinstance(content, PipelineSpec):
        return content.to_dict()
    if not isinstance(content, Mapping):
        raise SpecError(f"{show(content)} is not a pipeline: give a PipelineSpec, or a mapping of fields, as in a file")
    document = dict(content)
    check_values(document)
    return document


def make_draft(data: Mapping[str, Any]) -> dict[str, Any]:
    """Write a document as a user types it; content of unknown fields stays as it is, for the spec to refuse."""
    copied: dict[str, Any] = json.loads(json.dumps(data))
    draft = _type_table(copied, ())
    if isinstance(source := draft.get("source"), dict) and "kind" not in source:
        kinds = [kind for kind in SOURCE_KINDS if kind in source]
        if len(kinds) == 1:
            source["kind"] = kinds[0]
    return draft


def _type_table(table: dict[str, Any], before: Path) -> dict[str, Any]:
    typed: dict[str, Any] = {}
    for name, value in table.items():
        path = (*before, name)
        field = field_of(path)
        if field is not None and field.path != KIND_PATH:
            if value is not None:
                typed[name] = write_typed(field, value)
        elif path == ("nodes",) and isinstance(value, list):
            typed[name] = [
                _type_table(row, ("nodes", at)) if isinstance(row, dict) else row for at, row in enumerate(value)
            ]
        elif isinstance(value, dict):
            typed[name] = _type_table(value, path)
        elif value is not None:
            typed[name] = value
    return typed


def find_kind(draft: Mapping[str, Any]) -> str:
    """Return the chosen kind of source; empty if none is chosen."""
    source = draft.get("source")
    kind = source.get("kind") if isinstance(source, dict) else None
    return kind if isinstance(kind, str) else ""


def make_document(draft: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the document that a draft stands for, and the errors of unreadable fields by path.

    Of the source only the chosen kind is included: what was typed for the others stays in the draft.
    """
    faults: dict[str, str] = {}
    document = _read_table(draft, (), faults)
    source, kind = document.setdefault("source", {}), find_kind(draft)
    if kind in SOURCE_KINDS and isinstance(source, dict) and kind not in source:
        source[kind] = {} if kind == "git" else ""  # so that the error names that field
    return document, faults


def _read_table(table: Mapping[str, Any], before: Path, faults: dict[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, typed in table.items():
        path = (*before, name)
        if _is_aside(path, table):
            continue
        field = field_of(path)
        if field is not None:
            value = _read_field(field, typed, path, faults)
            if value is not NOTHING:
                found[name] = value
        elif path == ("nodes",) and isinstance(typed, list):
            rows = [
                _read_table(row, ("nodes", at), faults) if isinstance(row, dict) else row
                for at, row in enumerate(typed)
            ]
            found.update({"nodes": rows} if rows else {})
        elif isinstance(typed, dict):
            if inner := _read_table(typed, path, faults):
                found[name] = inner
        else:
            found[name] = typed
    return found


def _read_field(field: FieldInfo, typed: object, path: Path, faults: dict[str, str]) -> Any:
    try:
        value = read_typed(field, typed)
    except SpecError as exc:
        faults[format_path(path)] = str(exc)
        return typed
    is_default = value is not NOTHING and json.dumps(value) == json.dumps(field.default_value)
    return NOTHING if is_default and not field.is_required else value


def _is_aside(path: Path, source: Mapping[str, Any]) -> bool:
    """Return whether ``path`` is the choice of a source kind, or belongs to a kind that is not chosen."""
    if path[:1] != ("source",) or len(path) != 2:
        return False
    if path[1] == "kind":
        return True
    kind = source.get("kind")
    if not kind:
        return False
    return (path[1] in SOURCE_KINDS and path[1] != kind) or (path[1] == "entry" and kind not in FOLDER_KINDS)


def format_path(path: Path) -> str:
    """Write a path as the errors of a spec do: ``nodes[0].host``."""
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path).removeprefix(".")
