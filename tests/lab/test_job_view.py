"""A job's view in JupyterLab: it follows a real job of two ranks, stops and restarts it, and delivers its model."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Dialog, Locator, expect

from .narrow import require_fits
from .notebook import Notebook
from .pictures import take_picture
from .window import Window, set_theme

OpenNotebook = Callable[..., Notebook]
LIMIT_MS = 60_000  # for the job's actions: it starts in seconds, but the machine may be busy
LOAD = 'import os; os.environ["XDG_STATE_HOME"] = r"{home}"\n%load_ext detrain_nb'
SCRIPT = """
%%torchrun -n 2 --name {name} --training.steps 400 --checkpoint.url checkpoints --view
import math, os, pathlib, time
from detrain_nb import job_spec, log_metrics
job, orders, rank = job_spec(), pathlib.Path(r"{orders}"), int(os.environ["RANK"])
def wait(name):
    while not (orders / name).exists():
        time.sleep(0.02)
for step in range(400):
    if step % 100 == 0:
        wait(str(step))
    loss = 5 * math.exp(-step / 80) + 1 + 0.2 * math.sin(step * 7) + rank
    log_metrics(step, loss=loss, lr=3e-4 * (1 - step / 400), **({{"val_loss": loss + 0.2}} if step % 20 == 0 else {{}}))
    if step % 10 == 0:
        print(f"step {{step}} of rank {{rank}}")
    if step == 50 and rank == 1:
        print("WARNING: slow batch")
    if step == 100 and rank == 0:
        place = pathlib.Path("checkpoints/step-00000100")
        place.mkdir(parents=True, exist_ok=True)
        (place / "checkpoint.json").write_text("x")
    time.sleep(0.005)
{end}
"""
MODEL = 'import torch; torch.save({"w": torch.arange(5.0)}, "model.pt") if rank == 0 else None'
HOSTILE = "<img src=x onerror=alert(1)>"


def take_pictures(window: Window, view: Locator, state: str, folder: Path) -> None:
    """Take pictures in both themes; everything must fit a narrow page, too."""
    for name in ("dark", "light"):
        set_theme(window, dark=name == "dark")
        assert take_picture(view, f"job-{state}-{name}", folder).stat().st_size > 5000
    require_fits(view)


def view_of(nb: Notebook, cell: int) -> Locator:
    return nb.cell(cell).locator(".dt-job")


def state_of(view: Locator) -> Locator:
    return view.locator(".head .st")


def allow(orders: Path, *steps: int) -> None:
    for step in steps:
        (orders / str(step)).write_text("")


@pytest.fixture
def orders(tmp_path: Path) -> Path:
    folder = tmp_path / "orders"
    folder.mkdir()
    return folder


@pytest.mark.timeout(300)
def test_job_is_followed_stopped_restarted_and_its_model_loaded(
    notebook: OpenNotebook,
    window: Window,
    tmp_path: Path,
    orders: Path,
    check_accessibility: Callable[[Locator], None],
) -> None:
    nb = notebook(
        LOAD.format(home=tmp_path / "state"),
        SCRIPT.format(name="train", orders=orders, end=MODEL),
        "%job view train",
        "import detrain_nb.widgets.job_view as of_jobs; of_jobs._LONG_S = 0.1",
    )
    for cell in (0, 3, 1):
        nb.run(cell)
    view = view_of(nb, 1)
    expect(view.get_by_role("heading", name="train", exact=True)).to_be_visible()
    expect(state_of(view)).to_have_text(re.compile("running|preparing"))
    download = view.get_by_role("button", name="Download model")
    expect(download).to_have_attribute("aria-disabled", "true")
    expect(download).to_have_accessible_description(re.compile("The model is written after the last step"))

    lines = view.get_by_role("group", name="Lines of the log")
    expect(lines).to_have_text("No output yet")

    # the view grows while no cell runs
    allow(orders, 0)
    progress = view.get_by_role("progressbar", name="Steps")
    expect(progress).to_have_attribute("aria-valuenow", "24.8", timeout=LIMIT_MS)
    expect(lines).to_contain_text("step 90 of rank 1")
    curve = view.locator("polyline.c").first
    length = len(curve.get_attribute("points") or "")
    allow(orders, 100)
    expect(progress).to_have_attribute("aria-valuenow", "49.8", timeout=LIMIT_MS)
    expect(curve).to_have_attribute("points", re.compile(f"^.{{{length + 1},}}$"))
    expect(view.locator(".pgr .sub")).to_contain_text("checkpoint 100")
    expect(view.locator(".track .ck")).to_have_count(1)
    expect(view.get_by_role("list", name="Ranks of this machine").get_by_role("listitem")).to_have_text(["0", "1"])
    check_the_curves(view)
    check_the_logs(nb, view)
    take_pictures(window, view, "running", tmp_path)
    expect(lines.locator(".ln").last).to_have_text(re.compile("step 190 of rank [01]"))
    expect(view.get_by_role("button", name="Following")).to_have_attribute("aria-pressed", "true")
    check_accessibility(view)

    # a reloaded page shows all of it
    nb.save()
    nb.reload()
    view = view_of(nb, 1)
    expect(view.get_by_role("progressbar", name="Steps")).to_have_attribute("aria-valuenow", "49.8")
    expect(view.get_by_role("group", name="Lines of the log")).to_contain_text("step 190 of rank 1")

    # stopping a job that has run for long asks for confirmation in place
    view.get_by_role("button", name="Stop", exact=True).click()
    expect(view.locator(".sure")).to_contain_text("The job has run for")
    expect(view.get_by_role("button", name="Stop it")).to_be_focused()
    view.get_by_role("button", name="Keep it running").click()
    expect(view.get_by_role("button", name="Stop", exact=True)).to_be_focused()
    expect(state_of(view)).to_have_text("running")
    view.get_by_role("button", name="Stop", exact=True).click()
    view.get_by_role("button", name="Stop it").click()
    expect(state_of(view)).to_have_text("stopped", timeout=LIMIT_MS)

    # restarting starts another job from its beginning
    before = view.locator(".id").inner_text()
    view.get_by_role("button", name="Restart from checkpoint 100").click()
    expect(view.locator(".id")).not_to_have_text(before, timeout=LIMIT_MS)
    allow(orders, 200, 300)
    expect(state_of(view)).to_have_text("succeeded", timeout=LIMIT_MS)
    expect(view.locator(".model")).to_contain_text("model.pt")
    expect(view.locator(".facts")).to_contain_text("2 of 2 done")
    take_pictures(window, view, "succeeded", tmp_path)
    check_accessibility(view)
    check_that_labels_stay_in_their_plots(view)
    check_the_model(nb, view, tmp_path)

    # after the kernel has exited the last picture stays, with a note, and requests nothing
    nb.restart()
    view.get_by_role("button", name="Show logs").click()
    expect(view.locator(":scope > .note")).to_contain_text("The kernel of this view has ended")
    for name in ("Save on this server…", "Save it on this server…", "Download the whole log"):
        expect(view.get_by_role("button", name=name)).to_have_attribute("aria-disabled", "true")

    # a new kernel shows the job again
    nb.run(0)
    nb.run(2)
    view = view_of(nb, 2)
    expect(view.locator(".model")).to_contain_text("model.pt", timeout=LIMIT_MS)
    expect(view.locator(".facts")).to_contain_text("2 of 2 done")
    saved = nb.save().cells[2].outputs[-1].data
    assert re.match(r"✓ job train-\S+: succeeded", saved["text/plain"])
    assert "script" not in saved["text/html"]


def check_the_curves(view: Locator) -> None:
    """Check the curves by pointer and by keyboard, on one axis of steps."""
    loss = view.get_by_role("slider", name="Loss by step")
    expect(loss).to_have_attribute("aria-valuemax", "400")
    loss.hover(position={"x": 60, "y": 40})
    expect(view.locator(".cross:visible")).to_have_count(2 + view.locator(".side .ch:visible").count() - 1)
    expect(view.locator(".cross span:visible")).to_have_text(re.compile(r"step \d+\s*train [\d.]+  validation [\d.]+"))
    view.get_by_role("heading", name="Logs").hover()
    expect(view.locator(".cross:visible")).to_have_count(0)
    loss.focus()
    loss.press("Home")
    expect(loss).to_have_attribute("aria-valuetext", re.compile("^step 0, train 6, validation 6.2$"))
    loss.press("ArrowRight")
    expect(loss).to_have_attribute("aria-valuenow", "1")
    loss.press("Escape")
    expect(view.locator(".cross:visible")).to_have_count(0)
    expect(view.get_by_role("slider", name="Learning rate by step")).to_be_visible()


def check_that_labels_stay_in_their_plots(view: Locator) -> None:
    """Check the labels on a narrow view, too."""
    view.evaluate("view => { view.style.width = '700px'; }")
    for name, step in (("Loss", r"step 2\d\d"), ("Throughput", r"step [123]\d\d")):  # throughput has one value a second
        plot = view.get_by_role("slider", name=f"{name} by step")
        box = plot.bounding_box()
        assert box
        plot.hover(position={"x": 0.59 * box["width"], "y": 20})
        expect(plot.locator(".cross span")).to_have_text(re.compile(step))
        label = plot.locator(".cross span").bounding_box()
        assert label and box["x"] <= label["x"] and label["x"] + label["width"] <= box["x"] + box["width"] + 1, name
    view.evaluate("view => { view.style.width = ''; }")


def check_the_logs(nb: Notebook, view: Locator) -> None:
    lines = view.get_by_role("group", name="Lines of the log")
    follow = view.get_by_role("button", name="Following")
    expect(follow).to_have_attribute("aria-pressed", "true")
    search = view.get_by_role("searchbox", name=re.compile("Search"))
    search.fill("step 1")
    expect(view.locator(".bar2 [role=status]")).to_have_text("1 of 22")
    expect(follow).to_have_attribute("aria-pressed", "false")
    search.press("Enter")
    expect(view.locator(".bar2 [role=status]")).to_have_text("2 of 22")
    search.press("Shift+Enter")
    search.press("Shift+Enter")
    expect(view.locator(".bar2 [role=status]")).to_have_text("22 of 22")
    expect(lines.locator("mark.at")).to_have_text("step 1")
    expect(view.locator(".bar2 [role=status]")).to_have_attribute("aria-live", "polite")
    level = view.get_by_role("combobox", name="Minimum level")
    level.select_option("info and up")  # a redraw, as by new lines, must not announce the count
    expect(view.locator(".bar2 [role=status]")).to_have_attribute("aria-live", "off")
    search.fill("")
    level.select_option("warnings and errors")
    expect(lines.locator(".ln")).to_have_text([re.compile(r"^\d\d:\d\d:\d\drank 1warnWARNING: slow batch$")])
    expect(lines.locator(".tm")).to_have_attribute("title", re.compile(r"^printed \d{4}-\d\d-\d\d \d\d:\d\d:\d\d$"))
    level.select_option("all levels")
    tabs = view.get_by_role("tablist", name="Source of the lines")
    expect(tabs.get_by_role("tab")).to_have_text(["All", "0", "1"])
    tabs.get_by_role("tab", name="All").focus()
    nb.page.keyboard.press("End")
    nb.page.keyboard.press("Enter")
    expect(tabs.get_by_role("tab", name="rank 1")).to_have_attribute("aria-selected", "true")
    expect(lines).to_contain_text("step 190 of rank 1")
    expect(lines).not_to_contain_text("of rank 0")
    lines.focus()
    lines.press("Home")
    expect(lines).to_contain_text("step 0 of rank 1")
    expect(follow).to_have_attribute("aria-pressed", "false")
    lines.press("End")
    expect(follow).to_have_attribute("aria-pressed", "true")
    expect(view.get_by_role("button", name="Earlier lines")).to_have_attribute("aria-disabled", "true")
    with nb.page.expect_download(timeout=LIMIT_MS) as waiting:  # of the chosen rank
        view.get_by_role("button", name="Download the whole log").click()
    expect(view.locator(".doing")).to_have_text("the log is in the browser's downloads")
    assert waiting.value.suggested_filename.endswith("-rank-1.log")
    text = waiting.value.path().read_text()
    assert text.startswith("step 0 of rank 1\n") and "step 190 of rank 1\n" in text
    tabs.get_by_role("tab", name="All").click()


def check_the_model(nb: Notebook, view: Locator, folder: Path) -> None:
    with nb.page.expect_download(timeout=LIMIT_MS) as waiting:
        view.get_by_role("button", name="Download model").click()
    waiting.value.save_as(folder / "downloaded.pt")
    assert waiting.value.suggested_filename == "model.pt"
    expect(view.locator(".doing")).to_have_text("the model is in the browser's downloads")
    view.get_by_role("button", name="Save on this server…").click()
    place = view.get_by_role("textbox", name="Folder on this server for the model")
    expect(place).to_be_focused()
    place.fill(str(folder / "saved"))
    place.press("Enter")
    expect(view.locator(".doing")).to_contain_text("saved: 1 file", timeout=LIMIT_MS)
    heard = view.locator("xpath=following-sibling::*[@role='status']")  # updated at most once in 5 s
    expect(heard).to_contain_text("saved: 1 file", timeout=LIMIT_MS)
    expect(view.locator(".doing").locator("[role=status], [aria-live]")).to_have_count(0)
    for file in (folder / "downloaded.pt", folder / "saved/model.pt"):
        assert torch.equal(torch.load(file)["w"], torch.arange(5.0))


FAILING = """
%%torchrun -n 2 --name broken --view
import os, pathlib, time
from detrain_nb import log_metrics
rank = int(os.environ["RANK"])
for step in range(3000):
    print(f"line {{step}} " + "x" * 40)
