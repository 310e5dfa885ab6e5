"""Waiting for what other processes bring about."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def assert_soon(holds: Callable[[], bool], *, limit_s: float = 20.0) -> None:
    """Fails when it does not hold within ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.02)


def assert_no_session_is_left(folder: Path) -> None:
    """Fails when a session leaves its folder behind: an agent whose notebook was killed removes it a little later."""
    left: list[str] = []

    def is_empty() -> bool:
        left[:] = [
            path.name for path in folder.iterdir() if not path.name.startswith(".log-")
        ]  # it goes with its reader
        return not left

    try:
        assert_soon(is_empty)
    except AssertionError:
        raise AssertionError(f"a session left its folder behind: {left}") from None
