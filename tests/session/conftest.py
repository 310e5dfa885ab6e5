"""Fixtures of the session tests: a session for each module, a runtime folder, and the processes that a test starts."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from detrain_nb import Session

from ..testbed.nodes import ssh_nodes
from ..testbed.testbed import Testbed
from .soon import assert_no_session_is_left


@pytest.fixture(scope="module", params=["here", "ssh"])
def two_ranks(request: pytest.FixtureRequest) -> Callable[..., Session]:
    """Return a function that starts two ranks: both on this machine, or one on each of two SSH hosts.

    Both must behave in the same way.
    """
    if request.param == "here":
        return lambda **options: Session.start(ranks=2, device="cpu", **options)
    testbed: Testbed = request.getfixturevalue("testbed_of_two")
    return lambda **options: Session.start(
        1, **{"sync": False, "nodes": ssh_nodes(testbed), "device": "cpu", "warm_s": 0.0, **options}
    )


@pytest.fixture(scope="module")
def session(two_ranks: Callable[[], Session]) -> Iterator[Session]:
    """Start two ranks on the CPU, shared by the tests of a module; each test leaves them idle."""
    with two_ranks() as started:
        yield started


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests that run over SSH as slow, and deselect those marked ``here_only``.

    Tests marked ``rare_elsewhere`` behave the same over SSH, so only `make test-thorough` runs them there.
    """
    if not config.getoption("--older-python"):
        items[:] = [item for item in items if "older_python" not in getattr(item, "fixturenames", ())]
    items[:] = [item for item in items if not (_is_elsewhere(item) and item.get_closest_marker("here_only"))]
    for item in filter(_is_elsewhere, items):
        rare = item.get_closest_marker("rare_elsewhere")
        is_rare = rare is not None and not any(name in item.name for name in rare.args)
        item.add_marker("thorough" if is_rare else "slow")


def _is_elsewhere(item: pytest.Item) -> bool:
    return hasattr(item, "callspec") and item.callspec.params.get("two_ranks") == "ssh"


@pytest.fixture(autouse=True, scope="session")
def runtime_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep the tests' sessions in a folder of their own, and check at the end that no session is left in it."""
    folder = tmp_path_factory.mktemp("run")
    folder.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DETRAIN_NB_RUNTIME_DIR", str(folder))
        yield folder
    assert_no_session_is_left(folder)


@pytest.fixture
def processes(cold_starts: None, runtime_folder: Path) -> Callable[[], set[psutil.Process]]:
    """Return a function that finds the processes of the test's sessions by their environment, whatever their parent."""
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
