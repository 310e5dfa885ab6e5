"""The console of pipelines in a page: the list and the form of a pipeline, by mouse and by keyboard."""

from __future__ import annotations

import contextlib
import re
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Locator, expect

from detrain_nb.spec import Parallelism

from .console_steps import begin_pipeline, press, tab_to
from .narrow import require_fits
from .notebook import Notebook
from .pictures import take_picture
from .server import Lab
from .window import Window, set_theme

pytestmark = pytest.mark.timeout(240)

OpenNotebook = Callable[..., Notebook]

_IN_DOCS = ("list", "general", "nodes", "source", "review")

# The user's files are next to the notebook, and the hosts of the real ~/.ssh/config are not contacted.
_BEGIN = """
import os
from pathlib import Path
for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
    os.environ[name] = str(Path(name.lower()).absolute())
from detrain_nb import widgets
from detrain_nb.jobs.record import Record
from detrain_nb.pipelines import MyPipelines
%load_ext detrain_nb
"""
# Pipelines, and the last known state of their jobs.
_MAKE = """
mine, record = MyPipelines(), Record()
script = {"script_text": "print('ran')"}
def make(name, nodes, mesh, state="", code=None, metrics="", source=script, steps=5000):
    nodes = [{"host": node, "ranks": count} for node, count in nodes]
    spec = {"name": name, "source": source, "parallelism": mesh, "nodes": nodes, "training": {"steps": steps}}
    made = mine.create(spec)
    if state:
        nobody, file = '[{"host": "gpu1"}]', os.fsencode(made.path)  # answers there
        record.add(f"{name}-1", name=name, nodes=nobody, spec="{}", state=state, file=file)
        record.update(f"{name}-1", exit_code=code, metrics=metrics, started_at=1.0, ended_at=59.0)
two = [("gpu1", 4), ("gpu2", 4)]
make("llama-long", [(f"gpu{number}", 8) for number in range(8)], {"pp": 4, "tp": 2}, "unknown")
make("fashion-mnist", [("localhost", 2)], {"dp_replicate": 2, "dp_shard": 1}, "ended", 0)
make("resnet-two-hosts", [("gpu1", 2), ("gpu2", 2)], {"pp": 2, "dp_shard": 1, "dp_replicate": 2}, "ended", 3)
make("bert-finetune", two[:1], {}, "ended", 0)
make("gpt-pretrain", two, {"pp": 2, "tp": 2}, "running", metrics='{"step": 1850}')
make("moe-draft", [], {"pp": 4, "tp": 2}, source={})
make("sweep-lr", two[:1], {})
Path("pipelines/broken.toml").write_text("name = [")
"""
_SHOW = "%pipeline"
_SCROLLED = "() => document.querySelector('.jp-NotebookPanel:not(.lm-mod-hidden) .jp-WindowedPanel-outer').scrollTop"


def names(view: Locator) -> Locator:
    return view.locator("tbody tr .n b")


def row(view: Locator, name: str) -> Locator:
    return view.locator("tbody tr").filter(has=view.page.get_by_text(name, exact=True))


def take_pictures(nb: Notebook, view: Locator, name: str, folder: Path) -> None:
    """Take pictures in both themes, some of them for the docs. Everything must fit a narrow page, too."""
    before = nb.page.viewport_size
    assert before
    nb.page.set_viewport_size({**before, "height": 1600})  # all of it is visible
    try:
        for theme in ("dark", "light"):
            set_theme(nb.window, dark=theme == "dark")
            take_picture(view, f"console-{name}-{theme}", folder, is_for_docs=name in _IN_DOCS)
        require_fits(view)
    finally:
        nb.page.set_viewport_size(before)


