"""The list of pipelines as plain JSON for a page, and as it stays in a saved notebook."""

from __future__ import annotations

from typing import Any

from ..pipelines import EXAMPLES, Entries, Entry
from ..session.output.safe_output import one_line
from ..text import html_cells, html_table
from .displays import Settled

__all__ = ["describe_entry", "describe_examples", "settle_list"]

_COLUMNS = ("name", "file", "mesh", "nodes", "last job")
_LEFT = "text-align:left"
_MOST_ERRORS = 5


def describe_entry(entry: Entry, *, id: str, is_changed: bool) -> dict[str, Any]:
    """Return what a page shows of one pipeline; ``is_changed``: its form has what is not saved."""
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
    """Return what a page shows of the examples to begin from."""
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
    """Make a row of each pipeline."""
    rows = [(each.name, each.file, each.mesh or "-", each.nodes, _status(each)) for each in entries]
    body = "".join(f"<tr>{html_cells(map(one_line, row), style=_LEFT)}</tr>" for row in rows)
    title = f"My Pipelines: {len(entries)} in {entries.folder} and opened lately"
    head = html_cells(_COLUMNS, tag="th", style=_LEFT)
    return Settled(f"{title}\n{entries}", html_table(head, body, caption=[title]))


def _status(entry: Entry) -> str:
    return f"{entry.job.word}, {entry.job.detail}" if entry.job else " ".join(filter(None, ["never run", entry.fault]))
