"""Sessions for the tests of this room: one that the tests of a module share, and what watches over processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from detrain_nb import Session


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Two ranks on the CPU that the module's tests share; a test leaves them idle."""
    with Session.start(ranks=2, device="cpu") as started:
        yield started


@pytest.fixture(autouse=True, scope="session")
def runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Sessions of the tests live in a folder of their own, and none is left there."""
    folder = tmp_path_factory.mktemp("run")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DETRAIN_NB_RUNTIME_DIR", str(folder))
        yield folder
    left = [path.name for path in folder.iterdir() if not path.name.startswith(".log-")]  # a log goes with its reader
    assert not left, "a session left its folder behind"


@pytest.fixture
def processes(runtime_folder: Path) -> Callable[[], set[psutil.Process]]:
    """The processes of the test's sessions and all they started, whoever their parent is: their environment tells."""
    before = _processes_of(runtime_folder)
    return lambda: _processes_of(runtime_folder) - before


def _processes_of(runtime_folder: Path) -> set[psutil.Process]:
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            is_ours = process.environ().get("DETRAIN_NB_RUNTIME_DIR") == str(runtime_folder)
            if is_ours and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found
