"""Nodes are made, tested, saved and started in a real JupyterLab, by typing and clicking alone."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Locator, Page, expect

from ..testbed.testbed import Testbed
from .conftest import Notebook, Window

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

OpenNotebook = Callable[..., Notebook]

_PICTURES = Path(__file__).resolve().parents[2] / "docs" / "pictures"
_LONG_MS = 90_000
_LOAD = "%load_ext detrain_nb"


def _home_of(testbed: Testbed, home: Path) -> str:
    """A cell that lets the kernel's user reach the hosts of the testbed, and none else."""
    (home / ".ssh").mkdir(parents=True)
    (home / ".ssh" / "config").write_text(
        f"Include {testbed.inventory.ssh_config}\nHost <b>bold</b> plain\n  Port 2222\n"
    )
    return f"import os; os.environ['HOME'] = {str(home)!r}\n{_LOAD}"


def _row(view: Locator, label: str) -> Locator:
    return view.get_by_role("listitem").filter(has=view.page.get_by_role("button", name=re.compile(f"^{label}: ")))


def _form(view: Locator, label: str) -> Locator:
    return view.get_by_role("group", name=label, exact=True)


def _fill(view: Locator, label: str, **texts: str) -> None:
    for name, text in texts.items():
        _form(view, label).get_by_label(re.compile(f"^{name.replace('_', ' ')}")).fill(text)


def _wear(window: Window, theme: str) -> None:
    window.command("apputils:change-theme", theme=f"JupyterLab {theme.capitalize()}")
    expect(window.page.locator("#jupyterlab-splash")).to_have_count(0)
    expect(window.page.locator("body")).to_have_attribute("data-jp-theme-light", str(theme == "light").lower())


def _take_pictures(window: Window, view: Locator, name: str, folder: Path) -> None:
    """In both themes; where they are asked for, into the docs."""
    to = _PICTURES if os.environ.get("DETRAIN_NB_PICTURES") == "1" else folder
    for theme in ("dark", "light"):
        _wear(window, theme)
        view.screenshot(path=to / f"{name}-{theme}.png")


def _focused(page: Page) -> str:
    """The accessible name of what has the focus, as far as it is said."""
    name: str = page.evaluate(
        "() => { const at = document.activeElement;"
        " return at.getAttribute('aria-label') || at.labels?.[0]?.textContent || at.textContent; }"
    )
    return name


def test_two_ranks_here_are_started_by_clicking_and_run_a_cell(
    window: Window, notebook: OpenNotebook, tmp_path: Path
) -> None:
    nb = notebook(_LOAD, "%distributed nodes", "%%distributed\nprint(rank, world_size)")
    nb.run(0)
    nb.run(1)
    view = nb.cell(1).locator(".dt")
    expect(view.get_by_text("No nodes yet")).to_be_visible()
    _take_pictures(window, view, "nodes-empty", tmp_path)
    view.get_by_role("button", name="2 ranks on this machine").click()
    expect(_row(view, "localhost").get_by_text("auto, 2 ranks")).to_be_visible()
    view.get_by_role("button", name="Start session").click()
    expect(view.get_by_role("heading", name="Starting session")).to_be_visible()
    expect(view.get_by_text(re.compile(r"^Session \S+: 2 ranks on 1 node, ready after"))).to_be_visible(
        timeout=_LONG_MS
    )
    expect(view.get_by_text("%distributed board")).to_be_visible()
    nb.run(2)
    assert nb.text(2) == "[0] 0 2\n[1] 1 2\n"
