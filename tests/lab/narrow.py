"""Views on a narrow page: nothing is cut off, and nothing scrolls sideways."""

from __future__ import annotations

from playwright.sync_api import Locator

__all__ = ["require_fits"]

# The view is redrawn for the new width within some frames; elements that scroll by themselves have their own edge.
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
    """Check that nothing exceeds the edge of ``view`` at this width. Raises: AssertionError with what does."""
    beyond = view.evaluate(_BEYOND_ITS_EDGE, width_px)
    assert beyond == [], f"at {width_px} px beyond the edge:\n" + "\n".join(beyond)
