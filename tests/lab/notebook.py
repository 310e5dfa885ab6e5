"""A notebook, open in a window of JupyterLab."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
from playwright.sync_api import Locator, expect

from .window import LOOK_LIMIT_S, PAGE_LIMIT_S, Window

_POLL_S = 0.05
_AIR_PX = 8  # margin around the cells of a picture


class Notebook:
    """A notebook, open in a window. Cells are counted from 0."""

    def __init__(self, window: Window, path: Path, *, folder: Path) -> None:
        """Open ``path``, which is in the server's ``folder``, and wait until its kernel is idle."""
        self.window = window
        self.page = window.page
        self.js = window.js
        self.path = path
        self._in_lab = path.relative_to(folder).as_posix()
        self._panel = self.page.locator(".jp-NotebookPanel:not(.lm-mod-hidden)")
        self._open()

    def _open(self) -> None:
        self.window.command("docmanager:open", path=self._in_lab, factory="Notebook")
        self._wait_for_kernel()

    def show_again(self, *sources: str) -> None:
        """Replace all cells by these; the kernel and everything on it keep running."""
        self._open()
        self.js(_PUT_CELLS, [source.strip("\n") for source in sources])
        expect(self._panel.locator(".jp-Notebook .jp-Cell")).to_have_count(len(sources))

    def close(self) -> None:
        """Stop the kernel and close the notebook without saving it, if the page still has it."""
        is_closed = False
        try:
            is_closed = self.js(_CLOSE, self._in_lab)
        finally:
            if not is_closed:
                self.window.lab.end_kernel(self._in_lab)

    def _wait_for_kernel(self) -> None:
        self.page.wait_for_function(_IS_KERNEL_IDLE, arg=self._in_lab, timeout=PAGE_LIMIT_S * 1000)
        expect(self._panel.locator(".jp-Notebook")).to_be_visible()

    # ---- actions of a user

    def run_all(self) -> None:
        """Run all cells, as the menu does; return when the last reply has arrived."""
        self.window.command("notebook:run-all-cells")

    def run(self, index: int) -> None:
        """Run a cell; return when its reply has arrived."""
        self.select(index)
        self.window.command("notebook:run-cell")

    def start(self, *indices: int) -> None:
        """Run cells that take a while, without waiting for them; those after the first are queued."""
        for index in indices:
            self.select(index)
            self.js("() => { window.jupyterapp.commands.execute('notebook:run-cell'); }")
            expect(self.prompt(index)).to_have_text("[*]:")

    def stop(self) -> None:
        """Click on the stop button."""
        self._panel.locator("[data-command='notebook:interrupt-kernel'] >> visible=true").first.click()

    def select(self, index: int) -> None:
        self.js("index => { window.jupyterapp.shell.currentWidget.content.activeCellIndex = index; }", index)

    def restart(self) -> None:
        """Restart the kernel, as the menu does, without the confirmation."""
        self.js("() => window.jupyterapp.shell.currentWidget.sessionContext.restartKernel()")
        self._wait_for_kernel()

    def restart_and_run_all(self) -> None:
        """Restart and run all, as the menu does, without the confirmation."""
        self.restart()
        self.run_all()

    def reload(self) -> None:
        """Reload the page and open the notebook as it was saved, with its running kernel."""
        self.window.load()
        self._open()

    def save(self) -> nbformat.NotebookNode:
        """Save the notebook; return the content of the file."""
        self.window.command("docmanager:save")
        return nbformat.read(self.path, as_version=4)

    def wait_for_answer(self) -> None:
        """Wait until the kernel runs new requests; after a failed cell it drops the requests that were queued.

        A reloaded page is not informed when a cell that was sent before finishes.
        """
        self.page.wait_for_function(_ANSWERS, timeout=PAGE_LIMIT_S * 1000, polling=1000 * _POLL_S)

    # ---- what a user sees

    def cell(self, index: int) -> Locator:
        return self._panel.locator(".jp-Notebook .jp-Cell").nth(index)

    def prompt(self, index: int) -> Locator:
        """Return the prompt: ``[ ]:``, ``[*]:`` while the cell runs or is queued, ``[3]:``."""
        return self.cell(index).locator(".jp-InputPrompt")

    def expect_end(self, index: int, *, limit_s: float = LOOK_LIMIT_S) -> int:
        """Wait until a cell has finished; return its number."""
        expect(self.prompt(index)).to_have_text(re.compile(r"^\[\d+\]:$"), timeout=limit_s * 1000)
        return int(self.prompt(index).inner_text().strip("[]:"))

    def outputs(self, index: int) -> Locator:
        """The output of a cell, one element per output."""
        return self.cell(index).locator(".jp-OutputArea-output")

    def text(self, index: int) -> str:
        """Return all text of a cell's output as it is now."""
        texts = filter(None, self.outputs(index).all_inner_texts())
        return "".join(text if text.endswith("\n") else f"{text}\n" for text in texts)

    def wait_for_text(self, index: int, pattern: str, *, limit_s: float = LOOK_LIMIT_S) -> str:
        """Wait until the text of a cell's output matches ``pattern``; return the text."""
        deadline = time.monotonic() + limit_s
        while not re.search(pattern, text := self.text(index), re.MULTILINE):
            assert time.monotonic() < deadline, (
                f"no {pattern!r} within {limit_s:g} s below cell {index}:\n{text[-2000:]}"
            )
            self.page.wait_for_timeout(_POLL_S * 1000)
        return text

    def take_picture(self, path: Path, *, last: int) -> None:
        """Write a picture of the cells up to ``last``, as they are now."""
        for cell in self._panel.locator(".jp-Notebook .jp-Cell").all()[last + 1 :]:
            cell.evaluate("cell => { cell.style.visibility = 'hidden'; }")
        top, bottom = self.cell(0).bounding_box(), self.cell(last).bounding_box()
        assert top and bottom
        height = bottom["y"] + bottom["height"] - top["y"]
        self.page.screenshot(
            path=path,
            clip={
                "x": top["x"] - _AIR_PX,
                "y": top["y"] - _AIR_PX,
                "width": top["width"] + 2 * _AIR_PX,
                "height": height + 2 * _AIR_PX,
            },
        )


_IS_KERNEL_IDLE = """path => {
  const panel = window.jupyterapp.shell.currentWidget, kernel = panel?.sessionContext?.session?.kernel;
  return panel?.context?.path === path && panel.sessionContext.isReady
    && kernel?.connectionStatus === 'connected' && kernel.status === 'idle';
}"""

_ANSWERS = """async () => {
  const kernel = window.jupyterapp.shell.currentWidget.sessionContext.session.kernel;
  const reply = await kernel.requestExecute({code: '', silent: true, store_history: false}).done;
  return reply.content.status === 'ok';
}"""

_CLOSE = """async path => {
  const panel = [...window.jupyterapp.shell.widgets('main')].find(each => each.context?.path === path);
  await panel?.sessionContext.shutdown();
  panel?.dispose();
  return Boolean(panel);
}"""

_PUT_CELLS = """sources => {
  const cells = sources.map(source => ({cell_type: 'code', source, metadata: {}, outputs: []}));
  const model = window.jupyterapp.shell.currentWidget.content.model.sharedModel, before = model.cells.length;
  model.transact(() => { model.insertCells(before, cells); model.deleteCellRange(0, before); });
}"""


def write_notebook(path: Path, sources: Sequence[str]) -> None:
    cells = [nbformat.v4.new_code_cell(source.strip("\n")) for source in sources]
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)
