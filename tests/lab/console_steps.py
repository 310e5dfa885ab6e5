"""Steps of a user who creates a pipeline in the console, by typing and clicking, with the labels of the page."""

from __future__ import annotations

from playwright.sync_api import Locator, expect

_MOST_TABS = 100


def tab_to(target: Locator, *, back: bool = False) -> None:
    """Press Tab until ``target`` has the focus, like a user without a mouse; ``back``: with Shift."""
    expect(target).to_be_visible()
    for _ in range(_MOST_TABS):
        if target.evaluate("element => element === document.activeElement"):
            return
        target.page.keyboard.press("Shift+Tab" if back else "Tab")
    raise AssertionError(f"{_MOST_TABS} presses of Tab do not reach {target}")


def press(target: Locator, *, back: bool = False) -> None:
    """Move the focus to ``target`` with Tab and press Enter."""
    tab_to(target, back=back)
    target.page.keyboard.press("Enter")


def begin_pipeline(view: Locator, name: str) -> None:
    """Create a pipeline, which opens its form."""
    view.get_by_role("button", name="New").click()
    view.page.keyboard.type(name)
    view.page.keyboard.press("Enter")
    expect(view.get_by_role("heading", name=name, exact=True)).to_be_visible()
    expect(view.get_by_label("Name", exact=True)).to_be_focused()


def add_node(view: Locator, host: str, *, ranks: int) -> None:
    """Add a node without GPUs on the page of nodes; only its form is open then."""
    for opened in view.locator(".twist[aria-expanded=true]").all():
        opened.click()
    view.get_by_role("button", name="Add node").click()
    expect(view.get_by_label("Host", exact=True).locator("visible=true")).to_be_focused()
    view.page.keyboard.type(host)
    view.get_by_role("radio", name="cpu").locator("visible=true").click()
    view.get_by_label("Ranks").locator("visible=true").fill(f"{ranks}")


def type_script(view: Locator, text: str) -> None:
    """Choose a typed script on the page of the source."""
    view.get_by_role("radio", name="Text").check()
    view.get_by_label("Script text").fill(text)
