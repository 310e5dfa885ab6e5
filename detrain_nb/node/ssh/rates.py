"""The measurement of the speed of a connection: for the text of probe.py, and for the doctor in the notebook."""

from __future__ import annotations

import time
from collections.abc import Callable

CHUNK_BYTES = 1 << 20
_FIRST_BYTES = 1 << 16
_LONG_ENOUGH_S = 0.5
_SETTLED_ROUND_TRIPS = 20
_SETTLED_GAIN = 1.25


def find_rate(transfer: Callable[[int], float], *, round_trip_s: float, deadline: float, most_bytes: int) -> float:
    """Return bytes per second: call ``transfer(size)`` with growing sizes until it takes long enough.

    With long round trips, also until larger sizes are no faster: TCP starts slowly. ``transfer`` returns the rate seen
    by the other side, or 0 if unknown.
    """
    size, before = _FIRST_BYTES, 0.0
    while True:
        began = time.monotonic()
        seen = transfer(size)
        now = time.monotonic()
        took_s = now - began
        rate = seen or size / took_s
        has_settled = took_s > _SETTLED_ROUND_TRIPS * round_trip_s or rate < _SETTLED_GAIN * before
        is_over = now + 2 * took_s > deadline or size * 2 > most_bytes
        if is_over or (took_s >= _LONG_ENOUGH_S and has_settled):
            return rate
        size, before = size * 2, rate
