"""What a user of JupyterLab sees of cells that run on ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from matplotlib.image import imread
from playwright.sync_api import expect

from ..testbed.nodes import home_with_hosts
from .pictures import are_for_docs, picture_path, shrink

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..testbed.fixtures import MakeTestbed
    from .conftest import Notebook, Window

    OpenNotebook = Callable[..., Notebook]

pytestmark = pytest.mark.timeout(240)  # the machine may be busy

START = "%load_ext detrain_nb\n%distributed start -n 2"
WAIT_FOR = """
def wait_for(what):
    while not os.path.exists(what):
        time.sleep(0.01)
"""


def say(nb: Notebook, what: str) -> None:
    """Make ``wait_for(what)`` return in the kernel and on the ranks, which all run in the notebook's folder."""
    (nb.path.parent / what).touch()


def stored_text(nb: Notebook, index: int) -> str:
    """Return all text of a cell's output in the notebook's file."""
    return "".join(output.get("text", "") for output in nb.save().cells[index].outputs)


@pytest.mark.slow
def test_lines_appear_whole_in_their_cell_while_it_runs_and_after(same_notebook: OpenNotebook) -> None:
    nb = same_notebook(
        START,
        f"""
%%distributed
import os, threading, time
{WAIT_FOR}
for i in range(200):
    os.write(1, f"line {{i}} ".encode())  # in two pieces: another rank's could come between them
    time.sleep(0.001)
    os.write(1, f"of rank {{rank}}\\n".encode())
def print_late():
    wait_for("the next cell runs")
    print("late line of rank", rank)
threading.Thread(target=print_late).start()
wait_for("all lines were seen")
""",
        f"""
import os, time
{WAIT_FOR}
wait_for("the late lines were seen")
""",
        "%%distributed\nprint('the last cell')",
    )
    nb.run(0)
    nb.start(1, 2, 3)
    live = nb.wait_for_text(1, r"\A(\[(\d)\] line \d+ of rank \2\n){400}\Z").splitlines()
    expect(nb.prompt(1)).to_have_text("[*]:")
    say(nb, "all lines were seen")
    nb.expect_end(1)
    settled = nb.wait_for_text(1, r"\A(\[0\] .*\n){200}(\[1\] .*\n){200}\Z").splitlines()
    say(nb, "the next cell runs")
    for rank in (0, 1):
        nb.wait_for_text(1, rf"^\[{rank}\] late line of rank {rank}$")
    expect(nb.prompt(2)).to_have_text("[*]:")
    say(nb, "the late lines were seen")
    nb.expect_end(3)

    by_rank = {rank: [f"[{rank}] line {i} of rank {rank}" for i in range(200)] for rank in (0, 1)}
    assert {rank: [line for line in live if line.startswith(f"[{rank}]")] for rank in (0, 1)} == by_rank
    assert settled == by_rank[0] + by_rank[1]
    assert len(nb.text(1).splitlines()) == 402
    assert [nb.text(2), nb.text(3)] == ["", "[0-1] the last cell\n"]


@pytest.mark.slow
def test_canonical_form_stands_once_below_the_cell_and_in_the_file(same_notebook: OpenNotebook) -> None:
    nb = same_notebook(
        START,
        f"""
%%distributed
import os, time
{WAIT_FOR}
print("before")
print("rank", rank)
wait_for("go on")
print("after")
torch.ones(2)
""",
    )
    nb.run(0)
    nb.start(1)
    for rank in (0, 1):
        nb.wait_for_text(1, rf"^\[{rank}\] rank {rank}$")
    assert sorted(nb.text(1).splitlines()) == ["[0] before", "[0] rank 0", "[1] before", "[1] rank 1"]
    say(nb, "go on")
    nb.expect_end(1)
    printed, value = "[0-1] before\n[0] rank 0\n[1] rank 1\n[0-1] after\n", "[0-1] tensor([1., 1.])"
    expect(nb.outputs(1)).to_have_count(2)
    assert nb.text(1) == f"{printed}{value}\n"
    stored = nb.save().cells[1].outputs
    assert [output.get("text") or output.data["text/plain"] for output in stored] == [printed, value]


