"""A project folder above the notebook's is sent to the nodes; ranks start in its copy of the notebook's folder."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from detrain_nb import Session
from detrain_nb.errors import SpecError
from detrain_nb.session.files import find_project

from ..testbed.nodes import ssh_nodes
from ..testbed.testbed import Testbed

_LOOK = """
import os, sys
sys.path.insert(0, "../lib")
import importlib, shared
importlib.reload(shared)
os.path.basename(os.getcwd()), shared.number
"""


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    """A project with a notebook's folder, which is the current folder, and a module in the folder ``lib``."""
    before = os.getcwd()
    for folder, text in (("lib/shared.py", "number = 1\n"), ("notes/notebook.ipynb", "{}")):
        (tmp_path / "project" / folder).parent.mkdir(parents=True)
        (tmp_path / "project" / folder).write_text(text)
    os.chdir(tmp_path / "project" / "notes")
    try:
        yield tmp_path / "project"
    finally:
        os.chdir(before)


@pytest.mark.slow
def test_ranks_on_a_host_start_in_the_like_of_the_notebooks_folder(project: Path, testbed: Testbed) -> None:
    nodes = ssh_nodes(testbed, 1)
    with Session.start(1, nodes=nodes, device="cpu", init=False, name="project", project="..") as session:
        assert session.run_cell(_LOOK).values == {0: ("notes", 1)}
        (project / "lib" / "shared.py").write_text("number = 23\n")
        assert session.run_cell(_LOOK).values == {0: ("notes", 23)}
        session.files.put("notebook.ipynb", "put")
        assert session.run_cell("os.path.exists('put/notebook.ipynb')").values == {0: True}
        session.detach()
    with Session.attach("project", nodes=ssh_nodes(testbed, 1)) as session:  # it knows the folder that was sent
        (project / "lib" / "shared.py").write_text("number = 456\n")
        assert session.run_cell(_LOOK).values == {0: ("notes", 456)}
        assert not session.news.notices


def test_on_this_machine_ranks_start_in_the_folder_itself(project: Path) -> None:
    with Session.start(1, device="cpu", init=False, project=str(project)) as session:
        assert session.run_cell("import os; os.getcwd()").values == {0: str(project / "notes")}


def test_a_project_is_the_folder_or_one_above_it(project: Path) -> None:
    assert find_project("..", os.getcwd()) == str(project)
    assert find_project(".", os.getcwd()) == os.getcwd()
    for wrong in ("../lib", "below"):
        with pytest.raises(SpecError, match=r"does not contain .*/notes, where the ranks start"):
            find_project(wrong, os.getcwd())
