"""A real JupyterLab in Debian's Chromium, as a user has it.

For a module of tests, `lab` is a server and `window` a page with JupyterLab; `notebook("x = 1", "x + 1")` opens a new
notebook with these cells in it. A test fails on an error in the page, and when a process outlives the kernel.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import psutil
import pytest
from playwright.sync_api import Browser, Locator, expect, sync_playwright

_SERVER_LIMIT_S = 60.0
_PAGE_LIMIT_S = 100.0
_LOOK_LIMIT_S = 20.0  # how long the page may take to show what it should
_END_LIMIT_S = 20.0
_POLL_S = 0.05
_AIR_PX = 8  # around the cells of a picture

# Every cell in the DOM, no pop-up, no autosave: the page changes only when a test or a kernel changes it.
_SETTINGS = {
    "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none", "recordTiming": False},
    "@jupyterlab/apputils-extension:notification": {
        "fetchNews": "false",
        "checkForUpdates": False,
        "doNotDisturbMode": True,
    },
    "@jupyterlab/docmanager-extension:plugin": {"autosave": False},
}
_CHROMIUM_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
# The server ends when this process is killed, before it could end the server.
_WITH_US = """
import os, sys
from detrain_nb.node.system.processes import die_with_parent
die_with_parent(int(sys.argv[1]))
os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
"""
_MARK = "DETRAIN_NB_LAB_TEST"  # in the environment of the server, and so of all that it and its kernels start


@dataclass(frozen=True)
class Lab:
    """A server that runs, and the folder it serves."""

    url: str
    token: str
    root: Path
    mark: str

    def processes(self) -> set[psutil.Process]:
        """The server and everything that was started by it, by its kernels or by their sessions."""
        return _marked_processes(self.mark)


@pytest.fixture(scope="module")
def lab(needs_debian: Callable[..., None], tmp_path_factory: pytest.TempPathFactory) -> Generator[Lab]:
    needs_debian("chromium")
    base = tmp_path_factory.mktemp("lab")
    root, settings = base / "root", base / "app-settings"
    for folder in (root, settings, base / "runtime"):
        folder.mkdir()
    (settings / "overrides.json").write_text(json.dumps(_SETTINGS), encoding="utf-8")
    token, mark = uuid.uuid4().hex, uuid.uuid4().hex
    options = [
        "--no-browser",
        "--allow-root",
        "--ServerApp.ip=127.0.0.1",
        "--ServerApp.port=0",
        f"--ServerApp.root_dir={root}",
        f"--IdentityProvider.token={token}",
        "--LabApp.expose_app_in_browser=True",
        "--LabApp.extension_manager=readonly",
        f"--LabApp.app_settings_dir={settings}",
    ]
    with open(base / "server.log", "wb") as log:
        server = subprocess.Popen(
            [sys.executable, "-c", _WITH_US, str(os.getpid()), "-m", "jupyterlab", *options],
            env=_environment(base, mark),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        url = _wait_for_server(server, base / "runtime", token, base / "server.log")
        yield Lab(url, token, root, mark)
    finally:
        server.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            server.wait(_END_LIMIT_S)
        for process in _marked_processes(mark):
            with contextlib.suppress(psutil.Error):
                process.kill()
        server.wait(_END_LIMIT_S)


def _environment(base: Path, mark: str) -> dict[str, str]:
    """This process's environment, with nothing of its user's Jupyter, of IPython or of other sessions."""
    foreign = ("JUPYTER", "JPY_", "IPYTHON", "DETRAIN_NB_")
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith(foreign)},
        "JUPYTER_CONFIG_DIR": str(base / "config"),
        "JUPYTER_DATA_DIR": str(base / "data"),
        "JUPYTER_RUNTIME_DIR": str(base / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(base / "user-settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(base / "workspaces"),
        "IPYTHONDIR": str(base / "ipython"),
        "DETRAIN_NB_RUNTIME_DIR": str(base / "sessions"),
        "DETRAIN_NB_LINGER": "20",
        _MARK: mark,
    }


def _marked_processes(mark: str) -> set[psutil.Process]:
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(_MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.add(process)
    return found


def _wait_for_server(server: subprocess.Popen[bytes], runtime: Path, token: str, log: Path) -> str:
    """Wait until the server answers; return its address."""
    deadline = time.monotonic() + _SERVER_LIMIT_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            raise RuntimeError(f"JupyterLab ended with exit code {server.returncode}:\n{log.read_text()}")
        with contextlib.suppress(OSError, ValueError):  # its file is not there, or not whole yet
            url: str = json.loads((runtime / f"jpserver-{server.pid}.json").read_text(encoding="utf-8"))["url"]
            urllib.request.urlopen(f"{url}api/status?token={token}", timeout=_SERVER_LIMIT_S).close()
            return url
        time.sleep(_POLL_S)
    raise RuntimeError(f"JupyterLab did not answer within {_SERVER_LIMIT_S:g} s:\n{log.read_text()}")


@pytest.fixture(scope="module")
def browser(needs_debian: Callable[..., None]) -> Generator[Browser]:
    # Not longer than a module: while Playwright runs, this thread has an event loop, and other tests want their own.
    needs_debian("chromium")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=_CHROMIUM_FLAGS)
        try:
            yield chromium
        finally:
            chromium.close()


class Window:
    """JupyterLab, open in a page."""

    def __init__(self, browser: Browser, lab: Lab, *, width: int = 1280, height: int = 900, sharpness: int = 1) -> None:
        """``sharpness``: how many points of a picture a point of the page is, along a side."""
        context = browser.new_context(viewport={"width": width, "height": height}, device_scale_factor=sharpness)
        self.page = context.new_page()
        self.page.set_default_timeout(_LOOK_LIMIT_S * 1000)
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))
        self._url = f"{lab.url}lab?token={lab.token}&reset"
        self.load()

    def load(self) -> None:
        """Open JupyterLab's page, or reload it; no notebook is open then."""
        self.page.goto(self._url, timeout=_PAGE_LIMIT_S * 1000)
        self.page.wait_for_function("() => window.jupyterapp?.restored", timeout=_PAGE_LIMIT_S * 1000)
        self.js("() => window.jupyterapp.restored")

    def js(self, function: str, *arguments: object, limit_s: float = _PAGE_LIMIT_S) -> Any:
        """Call a JavaScript function in the page and wait for its promise."""
        in_time = f"""([within_ms, ...values]) => Promise.race([
            ({function})(...values),
            new Promise((_, fail) => setTimeout(() => fail(new Error(`not within ${{within_ms}} ms`)), within_ms)),
        ])"""
        return self.page.evaluate(in_time, [int(limit_s * 1000), *arguments])

    def command(self, name: str, **arguments: object) -> None:
        """Run a command of JupyterLab; its promise settles when all it caused is over."""
        self.js(
            "async (name, args) => { await window.jupyterapp.commands.execute(name, args); }", name, dict(arguments)
        )

    def close(self) -> None:
        self.page.context.close()