def test_list_is_searched_sorted_and_worked_with_by_keyboard(notebook: OpenNotebook, tmp_path: Path) -> None:
    nb = notebook(_BEGIN, _MAKE, _SHOW)
    for index in range(3):
        nb.run(index)
    view = nb.cell(2).locator(".dt")
    by_job = ["gpt-pretrain", "bert-finetune", "resnet-two-hosts", "fashion-mnist", "llama-long"]
    expect(names(view)).to_have_text([*by_job, "broken", "moe-draft", "sweep-lr"])
    take_pictures(nb, view, "list", tmp_path)

    expect(row(view, "gpt-pretrain")).to_contain_text("running 37 %")
    expect(row(view, "gpt-pretrain")).to_contain_text("gpu1, gpu2 · 8 ranks")
    expect(row(view, "broken")).to_contain_text("cannot be read")
    run = row(view, "moe-draft").get_by_role("button", name="Run: moe-draft")
    expect(run).to_have_attribute("aria-disabled", "true")
    expect(run).to_have_attribute("title", "1 field to correct")

    search = view.get_by_role("searchbox", name="Search name, node, status")
    search.fill("failed two")
    expect(names(view)).to_have_text(["resnet-two-hosts"])
    search.fill("nothing has this")
    expect(view.get_by_text("None of 8 pipelines has")).to_be_visible()
    search.fill("")
    view.get_by_role("button", name="Name").click()
    expect(names(view)).to_have_text(sorted([*by_job, "broken", "moe-draft", "sweep-lr"]))

    more = view.get_by_role("button", name="More for sweep-lr", exact=True)
    more.focus()
    for key in ("ArrowDown", "End", "Home", "ArrowDown", "ArrowUp", "Enter"):
        nb.page.keyboard.press(key)
    expect(view.get_by_role("button", name="Open sweep-lr-2", exact=True)).to_be_focused()
    expect(names(view).first).to_have_text("sweep-lr-2")

    more.click()
    nb.page.keyboard.press("Escape")
    expect(more).to_be_focused()
    expect(view.get_by_role("menu")).to_have_count(0)
    more.click()
    view.get_by_role("menuitem", name="Delete").click()
    undo = view.locator(".undo")
    expect(undo).to_contain_text("sweep-lr was moved to pipelines/.trash")
    expect(row(view, "sweep-lr")).to_have_count(0)
    expect(undo.get_by_role("button", name="Undo")).to_be_focused()
    take_pictures(nb, view, "deleted", tmp_path)
    nb.page.keyboard.press("Enter")
    expect(undo).to_be_hidden()
    expect(view.get_by_role("button", name="Open sweep-lr", exact=True)).to_be_focused()

    view.get_by_role("button", name="More for bert-finetune").click()
    expect(view.get_by_role("menuitem", name="Show job")).to_be_enabled()
    view.get_by_role("menuitem", name="Jobs of this pipeline (1)").click()
    expect(view.locator("tr.more")).to_contain_text("%job show bert-finetune-1")
    view.locator("tr.more").get_by_role("button", name="Close").click()
    expect(view.locator("tr.more")).to_have_count(0)
    view.get_by_role("button", name="New").click()
    expect(view.get_by_role("button", name="Two copies, this machine")).to_be_visible()
    nb.page.keyboard.press("Escape")

    view.get_by_role("button", name="Open file…").click()
    nb.page.keyboard.type("gone.yaml")
    nb.page.keyboard.press("Enter")
    expect(view.get_by_role("alert")).to_contain_text("it does not exist")
    nb.page.keyboard.press("Escape")
    expect(view.get_by_label("Path of a spec file")).to_have_count(0)
    view.get_by_role("button", name="Import…").click()
    expect(view.get_by_label("Path or URL of another tool's file")).to_be_focused()
    nb.page.keyboard.type("gone.json")
    nb.page.keyboard.press("Enter")
    expect(view.get_by_role("alert")).to_contain_text("it does not exist")
    nb.page.keyboard.type("2")
    expect(view.get_by_text("it does not exist")).to_be_hidden()  # the new name has not been submitted
    view.get_by_text("Paste its text, choose its kind").click()
    take_pictures(nb, view, "import", tmp_path)
    view.get_by_label("Text of the file").press("Escape")
    expect(view.get_by_role("button", name="Import…")).to_be_focused()

    gone = view.get_by_role("button", name="Open moe-draft").element_handle()
    assert gone
    (nb.path.parent / "pipelines" / "moe-draft.toml").unlink()
    gone.evaluate("button => button.click()")  # also if the list was just redrawn without it
    expect(view.get_by_role("alert")).to_contain_text("moe-draft")
    view.get_by_role("button", name="Refresh").click()
    expect(row(view, "moe-draft")).to_have_count(0)
    expect(view.get_by_role("alert")).to_contain_text("moe-draft")  # until the alert is closed

    view.evaluate("view => { view.style.width = '420px'; }")  # nothing is cut off, or scrolls sideways
    take_pictures(nb, view, "narrow", tmp_path)
    expect(view.get_by_role("button", name="Open sweep-lr", exact=True)).to_be_visible()
    view.evaluate("view => { view.style.width = ''; }")

    saved = nb.save()
    assert "gpt-pretrain" in saved.cells[2].outputs[1].data["text/html"]
    nb.reload()
    expect(names(nb.cell(2).locator(".dt"))).to_have_count(8)


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port of the loopback on which no process listens while a test runs."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound.getsockname()[1]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_everybody_can_use_it(
    notebook: OpenNotebook, check_accessibility: Callable[[Locator], None], closed_port: int, tmp_path: Path
) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(f"Host away\n  HostName 127.0.0.1\n  Port {closed_port}\n")
    nb = notebook(f"{_BEGIN}\nos.environ['HOME'] = {str(tmp_path)!r}", _SHOW, _MAKE)
    nb.run(0)
    nb.run(1)
    view = nb.cell(1).locator(".dt")
    check_accessibility(view)
    view.get_by_role("button", name="Import…").click()
    view.get_by_text("Paste its text, choose its kind").click()
    view.get_by_label("Text of the file").fill("gpu1 rack=7 row=2")
    check_accessibility(view)
    view.get_by_role("button", name="Import", exact=True).click()
    expect(view.get_by_role("group", name="Left out of the import")).to_be_visible()
    check_accessibility(view)
    view.get_by_role("button", name="My Pipelines").click()
    expect(view.get_by_label("Search name, node, status")).to_be_focused()  # otherwise its cell is the active one again
    nb.run(2)
    view.get_by_role("button", name="Refresh").click()
    view.get_by_role("button", name="More for sweep-lr").click()
    next_menu = view.get_by_role("button", name="More for bert-finetune").element_handle()
    view.get_by_role("menuitem", name="Delete").evaluate("(item, menu) => { item.click(); menu.click(); }", next_menu)
    expect(view.locator(".undo")).to_be_visible()
    expect(view.get_by_role("menuitem", name="Duplicate")).to_be_focused()  # a user who has moved on keeps the focus
    check_accessibility(view)
    nb.page.keyboard.press("Escape")
    view.get_by_role("button", name="Open gpt-pretrain").click()
    _type_wrong_into_every_field(view, check_accessibility)
    view.get_by_role("button", name="Nodes").first.click()
    _import_and_test_a_host(view)
    take_pictures(nb, view, "tested", tmp_path)
    check_accessibility(view)
    view.get_by_role("button", name="Remove away").click()
    view.get_by_role("button", name="Next: Source").click()
    check_accessibility(view)
    view.get_by_role("button", name="Next: Review").click()
    expect(view.locator(".plan")).to_contain_text("rank 7")
    check_accessibility(view)