for step in range(30):
    log_metrics(step, {{"{hostile}": 1.0, "loss": float("nan") if step > 20 else 1.0 / (step + 1)}})
print("{hostile} \\x1b[31mred\\x1b[0m \\x1b[2J\\u202e")
model = pathlib.Path("model{hostile}.pt")
if rank == 0:
    model.write_text("x")
    time.sleep(60)
while not model.exists():  # rank 0 has done all that is looked at
    time.sleep(0.02)
raise OSError(28, "No space left on device", "{hostile}")
"""


@pytest.fixture
def alerts(window: Window) -> Generator[list[str]]:
    """The messages of alerts while a test runs: a permanent listener would keep other tests from leaving the page."""
    found: list[str] = []

    def note(dialog: Dialog) -> None:
        found.append(dialog.message)
        dialog.dismiss()

    window.page.on("dialog", note)
    yield found
    window.page.remove_listener("dialog", note)


@pytest.mark.timeout(200)
def test_failed_job_leads_with_the_cause_and_shows_what_is_hostile_as_text(
    notebook: OpenNotebook,
    window: Window,
    alerts: list[str],
    tmp_path: Path,
    check_accessibility: Callable[[Locator], None],
) -> None:
    nb = notebook(LOAD.format(home=tmp_path / "state"), FAILING.format(hostile=HOSTILE))
    nb.run(0)
    nb.run(1)
    view = view_of(nb, 1)
    expect(state_of(view)).to_have_text("failed", timeout=LIMIT_MS)
    note = view.locator(".fail .note")
    expect(note).to_contain_text("rank 1 exited with code 1")
    expect(note).to_contain_text("To do: Free disk space on the node, then run it again.")
    expect(view.locator(".fail pre")).to_contain_text(f"OSError: [Errno 28] No space left on device: '{HOSTILE}'")
    expect(view.locator(".charts")).to_be_hidden()
    expect(
        view.get_by_role("list", name="Ranks of this machine").get_by_role("listitem").nth(1)
    ).to_have_accessible_name("rank 1: failed")
    view.get_by_role("button", name="Whole log").click()
    lines = view.get_by_role("group", name="Lines of the log")
    expect(lines).to_be_focused()
    expect(view.get_by_role("button", name="Earlier lines")).to_have_attribute("aria-disabled", "true")
    view.get_by_role("tab", name="rank 0").click()
    expect(lines).to_contain_text(HOSTILE)
    expect(lines).not_to_contain_text("line 2000 ")
    earlier = view.get_by_role("button", name="Earlier lines")
    expect(earlier).not_to_have_attribute("aria-disabled", "true")
    for _ in range(5):
        if earlier.get_attribute("aria-disabled") == "true":
            break
        count = view.locator(".st2 > span").first.inner_text()
        earlier.click()
        expect(view.locator(".st2 > span").first).not_to_have_text(count, timeout=LIMIT_MS)
    expect(view.locator(".st2 > span").first).to_have_text("3,001 lines")
    lines.press("Home")
    expect(lines).to_contain_text("line 0 ")
    view.get_by_role("button", name="Show curves").click()
    expect(view.locator(".charts .st")).to_have_text("nan since step 21")
    assert view.locator(".charts polyline").count() > 0, "what came before is drawn"
    expect(view.locator(".model")).to_contain_text(f"model{HOSTILE}.pt")
    check_accessibility(view)
    view.get_by_role("button", name="Hide curves").click()
    view.get_by_role("button", name="Hide logs").click()
    take_pictures(window, view, "failed", tmp_path)
    assert view.locator("img").count() == 0
    assert alerts == []
