"""The doctor's results for the nodes of a form, for its pages: failed checks first, then warnings, then passed ones."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..doctor.report import Report
from ..pipelines.draft_form import MOST_NODES
from ..session.output.safe_output import one_line, show_hidden
from ..spec.node import Node
from ..text import count_of

__all__ = ["NodeTests"]

_MOST_CHARS = 2000
_MOST_RESULTS = 4 * MOST_NODES  # of present and removed nodes


@dataclass(frozen=True)
class Result:
    """The last test of one node, as plain JSON, and the node that was tested."""

    node: Node | None
    told: dict[str, Any] = field(default_factory=dict)


class NodeTests:
    """The last test of each node, by the node's key."""

    def __init__(self) -> None:
        self._results: dict[str, Result] = {}
        self._changing = threading.Lock()

    def begin(self, rows: Iterable[str]) -> None:
        self._take({row: Result(None, {"is": "running"}) for row in rows})

    def end(self, rows: Mapping[str, Node], report: Report) -> None:
        """Take a report on the nodes of ``rows``, in the order of ``rows``."""
        found = {}
        for number, (row, node) in enumerate(rows.items()):
            cells = [(each.check, each.cells[number]) for each in report.rows]
            told = {
                state: [
                    {
                        "check": one_line(check),
                        "text": one_line(cell.text, most_chars=_MOST_CHARS),
                        "advice": one_line(cell.advice, most_chars=_MOST_CHARS),
                        "command": show_hidden(cell.command)[:_MOST_CHARS],
                    }
                    for check, cell in cells
                    if cell.state == state
                ]
                for state in ("bad", "warning", "good")
            }
            found[row] = Result(node, {"is": "done", **told})
        self._take(found)

    def fail(self, rows: Iterable[str], why: str, *, cancelled: bool = False) -> None:
        told = {"is": "cancelled" if cancelled else "failed", "error": one_line(why, most_chars=_MOST_CHARS)}
        self._take({row: Result(None, told) for row in rows})

    def told(self, nodes: Mapping[str, Node | None]) -> dict[str, Any]:
        """Return the results for pages, by row; ``is_old``: the node has changed since the test."""
        results = dict(self._results)
        return {
            row: {**result.told, "is_old": result.node is not None and result.node != nodes[row]}
            for row, result in results.items()
            if row in nodes
        }

    def words(self, row: str) -> str:
        """Return the result of a row in a few words."""
        told = self._results[row].told if row in self._results else {"is": "none"}
        if told["is"] != "done":
            words = {"running": "is being tested", "failed": f"failed: {told.get('error')}", "cancelled": "cancelled"}
            return words.get(told["is"], "not tested")
        bad, warnings, good = (len(told[state]) for state in ("bad", "warning", "good"))
        if bad or warnings:
            parts = [f"{bad} failed"] * bool(bad) + [count_of(warnings, "warning")] * bool(warnings)
            return ", ".join(parts)
        return f"{good} checks passed"

    def _take(self, results: Mapping[str, Result]) -> None:
        with self._changing:
            kept = {**self._results, **results}
            self._results = dict([*kept.items()][-_MOST_RESULTS:])
