"""Report on one job for people: the state of each node, which ranks do what, and the metrics logged last."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..errors import behind_ours, quoted, short_ranks
from ..metrics import NO_VALUES
from ..plan import Plan
from ..text import (
    RED,
    ShownAsText,
    html_cells,
    html_table,
    html_text,
    printable,
    short_number,
    show,
    table_lines,
    told_node,
)
from .job_status import JobStatus, has_failed, sign_and_word
from .report_checks import NodeReport

__all__ = ["SHOWN_STEPS", "JobReport", "describe_metrics"]

_NODE_COLUMNS = ("node", "state", "exit", "ranks", "restarts", "")
SHOWN_STEPS = 10  # the last that were logged
_MOST_NAMES = 8  # of metrics, the first
_MOST_CHARS = 40  # of a logged name or text
_WORD = re.compile(r"[\w./@%+-]*", re.ASCII)
_LEFT = "text-align:left"
_FAILED = f"{_LEFT};{RED}"


@dataclass(frozen=True)
class JobReport(ShownAsText):
    """Report on a job, shown as tables. ``metrics``: lines of ``Job.metrics()``."""

    status: JobStatus
    plan: Plan | None = None
    metrics: Sequence[Mapping[str, Any]] = ()

    def __str__(self) -> str:
        parts = [str(self.status)]
        if self.plan is not None:
            parts.append(str(self.plan))
        if self.metrics:
            parts.append("\n".join(table_lines(_metrics_table(self.metrics), num_right=2)))
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        status = self.status
        rows = [
            (_node_cells(node, self._with_ranks(each)), has_failed(each.state, each.exit_code))
            for node, each in status.reports.items()
        ]
        rows += [
            ((told_node(node), "no report", "", "", "", printable(why)), True) for node, why in status.silent.items()
        ]
        body = "".join(f"<tr>{html_cells(cells, style=_FAILED if is_red else _LEFT)}</tr>" for cells, is_red in rows)
        head = html_cells(_NODE_COLUMNS, tag="th", style=_LEFT)
        parts = [html_table(head, body, caption=[str(status).partition("\n")[0]])]
        if status.is_over and status.last_lines:
            last = [quoted(printable(line)) for line in status.last_lines]
            lines = "\n".join([f"{status.whose_lines}:", *last])
            parts.append(html_text(lines))
        if self.plan is not None:
            parts.append(self.plan._repr_html_())
        if self.metrics:
            names, *steps = _metrics_table(self.metrics)
            body = "".join(f"<tr>{html_cells(cells, style=_LEFT)}</tr>" for cells in steps)
            parts.append(html_table(html_cells(names, tag="th", style=_LEFT), body, caption=["logged last"]))
        return "".join(parts)

    def _with_ranks(self, report: NodeReport) -> NodeReport:
        """Fill in the ranks of the plan: a node reports only ranks that have started."""
        if self.plan is None or report.ranks or report.is_over or report.node_rank >= len(self.plan.nodes):
            return report
        return replace(report, ranks=self.plan.nodes[report.node_rank].ranks)


def describe_metrics(values: Mapping[str, Any]) -> str:
    """Describe what a rank logged in one step, by the first few names: ``step 120, loss 0.031``.

    The text appears inside messages of ours, so a name or value of more than one word is quoted.
    """
    shown = [f"{_one_word(name)} {_as_word(values[name])}" for name in _names_in([values])]
    return ", ".join([f"step {_short(values.get('step'))}", *shown])


def _as_word(value: object) -> str:
    text = _short(value)
    return text if isinstance(value, float) else _one_word(text)  # 12.5 k is one word


def _one_word(text: str) -> str:
    return text[:_MOST_CHARS] if _WORD.fullmatch(text) else show(text, most=_MOST_CHARS)


def _node_cells(node: str, report: NodeReport) -> tuple[str, ...]:
    cells = (
        told_node(node),
        sign_and_word(report.state, report.exit_code)[1],
        "" if report.exit_code is None else str(report.exit_code),
        short_ranks(report.ranks),
        str(report.restarts or ""),
        behind_ours(report.reason) if report.reason else "",
    )
    return tuple(map(printable, cells))


def _metrics_table(lines: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return the last steps, one row per rank. Names and values came from a node, so they are cleaned."""
    last = lines[-SHOWN_STEPS:]
    names = _names_in(last)
    rows = [[_short(line.get(name)) for name in ("step", "rank", *names)] for line in last]
    return [["step", "rank", *(printable(name)[:_MOST_CHARS] for name in names)], *rows]


def _names_in(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    names = dict.fromkeys(name for line in lines for name in line if name not in NO_VALUES)
    return [*names][:_MOST_NAMES]


def _short(value: object) -> str:
    if value is None:
        return ""
    return short_number(value) if isinstance(value, float) else printable(str(value)[:_MOST_CHARS])
