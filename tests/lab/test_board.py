"""The board in JupyterLab: two real ranks that run, wait, die and are stopped; and 64 synthetic ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import expect

from .pictures import take_picture
from .window import set_theme

if TYPE_CHECKING:
    from collections.abc import Callable

    from playwright.sync_api import Locator

    from .notebook import Notebook
    from .window import Window

    OpenNotebook = Callable[..., Notebook]

pytestmark = pytest.mark.timeout(240)  # the machine may be busy

TESTS = Path(__file__).resolve().parents[2]
START = "%load_ext detrain_nb\n%distributed start -n 2"
SETUP = """%%distributed
import os, pathlib, signal, time
from detrain_nb import log_metrics
def wait_for(path):
    while not pathlib.Path(path).exists():
        time.sleep(0.01)
"""
PRINTING = """%%distributed --quiet
step = 0
while True:
    for line in range(1000):
        print("step", step, "of rank", rank)
        step += 1
    log_metrics(step=step, loss=1.0 / step)
    time.sleep(0.05)
"""
HANGING = """%%distributed
if rank == 1:
    wait_for("go on")
dist.all_reduce(torch.ones(2))
"""
DYING = """%%distributed
if rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
dist.barrier()
"""

CALM = """%%distributed
import time
from detrain_nb import log_metrics
for step in range(30):
    log_metrics(step=step)
    time.sleep(0.1)
