"""Notices that belong to no cell: kept until the user is shown them, a bounded number from each node."""

from __future__ import annotations

import threading

LONGEST_NOTICE = 4000
_MOST_NOTICES = 1000
_MOST_OF_NODE = 200


class Notices:
    """The notices of one session; ``lock`` is held while messages of ranks are handled."""

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._notices: list[str] = []
        self._num_of: dict[int, int] = {}  # by node, since a cell was begun

    @property
    def all(self) -> tuple[str, ...]:
        return tuple(self._notices)

    def add(self, text: str) -> None:
        with self._lock:
            self._notices = [*self._notices, text[:LONGEST_NOTICE]][-_MOST_NOTICES:]

    def pop(self) -> list[str]:
        """Return all notices and forget them; the caller shows them."""
        with self._lock:
            notices, self._notices = self._notices, []
        return notices

    def within_bounds(self, text: str, node: int, *, name: str) -> str:
        """Return ``text``, a notice about a node; empty after too many, which leaves room for others and for ours."""
        said = self._num_of[node] = self._num_of.get(node, 0) + 1
        more = f"{name}too many notices: further ones are dropped until the next cell"
        return "" if said > _MOST_OF_NODE else more if said == _MOST_OF_NODE else text

    def begin_cell(self) -> None:
        """Reset the bound of every node."""
        self._num_of.clear()
