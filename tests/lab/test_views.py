"""What all views share: they update and respond while a cell runs, refuse invalid input, and leave plain HTML."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import expect

from .notebook import Notebook

pytestmark = pytest.mark.timeout(240)  # the machine may be busy

_FOLDER = str(Path(__file__).parent)
_SHOW = f"import sys; sys.path.insert(0, {_FOLDER!r}); from probe_view import ProbeView; view = ProbeView(); view"
_COUNT = "view.count_to(7); view.press('again'); print(view.are_pages_there.wait(60))"
_WAIT = "print('waits'); was_pressed = view.pressed.wait(60); print('pressed' if was_pressed else 'not pressed')"

# As in front ends without sub-shells: messages of a page go to the main shell, where the cell runs.
_WITHOUT_SUBSHELLS = """() => {
  window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.commsOverSubshells = 'disabled';
}"""

_HOSTILE = "<img src='x:' onerror='window.was_run = 1'><script>window.was_run = 2</script>"


def test_view_is_told_and_answers_while_a_cell_runs(notebook: Callable[..., Notebook]) -> None:
    nb = notebook(_SHOW, _WAIT, "[view.count_to(count) for count in range(1000)]; None")
    nb.run(0)
    view = nb.cell(0).locator(".dt")
    expect(view.get_by_label("Count")).to_have_text("0")
    nb.start(1)
    nb.wait_for_text(1, "^waits$")
    view.get_by_role("button", name="Press").click()
    nb.wait_for_text(1, "^pressed$")
    expect(view.get_by_label("Said")).to_have_text("heard hello in False")
    expect(view.get_by_label("Lines").get_by_role("listitem")).to_have_text(["hello"])
    nb.run(2)
    expect(view.get_by_label("Count")).to_have_text("999")


def test_page_that_is_reloaded_while_a_cell_runs_has_its_view_at_once(notebook: Callable[..., Notebook]) -> None:
    nb = notebook(_SHOW, _WAIT, "print(was_pressed)")
    nb.run(0)
    nb.start(1)
    nb.wait_for_text(1, "^waits$")
    nb.save()
    nb.reload()
    nb.js(_WITHOUT_SUBSHELLS)
    view = nb.cell(0).locator(".dt")
    view.get_by_role("button", name="Press").click()
    expect(view.get_by_label("Said")).to_have_text("heard hello in False")
    nb.run(2)
    assert nb.text(2) == "True\n"


def test_what_is_wrong_is_said_beside_it_and_nothing_is_called(notebook: Callable[..., Notebook]) -> None:
    nb = notebook(_SHOW, "view.heard", "[view._forget(page) for page in [*view._pages]]; None")
    nb.run(0)
    view = nb.cell(0).locator(".dt")
    for button, said in {
        "Wrong": "press: said must be a string of at most 20 characters, not 3",
        "More": "press takes said, not ['more', 'said']",
        "Refused": "3 is not 0: give 0",
        "Fault": "this is a bug in detrain_nb: TypeError: wrong",
        "None": "this view has no such action: reload the page",
        "Long": "counting done",
    }.items():
        view.get_by_role("button", name=button).click()
        expect(view.get_by_label("Said")).to_have_text(said)
    expect(view.get_by_label("Count")).to_have_text("100")
    nb.run(1)
    assert nb.text(1) == "[]\n"
    nb.run(2)  # as after a page was silent for long
    view.get_by_role("button", name="Refused").click()
    expect(view.get_by_role("alert")).to_have_text("3 is not 0: give 0")
    nb.run(2)
    view.get_by_role("button", name="Press").click()
    expect(view.get_by_label("Lines").get_by_role("listitem")).to_have_text(["hello"])


def test_reload_shows_all_of_it_again_and_what_is_settled_is_plain(notebook: Callable[..., Notebook]) -> None:
    nb = notebook(_SHOW, _COUNT, "view.settle(); view")
    nb.run(0)
    nb.run(1)
    assert nb.text(1) == "True\n"
    saved = nb.save()
    live, plain = (output.data for output in saved.cells[0].outputs)
    assert list(live) == ["application/vnd.jupyter.widget-view+json"]
    assert "<b>count 0</b><p><em>as it was when this cell ran; run it again" in plain["text/html"]
    assert not saved.metadata.get("widgets")
    nb.reload()
    view = nb.cell(0).locator(".dt")
    expect(view.get_by_label("Count")).to_have_text("7")
    expect(view.get_by_label("Lines").get_by_role("listitem")).to_have_text(["again"])
    nb.run(2)
    assert nb.text(2) == "count 7\n"
    expect(nb.cell(2).locator(".dt")).to_have_count(0)


@pytest.mark.slow
def test_page_whose_kernel_is_silent_or_gone_says_so_with_its_age(notebook: Callable[..., Notebook]) -> None:
    nb = notebook(_SHOW, "import os; os.getpid()")
    nb.run(0)
    nb.run(1)
    kernel = int(nb.text(1))
    view = nb.cell(0).locator(".dt")
    press = view.get_by_role("button", name="Press")
    silent, gone = view.get_by_text("The kernel does not answer"), view.get_by_text("of this view has ended")
    age = r"This view shows the state of \d\d:\d\d:\d\d\.$"
    expect(press).to_be_visible()
    os.kill(kernel, signal.SIGSTOP)
    expect(silent).to_have_text(re.compile(rf"^The kernel does not answer\. {age}"), timeout=40_000)
    os.kill(kernel, signal.SIGCONT)
    expect(silent).to_have_count(0)
    os.kill(kernel, signal.SIGKILL)
    expect(gone).to_have_text(re.compile(rf"ended: run the cell again\. {age}"), timeout=40_000)
    expect(press).to_have_attribute("aria-disabled", "true")
    nb.page.get_by_role("button", name="Ok", exact=True).click()  # JupyterLab reports that it restarts the kernel
    nb.run(0)
    press.click()
    expect(view.get_by_label("Said")).to_have_text("heard hello in False")


@pytest.mark.parametrize("is_trusted", [True, False], ids=["trusted", "untrusted"])
def test_notebook_that_is_opened_without_its_kernel_shows_the_plain_form(
    notebook: Callable[..., Notebook], is_trusted: bool
) -> None:
    nb = notebook(_SHOW, "view.settle(); view", _SHOW)
    nb.run_all()
    expect(nb.cell(2).locator(".dt").get_by_label("Count")).to_have_text("0")
    expect(nb.cell(2).locator(".dt-plain")).to_be_hidden()
    saved = nb.save()
    nb.close()
    if not is_trusted:  # whoever changed the file did not sign it
        for cell in saved.cells:
            cell.outputs[-1].data["text/html"] = f"{cell.outputs[-1].data.get('text/html', '')}{_HOSTILE}"
        nbformat.write(saved, nb.path)
    nb.reload()
    for index, end in enumerate(["", "", "as it was when this cell ran; run it again for the live view"]):
        shown = nb.cell(index).locator(".jp-OutputArea-child >> visible=true").filter(has_text="count 0")
        expect(shown).to_have_count(1)
        expect(shown).to_contain_text(re.compile(rf"count 0\s*{end}"))
    expect(nb.page.get_by_text("Error displaying widget >> visible=true")).to_have_count(0)
    expect(nb.page.locator(".dt, .jp-OutputArea button")).to_have_count(0)
    assert nb.js("() => window.was_run ?? null") is None
