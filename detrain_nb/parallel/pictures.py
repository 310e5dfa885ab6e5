"""What a split looks like: the stages of a partition as bars, the ranks of a mesh as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .costs.partitioner import Partition
from .mesh import resolve_axes

__all__ = ["draw_partition", "show_mesh"]

_MOST_ROWS = 32


def draw_partition(found: Partition, axes: Any = None) -> Any:
    """Draw the time and the memory of every stage, its units as steps, with matplotlib, which has to be installed.

    ``axes``: two of them, or None for new ones; returns them.
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
    axes[1].set_xlabel("GB; red: what the node has")
    axes[0].set_title(f"slowest by mean {found.imbalance:.3f}")
    return axes


def show_mesh(sizes: Mapping[str, int], world_size: int) -> str:
    """Return which ranks a mesh of these sizes has on each place: a row for each pipeline stage and replica.

    Raises: SpecError where they do not fit.
    """
    resolved = resolve_axes(sizes, world_size)
    *outer, inner = resolved.items()
    rows = world_size // inner[1]
    lines = ["  ".join([*(f"{axis:>12}" for axis, _ in outer), f"ranks along {inner[0]}={inner[1]}"])]
    for row in range(min(rows, _MOST_ROWS)):
        places, left = [], row
        for _, size in reversed(outer):
            places.append(left % size)
            left //= size
        first = row * inner[1]
        ranks = str(first) if inner[1] == 1 else f"{first}-{first + inner[1] - 1}"
        lines.append("  ".join([*(f"{place:>12}" for place in reversed(places)), ranks]))
    if rows > _MOST_ROWS:
        lines.append(f"... {rows - _MOST_ROWS} more")
    return "\n".join(lines)
