"""A home directory for the jobs of these tests, which run on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")  # not "session": tests in other folders must not see these settings
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the folder that holds the jobs and their record; a node gets 30 s to start Python and answer."""
    base = tmp_path_factory.mktemp("jobs")
    with pytest.MonkeyPatch.context() as patch:
        for name, folder in (
            ("XDG_STATE_HOME", "state"),
            ("XDG_CACHE_HOME", "cache"),
            ("DETRAIN_NB_RUNTIME_DIR", "run"),
        ):
            (base / folder).mkdir(mode=0o700)
            patch.setenv(name, str(base / folder))
        patch.setattr("detrain_nb.jobs.noting.ASK_LIMIT_S", 30.0)
        yield base