print("trained", step)
"""


def tile(board: Locator, rank: int) -> Locator:
    return board.locator(f".tile[data-rank='{rank}']")


def focused_rank(nb: Notebook) -> str | None:
    return nb.page.evaluate("() => document.activeElement.dataset.rank ?? null")  # type: ignore[no-any-return]


@pytest.mark.slow
def test_board_follows_two_ranks_that_run_wait_die_and_are_stopped(
    narrow_window: Window, notebook: OpenNotebook, tmp_path: Path
) -> None:
    cells = [SETUP, PRINTING, HANGING, DYING, "%distributed board", CALM, "%distributed stop"]
    nb = notebook(START, "%distributed board", *cells, window=narrow_window)
    nb.run(0)
    nb.run(1)
    board = nb.cell(1).locator(".dt")
    check_idle(board)
    nb.run(2)
    nb.start(3)
    check_running(nb, board)
    many = re.compile(r"step ([5-9]\d{4}|\d{6,}) of rank 0")  # 100,000 lines from both ranks
    expect(tile(board, 0)).to_contain_text(many, timeout=60_000)
    nb.save()
    board.get_by_role("button", name="Stop cell").click()
    expect(nb.prompt(3)).to_have_text("[4]:")
    expect(board.get_by_text("all ranks stopped and kept their variables")).to_be_visible()
    nb.start(4)
    check_hang(nb, board, tmp_path)
    nb.run(5)
    check_death(board)
    check_end(nb)
    take_pictures(narrow_window, nb.outputs(6).first, "settled", tmp_path)


def check_idle(board: Locator) -> None:
    """An idle board is one line, which can be opened."""
    expect(board.get_by_text("2 ranks")).to_be_visible()
    expect(tile(board, 0)).to_be_hidden()
    board.get_by_role("button", name="Show ranks").click()
    expect(tile(board, 0)).to_contain_text("idle")
    board.get_by_role("button", name="Hide ranks").click()
    expect(tile(board, 0)).to_be_hidden()
    expect(board.get_by_role("button", name="Stop cell")).to_be_hidden()


def check_running(nb: Notebook, board: Locator) -> None:
    """Check all entries of a tile, its pane, and the keys."""
    expect(board.get_by_text(re.compile(r"cell \[4\], 0:\d\d"))).to_be_visible()
    first = tile(board, 0)
    expect(first).to_contain_text("running")
    expect(first).to_contain_text(re.compile(r"line \d: "))
    expect(first).to_contain_text(re.compile(r"CPU\d+ %mem\d+ MB"))
    expect(first).to_contain_text(re.compile(r"[\d,.]+ /s"))
    expect(first).to_contain_text(re.compile(r"step \d+ of rank 0"))
    expect(first.locator("polyline")).to_have_attribute("points", re.compile(r"\d"))
    first.focus()
    nb.page.keyboard.press("ArrowRight")
    assert focused_rank(nb) == "1"
    nb.page.keyboard.press("Home")
    assert focused_rank(nb) == "0"
    nb.page.keyboard.press("End")
    nb.page.keyboard.press("Enter")
    pane = board.get_by_role("region", name="rank 1")
    expect(pane.locator("pre")).to_contain_text(re.compile(r"(step \d+ of rank 1\n){50}"))
    pane.get_by_role("tab", name="Output").focus()
    nb.page.keyboard.press("ArrowRight")
    expect(pane.locator("pre")).to_contain_text(re.compile(r"cell \[4\].*\n(.*\n)*<cell 4>:\d"))
    nb.page.keyboard.press("Escape")
    expect(pane).to_be_hidden()
    assert focused_rank(nb) == "1"
    check_densities(nb, board)
    expect(nb.prompt(3)).to_have_text("[*]:")


def check_densities(nb: Notebook, board: Locator) -> None:
    choice = board.get_by_role("radiogroup", name="Density")
    choice.get_by_role("radio", name="Tiles").focus()
    nb.page.keyboard.press("ArrowRight")
    expect(board.get_by_role("button", name=re.compile("rank 1, running, memory"))).to_be_visible()
    nb.page.keyboard.press("ArrowRight")
    expect(board.get_by_role("table").get_by_role("row")).to_have_count(3)
    nb.page.keyboard.press("Home")
    expect(tile(board, 1)).to_be_visible()
    filters = board.get_by_role("group", name="Show ranks that are")
    filters.get_by_role("button", name="2 running").click()
    expect(tile(board, 1)).to_be_visible()
    filters.get_by_role("button", name="All 2").click()


def check_hang(nb: Notebook, board: Locator, folder: Path) -> None:
    """Check which rank waits for which; interrupting one frees none. A reloaded page shows it, and stops the cell."""
    expect(tile(board, 0)).to_contain_text("waits")
    expect(tile(board, 0)).to_contain_text(re.compile(r"all_reduce.* for rank 1"))
    expect(tile(board, 1)).to_contain_text("awaited")
    expect(board.get_by_text(re.compile("rank 0 waits in all_reduce"))).to_be_visible()
    board.get_by_role("button", name="Stack of rank 1").click()
    expect(board.get_by_role("region", name="rank 1").locator("pre")).to_contain_text("wait_for")
    take_pictures(nb.window, board, "run", folder)
    board.get_by_role("button", name="Interrupt rank 1").click()
    expect(board.get_by_text("KeyboardInterrupt sent to rank 1")).to_be_visible()
    expect(tile(board, 1)).to_contain_text("has ended the cell")
    nb.save()
    nb.reload()
    expect(tile(board, 1)).to_contain_text("has ended the cell")
    board.get_by_role("button", name="Stop cell").first.click()
    expect(board.get_by_text(re.compile(r"idle since .* cell \[5\] failed or was stopped after"))).to_be_visible()
    nb.wait_for_answer()


def check_death(board: Locator) -> None:
    expect(tile(board, 1)).to_have_class(re.compile(r"is-bad loud"))
    expect(tile(board, 1)).to_contain_text("ended with signal 9 (SIGKILL)")
    expect(tile(board, 1)).to_contain_text("replaced by a fresh rank without its variables")
    expect(board.get_by_text(re.compile(r"rank 1 ended with signal 9"))).to_be_visible()
    board.get_by_role("button", name="Replay on rank 1").click()
    expect(board.get_by_text(re.compile(r"ran cells? [\d,-]+ again"))).to_be_visible()
    board.get_by_role("button", name="Restart…").click()
    field = board.get_by_label("Restart ranks")
    expect(field).to_be_focused()
    field.fill("7")
    field.press("Enter")
    expect(board.get_by_role("alert")).to_contain_text("7")
    field.fill("0")
    field.press("Enter")
    expect(board.get_by_text("rank 0 restarted")).to_be_visible()


def check_end(nb: Notebook) -> None:
    """A reloaded page keeps the last picture; a page that is opened later shows the plain form."""
    nb.run(6)
    nb.run(7)
    expect(nb.cell(6).locator(".dt").get_by_text("cell [8] took")).to_be_visible()
    nb.run(8)
    expect(nb.cell(1).locator(".dt")).to_contain_text("ended")
    expect(nb.cell(1).get_by_role("button", name="Stop cell")).to_be_hidden()
    expect(nb.cell(6).locator(".dt")).to_have_count(0)
    assert "Cell [8] ended after" in nb.text(6) and "✓ 2 ranks done" in nb.text(6)
    saved = nb.save().cells[6].outputs[0].data
    assert sorted(saved) == ["text/html", "text/plain"]
    assert "<table" in saved["text/html"] and len(str(saved)) < 50_000


@pytest.mark.slow
def test_first_long_cell_of_a_session_shows_a_board_above_its_output(notebook: OpenNotebook) -> None:
    long = "%%distributed\nfor i in range(40):\n    print('line', i)\nwait_for('{}')"
    cells = [long.format("first"), long.format("second"), "%distributed stop"]
    nb = notebook(START, SETUP, "%distributed config board=auto", *cells)  # a cell of SETUP may take long enough, too
    for index in range(3):
        nb.run(index)
    nb.start(3)
    board = nb.cell(3).locator(".dt")
    expect(board.get_by_text("cell [4]")).to_be_visible()
    expect(nb.prompt(3)).to_have_text("[*]:")
    board.get_by_role("radio", name="Table").click()
    (nb.path.parent / "first").touch()
    expect(nb.prompt(3)).to_have_text("[4]:")
    lines = "".join(f"[0-1] line {i}\n" for i in range(40))
    expect(nb.cell(3).locator(".dt-plain")).to_be_hidden()
    assert nb.outputs(3).last.inner_text().strip() == lines.strip()
    plain = nb.save().cells[3].outputs[1]
    assert "<table" in plain.data["text/html"], "what is read without this kernel"
    nb.start(4)
    expect(board.get_by_text("cell [5]")).to_be_visible()
    expect(board.get_by_role("table")).to_be_visible()  # as it was before the new cell drew it
    (nb.path.parent / "second").touch()
    expect(nb.prompt(4)).to_have_text("[5]:")
    expect(nb.cell(4).locator(".dt")).to_have_count(0)
    nb.run(5)
    expect(board).to_have_count(0)
    first, *_, last = nb.save().cells[3].outputs
    assert "Cell [5] ended" in first.data["text/plain"] and "application/vnd.jupyter.widget-view+json" not in first.data
    assert last.text == lines


# ---- 64 synthetic ranks

MANY = f"""
import sys, time; sys.path.insert(0, {str(TESTS / "tests" / "widgets")!r})
from dataclasses import replace
from made_boards import MadeSession, board_with_a_hang, made_board, with_ranks
from detrain_nb.widgets.board_view import BoardView
view = BoardView(MadeSession(board_with_a_hang())); view
"""
TURNS = """
for turn in range(20):
    board = made_board(64)
    source = f"turn {turn} sent {time.time() * 1000:.0f}"
    ranks = [replace(rank, source=source) for rank in board.ranks]
    view.show(replace(board, ranks=tuple(ranks)))
    time.sleep(0.3)
