"""A point in the messages of a node: they are acknowledged when everything before it has been shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...wire import Unfinished


@dataclass
class ShownMark:
    """A point in the messages of a node.

    ``unfinished``: the lines unfinished at that point; ``number``: of the last message before it.
    """

    unfinished: list[Unfinished]
    is_shown: Callable[[], bool]
    number: int = 0
    was_shown: bool = False
