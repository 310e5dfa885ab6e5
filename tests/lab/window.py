"""JupyterLab, open in a page."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Browser, expect

from .server import Lab

LOOK_LIMIT_S = 20.0  # how long the page may take to show what it should
PAGE_LIMIT_S = 100.0
# JupyterLab's own, of a kernel that is restarted before it has answered whether it has sub-shells.
_OF_JUPYTERLAB = "Canceled future for create_subshell_request message before replies were done"


class Window:
    """JupyterLab, open in a page."""

    def __init__(self, browser: Browser, lab: Lab, *, width: int = 1280, height: int = 900, sharpness: int = 1) -> None:
        """``sharpness``: how many points of a picture a point of the page is, along a side."""
        context = browser.new_context(viewport={"width": width, "height": height}, device_scale_factor=sharpness)
        self.page = context.new_page()
        self.page.set_default_timeout(LOOK_LIMIT_S * 1000)
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self._note(str(error)))
        self.page.on("crash", lambda _: self.errors.append("the page has crashed"))
        self._url = f"{lab.url}lab?token={lab.token}&reset"
        self.load()

    def _note(self, error: str) -> None:
        if _OF_JUPYTERLAB not in error:
            self.errors.append(error)

    def load(self) -> None:
        """Open JupyterLab's page, or reload it; no notebook is open then."""
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
        """Run a command of JupyterLab; its promise settles when all it caused is over."""
        self.js(
            "async (name, args) => { await window.jupyterapp.commands.execute(name, args); }", name, dict(arguments)
        )

    def close(self) -> None:
        self.page.context.close()


def set_theme(window: Window, *, dark: bool) -> None:
    """Have JupyterLab show its dark theme, or its light one; return when that is on and can be seen."""
    name = "JupyterLab Dark" if dark else "JupyterLab Light"
    window.command("apputils:change-theme", theme=name)
    expect(window.page.locator("body")).to_have_attribute("data-jp-theme-name", name)
    expect(window.page.locator("body")).to_have_attribute("data-jp-theme-light", str(not dark).lower())
    expect(window.page.locator("#jupyterlab-splash")).to_have_count(0)  # the veil over a page whose colours change
