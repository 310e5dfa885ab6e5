"""The findings of an examination as a table: hosts are the columns, checks the rows."""

from __future__ import annotations

import html
import itertools
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from ..text import count_of, html_cells, html_table, printable, table_lines

if TYPE_CHECKING:
    from ..spec.node import Node
    from ..transport.ssh import AskPassphrase

__all__ = ["Cell", "Link", "Problem", "Report", "Row"]

State: TypeAlias = Literal["good", "warning", "bad", "none"]

_MOST_TEXT = 2000
_TABLE_WIDTH = 118
_NAME_WIDTH = 12
_NARROWEST, _WIDEST = 18, 48
_MARKS: dict[State, str] = {"good": "", "none": "", "warning": "! ", "bad": "✗ "}
_LEFT = "text-align:left"  # like the values
_STYLES: dict[State, str] = {
    "good": "",
    "none": "color:gray",
    "warning": "background:#fff3cd;color:#664d03",
    "bad": "background:#f8d7da;color:#842029",
}


@dataclass(frozen=True)
class Cell:
    """One finding about a host, with advice when it is not good, and the command for it if there is one.

    ``state`` is "good", "warning", "bad", or "none" for what was not examined or does not apply.
    Whatever a host reports, texts are one line, without control characters, and limited in length.
    """

    text: str = "-"
    state: State = "none"
    advice: str = ""
    command: str = ""

    def __post_init__(self) -> None:
        for name in ("text", "advice"):
            object.__setattr__(self, name, printable(" ".join(getattr(self, name).split()), "")[:_MOST_TEXT])
        object.__setattr__(self, "command", printable(self.command, "")[:_MOST_TEXT])  # spaces kept: it was quoted

    def __str__(self) -> str:
        return _MARKS[self.state] + self.text + (f": {self.advice}" if self.advice else "")


@dataclass(frozen=True)
class Row:
    """One check, with a cell for every host."""

    check: str
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Problem:
    """One problem of a host; ``advice`` and ``command`` say what to do. A warning does not prevent training."""

    host: str
    check: str
    what: str
    advice: str
    command: str
    is_warning: bool

    def __str__(self) -> str:
        text = f"{self.host}, {self.check}: {self.what}" + (f": {self.advice}" if self.advice else "")
        return f"{text}:\n    {self.command}" if self.command else text


@dataclass(frozen=True)
class Link:
    """The link from one host to another, by their names; ``error`` is empty when it works. None: not measured.

    ``round_trip_ms`` is in milliseconds, ``bandwidth_mbit_s`` in megabits per second.
    """

    source: str
    target: str
    error: str
    round_trip_ms: float | None
    bandwidth_mbit_s: float | None


@dataclass(frozen=True, repr=False)
class Report:
    """The findings, shown as a table; the cells of each row are in the order of ``nodes``."""

    nodes: tuple[Node, ...]
    rows: tuple[Row, ...]
    links: tuple[Link, ...]
    _to_fix: tuple[Node, ...] = ()
    _config_path: Path | None = None
    _ask_passphrase: AskPassphrase | None = None
    _memory_bytes: Mapping[str, float] = field(default_factory=dict)
    _relative_speeds: Mapping[str, float] = field(default_factory=dict)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The names of the nodes."""
        return tuple(node.name for node in self.nodes)

    @property
    def problems(self) -> list[Problem]:
        """Everything that is wrong and what to do, by host, in the order of the rows."""
        return [
            Problem(host, row.check, cell.text, cell.advice, cell.command, cell.state == "warning")
            for number, host in enumerate(self.hosts)
            for row in self.rows
            if (cell := row.cells[number]).state in ("warning", "bad")
        ]

    @property
    def is_ok(self) -> bool:
        """True if these nodes can train together; there may be warnings."""
        return all(problem.is_warning for problem in self.problems)

    def cell(self, check: str, host: str) -> Cell:
        """Return the cell of a check and a host. Raises: KeyError for an unknown check, ValueError for a host."""
        return {row.check: row.cells for row in self.rows}[check][self.hosts.index(host)]

    def measured_nodes(self) -> tuple[Node, ...]:
        """Return the nodes with ``memory_gb``, ``bandwidth_mbit_s``, ``latency_ms`` and ``relative_speed`` as measured.

        Values that were not measured stay unchanged. A node gets the median of its links, so that one bad link does
        not spoil the nodes at its other end. A link is as fast as its slower direction; latency is half a round trip.
        """
        return tuple(node.model_copy(update=self._measures_of(node.name)) for node in self.nodes)

    def _measures_of(self, host: str) -> dict[str, float]:
        peers: dict[str, list[Link]] = {}
        for link in self.links:
            if host in (link.source, link.target) and not link.error:
                peers.setdefault(link.target if link.source == host else link.source, []).append(link)
        rates = [[link.bandwidth_mbit_s for link in links if link.bandwidth_mbit_s] for links in peers.values()]
        trips = [[link.round_trip_ms for link in links if link.round_trip_ms is not None] for links in peers.values()]
        found: dict[str, float] = {}
        if host in self._memory_bytes:
            found["memory_gb"] = max(0.1, round(self._memory_bytes[host] / 1e9, 1))
        if slower := [min(values) for values in rates if values]:
            found["bandwidth_mbit_s"] = max(0.001, round(statistics.median_low(slower), 3))
        if longer := [max(values) for values in trips if values]:
            found["latency_ms"] = round(statistics.median_high(longer) / 2, 3)
        if host in self._relative_speeds:
            found["relative_speed"] = self._relative_speeds[host]
        return found

    def __repr__(self) -> str:
        width = max(_NARROWEST, min(_WIDEST, (_TABLE_WIDTH - _NAME_WIDTH) // len(self.nodes) - 2))
        wrapped = _wrap_row("", [Cell(host) for host in self.hosts], width)
        for row in self.rows:
            wrapped += _wrap_row(row.check, row.cells, width)
        lines = table_lines(wrapped, min_widths=[_NAME_WIDTH, *[width] * len(self.nodes)])
        return "\n".join([self._title, *lines, *(f"- {problem}" for problem in self.problems)])

    def _repr_html_(self) -> str:
        head = html_cells(("", *self.hosts), tag="th", style=_LEFT)
        body = "".join(
            f"<tr>{html_cells([row.check], tag='th', style=_LEFT)}{''.join(map(_write_html_cell, row.cells))}</tr>"
            for row in self.rows
        )
        problems = "".join(f"<li><pre>{html.escape(str(problem))}</pre></li>" for problem in self.problems)
        return html_table(head, body, caption=[self._title]) + (f"<ul>{problems}</ul>" if problems else "")

    @property
    def _title(self) -> str:
        warnings = sum(problem.is_warning for problem in self.problems)
        counts = [(len(self.nodes), "host"), (len(self.problems) - warnings, "problem"), (warnings, "warning")]
        return ", ".join(count_of(number, noun) for number, noun in counts)


def _wrap_row(check: str, cells: Sequence[Cell], width: int) -> list[tuple[str, ...]]:
    """Return the lines of one row of the table; long texts are wrapped."""
    columns = [textwrap.wrap(str(cell), width, break_on_hyphens=False) or [""] for cell in cells]
    return list(itertools.zip_longest(textwrap.wrap(check, _NAME_WIDTH), *columns, fillvalue=""))


def _write_html_cell(cell: Cell) -> str:
    style = _STYLES[cell.state]
    return f'<td style="text-align:left;{style}">{html.escape(str(cell))}</td>'
