"""Waiting for what other processes bring about."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import pytest

_Look = TypeVar("_Look")


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


def each_below(folder: Path, look: Callable[[Path], _Look]) -> list[_Look]:
    """What ``look`` says of each file and folder; not of what goes meanwhile, as logs of earlier tests may."""
    found = []
    for parent, folders, files in os.walk(folder):  # unlike rglob it leaves out a folder that is gone
        for name in (*folders, *files):
            with contextlib.suppress(FileNotFoundError):
                found.append(look(Path(parent, name)))
    return found


@contextlib.contextmanager
def interrupted(after_s: float) -> Iterator[Callable[[], None]]:
    """What it gives begins the time after which what runs here is interrupted, as by the stop button."""
    begun, here = threading.Event(), threading.get_ident()
    gc.collect()  # Python drops an exception that comes while it finalizes what an earlier test has left

    def press() -> None:
        if begun.wait(60):
            time.sleep(after_s)
            signal.pthread_kill(here, signal.SIGINT)

    pressing = threading.Thread(target=press)
    pressing.start()
    with pytest.raises(KeyboardInterrupt):
        yield begun.set
        time.sleep(30)  # it was quicker
    pressing.join()
