"""Views where a page has little room for them: nothing is cut off there, and nothing scrolls sideways."""

from __future__ import annotations

from playwright.sync_api import Locator

__all__ = ["require_fits"]

# What is drawn anew for another width comes with one of the next frames; what scrolls by itself has its own edge.
_BEYOND_ITS_EDGE = """async (view, width) => {
  const before = view.style.width, scrolls = (each) => each.parentElement.closest('.dt pre, .dt .lines, .dt .wide');
  const find = () => {
    const edge = view.getBoundingClientRect().right + 1, all = [...view.querySelectorAll('*')];
    return all.filter((each) => each.getBoundingClientRect().right > edge && !scrolls(each));
  };
  view.style.width = `${width}px`;
  try {
    for (let frames = 60; frames && find().length; frames--) await new Promise(requestAnimationFrame);
    return find().map((each) => each.outerHTML.slice(0, 120));
  } finally { view.style.width = before; }
}"""


def require_fits(view: Locator, width_px: int = 420) -> None:
    """Raises: AssertionError with all that is beyond the edge of ``view`` where that is so narrow."""
    beyond = view.evaluate(_BEYOND_ITS_EDGE, width_px)
    assert beyond == [], f"at {width_px} px beyond the edge:\n" + "\n".join(beyond)
