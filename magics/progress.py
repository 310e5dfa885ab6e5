"""How far a start or a copy is, as one line that is drawn anew."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .screen import screen_for

_PATIENCE_S = 0.5


@contextmanager
def redrawn_line(ipython: Any, *, is_live: bool, is_alone: bool = False) -> Iterator[Callable[[str], None]]:
    """A line that is drawn anew, and gone at the end; none where output is not live, or while it takes no time.

    ``is_alone``: the cell shows nothing else yet, so that not even an empty output is left of it, where it was slow.
    """
    screen, started = screen_for(ipython), time.monotonic()
    last = ""

    def draw(text: str) -> None:
        nonlocal last
        if is_live and time.monotonic() - started >= _PATIENCE_S:
            last = text
            screen.set_transient(text)

    try:
        yield draw
        if last:
            screen.draw_now(last)
    finally:
        screen.set_transient("")
        if last and is_alone and screen.can_clear:
            screen.replace([])
        screen.close()
