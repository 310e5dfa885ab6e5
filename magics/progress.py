"""How far a start or a copy is, as one line that is drawn anew; of a copy a bar, per cent, bytes, bytes a second."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from ..text import format_size
from .screen import screen_for

_PATIENCE_S = 0.5
_REDRAW_S = 0.2
_RATE_S = 5.0  # what was copied in the last seconds tells the rate
_BAR_CHARS = 30


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


class CopyProgress:
    """Called with the files done, the bytes done and the bytes in all, it draws the line, a few times a second."""

    def __init__(self, what: str, draw: Callable[[str], object], *, now: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._draw = draw
        self._now = now
        self._drawn_at: float | None = None
        self._times = deque([(now(), 0)])  # when how many bytes were done

    def __call__(self, files: int, done: int, total: int) -> None:
        now = self._now()
        is_done = bool(total) and done >= total
        if self._drawn_at is None or now - self._drawn_at >= _REDRAW_S or is_done:
            self._drawn_at = now
            self._draw(self._line(now, files, done, total))

    def _line(self, now: float, files: int, done: int, total: int) -> str:
        self._times.append((now, done))
        while len(self._times) > 2 and self._times[1][0] <= now - _RATE_S:
            self._times.popleft()
        since, before = self._times[0]
        rate = f", {format_size((done - before) / (now - since))}/s" if now > since else ""
        share = min(1.0, done / total) if total else 0.0
        full = int(_BAR_CHARS * share)
        bar = "#" * full + "." * (_BAR_CHARS - full)
        counted = "1 file" if files == 1 else f"{files:,} files"
        return (
            f"{self._what} [{bar}] {int(100 * share):3} %, {format_size(done)} of {format_size(total)}{rate}, {counted}"
        )
