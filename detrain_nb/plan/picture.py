"""The picture of a plan: in HTML a cell per rank and a row per node, in text a line per rank."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from ..text import html_cells, html_table, printable, table_lines, told_node

T = TypeVar("T")

_MOST_NODES, _MOST_CELLS, _MOST_LINES = 16, 16, 48
_AT_THE_END = 4  # shown after a cut
# Translucent over the page's background, light or dark, so that text stays readable.
_COLOURS = ("66,133,244", "244,152,40", "60,160,80", "214,73,90", "142,96,190", "20,160,170", "190,150,30")
_SHADES = ("0.5", "0.22")
_COLOURED_BY = (("pp",), ("dp_replicate", "dp_shard"), ("tp",))  # hue by the first that varies, shade by the next
_CELL = "text-align:center;color:var(--jp-ui-font-color1, inherit);border:1px solid var(--jp-border-color2, #8886)"
_LEFT = "text-align:left"


@dataclass(frozen=True)
class RankRow:
    """The part of a plan that one rank has; ``stages`` is empty when unknown, ``coordinates`` without a mesh."""

    rank: int
    node: str
    node_rank: int
    local_rank: int
    device: str
    coordinates: dict[str, int] = field(default_factory=dict, hash=False)
    stages: tuple[int, ...] = ()

    def place(self, axes: Sequence[str]) -> str:
        """Describe the rank's place on these axes, and its stages if it has several."""
        places = [f"{axis} {self.coordinates[axis]}" for axis in axes]
        return ", ".join([*places, f"stages {_listed(self.stages)}"] if len(self.stages) > 1 else places)


def draw_text(rows: Sequence[RankRow], *, axes: Sequence[str], caption: Sequence[str]) -> str:
    """Write the caption and a line for each rank; ``axes`` are the axes to show."""
    has_stages = any(row.stages for row in rows)
    first, cut, last = _ends(rows, _MOST_LINES)
    table = [["rank", *axes, *["stages"] * has_stages, "device", "node"]]
    for row in (*first, *last):
        places = [str(row.coordinates[axis]) for axis in axes]
        table.append(
            [str(row.rank), *places, *[_listed(row.stages)] * has_stages, row.device, printable(told_node(row.node))]
        )
    lines = table_lines(table, num_right=1 + len(axes))
    if cut:
        lines.insert(1 + len(first), f"... {cut} more ranks")
    return "\n".join([*caption, *lines])


def draw_html(rows: Sequence[RankRow], *, axes: Sequence[str], caption: Sequence[str]) -> str:
    """Draw a table; the pipeline stage sets the colour of a cell and the replica its shade, if there are several."""
    nodes: dict[int, list[RankRow]] = {}
    for row in rows:
        nodes.setdefault(row.node_rank, []).append(row)
    first, cut, last = _ends(list(nodes.values()), _MOST_NODES)
    paint = _Paint(axes)
    width = max((min(len(ranks), _MOST_CELLS + 1) for ranks in nodes.values()), default=1)
    head = f"{html_cells(['node', 'device'], tag='th', style=_LEFT)}<th colspan='{width}' style='{_LEFT}'>ranks</th>"
    more = f"<tr>{html_cells([f'... {cut} more nodes'], tag='th', style=_LEFT)}</tr>" if cut else ""
    body = [*(_draw_node(ranks, paint) for ranks in first), more, *(_draw_node(ranks, paint) for ranks in last)]
    return html_table(head, "".join(body), caption=caption)


class _Paint:
    """The colours of ranks: hue by their place on the first varying axes, shade by the next ones."""

    def __init__(self, axes: Sequence[str]) -> None:
        self.axes = axes
        groups = [found for names in _COLOURED_BY if (found := [axis for axis in names if axis in axes])]
        self._hue_axes, self._shade_axes = [*groups, [], []][:2]
        self._hues: dict[tuple[int, ...], int] = {}
        self._shades: dict[tuple[int, ...], int] = {}

    def colour(self, row: RankRow) -> str:
        hue = self._hues.setdefault(tuple(row.coordinates[axis] for axis in self._hue_axes), len(self._hues))
        shade = self._shades.setdefault(tuple(row.coordinates[axis] for axis in self._shade_axes), len(self._shades))
        return f"rgba({_COLOURS[hue % len(_COLOURS)]},{_SHADES[shade % len(_SHADES)]})"


def _draw_node(ranks: Sequence[RankRow], paint: _Paint) -> str:
    first, cut, last = _ends(ranks, _MOST_CELLS)
    heading = [printable(told_node(ranks[0].node)), ranks[0].device.partition(":")[0]]
    more = html_cells([f"... {cut} more ..."]) if cut else ""
    cells = [*(_draw_rank(row, paint) for row in first), more, *(_draw_rank(row, paint) for row in last)]
    return f"<tr>{html_cells(heading, tag='th', style=_LEFT)}{''.join(cells)}</tr>"


def _draw_rank(row: RankRow, paint: _Paint) -> str:
    parts = row.place(paint.axes).split(", ")
    place = html.escape(", ".join(part.replace(" ", "\N{NO-BREAK SPACE}") for part in parts))  # broken between axes
    below = f"<br><small>{place}</small>" if place else ""
    told = html.escape(f"rank {row.rank}, local rank {row.local_rank}, {row.device}")
    return f"<td style='{_CELL};background-color:{paint.colour(row)}' title='{told}'><b>{row.rank}</b>{below}</td>"


def _ends(items: Sequence[T], most: int) -> tuple[Sequence[T], int, Sequence[T]]:
    """Return the first items, the number of omitted ones, and the last items."""
    if len(items) <= most:
        return items, 0, ()
    return items[: most - _AT_THE_END], len(items) - most, items[-_AT_THE_END:]


def _listed(stages: Sequence[int]) -> str:
    return ", ".join(map(str, stages))
