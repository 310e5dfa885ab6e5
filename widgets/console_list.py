"""The list of pipelines as plain JSON for a page; the list and a form as they appear in a saved notebook."""

from __future__ import annotations

import html
from typing import Any

from ..documents import format_document
from ..pipelines import EXAMPLES, Entries, Entry
from ..session.output.safe_output import one_line, show_hidden
from ..text import HERE, count_of, html_cells, html_table, html_text
from .displays import Settled, cut_text

__all__ = ["describe_entry", "describe_examples", "settle_form", "settle_list"]

_COLUMNS = ("name", "file", "mesh", "nodes", "last job")
_LEFT = "text-align:left"
_MOST_ERRORS = 5
_MOST_SPEC_BYTES = 5000  # of the spec in a saved notebook; the whole spec is in its file


def describe_entry(entry: Entry, *, id: str, is_changed: bool) -> dict[str, Any]:
    """Return what a page shows of one pipeline; ``is_changed``: its form has unsaved changes."""
    job = entry.job
    return {
        "id": id,
        "name": one_line(entry.name),
        "file": one_line(entry.file),
        "axes": [[*axis] for axis in entry.axes],
        "nodes": one_line(entry.nodes),
        "fault": one_line(entry.fault),
        "errors": [one_line(each) for each in entry.errors[:_MOST_ERRORS]],
        "can_open": entry.is_document,
        "can_run": entry.is_spec,
        "is_beside": entry.is_beside,
        "is_changed": is_changed,
        "searched": one_line(entry.searched),
        "job": job
        and {
            "id": one_line(job.id),
            "sign": job.sign,
            "word": one_line(job.word),
            "detail": one_line(job.detail),
            "at": job.submitted_at,
            "is_over": job.is_over,
            "count": job.count,
        },
    }


def describe_examples() -> list[dict[str, Any]]:
    """Return what a page shows of the examples."""
    return [
        {
            "name": each.name,
            "title": each.title,
            "description": each.description,
            "axes": [[*axis] for axis in each.axes],
            "needs": each.needs,
        }
        for each in EXAMPLES
    ]


def settle_list(entries: Entries) -> Settled:
    """Make a table with a row for each pipeline."""
    rows = [(each.name, each.file, each.mesh or "-", each.nodes, _status(each)) for each in entries]
    body = "".join(f"<tr>{html_cells(map(one_line, row), style=_LEFT)}</tr>" for row in rows)
    title = f"My Pipelines: {len(entries)} in {entries.folder} and recently opened"
    head = html_cells(_COLUMNS, tag="th", style=_LEFT)
    return Settled(f"{title}\n{entries}", html_table(head, body, caption=[title]))


def settle_form(told: dict[str, Any], spec: dict[str, Any] | None) -> Settled:
    """Summarize a form as its pages show it, with the ``spec`` in a fold.

    ``spec`` is None for a form with errors, which is not written out: it may contain a password that a spec refuses.
    """
    mesh, names = told["mesh"] or {}, [each["label"] for each in told["nodes"].values()]
    axes = ", ".join(f"{axis} {size}" for axis, size in mesh.get("axes", ()) if size > 1)
    nodes = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else HERE
    name = one_line(str(told["draft"].get("name", ""))) or "unnamed"
    cells = [name, told["file"], axes or "-", nodes]
    head, row = html_cells(_COLUMNS[:4], tag="th", style=_LEFT), html_cells(cells, style=_LEFT)
    lines = [f"{column}: {cell}" for column, cell in zip(_COLUMNS, cells)]
    if spec is None:
        fault = f"{count_of(len(told['errors']), 'field')} to correct"
        return Settled("\n".join([*lines, fault]), html_table(head, f"<tr>{row}</tr>") + html.escape(fault))
    parts = [{name: spec[name] for name in spec if name != "source"}, {"source": spec["source"]}]
    written = "\n".join(format_document(part, ".toml") for part in parts)  # a long script comes last and is cut
    text = cut_text(show_hidden(written), _MOST_SPEC_BYTES)
    fold = f"<details><summary>The spec as TOML</summary>{html_text(text)}</details>"
    return Settled("\n".join([*lines, "", text]), html_table(head, f"<tr>{row}</tr>") + fold)


def _status(entry: Entry) -> str:
    return f"{entry.job.word}, {entry.job.detail}" if entry.job else " ".join(filter(None, ["never run", entry.fault]))
