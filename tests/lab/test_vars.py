"""The view of variables in a page: filtered, sorted, opened by keyboard, and clear about a rank that is busy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Locator, expect

from .narrow import require_fits
from .notebook import Notebook
from .pictures import take_picture
from .window import Window, set_theme

DEFINE = """
%%distributed
import os, time
batch_size, epoch = 32, 4
logits = torch.linspace(-9.134, 8.772, 32 * 64).reshape(32, 64).sin() * 4
logits[2, 3] = torch.nan if rank == 1 else 0.5
losses = [4.71 - rank, 4.66, 4.58, 4.5]
vocabulary = {"the": 0, "of": 1, "<b>bold</b>": 2}
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU())
if rank == 0:
    sampler = "only here"
class Tokenizer:
    pass
tokenizer = Tokenizer()
"""
RUN = """
%%distributed -r 1
while not os.path.exists("go"):
    time.sleep(0.01)
late = 1
"""
MANY = "%%distributed\nfor number in range(500): globals()[f'name_{number:03}'] = number"
NODES = "from detrain_nb import spec, widgets\nwidgets.nodes([spec.Node(host='localhost')])"
NAMES = ["batch_size", "epoch", "logits", "losses", "model", "sampler", "tokenizer", "Tokenizer", "vocabulary"]
pytestmark = pytest.mark.timeout(180)


_CLICK_AT_THE_BOTTOM = """row => {
  const all = row.closest(".vars-all"), bottom = (each) => each.getBoundingClientRect().bottom;
  all.scrollTop += bottom(row.closest("tr")) - bottom(all);
  row.click();
}"""


def names(view: Locator) -> list[str]:
    return view.locator(".name").all_inner_texts()


@pytest.mark.slow
def test_variables_are_filtered_sorted_and_looked_into(
    notebook: Callable[..., Notebook],
    window: Window,
    check_accessibility: Callable[[Locator], None],
    tmp_path: Path,
) -> None:
    nb = notebook("%load_ext detrain_nb\n%distributed start -n 3", DEFINE, "%distributed vars", RUN, MANY, NODES)
    for index in range(3):
        nb.run(index)
    view = nb.cell(2).locator(".dt")
    expect(view.locator(".name")).to_have_count(len(NAMES))
    assert names(view) == NAMES
    _filter_and_sort(view)
    _look_by_keyboard(nb, view)
    check_accessibility(view)
    for name in ("dark", "light"):
        set_theme(window, dark=name == "dark")
        assert take_picture(view, f"vars-open-{name}", tmp_path).stat().st_size > 5000
    _is_honest_while_a_rank_is_busy(nb, view, tmp_path, window, check_accessibility)
    _fits_a_narrow_page(nb, view)
    nb.run(4)  # hundreds of names do not push the rest of the notebook far down
    expect(view.locator(".name")).to_have_count(len(NAMES) + 502)
    assert view.evaluate("view => view.clientHeight") < 800
    view.get_by_role("tab").first.press("Escape")
    row = view.get_by_role("button", name="name_020: preview")
    row.evaluate(_CLICK_AT_THE_BOTTOM)
    expect(view.get_by_role("tabpanel")).to_be_in_viewport(ratio=1)
    expect(view.get_by_role("button", name="Copy %pull")).to_be_visible()
    nb.page.keyboard.press("Escape")
    view.get_by_role("button", name="tokenizer: preview", exact=True).click()
    expect(view.get_by_role("tabpanel")).to_contain_text("it would run code of the class")
    expect(view.get_by_role("button", name="Copy %pull")).to_have_count(0)
    view.get_by_label("Filter names and types").fill("name_49")
    expect(view.get_by_text("10 of 511 shown")).to_be_visible()
    nb.run(5)  # the style of one view does not affect another
    name = nb.cell(5).locator(".node .twist").get_by_text("localhost")
    assert name.evaluate("name => name.clientWidth") > 30


def _filter_and_sort(view: Locator) -> None:
    search = view.get_by_label("Filter names and types")
    search.fill("TENSOR")
    expect(view.locator(".name")).to_have_text(["logits"])
    search.fill("nothing")
    expect(view.get_by_text("No variable matches the filter.")).to_be_visible()
    search.fill("")
    only = view.get_by_role("group", name="Only")
    only.get_by_role("button", name=re.compile("same")).click()
    expect(view.locator(".name")).to_have_text(["batch_size", "epoch", "vocabulary"])
    expect(only.get_by_role("button", name=re.compile("same"))).to_have_attribute("aria-pressed", "true")
    only.get_by_role("button", name="All 9").click()
    view.get_by_role("button", name="Bytes").click()
    view.get_by_role("button", name=re.compile("Bytes")).click()
    expect(view.locator(".name").first).to_have_text("model")
    expect(view.get_by_role("columnheader", name=re.compile("Bytes"))).to_have_attribute("aria-sort", "descending")
    view.get_by_role("button", name="Name").click()
    assert names(view) == NAMES


def _look_by_keyboard(nb: Notebook, view: Locator) -> None:
    twist = view.get_by_role("button", name="logits: preview")
    view.get_by_role("button", name="batch_size: preview").focus()
    nb.page.keyboard.press("ArrowDown")
    nb.page.keyboard.press("ArrowDown")
    expect(twist).to_be_focused()
    nb.page.keyboard.press("Enter")
    expect(twist).to_have_attribute("aria-expanded", "true")
    panel = view.get_by_role("tabpanel", name="logits on rank 0")
    expect(panel).to_contain_text(
        re.compile(r"First 5 x 6 of 32 x 64, from rank 0 at \d\d:\d\d:\d\d\. The rest stays on the rank\.")
    )
    view.get_by_role("tab", name="0").focus()
    nb.page.keyboard.press("ArrowRight")
    nb.page.keyboard.press("Enter")
    panel = view.get_by_role("tabpanel", name="logits on rank 1")
    expect(panel).to_contain_text("1 nan on rank 1")
    expect(panel.locator("td.bad")).to_have_text("nan")
    expect(panel.locator("td.bad")).to_have_css("text-align", "right")
    expect(panel.locator(".sums .x")).to_have_text(re.compile("^1:[0-9a-f]{4}$"))
    expect(panel.get_by_role("definition")).to_have_count(4)
    expect(panel.locator(".kv")).to_have_text(re.compile(r"^min-4\.\d{4}max4\.\d{4}mean"))
    expect(panel.get_by_role("img", name=re.compile("Histogram from -"))).to_be_visible()
    nb.page.keyboard.press("Escape")
    expect(twist).to_be_focused()
    expect(view.get_by_role("tabpanel")).to_have_count(0)
    view.get_by_role("cell", name="dict, 3").click()
    expect(view.get_by_role("tabpanel")).to_contain_text("<b>bold</b>")
    expect(view.get_by_role("tabpanel").locator("td").last).to_have_css("text-align", "left")
    view.get_by_role("cell", name="dict, 3").click()
    twist.click()
    view.get_by_role("tab", name="1").click()
    expect(view.get_by_role("tabpanel", name="logits on rank 1")).to_contain_text("1 nan on rank 1")


def _is_honest_while_a_rank_is_busy(
    nb: Notebook, view: Locator, tmp_path: Path, window: Window, check_accessibility: Callable[[Locator], None]
) -> None:
    nb.start(3)
    view.get_by_role("tab", name="0").click()
    expect(view.get_by_role("tabpanel", name="logits on rank 0")).to_contain_text("from rank 0 at ")
    expect(view.locator(".head")).to_contain_text(re.compile(r"rank 1 runs cell \[\d+\]"))
    view.get_by_role("button", name="Refresh").click()
    expect(view.locator(".notes")).to_have_text(re.compile(r"^rank 1 is busy: running cell \d+$"))
    expect(view.get_by_text("9 names on 2 ranks")).to_be_visible()
    expect(view.get_by_role("tab")).to_have_text(["0", "2"])
    for name in ("dark", "light"):
        set_theme(window, dark=name == "dark")
        assert take_picture(view, f"vars-busy-{name}", tmp_path).stat().st_size > 5000
    check_accessibility(view)
    twist = view.get_by_role("button", name="logits: preview")
    twist.focus()
    (nb.path.parent / "go").touch()
    expect(view.locator(".name")).to_have_count(len(NAMES) + 1)  # the view reloads by itself
    expect(view.get_by_role("row", name=re.compile("^logits"))).to_contain_text("differs on 1")
    expect(twist).to_be_focused()  # although its row has changed
    expect(view.get_by_role("row", name=re.compile("^late"))).to_contain_text("only on 1")
    expect(view.locator(".notes")).to_have_text("")


def _fits_a_narrow_page(nb: Notebook, view: Locator) -> None:
    view.evaluate("view => { view.style.width = '420px'; }")
    expect(view.get_by_role("columnheader", name="Dtype")).to_be_hidden()
    require_fits(view)
    saved = nb.save().cells[2].outputs[1].data
    assert "= same on 3" in saved["text/plain"] and "<table>" in saved["text/html"]