# Types an invalid value into every visible field of a view, and keeps the previous value.
_TYPE_WRONG = """view => {
  for (const fold of view.querySelectorAll("details")) fold.open = true;
  for (const field of view.querySelectorAll(".body .in:not(select)")) if (field.offsetParent) {
    field.dataset.before ??= field.value;
    field.value = field.labels[0]?.innerText.startsWith("Arguments") ? "'" : "\\u001b[2J";
    for (const kind of ["input", "blur"]) field.dispatchEvent(new Event(kind));
  }
}"""
_MEND = """view => {
  for (const field of view.querySelectorAll("[data-before]")) {
    field.value = field.dataset.before;
    delete field.dataset.before;
    for (const kind of ["input", "blur"]) field.dispatchEvent(new Event(kind));
  }
}"""
_TYPED_AND_TOLD = """view => {
  const told = field => document.getElementById(field.getAttribute("aria-describedby").split(" ")[0]).innerText;
  const fields = [...view.querySelectorAll("[data-before]")].filter(field => field.offsetParent);
  return fields.map(field => [field.value, told(field)]);
}"""
_OF_KINDS = {"Script": "Script", "Notebook": "Notebook", "Git": "URL", "Folder": "Path", "Module": "Module"}


def _type_wrong_into_every_field(view: Locator, check_accessibility: Callable[[Locator], None]) -> None:
    """Check that each wrong value stays and is reported next to its field; restored values clear the errors."""
    expect(view.get_by_label("Name", exact=True)).to_be_visible()
    _require_faults(view)
    check_accessibility(view)
    view.get_by_role("button", name="Next: Nodes").click()
    view.get_by_role("button", name="gpu1: open").click()
    view.get_by_role("radio", name="choose").locator("visible=true").click()
    _require_faults(view)
    check_accessibility(view)
    view.evaluate(_MEND)
    view.get_by_role("radio", name="auto").locator("visible=true").click()
    view.get_by_role("button", name="Next: Source").click()
    for kind, field in _OF_KINDS.items():
        view.get_by_role("radio", name=kind).click()
        expect(view.get_by_role("textbox", name=re.compile(f"^{field}( optional)?$"))).to_be_visible()
        _require_faults(view)
    view.evaluate(_MEND)
    view.get_by_role("radio", name="Text").click()
    script = view.get_by_role("textbox", name="Script text")
    right = script.input_value()
    script.fill("print('")
    expect(script).to_have_attribute("aria-invalid", "true")
    script.fill(right)
    expect(view.locator("[aria-invalid]")).to_have_count(0)
    expect(view.locator(".steps li").last).to_contain_text("ready")


