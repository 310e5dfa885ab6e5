"""Live views in JupyterLab: how soon a button responds under a flood of output, and how soon 64 tiles are drawn."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.lab.notebook import Notebook, write_notebook
from tests.lab.server import Lab, running_lab
from tests.lab.window import Window, running_browser

_LIMIT_S = 300.0
_MADE = Path(__file__).resolve().parents[1] / "tests/widgets"
_START = "%load_ext detrain_nb\n%distributed start -n 2"
# The kernel refuses the request and the page shows why: a round trip without any action.
_PRESS = """async cell => {
  const form = cells()[cell].querySelector('.dt .asked'), field = form.querySelector('input');
  const press = form.querySelector('button'), said = form.querySelector('[role=alert]');
  const isRunning = () => [...document.querySelectorAll('.jp-InputPrompt')].some(each => each.textContent === '[*]:');
  const took_ms = [];
  for (let rank = 1000; isRunning(); rank++) {
    const pressed = performance.now();
    field.value = `${rank}`;
    press.click();
    while (!said.textContent.includes(`${rank}`)) await new Promise(next => setTimeout(next, 2));
    took_ms.push(performance.now() - pressed);
    await new Promise(next => setTimeout(next, 50));
  }
  return took_ms;
}"""
_CELLS = "const cells = () => document.querySelectorAll('.jp-NotebookPanel:not(.lm-mod-hidden) .jp-Notebook .jp-Cell');"
_TILES = f"""
import sys, time; sys.path.insert(0, {str(_MADE)!r})
from dataclasses import replace
from made_boards import MadeSession, made_board
from detrain_nb.widgets.board_view import BoardView
view = BoardView(MadeSession(made_board(64))); view
"""
_TURN = """
for turn in range({turns}):
    board = made_board(64)
    ranks = [replace(rank, source=f"sent {{time.time() * 1000:.0f}}") for rank in board.ranks]
    view.show(replace(board, ranks=tuple(ranks)))
    time.sleep(0.5)
"""
# From the kernel's clock to the page's, which are the same on one machine. A turn counts once all tiles are painted.
_WATCH = """cell => {
  const board = cells()[cell].querySelector('.dt');
  window.drawn_ms = [];
  let last = 0;
  new MutationObserver(() => {
    const said = [...board.querySelectorAll('.tile')].map(tile => tile.textContent.match(/sent (\\d+)/));
    const sent = said.map(found => Number(found?.[1] ?? 0));
    if (sent.length < 64 || !sent[0] || sent[0] === last || Math.max(...sent) - Math.min(...sent) > 100) return;
    last = sent[0];
    requestAnimationFrame(() => setTimeout(() => window.drawn_ms.push(Date.now() - sent[0])));
  }).observe(board, {subtree: true, childList: true, characterData: true});
}"""


@contextlib.contextmanager
def open_pages(folder: Path) -> Iterator[Pages]:
    """Run a server and a browser."""
    folder.mkdir()
    with running_lab(folder) as lab, running_browser() as browser:
        yield Pages(lab, Window(browser, lab))


class Pages:
    """JupyterLab in a page."""

    def __init__(self, lab: Lab, window: Window) -> None:
        self._lab = lab
        self._window = window

    def press_buttons(self, *, lines: int, floods: int) -> list[float]:
        """Return the milliseconds until the board shows its refusal, while two ranks print ``lines``, repeatedly."""
        flood = f"%%distributed\nfor line in range({lines // 2}):\n    print('line', line, 'of rank', rank, '.' * 40)"
        took_ms = []
        with self._notebook("buttons", _START, "%distributed board", flood) as nb:
            nb.run(0)
            nb.run(1)
            nb.cell(1).get_by_role("button", name="Restart…").click()
            for _ in range(floods):
                nb.start(2)
                took_ms += self._call(nb, _PRESS, 1)
        return took_ms

    def draw_tiles(self, *, turns: int) -> list[float]:
        """Return the milliseconds from updating all 64 ranks of a view until the page has painted them."""
        with self._notebook("tiles", _TILES, _TURN.format(turns=turns)) as nb:
            nb.run(0)
            nb.cell(0).get_by_role("radio", name="Tiles").click()
            self._call(nb, _WATCH, 0)
            nb.run(1)
            nb.page.wait_for_function("turns => window.drawn_ms.length >= turns", arg=turns, timeout=_LIMIT_S * 1000)
            return [float(each) for each in nb.js("() => window.drawn_ms")]

    @contextlib.contextmanager
    def _notebook(self, name: str, *sources: str) -> Iterator[Notebook]:
        folder = self._lab.root / name
        folder.mkdir()
        write_notebook(folder / "notebook.ipynb", sources)
        nb = Notebook(self._window, folder / "notebook.ipynb", folder=self._lab.root)
        try:
            yield nb
        finally:
            nb.close()

    def _call(self, nb: Notebook, function: str, cell: int) -> list[float]:
        called: list[float] = nb.js(f"cell => {{ {_CELLS} return ({function})(cell); }}", cell, limit_s=_LIMIT_S)
        return called
