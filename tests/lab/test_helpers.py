"""What the helpers of this folder find on a page, shown on correct and on faulty elements."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from playwright.sync_api import Locator, expect

from .window import set_theme

if TYPE_CHECKING:
    from .conftest import Notebook, Window

    OpenNotebook = Callable[..., Notebook]
    CheckAccessibility = Callable[[Locator], None]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

_SHOW = "from IPython.display import HTML\nHTML('''{}''')"
# Raises an error with a message that JupyterLab is known to raise, from a script with this address.
_RAISE = """address => (0, eval)(
  `setTimeout(() => document.body.removeChild(document.createElement("p")))\\n//# sourceURL=${address}`
)"""
_BACKGROUND = "element => getComputedStyle(element).getPropertyValue('--jp-layout-color0').trim()"


def show(same_notebook: OpenNotebook, html: str) -> Locator:
    """Show HTML in the output of a cell."""
    nb = same_notebook(_SHOW.format(html))
    nb.run(0)
    return nb.outputs(0)


def test_theme_is_on_and_nothing_veils_the_page(window: Window) -> None:
    seen = []
    for dark in (True, False):
        set_theme(window, dark=dark)
        expect(window.page.locator("#jupyterlab-splash")).to_have_count(0)
        seen.append(window.page.locator("body").evaluate(_BACKGROUND))
    assert seen[0] != seen[1], seen


def test_errors_in_the_page_but_those_of_jupyterlab_are_told_and_what_is_loaded_from_elsewhere(
    window: Window,
) -> None:
    with window.page.expect_event("pageerror") as raised:
        window.js(_RAISE, "http://localhost/static/lab/theirs.js")
    assert "/static/lab/theirs.js" in str(raised.value.stack)
    assert window.errors == []
    with window.page.expect_event("pageerror"):
        window.js(_RAISE, "http://localhost/files/ours.js")
    (error,) = window.errors
    assert "removeChild" in error and "/files/ours.js" in error
    window.errors.clear()
    elsewhere = "http://localhost:9/font.css"
    with window.page.expect_event("request"):
        window.js("address => { fetch(address).catch(() => {}); }", elsewhere)
    assert window.errors == [f"the page asks for {elsewhere}"]
    window.errors.clear()


def test_part_that_is_accessible_in_both_themes_passes(
    same_notebook: OpenNotebook, check_accessibility: CheckAccessibility, window: Window
) -> None:
    check_accessibility(show(same_notebook, "<button>Start</button><p>Two ranks <b>wait</b>.</p>"))
    expect(window.page.locator("body")).to_have_attribute("data-jp-theme-light", "true")


@pytest.mark.parametrize(
    "html, faults",
    [
        ("<p>The button</p><button></button>", ["dark: button-name", "light: button-name"]),
        ('<p style="color: #555">Two ranks wait.</p>', ["dark: color-contrast"]),
        ('<p style="color: #ccc">Two ranks wait.</p>', ["light: color-contrast"]),
    ],
)
def test_fault_is_named_with_its_theme(
    same_notebook: OpenNotebook, check_accessibility: CheckAccessibility, html: str, faults: list[str]
) -> None:
    with pytest.raises(AssertionError, match="not accessible:") as caught:
        check_accessibility(show(same_notebook, html))
    lines = str(caught.value).splitlines()
    assert [line.partition(",")[0] for line in lines if line.startswith(("dark:", "light:"))] == faults


def test_fault_beside_the_element_is_no_fault_of_it(
    same_notebook: OpenNotebook, check_accessibility: CheckAccessibility
) -> None:
    output = show(same_notebook, "<button></button><p>Two ranks wait.</p>")
    check_accessibility(output.locator("p"))


def test_element_without_anything_to_check_is_told(
    same_notebook: OpenNotebook, check_accessibility: CheckAccessibility
) -> None:
    output = show(same_notebook, '<p>words</p><div class="empty" style="height: 9px"></div>')
    with pytest.raises(AssertionError, match="nothing to check"):
        check_accessibility(output.locator(".empty"))
