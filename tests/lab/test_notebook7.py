"""Live views in Notebook 7, which the same server has: a board of two ranks and the console are shown, and answer."""

from __future__ import annotations

import json
import re
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from .notebook import write_notebook
from .server import Lab, end

_CELLS = [
    "%load_ext detrain_nb\n%distributed start -n 2",
    "%distributed board",
    "%%distributed\nimport time\nwhile True:\n    time.sleep(0.1)",
    "from detrain_nb.pipelines import MyPipelines\n"
    "MyPipelines().create({'name': 'here', 'source': {'script_text': 'print(1)'}})\n%pipeline",
    "%distributed stop",
]
_LIMIT_MS = 60_000


@pytest.mark.slow
def test_board_stops_a_cell_and_the_console_starts_a_job(lab: Lab, browser: Browser) -> None:
    before = lab.processes()
    with _opened(lab, browser) as page:
        _run(page, 0, 1)
        board = _cell(page, 1).locator(".dt")
        board.get_by_role("button", name="Show ranks").click()
        expect(board.locator(".tile[data-rank='1']")).to_contain_text("idle")
        _run(page, 2, until="[*]:")
        board.get_by_role("button", name="Stop cell").click()
        expect(board.get_by_text("all ranks stopped and kept their variables")).to_be_visible()
        expect(_cell(page, 2).locator(".jp-InputPrompt")).to_have_text("[3]:")
        expect(_cell(page, 1).locator(".dt-plain")).to_be_hidden()
        _run(page, 3)
        console = _cell(page, 3).locator(".dt")
        console.get_by_role("button", name="Run: here").click()
        expect(console.locator("tbody tr").first).to_contain_text(re.compile("running|succeeded"), timeout=_LIMIT_MS)
        _run(page, 4)
        expect(_cell(page, 1).locator(".jp-OutputArea")).to_contain_text("2 ranks")
        expect(board).to_have_count(0)
    assert end(lab.processes() - before) == [], "processes that outlive the notebook's kernel"


@contextmanager
def _opened(lab: Lab, browser: Browser) -> Iterator[Page]:
    """A page with these cells; its kernel ends with it."""
    folder = lab.root / Path(__file__).stem
    folder.mkdir()
    write_notebook(folder / "notebook.ipynb", _CELLS)
    errors: list[str] = []
    with browser.new_context(viewport={"width": 1280, "height": 900}) as context:
        page = context.new_page()
        page.on("pageerror", lambda error: errors.append(error.message))
        page.goto(f"{lab.url}notebooks/{folder.name}/notebook.ipynb?token={lab.token}", timeout=_LIMIT_MS)
        expect(page.locator(".jp-Notebook-ExecutionIndicator[data-status='idle']")).to_be_visible(timeout=_LIMIT_MS)
        try:
            yield page
        finally:
            page.screenshot(path=folder / "page.png")
            _end_kernels(lab)
    assert errors == [], "errors in the page"


def _end_kernels(lab: Lab) -> None:
    """Those of all notebooks that are open in the server."""
    sessions = f"{lab.url}api/sessions"
    with urllib.request.urlopen(f"{sessions}?token={lab.token}", timeout=60) as answer:
        ids = [session["id"] for session in json.load(answer)]
    for each in ids:
        order = urllib.request.Request(f"{sessions}/{each}?token={lab.token}", method="DELETE")
        urllib.request.urlopen(order, timeout=60).close()


def _cell(page: Page, index: int) -> Locator:
    return page.locator(".jp-Notebook .jp-Cell").nth(index)


def _run(page: Page, *indices: int, until: str | None = None) -> None:
    for index in indices:
        _cell(page, index).locator(".cm-content").click()
        page.keyboard.press("Control+Enter")
        prompt = _cell(page, index).locator(".jp-InputPrompt")
        expect(prompt).to_have_text(until or f"[{index + 1}]:", timeout=_LIMIT_MS)
