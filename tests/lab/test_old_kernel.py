"""Views in a kernel without sub-shells (ipykernel 6): their actions wait for the running cell, and the pages say so."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import expect

from .notebook import Notebook

_FOLDER = str(Path(__file__).parent)
_SHOW = f"import sys; sys.path.insert(0, {_FOLDER!r}); from probe_view import ProbeView; view = ProbeView(); view"


@pytest.mark.thorough
@pytest.mark.usefixtures("kernel_python")
def test_button_waits_for_the_cell_and_names_the_stop_button_which_works(notebook: Callable[..., Notebook]) -> None:
    nb = notebook(_SHOW, "import ipykernel, time; print(ipykernel.__version__); time.sleep(100)")
    nb.run(0)
    view = nb.cell(0).locator(".dt")
    expect(view.get_by_label("Count")).to_have_text("0")
    nb.start(1)
    nb.wait_for_text(1, r"^6\.")
    press = view.get_by_role("button", name="Press")
    press.click()
    expect(press).to_contain_text("queued until the cell ends; use the stop button")
    nb.stop()
    expect(view.get_by_label("Said")).to_have_text("heard hello in True")
    expect(press.get_by_text("queued until")).to_be_hidden()
