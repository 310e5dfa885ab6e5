"""Pictures of a split: the stages of a partition as bars, the ranks of a mesh as cells or as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..plan import resolve_axes
from ..text import table_lines
from .costs.partitioner import Partition

_MOST_ROWS = _MOST_COLUMNS = 32
_COLOURS = ("#7fa3cc", "#f1b26e", "#8cc084", "#e58f8f", "#b6a0d1", "#c4a78d")  # places on the outermost axis


def draw_partition(found: Partition, axes: Any = None) -> Any:
    """Draw the time and the memory of every stage, with its units as steps; needs matplotlib.

    ``axes``: two matplotlib axes, or None for new ones; returns them.
    """
    if axes is None:
        from matplotlib import pyplot

        _, axes = pyplot.subplots(1, 2, figsize=(10, 0.8 + 0.4 * len(found.stage_s)), layout="constrained", sharey=True)
    times, stages = found.profile.times(), range(len(found.stage_s))
    for stage in stages:
        begin, end = found.bounds[stage : stage + 2]
        parts, left = times[begin:end], 0.0
        scale = found.stage_s[stage] / sum(parts) if sum(parts) else 0.0
        for number, part in enumerate(parts):
            colour = "#4e79a7" if number % 2 else "#7fa3cc"
            axes[0].barh(stage, 1e3 * scale * part, left=1e3 * left, color=colour)
            left += scale * part
        axes[1].barh(stage, found.memory_bytes[stage] / 1e9, color="#59a14f")
        limit = found.nodes[stage].memory_bytes
        if limit < float("inf"):
            axes[1].plot([limit / 1e9] * 2, [stage - 0.4, stage + 0.4], color="#e15759")
    names = [
        f"stage {stage}" + (f" ({found.nodes[stage].name})" if found.nodes[stage].name else "") for stage in stages
    ]
    axes[0].set_yticks(list(stages), names)
    axes[0].invert_yaxis()
    axes[0].set_xlabel("ms for one microbatch")
    axes[1].set_xlabel("GB; red: memory of the node")
    axes[0].set_title(f"slowest stage / mean: {found.imbalance:.3f}")
    return axes


def draw_mesh(sizes: Mapping[str, int], world_size: int, axes: Any = None) -> Any:
    """Draw the ranks of a mesh as cells, rank by rank along the last axis; needs matplotlib.

    A row is one place on the other axes, coloured by its place on the first; of a large mesh only the first rows and
    columns are drawn. ``axes``: matplotlib axes to draw in, or None for new ones; returns them.
    Raises: SpecError when the sizes do not fit ``world_size``.
    """
    *outer, (inner, size) = _shown_axes(sizes, world_size)
    num_rows = world_size // size
    rows, columns = range(min(num_rows, _MOST_ROWS)), range(min(size, _MOST_COLUMNS))
    if axes is None:
        from matplotlib import pyplot

        _, axes = pyplot.subplots(figsize=(2 + 0.5 * len(columns), 1 + 0.4 * len(rows)), layout="constrained")
    names = []
    for row in rows:
        places = _places(row, [count for _, count in outer])
        names.append(", ".join(f"{axis} {place}" for (axis, _), place in zip(outer, places)))
        colour = _COLOURS[places[0] % len(_COLOURS)] if places else _COLOURS[0]
        for column in columns:
            axes.barh(row, 1.0, height=1.0, left=column - 0.5, color=colour, edgecolor="white")
            axes.text(column, row, str(row * size + column), ha="center", va="center")
    axes.set_yticks(list(rows), names)
    axes.set_xticks(list(columns))
    axes.invert_yaxis()
    axes.set_xlabel(f"{inner}, the first {len(columns)} of {size}" if len(columns) < size else inner)
    title = f"{world_size} ranks"
    axes.set_title(f"{title}, the first {len(rows)} of {num_rows} rows" if len(rows) < num_rows else title)
    return axes


def show_mesh(sizes: Mapping[str, int], world_size: int) -> str:
    """Return a table of the ranks of a mesh: one row for each pipeline stage and replica.

    Raises: SpecError when the sizes do not fit ``world_size``.
    """
    *outer, inner = _shown_axes(sizes, world_size)
    rows = world_size // inner[1]
    table = [[*(axis for axis, _ in outer), f"ranks along {inner[0]}={inner[1]}"]]
    for row in range(min(rows, _MOST_ROWS)):
        places = _places(row, [size for _, size in outer])
        first = row * inner[1]
        ranks = str(first) if inner[1] == 1 else f"{first}-{first + inner[1] - 1}"
        table.append([*map(str, places), ranks])
    lines = table_lines(table, num_right=len(outer), min_widths=[12] * len(outer))
    if rows > _MOST_ROWS:
        lines.append(f"... {rows - _MOST_ROWS} more")
    return "\n".join(lines)


def _shown_axes(sizes: Mapping[str, int], world_size: int) -> list[tuple[str, int]]:
    """Return the axes to show, without axes of one rank that were not asked for."""
    resolved = resolve_axes(sizes, world_size)
    return [(axis, size) for axis, size in resolved.items() if size > 1 or axis in sizes or len(resolved) == 1]


def _places(row: int, sizes: Sequence[int]) -> list[int]:
    """Return the place on each axis of a row; the last axis varies fastest."""
    places: list[int] = []
    for size in reversed(sizes):
        row, place = divmod(row, size)
        places.insert(0, place)
    return places
