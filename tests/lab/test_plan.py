"""The view of a plan, in a kernel without torch: its numbers, its pictures, and its keys."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from playwright.sync_api import Locator, expect
from torch import nn

from detrain_nb import parallel as par

from ..parallel.models import GPT
from .notebook import Notebook
from .pictures import take_picture
from .window import Window, set_theme

pytestmark = pytest.mark.timeout(240)  # the machine may be busy

OpenNotebook = Callable[..., Notebook]

SHOW = "import sys; sys.modules['torch'] = None\nfrom detrain_nb import widgets\nview = widgets.plan('plan.json'); view"
# Finds elements that exceed the edge of the view, except layer names and the contents of lanes, which are cut off.
TOO_WIDE = """view => [...view.querySelectorAll("*")].filter((each) => !each.closest(".lane, .n")
  && each.getBoundingClientRect().right > view.getBoundingClientRect().right + 1).map((each) => each.outerHTML)"""
HOSTILE = "<img src=x onerror=alert(1)>"
TOKENS = torch.empty(4, 16, dtype=torch.long, device="meta")


@cache
def small() -> dict[str, Any]:
    """Describe twelve blocks in four stages, with measurements of a dry run."""
    with torch.device("meta"):
        model = GPT(vocabulary=32000, width=768, layers=12)
    nodes = [par.StageNode(f"gpu{node}:{number}", memory_bytes=24e9) for node in (1, 2) for number in (0, 1)]
    return par.describe_plan(
        model, {"pp": 4, "dp_shard": 2}, example_inputs=TOKENS, nodes=nodes, num_microbatches=8, compare=["GPipe"]
    )


@cache
def large() -> dict[str, Any]:
    """Describe a hundred layers in twelve stages, two on each rank, with split backward passes."""
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(100)))
    found = par.partition(par.profile(model, torch.empty(8, 64, device="meta")), 12, num_microbatches=12)
    line = par.timeline("InterleavedZeroBubble", 6, 12, stage_s=found.stage_s)
    return {**found.to_dict(), "timelines": line.to_dict()["timelines"]}


def show(notebook: OpenNotebook, plan: dict[str, Any], *more: str, **options: Any) -> tuple[Notebook, Locator]:
    nb = notebook(SHOW, *more, **options)
    nb.path.with_name("plan.json").write_text(json.dumps(plan), encoding="utf-8")
    nb.run(0)
    view = nb.cell(0).locator(".dt")
    expect(view.get_by_role("heading", name="Plan")).to_be_visible()
    return nb, view


def press(slider: Locator, *keys: str) -> str:
    """Press keys on the slider; return its text."""
    slider.focus()
    for key in keys:
        slider.page.keyboard.press(key)
    return str(slider.page.evaluate("() => document.activeElement.getAttribute('aria-valuetext')"))


def test_plan_is_read_by_keyboard_and_settles_to_plain_html(notebook: OpenNotebook) -> None:
    plan = {**small(), "notes": [*small()["notes"], HOSTILE]}
    nb, view = show(notebook, plan, "view.settle(); view", "sys.modules['torch'] is None")
    expect(view.get_by_text(HOSTILE)).to_be_visible()
    expect(nb.cell(0).locator("img")).to_have_count(0)
    _check_numbers(view)
    _check_layers(view)
    _check_timeline(view)
    stored = nb.save().cells[0].outputs[1].data
    assert "Bubble: " in stored["text/plain"] and "as it was when this cell ran" in stored["text/plain"]
    nb.run(1)
    settled = nb.save().cells[0].outputs[0].data
    assert "application/vnd.jupyter.widget-view+json" not in settled
    assert f"Imbalance, slowest / mean: {_imbalance():.2f}" in settled["text/html"]
    assert settled["text/html"].count("<tr>") == 2 * (1 + 4)
    assert not re.search(r"class=|<script|style=(?!'text-align:left')|<img", settled["text/html"])
    nb.run(2)
    assert nb.text(2).strip() == "True"


@pytest.mark.slow
def test_nobody_is_kept_out_of_a_plan(notebook: OpenNotebook, check_accessibility: Callable[[Locator], None]) -> None:
    for plan in (small(), large()):
        _, view = show(notebook, plan)
        check_accessibility(view)
    view.get_by_role("radio", name="Table").click()
    press(view.get_by_role("slider", name=re.compile("^rank 0: ")), "End")
    check_accessibility(view)


def _imbalance() -> float:
    times = [stage["time_s"] for stage in small()["costs"]["stages"]]
    return max(times) * len(times) / sum(times)


def _check_numbers(view: Locator) -> None:
    """Check that the shown numbers follow from the plan's own numbers."""
    stages, lanes = small()["costs"]["stages"], small()["timelines"][0]["ranks"]
    end_s = max(lane["end_s"][-1] for lane in lanes)
    busy_s = sum(end - begin for lane in lanes for begin, end in zip(lane["begin_s"], lane["end_s"]))
    parts = ("parameter", "gradient", "optimizer", "activation", "working")
    most = max(sum(row[f"{part}_bytes"] for part in parts) for row in small()["memory"]["rows"])
    expect(view.locator(".head")).to_have_text(
        re.compile("GPT, .* parameters .*pp 4, dp_shard 2, 1F1B, 8 microbatches")
    )
    expect(view.locator(".facts .big")).to_have_text(
        [
            f"{_imbalance():.2f}",
            f"{100 * (1 - busy_s / end_s / 4):.0f} %",
            f"{1e3 * end_s:.0f} ms",
            f"{most / 1e6:.0f} MB",
        ]
    )
    rows = view.get_by_role("table", name="Stages").get_by_role("row")
    expect(rows).to_have_count(5)
    slowest = max(range(4), key=lambda stage: stages[stage]["time_s"])
    expect(rows.nth(slowest + 1)).to_contain_text("slowest")
    expect(rows.nth(1)).to_contain_text("stage 0 gpu1:0")
    expect(rows.nth(4)).to_contain_text("to head")
    expect(view.get_by_role("table", name="Memory of ranks").get_by_role("row")).to_have_count(5)
    expect(view.get_by_role("list", name="Notes")).to_contain_text("times are estimated")


