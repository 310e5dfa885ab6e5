"""More ranks on a node than it has processors or memory for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..deploy.files import label
from ..errors import SpecError
from ..launch import describe_crowd, most_ranks
from ..plan import Plan
from ..transport import Transport
from .report_checks import NodeResources

__all__ = ["find_crowds"]

_CROWDED = 8  # times the ranks a node has room for: with more it would be too busy to answer a stop


def find_crowds(plan: Plan, nodes: Sequence[Transport], facts: Sequence[NodeResources]) -> Iterator[str]:
    """Yield a message for each node with more ranks than it has room for. Raises: SpecError above 8 times that."""
    for part, node, said in zip(plan.nodes, nodes, facts):
        room = {"cpus": said.cpus, "free_bytes": said.memory_bytes}
        most, ranks = most_ranks(**room), len(part.ranks)
        if ranks > most:
            crowd = f"{describe_crowd(ranks, where=label(node), **room)}; it has room for {most}"
            if ranks > _CROWDED * most:
                raise SpecError(crowd)
            yield crowd
