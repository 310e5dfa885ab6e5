"""Live views in Notebook 7, which the same server provides: a board of two ranks and the console are shown and work."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
from playwright.sync_api import Browser, expect

from .notebook import Notebook, write_notebook
from .server import Lab, end
from .window import Window

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

# The record of the user's jobs is next to the notebook.
_BEGIN = """
import os, pathlib
for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME"):
    os.environ[name] = str(pathlib.Path(name.lower()).absolute())
%load_ext detrain_nb
%distributed start -n 2
"""
_CELLS = [
    _BEGIN,
    "%distributed board",
    "%%distributed\nimport time\nwhile True:\n    time.sleep(0.1)",
    "from detrain_nb.pipelines import MyPipelines\n"
    "MyPipelines().create({'name': 'here', 'source': {'script_text': 'print(1)'}})\n%pipeline",
    "%distributed stop",
]


class _Notebook7(Notebook):
    def _open(self) -> None:
        """Wait only: the page already shows the notebook."""
        self._wait_for_kernel()


def test_board_stops_a_cell_and_the_console_starts_a_job(lab: Lab, browser: Browser) -> None:
    before = lab.processes()
    path = lab.root / Path(__file__).stem / "notebook.ipynb"
    path.parent.mkdir()
    write_notebook(path, _CELLS)
    window = Window(browser, lab, place=f"notebooks/{path.relative_to(lab.root).as_posix()}")
    with closing(window), closing(_Notebook7(window, path, folder=lab.root)) as nb:
        nb.run(0)
        nb.run(1)
        board = nb.cell(1).locator(".dt")
        board.get_by_role("button", name="Show ranks").click()
        expect(board.locator(".tile[data-rank='1']")).to_contain_text("idle")
        nb.start(2)
        board.get_by_role("button", name="Stop cell").click()
        expect(board.get_by_text("all ranks stopped and kept their variables")).to_be_visible()
        expect(nb.prompt(2)).to_have_text("[3]:")
        expect(nb.cell(1).locator(".dt-plain")).to_be_hidden()
        nb.run(3)
        console = nb.cell(3).locator(".dt")
        console.get_by_role("button", name="Run: here").click()
        expect(console.locator("tbody tr").first).to_contain_text("succeeded", timeout=60_000)
        nb.run(4)
        expect(board).to_have_count(0)
        assert "2 ranks" in nb.text(1)
    assert window.errors == [], "errors in the page"
    assert end(lab.processes() - before) == [], "processes that outlive the notebook's kernel"
