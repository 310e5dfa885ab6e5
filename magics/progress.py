"""The progress of a start or a copy, as one line that is redrawn."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .screen import screen_for

_PATIENCE_S = 0.5


@contextmanager
def redrawn_line(ipython: Any, *, is_live: bool, is_alone: bool = False) -> Iterator[Callable[[str], None]]:
    """Yield a function that redraws a line; none shows in the first 0.5 s, after the end, or if output is not live.

    ``is_alone``: the cell shows nothing else yet, so its output is cleared at the end if the line was shown.
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
