"""The decision whether ranks wait for a notebook that reads their output more slowly than they print."""

from __future__ import annotations

import time

from .spool import Spool

_FULL_BYTES = 4 << 20  # of output: a notebook shows it in a second or two
_LETS_GO_S = 10.0  # even a busy notebook shows a megabyte of short lines in seconds


class Pace:
    """How fast one notebook reads output.

    Ranks block in ``print`` while the notebook keeps reading but lags behind. Otherwise minutes of output would queue
    up, and the effect of a stop would show only after it. Ranks do not wait while the notebook catches up with output
    from before it attached, nor for a notebook that reads nothing for 10 s, such as on a sleeping laptop.
    """

    def __init__(self) -> None:
        self._has_caught_up = False  # the notebook has read all output from before it attached
        self._taken_bytes = -1
        self._took_at = 0.0
        self.lets_go_at: float | None = None  # while ranks wait: when they stop waiting if the notebook reads nothing

    def has_to_wait(self, spool: Spool, waiting_bytes: int) -> bool:
        """Return whether the ranks have to wait now.

        ``waiting_bytes``: the bytes that were read from ``spool`` and have not reached the notebook yet.
        """
        self._has_caught_up = self._has_caught_up or not spool.has_more
        taken_bytes, now = spool.read_bytes - waiting_bytes, time.monotonic()
        if taken_bytes > self._taken_bytes:
            self._taken_bytes, self._took_at = taken_bytes, now
        is_full = self._has_caught_up and spool.unread_bytes + waiting_bytes > _FULL_BYTES
        is_waiting = is_full and now < self._took_at + _LETS_GO_S
        self.lets_go_at = self._took_at + _LETS_GO_S if is_waiting else None
        return is_waiting
