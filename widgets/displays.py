"""Displays of a view in a notebook: live, with its plain form below; once it has settled, its plain form alone."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from IPython.display import update_display

from ..text import html_text

__all__ = ["Display", "Displays", "Settled", "cut_text"]

_MOST_DISPLAYS = 20
_MOST_TEXT_BYTES, _MOST_HTML_BYTES = 12_000, 36_000  # of a settled view: 50 kB of a saved notebook in all
_LONGEST_ESCAPE = 6  # bytes of HTML for one of text
_LIVE = "as it was when this cell ran; run it again for the live view"
_LIVE_SINCE = "as it was after the last change; run this cell again for the live view"
_CHILD = ".jp-OutputArea-child"
# JupyterLab shows one of both outputs: the live view or, instead of an error for a missing widget, its plain form.
_ONE_OF_BOTH = (
    f"<style>{_CHILD}:not(:has(.dt)):has(+ {_CHILD} .dt-plain),"
    f" {_CHILD}:has(.dt.live) + {_CHILD}:has(.dt-plain) {{ display: none; }}</style>"
)
_NOTHING = {"text/plain": ""}


@dataclass(frozen=True)
class Settled:
    """A view in a saved notebook: the same facts as text, and as HTML without scripts, classes or links."""

    text: str
    html: str = ""  # if empty, the text is shown in a fixed-width font

    def bundle(self, *, end: str = "") -> dict[str, str]:
        """Return the MIME bundle with the line ``end`` below it. Content that is too long is cut, with a note."""
        text, page = cut_text(self.text, _MOST_TEXT_BYTES), self.html or html_text(self.text)
        if len(page.encode()) > _MOST_HTML_BYTES:  # HTML cannot be cut: use the text instead
            page = html_text(cut_text(self.text, _MOST_HTML_BYTES // _LONGEST_ESCAPE))
        if end:
            text, page = f"{text}\n{end}", f"{page}<p><em>{end}</em></p>"
        return {"text/plain": text, "text/html": page}


@dataclass(frozen=True)
class Display:
    """One display of a view: the ids of its two outputs. Its methods return the contents of display messages."""

    live_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    plain_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def live(self, data: Mapping[str, Any], metadata: Mapping[str, Any], plain: Settled) -> list[dict[str, Any]]:
        """Return the widget and, below it, the plain form: JupyterLab has no fallback for a widget without a kernel."""
        below = _below(plain, _LIVE)
        own = {mime: value for mime, value in data.items() if mime not in below}
        return [_output(own, self.live_id, metadata), _output(below, self.plain_id)]

    def settled(self, plain: Settled) -> dict[str, Any]:
        """Return the plain form alone."""
        return _output(plain.bundle(), self.live_id)


class Displays:
    """The displays of one view; of very many, the last ones."""

    def __init__(self) -> None:
        self._all: list[Display] = []

    def add(self) -> Display:
        """Add a display."""
        made = Display()
        self._all = [*self._all, made][-_MOST_DISPLAYS:]
        return made

    def renew(self, make_plain: Callable[[], Settled]) -> None:
        """Update the plain form below each live view, for when the notebook is saved."""
        for each in self._all:
            update_display(_below(make_plain(), _LIVE_SINCE), raw=True, display_id=each.plain_id)

    def settle(self, make_plain: Callable[[], Settled]) -> None:
        """Replace each display with the plain form, in the saved notebook too."""
        for each in self._all:
            update_display(make_plain().bundle(), raw=True, display_id=each.live_id)
            update_display(_NOTHING, raw=True, display_id=each.plain_id)


def _below(plain: Settled, end: str) -> dict[str, str]:
    bundle = plain.bundle(end=end)
    return {**bundle, "text/html": f"<div class='dt-plain'>{bundle['text/html']}</div>{_ONE_OF_BOTH}"}


def cut_text(text: str, most_bytes: int) -> str:
    """Return the beginning of a text, with a line that says how many bytes were cut."""
    written = text.encode()
    if len(written) <= most_bytes:
        return text
    return f"{written[:most_bytes].decode(errors='ignore')}\n... {len(written) - most_bytes:,} bytes not kept"


def _output(data: Mapping[str, Any], display_id: str, metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the content of a display message."""
    return {"data": {**data}, "metadata": {**(metadata or {})}, "transient": {"display_id": display_id}}
