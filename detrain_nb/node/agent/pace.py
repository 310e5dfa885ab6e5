"""Whether the ranks wait for a notebook that takes their output more slowly than they print."""

from __future__ import annotations

import time

from .spool import Spool

_FULL_BYTES = 4 << 20  # of output: it takes a notebook a second or two to show
_LETS_GO_S = 10.0  # one that is busy shows a megabyte of short lines in seconds


class Pace:
    """How fast one notebook takes what it is given.

    Ranks wait in their print while it goes on taking: else minutes of output would be kept ahead of it, and a stop
    would stand behind them. They do not wait for what it missed before it came, nor for one that takes nothing for a
    while, as that of a laptop that sleeps.
    """

    def __init__(self) -> None:
        self._has_caught_up = False  # the notebook has had all that there was when it came
        self._taken_bytes = -1
        self._took_at = 0.0
        self.lets_go_at: float | None = None  # where ranks have to wait: until then, if it takes nothing

    def has_to_wait(self, spool: Spool, waiting_bytes: int) -> bool:
        """The ranks print nothing now. ``waiting_bytes``: what was read from ``spool`` and is not yet with the
        notebook."""
        self._has_caught_up = self._has_caught_up or not spool.has_more
        taken_bytes, now = spool.read_bytes - waiting_bytes, time.monotonic()
        if taken_bytes > self._taken_bytes:
            self._taken_bytes, self._took_at = taken_bytes, now
        is_full = self._has_caught_up and spool.unread_bytes + waiting_bytes > _FULL_BYTES
        is_waiting = is_full and now < self._took_at + _LETS_GO_S
        self.lets_go_at = self._took_at + _LETS_GO_S if is_waiting else None
        return is_waiting
