"""A form as plain JSON for a page: its values, the errors by field, and a summary of its nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from ..pipelines.draft_form import DraftForm, label_of
from ..pipelines.form_fields import FIELDS, NODE_FIELDS, FieldInfo
from ..session.output.safe_output import one_line
from ..spec.node import Node
from ..text import count_of

__all__ = ["describe_draft", "describe_fields", "describe_nodes", "errors_by_key", "num_ranks"]

_NODE = re.compile(r"nodes\[(\d+)\]\.?(.*)", re.DOTALL)


def describe_fields(fields: Iterable[FieldInfo] = ()) -> dict[str, Any]:
    """Return the constant descriptions of ``fields`` and of the fields of a node."""
    return {
        "fields": {each.path: each.to_json() for each in fields},
        "node": {each.path: each.to_json() for each in NODE_FIELDS.values()},
    }


def describe_draft(form: DraftForm) -> dict[str, Any]:
    """Return the present state of a form for a page."""
    return {
        "draft": form.draft,
        "rows": [*form.rows],
        "nodes": describe_nodes(form),
        "errors": errors_by_key(form),
        "warnings": _beside_fields(form, form.warnings),
        "revision": form.revision,
        "undo": one_line(form.undo_words),
        "conflicts": [
            {"path": one_line(each.path), "theirs": each.theirs, "mine": each.mine, "editor": each.editor}
            for each in form.conflicts
        ],
    }


def describe_nodes(form: DraftForm) -> dict[str, dict[str, str]]:
    """Return by key the name and the address of each node, and the devices and ranks that it offers."""
    typed = form.draft.get("nodes", [])
    rows = zip(typed if isinstance(typed, list) else (), form.nodes_by_key().items())
    return {key: {"label": label_of(row), "where": _where(row), "offers": _offers(node)} for row, (key, node) in rows}


def _where(row: object) -> str:
    """Return ``user@host:port`` as typed."""
    typed = row if isinstance(row, dict) else {}
    user, host, port = (str(typed.get(name, "")).strip() for name in ("user", "host", "port"))
    text = f"{user}@{host}" if user else host
    return one_line(f"{text}:{port}" if port else text, most_chars=200)


def _offers(node: Node | None) -> str:
    if node is None:
        return ""
    gpus = count_of(len(node.devices), "GPU") if isinstance(node.devices, tuple) else node.devices
    number = num_ranks(node)
    return f"{gpus}, {count_of(number, 'rank') if number else 'default ranks'}"


def num_ranks(node: Node) -> int | None:
    """Return how many ranks a node has; None where the node does not specify it."""
    return node.ranks or (len(node.devices) if isinstance(node.devices, tuple) else None)


def errors_by_key(form: DraftForm) -> dict[str, str]:
    """Return errors by the path of the page's field: with the key of the node, without parts inside the field."""
    return _beside_fields(form, form.errors)


def _beside_fields(form: DraftForm, found: dict[str, str]) -> dict[str, str]:
    told: dict[str, list[str]] = {}
    for path, said in found.items():
        if match := _NODE.fullmatch(path):
            place = int(match[1])
            key = form.rows[place] if place < len(form.rows) else match[1]
            inner = _nearest_field(match[2], NODE_FIELDS)
            at = f"nodes[{key}].{inner}" if inner else f"nodes[{key}]"
        else:
            at = _nearest_field(path, FIELDS) or path
        told.setdefault(at, []).append(one_line(said))
    return {at: "; ".join(texts) for at, texts in told.items()}


def _nearest_field(path: str, fields: Any) -> str:
    """Return the field that contains ``path``: ``env`` for ``env.RANK``; an empty string if there is none."""
    while path:
        if path in fields:
            return path
        path = path[: max(path.rfind("."), path.rfind("["), 0)]
    return ""