@pytest.mark.slow
def test_bars_are_redrawn_in_place_a_line_per_rank(same_notebook: OpenNotebook) -> None:
    nb = same_notebook(
        START,
        f"""
%%distributed
import os, time
from tqdm import tqdm
{WAIT_FOR}
for step in tqdm(range(40), miniters=1, mininterval=0, bar_format="{{percentage:3.0f}}%|{{bar}}|"):
    time.sleep(0.01)
    if step == 20:
        wait_for("go on")
""",
    )
    nb.run(0)
    nb.start(1)
    nb.wait_for_text(1, r"\A\[0\]  50%\|.*\|\n\[1\]  50%\|.*\|\n\Z")
    say(nb, "go on")
    nb.expect_end(1)
    final = nb.wait_for_text(1, r"\A\[0-1\] 100%\|.*\|\n\Z")
    assert stored_text(nb, 1) == final


@pytest.mark.slow
def test_nested_bars_stay_below_the_lines_a_block_for_each_rank_and_are_no_errors(same_notebook: OpenNotebook) -> None:
    nb = same_notebook(
        START,
        f"""
%%distributed
import os, time, warnings
from tqdm.notebook import tqdm, trange
{WAIT_FOR}
form = dict(bar_format="{{desc}}{{n}}/{{total}}", mininterval=0)
for epoch in trange(2, desc="epochs ", **form):
    for step in trange(30, desc="steps ", leave=False, **form):
        if step % 10 == 0:
            tqdm.write(f"epoch {{epoch}} step {{step}}")
            time.sleep(0.2)
        if epoch == 1 and step == 15:
            wait_for("go on")
warnings.warn("careful")
""",
    )
    nb.run(0)
    nb.start(1)
    lines = r"(\[[01]\] epoch [01] step \d+\n){10}"
    nb.wait_for_text(1, rf"\A{lines}\[0\] epochs 1/2\n\[0\] steps 15/30\n\[1\] epochs 1/2\n\[1\] steps 15/30\n\Z")
    say(nb, "go on")
    nb.expect_end(1)
    steps = "".join(f"[0-1] epoch {epoch} step {step}\n" for epoch in (0, 1) for step in (0, 10, 20))
    nb.wait_for_text(1, rf"\A{re.escape(steps)}\[0-1\] epochs 2/2\n.*UserWarning: careful")
    printed, warned = nb.save().cells[1].outputs
    assert (printed.name, printed.text) == ("stdout", f"{steps}[0-1] epochs 2/2\n")
    assert (warned.name, "careful" in warned.text) == ("stderr", True)


@pytest.mark.slow
def test_figures_and_tables_are_shown_as_such(same_notebook: OpenNotebook) -> None:
    nb = same_notebook(
        START,
        """
%%distributed
import matplotlib.pyplot as plt
plt.plot([rank, 2, 1])
plt.show()
""",
        """
%%distributed
import pandas as pd
pd.DataFrame({"rank": [0, 1], "loss": [0.5, 0.25]})
""",
    )
    nb.run_all()
    figures = nb.outputs(1).locator("img")
    expect(figures).to_have_count(2)
    for figure in figures.all():
        expect(figure).to_have_js_property("complete", True)
        assert figure.evaluate("image => image.naturalWidth") > 300
    assert re.findall(r"\[\d\]", nb.text(1)) == ["[0]", "[1]"]
    expect(nb.outputs(2).locator("table th")).to_have_text(["", "rank", "loss", "0", "1"])
    assert "[0-1]" in nb.text(2)