def _require_faults(view: Locator) -> None:
    view.evaluate(_TYPE_WRONG)
    expect(view.locator(".body .in:not(select, [aria-invalid])").locator("visible=true")).to_have_count(0)
    told = view.evaluate(_TYPED_AND_TOLD)
    assert told and all(typed in ("'", "\x1b[2J") and fault for typed, fault in told), told


def _import_and_test_a_host(view: Locator) -> None:
    """On the page of nodes, import a host of ~/.ssh/config on which no process listens, and test it."""
    view.get_by_role("button", name="Import from ~/.ssh/config").click()
    view.get_by_role("checkbox", name="away").check()
    view.get_by_role("button", name="Add 1 node").click()
    view.get_by_role("button", name="Test away").click()
    away = view.get_by_role("listitem").filter(has=view.page.get_by_role("button", name="away: open"))
    expect(away.get_by_text("1 failed")).to_be_visible(timeout=60_000)
    expect(away.get_by_text("connection refused: nothing listens on port")).to_be_visible()
    view.get_by_role("button", name="Remove away").click()
    expect(away).to_have_count(0)
    view.get_by_role("button", name="Undo").click()
    expect(away.get_by_text("1 failed")).to_be_visible()


def test_empty_list_has_examples_and_a_pipeline_runs(notebook: OpenNotebook, tmp_path: Path) -> None:
    nb = notebook(_BEGIN, _SHOW, "MyPipelines().create({'name': 'here', 'source': {'script_text': 'print(1)'}}); None")
    nb.run(0)
    nb.run(1)
    view, menu = nb.cell(1).locator(".dt"), nb.cell(1).get_by_role("menu")
    expect(view.get_by_text("No pipelines next to this notebook")).to_be_visible()
    take_pictures(nb, view, "empty", tmp_path)
    nb.run(2)
    view.get_by_role("button", name="Refresh").click()
    view.get_by_role("button", name="More for here").click()
    expect(menu.get_by_role("menuitem", name="Delete")).to_be_in_viewport(ratio=1)  # also for a short list
    nb.page.keyboard.press("Escape")
    view.get_by_role("button", name="Run: here").click()
    expect(row(view, "here")).to_contain_text("succeeded", timeout=60_000)  # only the list queries the job
    view.get_by_role("button", name="Open here").click()
    view.get_by_role("button", name="Insert as code").click()
    expect(nb.cell(2).locator(".jp-InputArea")).to_contain_text("job = submit(spec)")
    expect(view.get_by_text("Inserted below this cell; run it")).to_be_visible()
    view.get_by_role("button", name="Copy the code").click()
    view.get_by_label("Description").focus()
    nb.page.keyboard.press("Control+V")
    expect(view.get_by_label("Description")).to_have_value(re.compile(r"job = submit\(spec\)"))
    view.get_by_label("Batch size").fill("32")
    view.get_by_role("button", name="My Pipelines").click()
    begin_pipeline(view, "other")
    expect(view.get_by_label("Batch size")).to_have_value("")  # text of the other form does not appear here
    view.get_by_role("button", name="My Pipelines").click()
    _import_hosts(nb, view, tmp_path)


