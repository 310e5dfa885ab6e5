"""What of a rank's output is shown: the one place that decides.

A node is not trusted. Nothing from it runs in the notebook: JavaScript and widget views are dropped everywhere, HTML
and SVG are shown only from ranks on this machine, which are as trusted as the cell that the user wrote.
"""

from __future__ import annotations

import re
from typing import Any

Bundle = dict[str, Any]

_ALWAYS = ("text/plain", "image/png", "image/jpeg", "image/gif", "application/json")
_FROM_THIS_MACHINE = ("text/html", "image/svg+xml", "text/markdown", "text/latex")
# colours (SGR) are kept; every other escape sequence, and every control character but tab, newline, return, goes
_ESCAPES = re.compile(
    r"\x1b\[[0-9;:]*m"  # SGR: kept
    r"|\x1b\[[0-?]*[ -/]*[@-~]?"  # other control sequences
    r"|\x1b[\]PX^_].*?(?:\x07|\x1b\\|$)"  # strings for the terminal: titles, links, clipboard
    r"|\x1b[ -/]*[0-~]?"
    r"|[\x00-\x08\x0b\x0c\x0e-\x1a\x1c-\x1f\x7f-\x9f]",
    re.DOTALL,
)


def clean_text(text: str) -> str:
    """Text without control sequences for a terminal, save colours."""
    if not _NEEDS_CLEANING.search(text):
        return text
    return _ESCAPES.sub(lambda match: match[0] if match[0].startswith("\x1b[") and match[0].endswith("m") else "", text)


_NEEDS_CLEANING = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


def safe_bundle(bundle: object, *, is_this_machine: bool) -> Bundle:
    """The part of a rich output that may be shown; always with a text/plain."""
    if not isinstance(bundle, dict):
        return {"text/plain": ""}
    allowed = _ALWAYS + (_FROM_THIS_MACHINE if is_this_machine else ())
    safe = {mime: bundle[mime] for mime in allowed if mime in bundle and _has_right_type(mime, bundle[mime])}
    safe["text/plain"] = clean_text(safe.get("text/plain", ""))
    return safe


def _has_right_type(mime: str, value: object) -> bool:
    return mime == "application/json" or isinstance(value, str)
