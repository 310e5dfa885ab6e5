"""One node reached through every transport, so that all of them share one suite of contract tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from detrain_nb.transport import Transport
from detrain_nb.transport.local import LocalTransport

from ..testbed.nodes import ssh_nodes
from ..testbed.testbed import Testbed
from .pipe_transport import PipeTransport

MakeTransport = Callable[[], Transport]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark whole sessions on this machine and over SSH as slow, because most other tests cover these, too."""
    for item in items:
        of = getattr(item, "callspec", None)
        way = of.params.get("make_transport") if of else None
        if item.path.name == "test_sessions.py" and way in ("local", "ssh"):
            item.add_marker("slow")
        if "test_job_is_" in item.name and way in (
            "local",
            "pipe",
        ):  # tests/node/test_job_service.py covers local jobs
            item.add_marker("slow")


@pytest.fixture(params=["local", "ssh", "pipe"])
def make_transport(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeTransport]:
    """Yield a function; each call reaches the same node again, as another notebook would."""
    made: list[Transport] = []
    home = Path(tempfile.mkdtemp(prefix="p-"))  # a short path, because the agent's socket is in it
    if request.param == "local":
        folder = tmp_path_factory.mktemp("run")
        folder.chmod(0o700)
        monkeypatch.setenv("DETRAIN_NB_RUNTIME_DIR", str(folder))
        make: MakeTransport = LocalTransport
    elif request.param == "ssh":
        testbed: Testbed = request.getfixturevalue("testbed")
        make = lambda: ssh_nodes(testbed, 1)[0]  # noqa: E731
    else:
        make = lambda: PipeTransport("pipe", home)  # noqa: E731

    def one_more() -> Transport:
        made.append(make())
        return made[-1]

    try:
        yield one_more
    finally:
        for transport in made:
            transport.leave()
        shutil.rmtree(home)