@pytest.mark.slow
def test_error_of_a_rank_shows_its_line_and_stops_run_all(same_notebook: OpenNotebook) -> None:
    nb = same_notebook(
        START,
        """
%%distributed
batch = rank + 2
if batch == 3:
    raise ValueError(f"batch {batch} has no labels")
""",
        "print('never')",
    )
    nb.run_all()
    shown = nb.wait_for_text(1, "ValueError: batch 3 has no labels")
    assert "rank 1 on this machine" in shown
    number = nb.expect_end(1)
    assert f"cell {number}, line 4" in shown, "as the prompt and JupyterLab count"
    assert 'raise ValueError(f"batch {batch} has no labels")' in shown
    assert "site-packages" not in shown
    expect(nb.prompt(2)).to_have_text("[ ]:")
    assert nb.text(2) == ""


def test_stop_button_gives_the_prompt_back_and_variables_stay(same_notebook: OpenNotebook) -> None:
    nb = same_notebook(
        START,
        """
%%distributed
import time
kept = 7 * rank
print("it runs")
while True:
    time.sleep(0.1)
""",
        "%%distributed\nkept",
    )
    nb.run(0)
    nb.start(1)
    nb.wait_for_text(1, r"^\[1\] it runs$")
    nb.stop()
    nb.expect_end(1)
    assert "KeyboardInterrupt" in nb.text(1)
    nb.run(2)
    assert nb.text(2) == "[0] 0\n[1] 7\n"


@pytest.mark.slow
def test_rank_in_a_collective_is_named_while_it_is_waited_for_and_freed_by_stop(same_notebook: OpenNotebook) -> None:
    nb = same_notebook(
        START,
        "%distributed config hang=1",
        "%%distributed\nkept = rank\nif rank == 1:\n    dist.barrier()",
        "%%distributed\ndist.barrier()\nkept",
    )
    nb.run(0)
    nb.run(1)
    nb.start(2)
    nb.wait_for_text(2, r"^rank 1 waits in barrier #\d+ \(line 4\); rank 0 has ended the cell$")
    nb.stop()
    nb.expect_end(2)
    shown = nb.text(2)
    assert re.search(r"rank 1 waited in barrier #\d+ \(line 4\): freed", shown), shown
    assert "waits in" not in shown
    nb.run(3)
    assert nb.text(3) == "[0] 0\n[1] 1\n"


@pytest.mark.slow
def test_restart_and_run_all_gives_the_same_notebook(notebook: OpenNotebook) -> None:
    nb = notebook(f"{START} --fresh", "%%distributed\nassert 'x' not in globals()\nx = 2 * rank\nx")
    nb.run_all()
    first = [nb.text(0), nb.text(1)]
    assert first[1] == "[0] 0\n[1] 2\n"
    nb.restart_and_run_all()
    again = [nb.text(0), nb.text(1)]
    assert again[1] == first[1]
    assert "of this notebook is still running" in again[0]
    assert again[0].splitlines()[-1] == first[0].splitlines()[-1]


@pytest.mark.slow
def test_restarted_kernel_attaches_and_sees_what_it_missed(notebook: OpenNotebook) -> None:
    # the restart takes some time
    patient = "\nimport detrain_nb\ndetrain_nb.current_session().settings.stop_gap_s = 5.0"
    nb = notebook(
        START + patient,
        "%%distributed\nimport time\nfor i in range(60):\n    print('step', i); time.sleep(0.1)\nkept = rank",
        "%load_ext detrain_nb\n%distributed attach",
        "%%distributed\nkept",
    )
    nb.run(0)
    nb.start(1)
    nb.wait_for_text(1, r"^\[1\] step 3$")
    nb.restart()
    nb.run(2)
    for rank in (0, 1):
        nb.wait_for_text(2, rf"^\[{rank}\] step 59$")
    seen = nb.text(1) + nb.text(2)
    for rank in (0, 1):
        numbers = [int(number) for number in re.findall(rf"^\[{rank}\] step (\d+)$", seen, re.MULTILINE)]
        assert sorted(set(numbers)) == list(range(60)), "nothing is missing"
    nb.run(3)
    assert nb.text(3) == "[0] 0\n[1] 1\n"


