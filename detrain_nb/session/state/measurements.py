"""The latest measurements of nodes and ranks, kept while a live view is open, until they are too old."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from ...errors import WireError
from ...wire import Measured
from ..output.safe_output import one_line

_OLD_S, _OLD_TIMES = 5.0, 3  # a measurement older than both 5 s and 3 intervals is not shown
_MOST_GPUS = 256
_NAME_CHARS = 80
_MOST_BYTES = 1 << 60


@dataclass(frozen=True)
class RankUse:
    """Resource use of one rank; None for an unknown value."""

    cpu_percent: float | None = None
    rss_bytes: int | None = None
    gpu_percent: float | None = None
    gpu_used_bytes: int | None = None
    gpu_total_bytes: int | None = None
    gpu_name: str = ""
    steps_per_s: float | None = None


@dataclass(frozen=True)
class NodeUse:
    """Resource use of one node; None for an unknown value."""

    cpu_percent: float | None = None
    memory_used_bytes: int | None = None
    memory_total_bytes: int | None = None


_InCell = tuple[RankUse, int]  # with the number of the cell that the rank ran; -1: none


class Measurements:
    """The measurements of one session."""

    def __init__(self) -> None:
        self._every_s = 0.0  # 0: no live view is open
        self._nodes: dict[int, tuple[float, NodeUse, dict[int, _InCell]]] = {}  # by node, with the time of arrival

    def want(self, every_s: float) -> None:
        """Keep measurements that arrive every ``every_s``; with 0 forget them, and keep no more."""
        self._every_s = every_s
        if not every_s:
            self._nodes.clear()

    @property
    def are_wanted(self) -> bool:
        return self._every_s > 0

    def take(self, said: Measured, node: int) -> None:
        """Keep the measurements of a node, which have been checked."""
        if self.are_wanted:
            ranks = {rank: (_use_of(said, at), said.cells[at]) for at, rank in enumerate(said.ranks)}
            total = said.memory_total_bytes
            used = NodeUse(_known(said.node_cpu_percent), said.memory_used_bytes if total else None, total or None)
            self._nodes[node] = time.monotonic(), used, ranks

    def forget(self) -> None:
        """Forget all: ranks are about to be renumbered."""
        self._nodes.clear()

    def of_rank(self, rank: int, node: int, *, cell: int | None, now: float) -> RankUse:
        """Return the use of a rank that runs ``cell`` now; its step rate only if measured in that cell."""
        use, of_cell = self._of(node, now)[1].get(rank, (RankUse(), -1))
        return use if of_cell == cell else replace(use, steps_per_s=None)

    def of_node(self, node: int, *, now: float) -> NodeUse | None:
        """Return the use of a node; None if nothing has arrived for a while."""
        return self._of(node, now)[0]

    def _of(self, node: int, now: float) -> tuple[NodeUse | None, dict[int, _InCell]]:
        came_at, of_node, ranks = self._nodes.get(node, (0.0, None, {}))
        is_old = now - came_at > max(_OLD_S, _OLD_TIMES * self._every_s)
        return (None, {}) if of_node is None or is_old else (of_node, ranks)


def _use_of(said: Measured, at: int) -> RankUse:
    gpu = said.gpus[at]
    of_rank = _known(said.cpu_percent[at]), said.rss_bytes[at] or None
    steps_per_s = _known(said.steps_per_s[at])
    if gpu < 0:
        return RankUse(*of_rank, steps_per_s=steps_per_s)
    used, total = _known(said.gpu_used_bytes[gpu]), _known(said.gpu_total_bytes[gpu])
    name = one_line(said.gpu_names[gpu], most_chars=_NAME_CHARS)
    return RankUse(
        *of_rank,
        _known(said.gpu_percent[gpu]),
        None if used is None else int(used),
        None if total is None else int(total),
        name,
        steps_per_s,
    )


def _known(value: float) -> float | None:
    return None if value < 0 else value


def check_measured(said: Measured) -> None:
    """Check the lengths of the lists, the number of GPUs and the range of each number. Raises: WireError."""
    if len(set(said.ranks)) < len(said.ranks):
        raise WireError("a node reports measurements of a rank twice")
    of_ranks = (said.cpu_percent, said.rss_bytes, said.steps_per_s, said.cells, said.gpus)
    of_gpus = (said.gpu_percent, said.gpu_used_bytes, said.gpu_total_bytes)
    num_gpus = len(said.gpu_names)
    if any(len(numbers) != len(said.ranks) for numbers in of_ranks) or num_gpus > _MOST_GPUS:
        raise WireError(f"the lists with measurements of {len(said.ranks)} ranks and {num_gpus} GPUs do not match")
    if any(len(numbers) != num_gpus for numbers in of_gpus):
        raise WireError(f"the lists with measurements of {num_gpus} GPUs do not match")
    _check_range("cpu_percent", said.cpu_percent, -1, Measured.MOST_PERCENT)
    _check_range("rss_bytes", said.rss_bytes, 0, _MOST_BYTES)
    _check_range("steps_per_s", said.steps_per_s, -1, Measured.MOST_STEPS_PER_S)
    _check_range("gpus", said.gpus, -1, num_gpus - 1)
    _check_range("gpu_percent", said.gpu_percent, -1, 100)
    _check_range("gpu bytes", [*said.gpu_used_bytes, *said.gpu_total_bytes], -1, _MOST_BYTES)
    _check_range("node_cpu_percent", [said.node_cpu_percent], -1, 100)
    _check_range("memory", [said.memory_total_bytes], 0, _MOST_BYTES)
    _check_range("memory", [said.memory_used_bytes], 0, said.memory_total_bytes)


def _check_range(what: str, numbers: Collection[float], least: float, most: float) -> None:
    if wrong := [number for number in numbers if not least <= number <= most]:
        raise WireError(f"measured {what} {wrong[0]} is out of range ({least} to {most})")
