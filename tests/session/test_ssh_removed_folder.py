"""A kernel whose current folder was removed: a session starts in another folder, or not at all."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from detrain_nb import Session
from detrain_nb.agents import running_sessions
from detrain_nb.errors import SpecError

from ..testbed.nodes import ssh_nodes
from ..testbed.testbed import Testbed


@pytest.fixture
def nowhere(tmp_path: Path) -> Iterator[None]:
    before = os.getcwd()
    folder = tmp_path / "removed"
    folder.mkdir()
    os.chdir(folder)
    folder.rmdir()
    yield
    os.chdir(before)


def _links() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "detrain_nb node link"]


def test_start_in_another_folder_is_no_matter(nowhere: None, tmp_path: Path) -> None:
    with Session.start(ranks=1, device="cpu", init=False, folder=str(tmp_path)) as session:
        assert session.run_cell("import os; os.getcwd()").values == {0: str(tmp_path)}


def test_start_and_attach_that_cannot_be_leave_nothing(nowhere: None, tmp_path: Path) -> None:
    before, others = _links(), running_sessions()  # processes of an earlier test may still be exiting
    with pytest.raises(SpecError, match="the current folder was removed"):
        Session.start(ranks=1, device="cpu", init=False)
    assert {*_links()} <= {*before} and running_sessions().items() <= others.items()
    with Session.start(ranks=1, device="cpu", init=False, folder=str(tmp_path), name="mine") as session:
        links = _links()
        with pytest.raises(SpecError, match="the current folder was removed"):
            Session.attach("mine", steal=True)
        assert _links() == links
        assert session.run_cell("1").values == {0: 1}


def test_attach_over_ssh_that_cannot_be_leaves_no_connection(testbed: Testbed, tmp_path: Path) -> None:
    before = os.getcwd()
    nodes = ssh_nodes(testbed, 1)
    with Session.start(1, sync=False, nodes=nodes, device="cpu", init=False, name="far") as session:
        (tmp_path / "removed").mkdir()
        os.chdir(tmp_path / "removed")
        os.rmdir(tmp_path / "removed")
        (node,) = ssh_nodes(testbed, 1)
        try:
            with pytest.raises(SpecError, match="the current folder was removed"):
                Session.attach("far", nodes=[node], steal=True)
        finally:
            os.chdir(before)
        assert node._connection is None
        assert session.run_cell("1").values == {0: 1}
