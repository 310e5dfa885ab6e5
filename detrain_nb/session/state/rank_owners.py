"""Which node has which rank, and whose word counts before that is known."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...wire import Attached

MOST_RANKS = 1 << 16


class RankOwners:
    """Those of one session: known from its plan, else as far as nodes have spoken, the first one before the others."""

    def __init__(self) -> None:
        self._node_of: dict[int, int] = {}
        self._disputed: dict[int, tuple[int, int]] = {}
        self._first: Attached | None = None
        self._world_size = 0
        self._is_known = False
        self._is_noted = False  # until then: who had which was noted down here

    @property
    def node_of(self) -> Mapping[int, int]:
        return MappingProxyType(self._node_of)

    @property
    def disputed(self) -> dict[int, tuple[int, int]]:
        """The ranks that two nodes say they have, neither of them the first, and these nodes."""
        return dict(self._disputed)  # copied: others may be added meanwhile

    @property
    def is_known(self) -> bool:
        """It is known which ranks there are."""
        return self._is_known

    @property
    def first(self) -> Attached | None:
        """What the first node has said, once it is the measure for the others."""
        return self._first

    @property
    def world_size(self) -> int:
        """As the ranks of the first node say, once they are the measure; 0 where none was up."""
        return self._world_size

    def know(self, node_of: Mapping[int, int]) -> None:
        """These are the ranks that there are, and their nodes."""
        self._is_known = True
        self._node_of = dict(node_of)

    def measure_by(self, first: Attached, *, world_size: int, noted: Mapping[int, int]) -> None:
        """What the first node says is the measure for the others, until it is known which ranks there are.

        ``noted``: which node had a rank. It counts if the first node agrees: since then the session may have shrunk.
        """
        own = {rank for rank, owner in noted.items() if owner == 0}
        self._is_noted = len(noted) == world_size and own == set(first.ranks)
        if self._is_noted:
            self._node_of = dict(noted)
        self._first, self._world_size = first, world_size

    def may_speak_for(self, rank: int, node: int) -> bool:
        """``node`` has ``rank``, or is the first to say so before that is known."""
        owner = self._owner_of(rank, node)
        if owner and owner != node and not self._is_known and not self._is_noted:
            self._disputed.setdefault(rank, (owner, node))
        return owner == node

    def _owner_of(self, rank: int, node: int) -> int | None:
        if self._is_known:
            return self._node_of.get(rank)
        is_its_turn = node == 0 or self._first is not None  # else it could take a rank of the first
        return self._node_of.setdefault(rank, node) if is_its_turn and 0 <= rank < MOST_RANKS else None
