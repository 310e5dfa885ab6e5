"""Which node has which rank, and which node is believed before that is known."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from ...wire import Attached

MOST_RANKS = 1 << 16


class RankOwners:
    """The owners of the ranks of one session: from its plan, else from what nodes claim, the first node first."""

    def __init__(self) -> None:
        self._node_of: dict[int, int] = {}
        self._disputed: dict[int, tuple[int, int]] = {}
        self._first: Attached | None = None
        self._world_size = 0
        self._is_known = False
        self._is_noted = False  # until then: this machine had recorded the owners

    @property
    def node_of(self) -> Mapping[int, int]:
        return MappingProxyType(self._node_of)

    @property
    def disputed(self) -> dict[int, tuple[int, int]]:
        """The ranks that two nodes claim, neither of them the first one, and the two nodes."""
        return dict(self._disputed)  # copied: others may be added meanwhile

    @property
    def is_known(self) -> bool:
        """The ranks and their owners are known for certain."""
        return self._is_known

    @property
    def first(self) -> Attached | None:
        """What the first node has reported, once the other nodes are checked against it."""
        return self._first

    @property
    def world_size(self) -> int:
        """The world size reported by the ranks of the first node; 0 if none was up, or it is not known yet."""
        return self._world_size

    def know(self, node_of: Mapping[int, int]) -> None:
        """Set which ranks there are, and their nodes."""
        self._is_known = True
        self._node_of = dict(node_of)

    def measure_by(self, first: Attached, *, world_size: int, noted: Mapping[int, int]) -> None:
        """Check the other nodes against the first one from now on, until the owners are known.

        ``noted``: the owners that this machine recorded. They count if the first node agrees: the session may have
        shrunk since.
        """
        own = {rank for rank, owner in noted.items() if owner == 0}
        self._is_noted = len(noted) == world_size and own == set(first.ranks)
        if self._is_noted:
            self._node_of = dict(noted)
        self._first, self._world_size = first, world_size

    def may_speak_for(self, rank: int, node: int) -> bool:
        """Return whether ``node`` owns ``rank``, or is the first to claim it while owners are unknown."""
        owner = self._owner_of(rank, node)
        if owner and owner != node and not self._is_known and not self._is_noted:
            self._disputed.setdefault(rank, (owner, node))
        return owner == node

    def _owner_of(self, rank: int, node: int) -> int | None:
        if self._is_known:
            return self._node_of.get(rank)
        is_its_turn = node == 0 or self._first is not None  # else it could claim a rank of the first node
        return self._node_of.setdefault(rank, node) if is_its_turn and 0 <= rank < MOST_RANKS else None