@pytest.mark.slow
def test_status_is_a_table(same_notebook: OpenNotebook) -> None:
    nb = same_notebook(START, "%%distributed\n1 + 1", "%distributed status")
    nb.run_all()
    rows = nb.outputs(2).locator("table tr")
    expect(rows).to_have_count(3)
    expect(rows.nth(0).locator("th")).to_contain_text(["rank", "host", "pid", "device", "state"])
    for rank in (0, 1):
        expect(rows.nth(1 + rank).locator("td")).to_contain_text([str(rank), "", "", "cpu", "idle"])


# A click on an ipywidgets button waits for the running cell: ipykernel 7.4 handles it in the thread that published last
# on the button's comm, the main thread. Without that entry a sub-shell handles it, in a thread next to the cell's.
COUNTING_BUTTON = """
import ipywidgets
class LiveButton(ipywidgets.Button):
    def open(self):
        super().open()
        vars(self.comm).pop("_reply_subshell_id", None)
    def _send(self, *args, **kwargs):
        super()._send(*args, **kwargs)
        vars(self.comm).pop("_reply_subshell_id", None)
clicks, button, label = [], LiveButton(description="click"), ipywidgets.Label("0")
def count(_):
    clicks.append(1)
    label.value = str(len(clicks))
button.on_click(count)
ipywidgets.HBox([button, label])
"""
# Clicks repeatedly while a cell runs; returns how many clicks were handled meanwhile.
CLICK_WHILE_IT_RUNS = """async (widgetCell, runningCell) => {
  const cells = document.querySelectorAll('.jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook .jp-Cell');
  const button = cells[widgetCell].querySelector('button.widget-button');
  const label = cells[widgetCell].querySelector('.widget-label');
  const isRunning = () => cells[runningCell].querySelector('.jp-InputPrompt').textContent === '[*]:';
  let answered = 0;
  while (isRunning()) {
    const before = label.textContent;
    button.click();
    while (label.textContent === before) await new Promise(next => setTimeout(next, 2));
    if (isRunning()) answered += 1;
    await new Promise(next => setTimeout(next, 20));
  }
  return answered;
}"""
FLOOD = """
%%distributed
for i in range(100_000):
    print(f"line {i:5d} of rank {rank}, filled up to a length of sixty bytes.")
"""


def flood_line(rank: int, i: int) -> str:
    return f"[{rank}] line {i:5d} of rank {rank}, filled up to a length of sixty bytes."


@pytest.mark.slow
def test_flood_leaves_page_and_kernel_usable(notebook: OpenNotebook) -> None:
    nb = notebook("%load_ext detrain_nb\n%distributed start -n 4", COUNTING_BUTTON, FLOOD)
    nb.run(0)
    nb.run(1)
    expect(nb.cell(1).locator("button.widget-button")).to_be_visible()
    nb.start(2)
    assert nb.js(CLICK_WHILE_IT_RUNS, 1, 2) > 1, "clicks waited for the cell"
    nb.wait_for_text(2, r"^\[3\] line 99999 ")
    stored = stored_text(nb, 2)
    lines = stored.splitlines()
    assert nb.text(2) == stored
    assert len(lines) <= 5_000 + 4
    assert len(stored) <= 200_000 + 4 * 100  # plus the lines with the number of omitted lines
    for rank in range(4):
        mine = [line for line in lines if line.startswith(f"[{rank}]")]
        (cut,) = [index for index, line in enumerate(mine) if "more lines" in line]
        first, last = mine[:cut], mine[cut + 1 :]
        assert f"{100_000 - len(first) - len(last):,} more lines" in mine[cut]
        assert f"%distributed log --cell 3 --rank {rank}" in mine[cut]
        assert first == [flood_line(rank, i) for i in range(len(first))]
        assert last == [flood_line(rank, i) for i in range(100_000 - len(last), 100_000)]
        assert min(len(first), len(last)) > 100
    assert [line[:3] for line in lines] == sorted(line[:3] for line in lines)