"""
MEASURE = """board => {
  window.lates = [];
  new MutationObserver(() => {
    const sent = [...board.querySelectorAll('.k')].map(cell => Number(cell.title.split('sent ')[1] ?? 0));
    const note = () => window.lates.push(Date.now() - sent[0]);
    if (new Set(sent).size === 1 && sent[0]) requestAnimationFrame(() => setTimeout(note));
  }).observe(board, {subtree: true, attributes: true, attributeFilter: ['title']});
}"""


def take_pictures(window: Window, board: Locator, name: str, folder: Path) -> None:
    for theme in ("dark", "light"):
        set_theme(window, dark=theme == "dark")
        take_picture(board, f"board-{name}-{theme}", folder)


@pytest.mark.slow
def test_64_ranks_stay_legible_and_are_drawn_at_once(
    narrow_window: Window, notebook: OpenNotebook, tmp_path: Path
) -> None:
    nb = notebook(MANY, TURNS, window=narrow_window)
    nb.run(0)
    board = nb.cell(0).locator(".dt")
    cells = board.locator(".k")
    expect(cells).to_have_count(64)
    expect(board.get_by_role("button", name="7 wait")).to_be_visible()
    awaited = board.get_by_role("button", name="rank 19, awaited, memory 76 %")
    awaited.focus()
    nb.page.keyboard.press("ArrowDown")
    assert focused_rank(nb) == "27"
    nb.page.keyboard.press("ArrowUp")
    expect(board.locator(".tip")).to_contain_text("batch = next(it)")
    take_pictures(narrow_window, board, "64", tmp_path)
    for cell in cells.all()[::9]:
        assert cell.evaluate(
            "cell => cell.scrollWidth <= cell.clientWidth && cell.getBoundingClientRect().height >= 24"
        )
    board.get_by_role("button", name="1 died").click()
    expect(board.locator(".k:visible")).to_have_count(1)
    board.get_by_role("button", name="All 64").click()
    expect(board.get_by_role("button", name="Replay when ready")).to_have_attribute("aria-disabled", "true")
    board.evaluate(MEASURE)
    nb.run(1)
    expect(cells.last).to_have_attribute("title", re.compile("turn 19 sent"))
    nb.page.wait_for_function("() => window.lates.length")  # fewer than turns on a busy machine
    print("ms from publish to drawn:", sorted(nb.js("() => window.lates")))
    check_narrow(board)


@pytest.mark.slow
def test_board_is_accessible_at_every_density(
    notebook: OpenNotebook, check_accessibility: Callable[[Locator], None]
) -> None:
    # in every state; with more ranks the accessibility check takes a minute
    nb = notebook(MANY.replace("board_with_a_hang()", "board_with_a_hang(16, host=0, late=3, dead=9, fresh=12)"))
    nb.run(0)
    board = nb.cell(0).locator(".dt")
    board.locator("[data-rank='3']").click()
    expect(board.get_by_role("region", name="rank 3")).to_be_visible()
    board.get_by_role("button", name="Restart…").first.click()
    for density in ("Cells", "Table", "Tiles"):
        board.get_by_role("radio", name=density).click()
        check_accessibility(board)
    nb.page.keyboard.press("Escape")


def check_narrow(board: Locator) -> None:
    """Check that on a narrow page nothing is wider than the view."""
    for width in (360, 700):
        board.evaluate("(board, width) => { board.style.width = `${width}px`; }", width)
        for density in ("Tiles", "Table", "Cells"):
            board.get_by_role("radio", name=density).click()
            assert board.evaluate("board => board.scrollWidth <= board.clientWidth + 1"), (width, density)
