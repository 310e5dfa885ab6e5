"""All that came up to a moment: a message counts as arrived when what came with it has been shown."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...wire import Unfinished


@dataclass
class Checkpoint:
    """All that ``on_message`` got up to a moment: the lines that had not ended then, and whether it has been shown."""

    unfinished: list[Unfinished]
    is_shown: Callable[[], bool]
    number: int = 0
    was_shown: bool = False
