"""A moment in what came from a node: it is acknowledged there when all that came before has been shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...wire import Unfinished


@dataclass
class ShownMark:
    """``unfinished``: the lines that had not ended then; ``number``: of the last message before it."""

    unfinished: list[Unfinished]
    is_shown: Callable[[], bool]
    number: int = 0
    was_shown: bool = False
