"""Where a view stands in a notebook: live, above its plain form; once it has settled, its plain form alone."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from IPython.display import update_display

from ..text import html_text

__all__ = ["Display", "Displays", "Settled", "cut_text"]

_MOST_DISPLAYS = 20
_MOST_TEXT_BYTES, _MOST_HTML_BYTES = 12_000, 36_000  # of a settled view: with all around it, 50 kB of a saved notebook
_LONGEST_ESCAPE = 6  # bytes of HTML for one of text
_LIVE = "as it was when this cell ran; run it again for the live view"
_LIVE_SINCE = "as it was when it was changed last; run this cell again for the live view"
_CHILD = ".jp-OutputArea-child"
# Of two outputs in JupyterLab one is shown: the live view, or its plain form and not an error in place of a widget.
_ONE_OF_BOTH = (
    f"<style>{_CHILD}:not(:has(.dt)):has(+ {_CHILD} .dt-plain),"
    f" {_CHILD}:has(.dt.live) + {_CHILD}:has(.dt-plain) {{ display: none; }}</style>"
)
_NOTHING = {"text/plain": ""}


@dataclass(frozen=True)
class Settled:
    """A view as it stays in a saved notebook: the same facts as text, and as HTML without script, class or link."""

    text: str
    html: str = ""  # the text, in columns of one width, if there is none

    def bundle(self, *, end: str = "") -> dict[str, str]:
        """The MIME bundle; ``end`` is a line below it. What is too long is cut, and says so."""
        text, page = cut_text(self.text, _MOST_TEXT_BYTES), self.html or html_text(self.text)
        if len(page.encode()) > _MOST_HTML_BYTES:  # tags cannot be cut: the text takes their place
            page = html_text(cut_text(self.text, _MOST_HTML_BYTES // _LONGEST_ESCAPE))
        if end:
            text, page = f"{text}\n{end}", f"{page}<p><em>{end}</em></p>"
        return {"text/plain": text, "text/html": page}


@dataclass(frozen=True)
class Display:
    """One place of a view: two outputs, by their ids. It gives the contents of display messages."""

    live_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    plain_id: str = field(default_factory=lambda: uuid.uuid4().hex)

    def live(self, data: Mapping[str, Any], metadata: Mapping[str, Any], plain: Settled) -> list[dict[str, Any]]:
        """The widget, and below it the plain form: JupyterLab shows no other form of a widget whose kernel has gone."""
        below = _below(plain, _LIVE)
        own = {mime: value for mime, value in data.items() if mime not in below}
        return [_output(own, self.live_id, metadata), _output(below, self.plain_id)]

    def settled(self, plain: Settled) -> dict[str, Any]:
        """The plain form alone."""
        return _output(plain.bundle(), self.live_id)


class Displays:
    """All places of one view; of very many, the last ones."""

    def __init__(self) -> None:
        self._all: list[Display] = []

    def add(self) -> Display:
        """Make one more."""
        made = Display()
        self._all = [*self._all, made][-_MOST_DISPLAYS:]
        return made

    def renew(self, make_plain: Callable[[], Settled]) -> None:
        """Put what the plain form is now below each live view, for who saves the notebook."""
        for each in self._all:
            update_display(_below(make_plain(), _LIVE_SINCE), raw=True, display_id=each.plain_id)

    def settle(self, make_plain: Callable[[], Settled]) -> None:
        """Put the plain form in the place of each, in the saved notebook too."""
        for each in self._all:
            update_display(make_plain().bundle(), raw=True, display_id=each.live_id)
            update_display(_NOTHING, raw=True, display_id=each.plain_id)


def _below(plain: Settled, end: str) -> dict[str, str]:
    bundle = plain.bundle(end=end)
    return {**bundle, "text/html": f"<div class='dt-plain'>{bundle['text/html']}</div>{_ONE_OF_BOTH}"}


def cut_text(text: str, most_bytes: int) -> str:
    """Return so much of its begin, and say how much is not there."""
    written = text.encode()
    if len(written) <= most_bytes:
        return text
    return f"{written[:most_bytes].decode(errors='ignore')}\n... {len(written) - most_bytes:,} bytes not kept"


def _output(data: Mapping[str, Any], display_id: str, metadata: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The content of a display message."""
    return {"data": {**data}, "metadata": {**(metadata or {})}, "transient": {"display_id": display_id}}
