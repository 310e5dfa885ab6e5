"""Pipelines in a folder of their own, and jobs in a home of their own."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from detrain_nb.pipelines import MyPipelines


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the notebook; the user's state is next to it. Sockets need a short path."""
    with tempfile.TemporaryDirectory(prefix="dtp") as base:
        for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "DETRAIN_NB_RUNTIME_DIR"):
            folder = Path(base, name.lower())
            folder.mkdir(mode=0o700)
            monkeypatch.setenv(name, str(folder))
        notebook = tmp_path / "notebook"
        notebook.mkdir()
        monkeypatch.chdir(notebook)
        yield notebook


@pytest.fixture
def mine(home: Path) -> MyPipelines:
    return MyPipelines()
