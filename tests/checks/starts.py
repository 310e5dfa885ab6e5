"""A plugin that sets how every test runs: sessions start warm, torch uses one thread in the test process, and
hypothesis has no deadlines. In `.ci/run` hypothesis tries the same examples each time, so a failure comes from the
change.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from detrain_nb import Session
from detrain_nb.deploy.kept import drop_kept

settings.register_profile(  # a slow disk or another process must not fail a test
    "without a clock", deadline=None, derandomize=bool(os.environ.get("DETRAIN_NB_CI"))
)
settings.load_profile("without a clock")


def pytest_collection_finish() -> None:
    """Use one thread of torch: workers and ranks share the processors, and more threads would wait for each other."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def warm_starts() -> Iterator[None]:
    """Start the sessions of tests as a notebook's second one, with torch preloaded, unless a test sets ``warm_s``."""
    with _started_with(warm_s=600.0):
        yield


@pytest.fixture
def cold_starts() -> Iterator[None]:
    """Start sessions that leave no warm process behind, as is the default in plain Python."""
    drop_kept()
    with _started_with(warm_s=0.0):
        yield


@contextlib.contextmanager
def _started_with(*, warm_s: float) -> Iterator[None]:
    defaults: dict[str, Any] = Session.start.__func__.__kwdefaults__  # type: ignore[attr-defined]
    before = defaults["warm_s"]
    defaults["warm_s"] = warm_s
    try:
        yield
    finally:
        defaults["warm_s"] = before