def _import_hosts(nb: Notebook, view: Locator, folder: Path) -> None:
    """Import a list of hosts as a draft; its omissions are dismissed line by line, with the focus on the next line."""
    (nb.path.parent / "cluster").write_text("gpu[1-2] slots=4 rack=7 row=2\n")
    view.get_by_role("button", name="Import…").click()
    nb.page.keyboard.type("cluster")
    nb.page.keyboard.press("Enter")
    expect(view.get_by_role("heading", name="cluster", exact=True)).to_be_visible()
    left_out = view.get_by_role("group", name="Left out of the import")
    expect(left_out.get_by_role("listitem")).to_have_count(2)
    take_pictures(nb, view, "imported", folder)
    left_out.get_by_role("button", name="Dismiss: rack").click()
    expect(left_out.get_by_role("button", name="Dismiss: row")).to_be_focused()
    nb.page.keyboard.press("Enter")
    expect(left_out).to_be_hidden()
    expect(view.get_by_label("Name", exact=True)).to_be_focused()


@pytest.mark.slow
def test_form_is_filled_in_by_keyboard_alone_saved_and_started(notebook: OpenNotebook, tmp_path: Path) -> None:
    nb = notebook(_BEGIN, _SHOW, "print((Path('pipelines') / 'train.toml').read_text())")
    nb.run(0)
    nb.run(1)
    view, keys = nb.cell(1).locator(".dt"), nb.page.keyboard
    view.get_by_role("button", name="Refresh").focus()
    press(view.get_by_role("button", name="New"))
    keys.type("train")
    keys.press("Enter")
    _type_general(nb, view, tmp_path)
    press(view.get_by_role("button", name="Next: Nodes"))
    _type_nodes(nb, view, tmp_path)
    press(view.get_by_role("button", name="Next: Source"))
    _type_source(nb, view, tmp_path)
    press(view.get_by_role("button", name="Next: Review"))
    _read_review(nb, view, tmp_path)
    press(view.get_by_role("button", name="Save", exact=True), back=True)
    expect(view.locator(".head >> visible=true")).to_contain_text("saved")
    press(view.get_by_role("button", name="Start on 1 node"))
    expect(view.get_by_text("starting train: the job is running")).to_be_visible(timeout=60_000)
    nb.run(2)
    assert "batch_size = 32" in nb.text(2) and 'host = "localhost"' in nb.text(2)
    view.get_by_role("button", name="Show job").click()
    shown = nb.cell(1).locator(".dt-shown")
    expect(shown.locator(".dt-job")).to_be_in_viewport(ratio=0.5)  # once it has grown
    plain = nb.save().cells[1].outputs[1].data["text/html"]
    assert "<details><summary>The spec as TOML</summary>" in plain and "batch_size = 32" in plain
    nb.reload()
    view = nb.cell(1).locator(".dt").first
    expect(view.get_by_label("Batch size")).to_have_value("32")
    expect(shown.locator(".dt-job .head")).to_be_visible()
    assert nb.js(_SCROLLED) == 0, "a page that is loaded again stays where it is"
    view.get_by_role("button", name="Review & start").click()
    expect(view.get_by_label("time", exact=True)).to_have_value("02:00:00")  # of the export to Slurm
    open_again = shown.get_by_role("button", name="Open pipeline")
    expect(open_again).to_be_hidden()  # the pipeline is already open
    view.get_by_role("button", name="My Pipelines").click()
    open_again.click()
    expect(view.get_by_label("Name", exact=True)).to_be_focused()
    shown.get_by_role("button", name="Close").first.click()
    view.get_by_role("button", name="My Pipelines").click()
    expect(names(view)).to_have_text(["train"])
    expect(row(view, "train")).to_contain_text("succeeded", timeout=60_000)  # no process of it outlives the kernel
    begin_pipeline(view, "other")
    expect(view.get_by_text("starting train: the job is running")).to_have_count(0)


