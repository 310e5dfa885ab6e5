"""Ranks laid out on named axes: which of them hold the stages, replicas and shards of one model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import SpecError, count_ranks
from ..text import HERE, name_some, printable

# From the outermost to the innermost: neighbouring ranks, usually on one node, communicate most.
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "ep", "tp")
DATA_AXES = ("dp_replicate", "dp_shard")  # ranks that differ on them see different samples


@dataclass(frozen=True)
class Mesh:
    """The size of every axis, in the order of ``AXES``; neighbouring ranks are next to each other on the last one."""

    axes: Mapping[str, int] = field(hash=False)

    def __str__(self) -> str:
        return _without_ones(self.axes)

    @property
    def world_size(self) -> int:
        return math.prod(self.axes.values())

    @property
    def replicas(self) -> int:
        """The number of parts that a batch is split into."""
        return math.prod(self.axes.get(axis, 1) for axis in DATA_AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank on every axis. Raises: SpecError for a rank outside the mesh."""
        if not 0 <= rank < self.world_size:
            raise SpecError(f"rank {rank} does not exist: mesh {self} has ranks 0-{self.world_size - 1}")
        places: dict[str, int] = {}
        for axis in reversed([*self.axes]):
            rank, places[axis] = divmod(rank, self.axes[axis])
        return {axis: places[axis] for axis in self.axes}


def resolve_axes(sizes: Mapping[str, int], world_size: int, *, nodes: Sequence[str] = ()) -> dict[str, int]:
    """Return the size of every given axis, in the order of ``AXES``, with -1 replaced by the remaining ranks.

    Without any axis all ranks are on ``dp_shard``. With several replicas a ``dp_shard`` of 1 is added, as FSDP2, which
    handles cases that DDP cannot, needs both axes. ``nodes`` are the names of the nodes with the ranks, for the error.
    Raises: SpecError when the axes are invalid, or do not fit ``world_size``.
    """
    if unknown := [axis for axis in sizes if axis not in AXES]:
        raise SpecError(f"unknown mesh axis {unknown[0]!r}: choose from {', '.join(AXES)}")
    ordered = {axis: sizes[axis] for axis in AXES if axis in sizes} or {"dp_shard": -1}
    text = _written(ordered)
    if wrong := [axis for axis, size in ordered.items() if size < 1 and size != -1]:
        raise SpecError(f"mesh {text}: {wrong[0]} must be 1 or more ranks, or -1 for all remaining ranks")
    open_axes = [axis for axis, size in ordered.items() if size == -1]
    if len(open_axes) > 1:
        raise SpecError(f"mesh {text}: only one axis can be -1, not both {' and '.join(open_axes)}")
    known = math.prod(size for size in ordered.values() if size != -1)
    if known > world_size or world_size % known or (known < world_size and not open_axes):
        raise SpecError(_misfit(ordered, known, world_size, nodes))
    if open_axes:
        ordered[open_axes[0]] = world_size // known
    if ordered.get("dp_replicate", 1) > 1:
        ordered.setdefault("dp_shard", 1)
    return {axis: ordered[axis] for axis in AXES if axis in ordered}


def _misfit(axes: Mapping[str, int], known: int, world_size: int, nodes: Sequence[str]) -> str:
    largest = max(axes, key=lambda axis: axes[axis])
    if known > world_size:  # an axis of -1 is not to blame
        axes, change = {axis: size for axis, size in axes.items() if size != -1}, f"add {'nodes' if nodes else 'ranks'}"
        change = f"{change} or lower {largest}"
    elif -1 in axes.values():
        change = f"change the number of ranks or {largest}"
    else:
        change = f"use fewer ranks or raise {largest}"
    needed = f"a multiple of {known} ranks" if -1 in axes.values() else count_ranks(known)
    return f"mesh {_without_ones(axes)} needs {needed}{_told_offer(world_size, nodes)}: {change}"


def _told_offer(world_size: int, nodes: Sequence[str]) -> str:
    named = [printable(name) for name in nodes if name]
    if not nodes:
        return f", but there {'is' if world_size == 1 else 'are'} {world_size}"
    who = f"node{'s' if len(nodes) > 1 else ''} {name_some(named)}" if named else HERE
    return f" but {who} {'offer' if len(nodes) > 1 else 'offers'} {world_size}"


def _without_ones(axes: Mapping[str, int]) -> str:
    return _written({axis: size for axis, size in axes.items() if size != 1} or axes)


def _written(axes: Mapping[str, int]) -> str:
    return " x ".join(f"{axis}={size}" for axis, size in axes.items())
