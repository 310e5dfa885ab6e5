"""The same node once more, by each of the transports that there are: one contract for all of them."""

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
    """Whole sessions on this machine and over SSH are what most other tests are about: here beside the quick ones."""
    for item in items:
        of = getattr(item, "callspec", None)
        way = of.params.get("make_transport") if of else None
        if item.path.name == "test_sessions.py" and way in ("local", "ssh"):
            item.add_marker("slow")
        if "test_job_is_" in item.name and way in (
            "local",
            "pipe",
        ):  # tests/node/test_job_service.py is about the first
            item.add_marker("slow")


@pytest.fixture(params=["local", "ssh", "pipe"])
def make_transport(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[MakeTransport]:
    """Each call reaches the same node once more, as another notebook would."""
    made: list[Transport] = []
    home = Path(tempfile.mkdtemp(prefix="p-"))  # short: the agent's socket is below it
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
