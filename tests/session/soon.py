"""Waiting for what other processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable


def assert_soon(holds: Callable[[], bool], *, limit_s: float = 20.0) -> None:
    """Fails when it does not hold within ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.02)
