"""Jobs on this machine, in a home of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(scope="module")  # what it sets is not for tests of other rooms, which may run next
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the jobs of these tests are, and what is known of them; a node has time to start Python to answer."""
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