def _type_general(nb: Notebook, view: Locator, folder: Path) -> None:
    """An error is shown next to its field, at the step and at the foot, which links to the field."""
    expect(view.get_by_label("Name", exact=True)).to_be_focused()
    expect(view.locator("[aria-current=step]")).to_contain_text("General")
    expect(view.locator(".ax label")).to_have_text([*Parallelism().axes])
    batch, precision, keys = view.get_by_label("Batch size"), view.get_by_label("Precision"), nb.page.keyboard
    tab_to(precision)
    keys.press("ArrowDown")  # the arrow key belongs to the drop-down list, not to JupyterLab
    expect(precision).to_have_value("bf16")
    tab_to(batch, back=True)
    keys.type("3o")
    expect(batch).to_have_attribute("aria-invalid", "true")
    expect(view.get_by_text("'3o': give a whole number, 1 to 1,000,000,000,000").first).to_be_visible()
    expect(view.locator(".steps li").first).to_contain_text("1 field to correct")
    expect(view.locator(".foot >> visible=true")).to_contain_text("Batch size: '3o': give a whole number")
    there = view.get_by_role("button", name="Go there")
    link = there.element_handle()
    press(view.get_by_role("button", name="pp: more"), back=True)
    expect(view.get_by_label("pp", exact=True)).to_have_value("2")
    expect(view.get_by_role("img", name=re.compile("^2 stages"))).to_be_visible()
    assert link.evaluate("link => link.isConnected"), "what has been said is not said again at each change"
    take_pictures(nb, view, "general", folder)
    press(there)
    expect(batch).to_be_focused()
    keys.press("Control+A")
    keys.type("32")
    expect(batch).not_to_have_attribute("aria-invalid", "true")


def _type_nodes(nb: Notebook, view: Locator, folder: Path) -> None:
    keys, nodes = nb.page.keyboard, view.get_by_role("list", name="Nodes").get_by_role("listitem")
    press(view.get_by_role("button", name="Add node"))
    expect(view.get_by_label("Host", exact=True)).to_be_focused()
    keys.type("localhost")
    tab_to(view.get_by_role("radio", name="auto"))
    keys.press("ArrowRight")
    keys.press("Enter")
    expect(view.get_by_role("radio", name="cpu")).to_have_attribute("aria-checked", "true")
    tab_to(view.get_by_label("Ranks"))
    keys.type("2")
    take_pictures(nb, view, "nodes", folder)
    press(view.get_by_role("button", name="Duplicate localhost"), back=True)
    expect(nodes).to_have_count(2)
    expect(view.get_by_text("localhost and localhost are both this machine").first).to_be_visible()
    press(view.get_by_role("button", name="Remove localhost").last, back=True)
    expect(nodes).to_have_count(1)
    press(view.get_by_role("button", name="Undo"), back=True)
    expect(nodes).to_have_count(2)
    press(view.get_by_role("button", name="Remove localhost").last)
    expect(nodes).to_have_count(1)


def _type_source(nb: Notebook, view: Locator, folder: Path) -> None:
    keys = nb.page.keyboard
    tab_to(view.get_by_role("radio", name="Script"))
    for name in ("Text", "Notebook", "Git"):
        keys.press("ArrowDown")
        expect(view.get_by_role("radio", name=name)).to_be_checked()
    tab_to(view.get_by_label("URL", exact=True))
    keys.type("https://example.org/a.git")
    expect(view.get_by_label("Entry", exact=True)).to_have_attribute("aria-invalid", "true")
    tab_to(view.get_by_role("radio", name="Git"), back=True)
    for name in ("Notebook", "Text"):
        keys.press("ArrowUp")
        expect(view.get_by_role("radio", name=name)).to_be_checked()
    tab_to(view.get_by_label("Script text"))
    keys.type("print('it ran')")
    take_pictures(nb, view, "source", folder)
    expect(view.locator(".foot")).to_contain_text("1 warning, none prevents a start")
    expect(view.get_by_text("the script does not call job_spec()")).to_be_visible()


def _read_review(nb: Notebook, view: Locator, folder: Path) -> None:
    expect(view.locator(".plan")).to_contain_text("rank 1")
    expect(view.get_by_role("heading", name="train", exact=True)).to_be_in_viewport()  # the previous page is longer
    expect(view.get_by_role("button", name="Review & start")).to_be_focused()
    expect(view.locator(".cmds")).to_contain_text("--nproc-per-node=2")
    summary = view.get_by_role("group", name="Summary").locator("> div")
    batch = "Batch32 = 4 microbatches \u00d7 8"
    expect(summary).to_have_text(["Ranks2 on 1 node", "Meshpp 2", batch, "Schedule1F1B, 2 stages"])
    tab_to(view.get_by_role("tab", name="TOML"))
    nb.page.keyboard.press("ArrowRight")
    expect(view.get_by_role("tab", name="JSON")).to_have_attribute("aria-selected", "true")
    take_pictures(nb, view, "review", folder)
    _export(nb, view, folder)


