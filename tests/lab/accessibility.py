"""Accessibility of a part of the page, as axe-core checks it: contrast, names for screen readers, the keyboard.

The Makefile installs axe-core, which is not part of this repository, with npm into the virtual environment.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, expect

from .window import Window, set_theme

AXE = Path(sys.prefix) / "share/axe-core/axe.min.js"
# JupyterLab is responsible for landmarks.
_OPTIONS = {"rules": {"region": {"enabled": False}}, "resultTypes": ["violations"]}
# In JupyterLab the page itself has no height and hides its overflow, so axe-core would take all text for hidden.
_RUN = """async (element, options) => {
  const hiding = [document.body, document.getElementById('main')], before = hiding.map(each => each.style.overflow);
  hiding.forEach(each => { each.style.overflow = 'visible'; });
  try {
    const found = await axe.run(element, options);
    return {checked: found.passes.length + found.violations.length, violations: found.violations};
  } finally {
    hiding.forEach((each, index) => { each.style.overflow = before[index]; });
  }
}"""


def require_accessible(window: Window, element: Locator) -> None:
    """Check ``element`` in both themes; the light one is left on. Raises: AssertionError with all violations."""
    if not window.js("() => 'axe' in window"):
        window.page.evaluate(AXE.read_text(encoding="utf-8"))
    try:
        faults = [fault for dark in (True, False) for fault in _find_faults(window, element, dark=dark)]
    finally:
        set_theme(window, dark=False)
    assert faults == [], "not accessible:\n" + "\n".join(faults)


def _find_faults(window: Window, element: Locator, *, dark: bool) -> list[str]:
    set_theme(window, dark=dark)
    expect(element).to_be_visible()
    found = element.evaluate(_RUN, _OPTIONS)
    assert found["checked"], "there is nothing to check in the element"
    theme = "dark" if dark else "light"
    return [
        f"{theme}: {_describe(violation, node)}" for violation in found["violations"] for node in violation["nodes"]
    ]


def _describe(violation: dict[str, Any], node: dict[str, Any]) -> str:
    why = " ".join(node["failureSummary"].split())
    return f"{violation['id']}, {violation['help']}: {why}\n  {node['html']}"
