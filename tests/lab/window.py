"""JupyterLab, open in a page."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

from playwright.sync_api import Browser, Error, Request, expect, sync_playwright

from .server import Lab

LOOK_LIMIT_S = 20.0  # for the page to show an expected change
PAGE_LIMIT_S = 100.0
_CHROMIUM_FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"]
# Errors that JupyterLab itself raises, with only its own code on the stack.
_OF_JUPYTERLAB = (
    # The kernel was restarted before it had answered whether it has sub-shells.
    "Canceled future for create_subshell_request message before replies were done",
    # The splash over a page that changes its theme is removed twice: a second change began while it faded.
    "Failed to execute 'removeChild' on 'Node'",
    # Notebook 7 lacks some settings of JupyterLab.
    "Cannot read properties of undefined (reading 'schema')",
)
_CODE_OF_JUPYTERLAB = re.compile(r"/static/(lab|notebook)/")


@contextlib.contextmanager
def running_browser() -> Iterator[Browser]:
    """Run Debian's Chromium; its sockets need a folder with a short path."""
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder, sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=_CHROMIUM_FLAGS, env={**os.environ, "TMPDIR": folder}
        )
        try:
            yield chromium
        finally:
            chromium.close()


class Window:
    """JupyterLab, open in a page."""

    def __init__(
        self,
        browser: Browser,
        lab: Lab,
        *,
        place: str = "lab",
        width: int = 1280,
        height: int = 900,
        sharpness: int = 1,
    ) -> None:
        """Open a page of the server, ``place``. ``sharpness``: pixels of a picture for each CSS pixel, along a side."""
        self.lab = lab
        context = browser.new_context(viewport={"width": width, "height": height}, device_scale_factor=sharpness)
        self.page = context.new_page()
        self.page.set_default_timeout(LOOK_LIMIT_S * 1000)
        self.errors: list[str] = []
        self.page.on("pageerror", self._note)
        self.page.on("request", self._note_foreign)
        self.page.on("crash", lambda _: self.errors.append("the page has crashed"))
        self._url = f"{lab.url}{place}?token={lab.token}&reset"
        self.load()

    def _note(self, error: Error) -> None:
        frames = [line for line in (error.stack or "").splitlines() if re.match(r" *at (?!async Promise)", line)]
        is_known = any(words in error.message for words in _OF_JUPYTERLAB)
        if not (is_known and all(_CODE_OF_JUPYTERLAB.search(frame) for frame in frames)):
            self.errors.append(f"{error.message}\n{error.stack}")

    def _note_foreign(self, request: Request) -> None:
        """Record requests to other hosts as errors: views must work without a network."""
        if request.url.startswith(("http:", "https:")) and not request.url.startswith(self.lab.url):
            self.errors.append(f"the page asks for {request.url}")

    def load(self) -> None:
        """Open or reload JupyterLab's page; no notebook is open then."""
        self.page.goto(self._url, timeout=PAGE_LIMIT_S * 1000)
        self.page.wait_for_function("() => window.jupyterapp?.restored", timeout=PAGE_LIMIT_S * 1000)
        self.js("() => window.jupyterapp.restored")

    def js(self, function: str, *arguments: object, limit_s: float = PAGE_LIMIT_S) -> Any:
        """Call a JavaScript function in the page and wait for its promise."""
        in_time = f"""([within_ms, ...values]) => Promise.race([
            ({function})(...values),
            new Promise((_, fail) => setTimeout(() => fail(new Error(`not within ${{within_ms}} ms`)), within_ms)),
        ])"""
        return self.page.evaluate(in_time, [int(limit_s * 1000), *arguments])

    def command(self, name: str, **arguments: object) -> None:
        """Run a command of JupyterLab; its promise settles when all its effects are complete."""
        self.js(
            "async (name, args) => { await window.jupyterapp.commands.execute(name, args); }", name, dict(arguments)
        )

    def show_sidebar(self, *, is_shown: bool) -> None:
        self.js(f"() => window.jupyterapp.shell.{'expandLeft' if is_shown else 'collapseLeft'}()")

    def close(self) -> None:
        self.page.context.close()


def set_theme(window: Window, *, dark: bool) -> None:
    """Switch JupyterLab to its dark or its light theme; return when the theme is visible.

    The focus is restored: JupyterLab hides everything until the next frame, and a hidden element may lose the focus.
    """
    name = "JupyterLab Dark" if dark else "JupyterLab Light"
    focused = window.page.evaluate_handle("document.activeElement")
    window.command("apputils:change-theme", theme=name)
    expect(window.page.locator("body")).to_have_attribute("data-jp-theme-name", name)
    expect(window.page.locator("body")).to_have_attribute("data-jp-theme-light", str(not dark).lower())
    expect(window.page.locator("#jupyterlab-splash")).to_have_count(0)  # the splash during the change of colours
    focused.evaluate("had => document.activeElement === document.body && had.focus({preventScroll: true})")