@pytest.mark.slow
def test_log_gives_a_flood_again_whole(notebook: OpenNotebook) -> None:
    """Four times as many lines as the cell keeps; with more, a page takes ever longer."""
    nb = notebook(START, FLOOD.replace("100_000", "20_000"), "%distributed log --cell 2 --rank 1")
    nb.run_all()
    stored = nb.save().cells[2].outputs
    assert [output.output_type for output in stored] == ["stream"], stored[-1]
    assert stored[0].text.splitlines() == [flood_line(1, i) for i in range(20_000)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_ranks_of_hosts_are_started_seen_and_stopped_as_those_of_this_machine(
    notebook: OpenNotebook, make_testbed: MakeTestbed, tmp_path: Path
) -> None:
    home = home_with_hosts(make_testbed, tmp_path)
    nb = notebook(
        f"import os\nos.environ['HOME'] = {str(home)!r}\n%load_ext detrain_nb",
        "%distributed doctor --nodes gpu1,gpu2",
        "%distributed start --nodes gpu1,gpu2",
        "%%distributed\nx = torch.ones(2) * rank\nprint('rank', rank)\ndist.all_reduce(x)\nx",
        "%%distributed\nprint('in')\nif rank == 1:\n    dist.recv(x, 0)",
        "%distributed status",
        "%distributed stop",
    )
    for index in range(3):
        nb.run(index)
    assert all(host in nb.text(1) for host in ("gpu1", "gpu2"))
    assert nb.outputs(1).locator("table").count() >= 1
    nb.run(3)
    assert nb.text(3).splitlines() == ["[gpu1:0] rank 0", "[gpu2:1] rank 1", "[0-1] tensor([1., 1.])"]
    nb.start(4)
    nb.wait_for_text(4, r"^\[gpu2:1\] in$")
    nb.stop()
    nb.wait_for_text(4, r"rank 1 waited in recv \(line 4\): freed")
    nb.run(5)
    assert nb.outputs(5).locator("tbody").count() == 2, "the ranks of each host stand together"
    assert "collectives time out after 600 s" in nb.text(5)
    nb.run(6)


CELLS_OF_THE_PICTURE = (
    "%load_ext detrain_nb",
    """
%%distributed -n 2
x = torch.ones(4) * rank
dist.all_reduce(x)
x
""",
    """
%%distributed
from torch import nn
model = nn.parallel.DistributedDataParallel(nn.Linear(784, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for step in range(1, 1001):
    images = torch.randn(4096, 784)  # every rank has its own batch
    loss = nn.functional.cross_entropy(model(images), images[:, :10].argmax(1))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 10 == 0:
        print(f"step {step}  loss {loss:.3f}")
""",
)


@pytest.mark.slow
def test_picture_of_a_cell_on_two_ranks(sharp_window: Window, notebook: OpenNotebook, tmp_path: Path) -> None:
    nb = notebook(*CELLS_OF_THE_PICTURE, "", "", window=sharp_window)
    nb.run(0)
    nb.run(1)
    nb.start(2)
    nb.select(4)
    for rank in (0, 1):
        nb.wait_for_text(2, rf"^\[{rank}\] step 20 ", limit_s=60)
    path = picture_path("cell", tmp_path)
    nb.take_picture(path, last=2)
    if are_for_docs():
        shrink(path)
    assert nb.text(1) == "[0-1] tensor([1., 1., 1., 1.])\n"
    expect(nb.prompt(2)).to_have_text("[*]:")

    picture = imread(path)
    height, width, _ = picture.shape
    assert 1400 < width < 2000  # sharp, and legible where a README is 800 to 1000 points wide
    assert 600 < height < 1600
    is_dark = picture[:, :, :3].max(axis=2) < 0.5
    assert 0.005 < is_dark.mean() < 0.2  # letters
    assert is_dark.any(axis=1).mean() > 0.3  # from top to bottom