def _export(nb: Notebook, view: Locator, folder: Path) -> None:
    """A wrong option is reported next to its field, and the options typed for a format are kept with it."""
    keys, exported = nb.page.keyboard, view.get_by_role("region", name="Exported file")
    time_limit = view.get_by_label("time", exact=True)
    tab_to(view.get_by_role("radio", name=re.compile("^torchrun")))
    expect(exported).to_contain_text("--nproc-per-node=2")
    keys.press("ArrowDown")
    expect(exported).to_contain_text("#SBATCH --job-name=train")
    tab_to(time_limit)
    keys.type("2 h")
    expect(time_limit).to_have_attribute("aria-invalid", "true")
    expect(view.get_by_text("time '2 h': give minutes, HH:MM:SS or DAYS-HH:MM:SS")).to_be_visible()
    expect(view.get_by_role("button", name="Save the file…")).to_have_attribute("aria-disabled", "true")
    take_pictures(nb, view, "export", folder)
    keys.press("Control+A")
    keys.type("02:00:00")
    expect(exported).to_contain_text("#SBATCH --time=02:00:00")
    tab_to(view.get_by_role("radio", name=re.compile("^slurm")), back=True)
    keys.press("ArrowUp")
    expect(time_limit).to_have_count(0)
    keys.press("ArrowDown")
    expect(time_limit).to_have_value("02:00:00")
    expect(exported).to_contain_text("#SBATCH --time=02:00:00")
    press(view.get_by_role("button", name="Copy the file"))
    expect(view.get_by_text("Copied", exact=True)).to_be_visible()
    for said in ("train.sbatch was written.", "train.sbatch already exists."):
        press(view.get_by_role("button", name="Save the file…"))
        keys.press("Enter")
        expect(view.get_by_text(said)).to_be_visible()
    expect(view.get_by_role("button", name="Overwrite")).to_be_focused()
    keys.press("Escape")
    expect(view.get_by_label("Save as")).to_be_focused()
    keys.press("Enter")
    expect(view.get_by_role("button", name="Overwrite")).to_be_focused()
    keys.press("Enter")
    expect(view.get_by_role("button", name="Save the file…")).to_be_focused()
    assert "#SBATCH --time=02:00:00" in (nb.path.parent / "train.sbatch").read_text()
    _export_what_cannot_be(view)


def _export_what_cannot_be(view: Locator) -> None:
    """The error of a format links to the field that it concerns."""
    export = view.locator(".export")
    export.get_by_role("radio", name=re.compile("^pytorchjob")).check()
    expect(export.get_by_text("a container on every node: give image")).to_be_visible()
    press(export.get_by_role("button", name="Go there"))
    expect(view.get_by_label("Image")).to_be_focused()
    view.get_by_label("Image").fill("ghcr.io/you/train:1")
    view.get_by_role("button", name="Review & start").click()
    expect(view.get_by_role("region", name="Exported file")).to_contain_text("kind: PyTorchJob")
    export.get_by_role("radio", name=re.compile("^slurm")).check()
    expect(view.get_by_role("region", name="Exported file")).to_contain_text("#SBATCH")


@pytest.mark.slow
def test_what_others_change_meanwhile_is_told_and_both_sides_can_be_kept(
    notebook: OpenNotebook, browser: Browser, lab: Lab, tmp_path: Path
) -> None:
    make = (
        "mine = MyPipelines(); mine.create({}, name='taken')\n"
        "mine.create({'name': 'train', 'source': {'script_text': 'print(1)'}}); None"
    )
    theirs = "mine.save(mine.open('train'), {**mine.open('train').data, 'training': {'steps': 7}}); None"
    again = "mine.save(mine.open('train'), {**mine.open('train').data, 'description': 'theirs'}); None"
    unheard = "view.publish = lambda *told: None; view.form.edit('env', 'A=1'); del view.publish"
    nb = notebook(_BEGIN, make, "view = widgets.console(); view", theirs, again, unheard, _TELL_OLDER)
    for index in range(3):
        nb.run(index)
    nb.save()
    with contextlib.closing(Window(browser, lab)) as window:
        one, two = nb.cell(2).locator(".dt"), Notebook(window, nb.path, folder=lab.root).cell(2).locator(".dt")
        expect(two.get_by_role("button", name="Open train")).to_be_visible()
        one.get_by_role("button", name="Open train").click()
        expect(_steps(two)).to_be_visible()
        expect(one.get_by_label("Name", exact=True)).to_be_focused()
        assert not two.evaluate("view => view.contains(document.activeElement)"), "nobody has touched it there"
        _steps(one).fill("5")
        expect(_steps(two)).to_have_value("5")
        nb.run(3)
        _settle_with_the_file(nb, one, tmp_path)
        _steps(one).fill("9")
        expect(_steps(two)).to_have_value("9")
        nb.run(4)
        two.get_by_role("button", name="Save").click()
        two.get_by_role("button", name="Overwrite with mine").click()
        expect(one.locator(".head >> visible=true")).to_contain_text("saved")
        _type_into_both(one, two)
        assert window.errors == []

    _choose_while_older_news_comes(nb, one)
    one.get_by_role("button", name="Next: Review & start").click()
    expect(one.locator(".plan")).to_contain_text("rank 0")
    nb.run(5)  # its update has not arrived when Start is pressed
    one.get_by_role("button", name="Start on this machine").click()
    expect(one.get_by_role("alert")).to_contain_text("has changed since this page showed it, and was not started")
    expect(one.get_by_role("tabpanel", name="Text of the spec")).to_contain_text('A = "1"')


