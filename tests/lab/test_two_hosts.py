"""A pipeline from nothing to its model, by typing and clicking alone, on two hosts that are reached over SSH."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Locator, expect

from ..testbed.fixtures import MakeTestbed
from ..testbed.nodes import home_with_hosts
from .console_steps import add_node, begin_pipeline, type_script
from .notebook import Notebook
from .pictures import take_picture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

OpenNotebook = Callable[..., Notebook]
LIMIT_MS = 90_000  # for a job on two hosts; the machine may be busy
BEGIN = """
import os
os.environ["HOME"], os.environ["XDG_STATE_HOME"] = r"{home}", r"{home}/state"
%load_ext detrain_nb
"""
SCRIPT = """
import pathlib, time
import torch, torch.distributed as dist
from detrain_nb import job_spec, log_metrics

steps = job_spec().training.steps
dist.init_process_group("gloo")
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
begun = pathlib.Path("/tmp/begun")  # each host has its own
is_again = begun.exists()
begun.touch()
for step in range(100 if is_again else steps):
    inputs = torch.randn(16, 4)
    loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log_metrics(step, loss=loss.item())
    print(f"step {step} of rank {rank}", flush=True)
    time.sleep(0.02)
if rank == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
"""


def test_pipeline_is_made_run_stopped_run_again_and_its_model_loaded(
    notebook: OpenNotebook, make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    home = home_with_hosts(make_testbed, tmp_path)
    nb = notebook(BEGIN.format(home=home), "%pipeline")
    nb.run_all()
    console = nb.cell(1).locator(".dt").first
    begin_pipeline(console, "two")
    console.get_by_label("Steps optional", exact=True).fill("20000")  # more than fit into the time: the job is stopped
    console.get_by_role("button", name="Next: Nodes").click()
    for host in ("gpu1", "gpu2"):
        add_node(console, host, ranks=1)
    console.get_by_role("button", name="Next: Source").click()
    type_script(console, SCRIPT)
    console.get_by_role("button", name="Next: Review").click()
    expect(console.locator(".plan")).to_contain_text("rank 1")
    console.get_by_role("button", name="Start on 2 nodes").click()
    expect(console.get_by_text("starting two: the job is running")).to_be_visible(timeout=LIMIT_MS)
    console.get_by_role("button", name="Show job").click()

    # the job appears under the console and grows there
    view = nb.cell(1).locator(".dt-shown .dt-job")
    expect(view.locator(".head .st")).to_have_text("running", timeout=LIMIT_MS)
    line = nb.cell(1).locator(".dt-shown .cmdline")
    expect(line).to_have_text(f"%job view {view.locator('.id').inner_text()}")
    check_what_grows(view)
    take_picture(nb.cell(1).locator(".dt-shown"), "console-job", tmp_path, is_for_docs=False)

    # a reloaded page still shows it
    nb.save()
    nb.reload()
    view = nb.cell(1).locator(".dt-shown .dt-job")
    expect(view.get_by_role("group", name="Lines of the log")).to_contain_text(re.compile(r"step \d+ of rank 0"))
    view.get_by_role("button", name="Stop", exact=True).click()
    expect(view.locator(".head .st")).to_have_text("stopped", timeout=LIMIT_MS)
    before = view.locator(".id").inner_text()
    view.get_by_role("button", name="Run again").click()
    expect(view.locator(".id")).not_to_have_text(before, timeout=LIMIT_MS)
    expect(line).to_have_text(f"%job view {view.locator('.id').inner_text()}")
    expect(view.locator(".head .st")).to_have_text("succeeded", timeout=LIMIT_MS)
    console.get_by_role("button", name="My Pipelines").click()
    expect(console.locator("tbody tr")).to_contain_text("succeeded", timeout=LIMIT_MS)  # the list updates itself
    with nb.page.expect_download(timeout=LIMIT_MS) as waiting:
        view.get_by_role("button", name="Download model").click()
    waiting.value.save_as(tmp_path / "model.pt")
    torch.nn.Linear(4, 1).load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))


def check_what_grows(view: Locator) -> None:
    """Check the curve of the loss, and the log of each rank on its host."""
    curve, lines = view.locator(".charts polyline").first, view.get_by_role("group", name="Lines of the log")
    expect(curve).to_be_visible(timeout=LIMIT_MS)
    slider = view.get_by_role("slider", name="Loss by step")
    last_step = slider.get_attribute("aria-valuenow") or ""
    for node in ("gpu1", "gpu2"):
        expect(view.get_by_role("list", name=f"Ranks of {node}").get_by_role("listitem")).to_have_count(1)
    for rank in (0, 1):
        view.get_by_role("tab", name=f"gpu{rank + 1} rank {rank}").click()
        expect(lines.locator(".ln").last).to_contain_text(re.compile(rf"step \d+ of rank {rank}$"))
        last = lines.locator(".ln").last.text_content() or ""
        expect(lines.locator(".ln").last).not_to_have_text(last)
        expect(lines).not_to_contain_text(f"of rank {1 - rank}")
    expect(slider).not_to_have_attribute("aria-valuenow", last_step)