@pytest.fixture(scope="module")
def window(lab: Lab, browser: Browser) -> Generator[Window]:
    window = Window(browser, lab)
    try:
        yield window
    finally:
        window.close()


@pytest.fixture
def sharp_window(lab: Lab, browser: Browser) -> Generator[Window]:
    """A narrow window without a sidebar, for pictures. Ask for it before `notebook`: it then closes after it."""
    window = Window(browser, lab, width=880, height=1000, sharpness=2)
    try:
        window.command("application:toggle-left-area")
        yield window
        assert window.errors == [], "errors in the page"
    finally:
        window.close()


class Notebook:
    """A notebook, open in a window. Cells are counted from 0."""

    def __init__(self, window: Window, path: Path, *, folder: Path) -> None:
        """Open ``path``, which lies in the server's ``folder``, and wait until its kernel is idle."""
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

    def close(self) -> None:
        """End the kernel, close the notebook without saving it."""
        self.js(
            "async () => { const panel = window.jupyterapp.shell.currentWidget;"
            " await panel.sessionContext.shutdown(); panel.dispose(); }"
        )

    def _wait_for_kernel(self) -> None:
        self.page.wait_for_function(_IS_KERNEL_IDLE, arg=self._in_lab, timeout=_PAGE_LIMIT_S * 1000)
        expect(self._panel.locator(".jp-Notebook")).to_be_visible()

    # ---- what a user does

    def run_all(self) -> None:
        """Run all cells, as the menu does; return when the last reply is in."""
        self.window.command("notebook:run-all-cells")

    def run(self, index: int) -> None:
        """Run a cell; return when its reply is in."""
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
        """What the menu does, without its question."""
        self.js("() => window.jupyterapp.shell.currentWidget.sessionContext.restartKernel()")
        self._wait_for_kernel()

    def restart_and_run_all(self) -> None:
        """What the menu does, without its question."""
        self.restart()
        self.run_all()

    def reload(self) -> None:
        """Reload the page and open the notebook, as it was saved, with the kernel that it has."""
        self.window.load()
        self._open()

    def save(self) -> nbformat.NotebookNode:
        """Save the notebook; return what is in the file."""
        self.window.command("docmanager:save")
        return nbformat.read(self.path, as_version=4)

    # ---- what a user sees

    def cell(self, index: int) -> Locator:
        return self._panel.locator(".jp-Notebook .jp-Cell").nth(index)

    def prompt(self, index: int) -> Locator:
        """``[ ]:``, ``[*]:`` while the cell runs or is queued, ``[3]:``."""
        return self.cell(index).locator(".jp-InputPrompt")

    def outputs(self, index: int) -> Locator:
        """What stands below a cell, one element per output."""
        return self.cell(index).locator(".jp-OutputArea-output")

    def text(self, index: int) -> str:
        """All the text below a cell, as it stands there now."""
        texts = filter(None, self.outputs(index).all_inner_texts())
        return "".join(text if text.endswith("\n") else f"{text}\n" for text in texts)

    def wait_for_text(self, index: int, pattern: str, *, limit_s: float = _LOOK_LIMIT_S) -> str:
        """Wait until the text below a cell has a match of ``pattern``; return the text."""
        deadline = time.monotonic() + limit_s
        while not re.search(pattern, text := self.text(index), re.MULTILINE):
            assert time.monotonic() < deadline, (
                f"no {pattern!r} within {limit_s:g} s below cell {index}:\n{text[-2000:]}"
            )
            self.page.wait_for_timeout(_POLL_S * 1000)
        return text

    def take_picture(self, path: Path, *, last: int) -> None:
        """Write a picture of the cells down to ``last``, as they are now."""
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