# Before an edit is applied, pages are sent an older form, which has another name.
_TELL_OLDER = """
import time
edit, older = view.form.edit, view.describe_form()
older["draft"]["name"], until = "older", time.monotonic() + 60
def edit_late(*given, **named):
    view.publish("form", older)
    while not Path("shown").exists() and time.monotonic() < until:
        time.sleep(0.01)
    return edit(*given, **named)
view.form.edit = edit_late
"""


def _choose_while_older_news_comes(nb: Notebook, view: Locator) -> None:
    """The chosen kind of source stays selected all the time."""
    nb.run(6)
    view.get_by_role("button", name="Source").click()
    module, text = view.get_by_role("radio", name="Module"), view.get_by_role("radio", name="Text")
    expect(text).to_be_checked()
    module.check()
    expect(view.get_by_role("heading", name="older")).to_be_visible()
    expect(view.get_by_label("Module", exact=True).and_(view.get_by_role("textbox"))).to_be_visible()
    assert module.is_checked()
    (nb.path.parent / "shown").touch()
    expect(view.get_by_role("heading", name="train")).to_be_visible()
    expect(module).to_be_checked()
    text.check()
    expect(view.locator(".steps li").last).to_contain_text("ready")


def _steps(view: Locator) -> Locator:
    return view.get_by_label("Steps optional", exact=True)


def _settle_with_the_file(nb: Notebook, view: Locator, folder: Path) -> None:
    """A cell has changed the file meanwhile: both versions are shown, and the file's is taken."""
    view.get_by_role("button", name="Save").click()
    expect(view.get_by_role("alert")).to_contain_text("was changed after it was read here")
    expect(view.get_by_text("training.steps: 7 in the file, 5 here")).to_be_visible()
    expect(_steps(view)).to_have_value("5")
    take_pictures(nb, view, "conflict", folder)
    view.get_by_label("Name of the other pipeline").fill("taken")
    view.get_by_role("button", name="Save as another").click()
    expect(view.get_by_text("a pipeline named taken already exists: give another name")).to_be_visible()
    expect(view.get_by_text("training.steps: 7 in the file, 5 here")).to_be_visible()
    view.get_by_role("button", name="Load theirs").click()
    expect(_steps(view)).to_have_value("7")


def _type_into_both(one: Locator, two: Locator) -> None:
    """Type into one field in both windows: the text of ``two`` reaches the kernel after it has that of ``one``."""
    clock = two.page.clock
    clock.install()
    clock.pause_at(time.time() + 30)  # what is typed there is sent after the last key
    _steps(two).fill("1")
    _steps(one).fill("5")
    expect(one.locator(".head >> visible=true")).to_contain_text("changed")
    clock.resume()
    for view, shown in ((one, "5"), (two, "1")):
        told = view.locator(".note").filter(has_text="Another tab changed this form")
        expect(told).to_contain_text('The edit of Steps was not applied: "1" instead of "5"')
        expect(_steps(view)).to_have_value(shown)
    told.get_by_role("button", name="Apply mine").click()
    for view in (one, two):
        expect(_steps(view)).to_have_value("1")
        expect(view.get_by_text("Another tab changed this form")).to_have_count(0)
