"""What the user should know and no cell has said: kept until somebody asks, and of one node no more than so much."""

from __future__ import annotations

import threading

LONGEST_NOTICE = 4000
_MOST_NOTICES = 1000
_MOST_OF_NODE = 200


class Notices:
    """Those of one session; ``lock`` is held while what ranks say is taken."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._notices: list[str] = []
        self._num_of: dict[int, int] = {}  # what a node has said, since a cell was begun

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(self._notices)

    def add(self, text: str) -> None:
        with self._lock:
            self._notices = [*self._notices, text[:LONGEST_NOTICE]][-_MOST_NOTICES:]

    def pop(self) -> list[str]:
        """All; whoever asks shows them."""
        with self._lock:
            notices, self._notices = self._notices, []
        return notices

    def within_bounds(self, text: str, node: int, *, name: str) -> str:
        """What is said of what a node does; empty after very much: there is to be room for what others, and we, say."""
        said = self._num_of[node] = self._num_of.get(node, 0) + 1
        more = f"{name}it says more: that is left out until the next cell"
        return "" if said > _MOST_OF_NODE else more if said == _MOST_OF_NODE else text

    def begin_cell(self) -> None:
        """Each node may say as much again."""
        self._num_of.clear()