@pytest.fixture
def notebook(lab: Lab, window: Window, request: pytest.FixtureRequest) -> Generator[Callable[..., Notebook]]:
    """Return a function that opens a new notebook with the given cells, in a folder of its own."""
    before = lab.processes()
    expect.set_options(timeout=_LOOK_LIMIT_S * 1000)
    opened: list[Notebook] = []

    def open_notebook(*sources: str, window: Window = window) -> Notebook:
        path = lab.root / f"{request.node.name}-{len(opened)}" / "notebook.ipynb"
        path.parent.mkdir()
        _write_notebook(path, sources)
        opened.append(Notebook(window, path, folder=lab.root))
        return opened[-1]

    try:
        yield open_notebook
    finally:
        try:
            for nb in opened:
                nb.page.screenshot(path=nb.path.with_name("page.png"))  # for who wonders why a test failed
                nb.close()
        finally:
            left = _end(lab.processes() - before)
    errors, window.errors[:] = window.errors[:], []
    assert errors == [], "errors in the page"
    assert left == [], "processes that outlive the notebook's kernel"


def _write_notebook(path: Path, sources: Sequence[str]) -> None:
    cells = [nbformat.v4.new_code_cell(source.strip("\n")) for source in sources]
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel}), path)


def _end(processes: set[psutil.Process]) -> list[str]:
    """Wait until the processes have ended by themselves; kill those that do not and return what they are."""
    _, alive = psutil.wait_procs(processes, timeout=_END_LIMIT_S)
    names = []
    for process in alive:
        with contextlib.suppress(psutil.Error):
            names.append(f"{process.pid} {' '.join(process.cmdline())}")
            process.kill()
    return names