def _check_layers(view: Locator) -> None:
    layers, said = view.get_by_role("slider", name="Layers"), view.locator(".said").first
    names = [layer["name"] for layer in small()["costs"]["layers"]]
    assert press(layers, "Home").startswith("the start, stage 0: ")
    assert press(layers, "ArrowRight", "ArrowRight").startswith("h.1, stage 0: ")
    assert press(layers, "End", "ArrowRight").startswith("head, stage 3: ")
    expect(said).to_have_text(re.compile("^head, stage 3: .*parameters with their state"))
    expect(layers).to_have_attribute("aria-valuemax", str(len(names) - 1))
    view.locator(".col").nth(4).hover()
    expect(said).to_have_text(re.compile(f"^{re.escape(names[4])}, stage 1: "))
    view.get_by_role("radio", name="Bars").focus()
    view.page.keyboard.press("ArrowRight")
    expect(view.get_by_role("radio", name="Table")).to_have_attribute("aria-checked", "true")
    expect(view.get_by_role("table", name="Layers").get_by_role("row")).to_have_count(len(names) + 1)
    expect(layers).to_be_hidden()


def _check_timeline(view: Locator) -> None:
    first = view.get_by_role("slider", name=re.compile("^stage 0: "))
    assert re.match(r"stage 0: forward of microbatch 0, 0 .* to ", press(first, "Home"))
    assert press(first, "End").startswith("stage 0: backward of microbatch 7, ")
    expect(view.locator(".said").last).to_have_text(re.compile("^stage 0: backward of microbatch 7, "))
    assert press(first, "ArrowDown").startswith("stage 1: ")
    assert press(view.get_by_role("slider", name=re.compile("^stage 1: ")), "ArrowUp").startswith("stage 0: ")
    expect(view.locator(".lane[tabindex='0']")).to_have_count(1)
    view.page.keyboard.press("Tab")
    expect(view.locator(".lane:focus")).to_have_count(0)
    schedule = view.get_by_label("Schedule")
    expect(schedule.locator("option")).to_have_count(3)
    schedule.select_option(index=2)
    expect(view.get_by_role("group", name="Timeline: GPipe, 8 microbatches")).to_be_visible()
    expect(view.locator(".lane svg")).to_have_count(4)


@pytest.mark.slow
def test_plans_are_legible_in_both_themes_with_a_hundred_layers_too(
    narrow_window: Window, notebook: OpenNotebook, tmp_path: Path
) -> None:
    """Stages have their numbers, nothing is wider than the view, and the view does not grow with the plan."""
    narrow_window.page.set_viewport_size({"width": 880, "height": 1700})
    for name, plan in (("small", small()), ("large", large())):
        _, view = show(notebook, plan, window=narrow_window)
        for dark in (True, False):
            _look_at(narrow_window, view, f"plan-{name}-{'dark' if dark else 'light'}", tmp_path, dark=dark)
    expect(view.locator(".strip > div")).to_have_text([re.compile(rf"^{stage}$") for stage in range(12)])
    expect(view.locator(".lane svg")).to_have_count(6)
    last = view.get_by_role("slider", name=re.compile("^rank 5: "))
    assert re.match(r"rank 5: backward, for weights of microbatch \d+ through stage \d+, ", press(last, "End"))
    pairs = sum((stage["num_layers"] + 1) // 2 for stage in large()["costs"]["stages"])
    for width, count in ((880, 100), (540, pairs)):
        narrow_window.page.set_viewport_size({"width": width, "height": 1000})
        expect(view.locator(".col")).to_have_count(count)
        assert view.evaluate(TOO_WIDE) == []
        box = view.bounding_box()
        assert box and box["height"] < 1200
    expect(view.locator(".grouped")).to_have_text("a bar is the mean of up to 2 layers")


def _look_at(window: Window, view: Locator, name: str, folder: Path, *, dark: bool) -> None:
    set_theme(window, dark=dark)
    expect(view.locator(".lane svg").first).to_be_visible()
    picture = imread(take_picture(view, name, folder))[:, :, :3]
    assert (picture.mean() < 0.5) == dark
    assert picture.std() > 0.1
