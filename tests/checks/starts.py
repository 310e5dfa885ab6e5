"""A plugin: how every test of ours runs. Sessions start warm, torch computes in one thread here, and nothing that
hypothesis tries has a deadline. In `.ci/run` it tries the same each time, so that what fails is news of the change.
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

settings.register_profile(  # a slow disk, or another process, is no failure
    "without a clock", deadline=None, derandomize=bool(os.environ.get("DETRAIN_NB_CI"))
)
settings.load_profile("without a clock")


def pytest_collection_finish() -> None:
    """Workers and ranks share the processors: threads of torch would wait for each other, and use them up meanwhile."""
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def warm_starts() -> Iterator[None]:
    """A session of a test is started as a notebook's second one is: where nothing else is asked for, torch is there."""
    with _started_with(warm_s=600.0):
        yield


@pytest.fixture
def cold_starts() -> Iterator[None]:
    """Sessions of this test leave nothing behind: as they are by default in plain Python."""
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
