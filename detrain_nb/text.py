"""Texts for people, written and parsed the same way in the notebook and on a node."""

from __future__ import annotations

import html
import itertools
import math
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}
HERE = "this machine"  # shown in place of a name
RED = "color:var(--jp-error-color1, #c62828)"  # the style of failures in a page
_REDRAW_S = 0.2
_RATE_S = 5.0  # the rate is that of the last seconds
_BAR_CHARS = 30
USER = re.compile(r"(?:[A-Za-z0-9_][A-Za-z0-9._-]{0,63}\\)?[A-Za-z0-9._@+][A-Za-z0-9._@+-]{0,127}")  # on a host
USER_RULE = "a user name of letters, digits and . _ @ + -, not beginning with -; DOMAIN\\ may precede it"
_PASSWORD = re.compile(r":[^\s:@/'\"]+@")
_TARGET = re.compile(r"(?:(.+)@)?(?:\[([^]]*)\]|([^@:]*))(?::([0-9]+))?")


def format_size(size_bytes: float, *, smallest: str = "") -> str:
    """Format a size with three digits and a unit; with ``smallest``, one decimal, and whole numbers of that unit."""
    if smallest:
        unit = next(unit for unit, size in _UNITS.items() if size <= max(size_bytes, _UNITS[smallest]))
        return f"{size_bytes / _UNITS[unit]:,.{int(unit != smallest)}f} {unit}"
    unit = next((unit for unit, size in reversed(_UNITS.items()) if size_bytes < 999.5 * size), "GB")
    number = size_bytes / _UNITS[unit]
    return f"{number:.3g} {unit}" if number < 999.5 else f"{number:,.0f} {unit}"


def short_number(value: float) -> str:
    """Format a number in a few characters: ``2.434``, ``2.29e-04``, ``223 k``, ``nan``."""
    size = abs(value)
    for unit, scale, least in (("G", 1e9, 1e9), ("M", 1e6, 1e6), ("k", 1e3, 1e4)):
        if least <= size < 1e15:
            return f"{value / scale:.3g} {unit}"
    is_plain = size == 0 or 1e-3 <= size < 1e4 or not math.isfinite(size)
    return f"{value:.4g}" if is_plain else f"{value:.2e}"


def describe_seconds(seconds: float) -> str:
    """Format a duration: ``12 s``, ``3 min 5 s``, ``2 h 10 min``, ``3 days 4 h``."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    units = ((86_400, "days"), (3600, "h"), (60, "min"), (1, "s"))
    for (size, unit), (small, small_unit) in itertools.pairwise(units):
        if whole >= size:
            rest = whole % size // small
            return f"{whole // size} {unit}" + (f" {rest} {small_unit}" if rest else "")
    return f"{whole} s"


def create_again(names: Sequence[str]) -> str:
    """Advise to create variables again: ``run the cell that creates model again``."""
    return f"run the cell{'s' * (len(names) > 1)} that create{'s' * (len(names) == 1)} {', '.join(names)} again"


def escape(char: str) -> str:
    """Write a character as an escape of Python source."""
    return char.encode("unicode_escape").decode()


def printable(text: str, instead: str | Callable[[str], str] = escape) -> str:
    """Replace what `str.isprintable` refuses, such as control characters, line ends and surrogates, by ``instead``."""
    if text.isprintable():  # the common case, and fast
        return text
    return "".join(char if char.isprintable() else instead(char) if callable(instead) else instead for char in text)


def show(value: object, *, most: int = 60) -> str:
    """Format a value for a message: one line, cut to ``most`` characters, the password of ``user:it@host`` hidden."""
    text = " ".join(map(str.strip, repr(value).splitlines()))  # repr escapes what does not print
    text = _PASSWORD.sub(":***@", text)
    return text if len(text) <= most else f"{text[: most - 3]}..."


def count_of(number: int, noun: str) -> str:
    """Format a count with its noun: ``1 node``, ``2 nodes``, ``1,024 microbatches``."""
    ending = "" if number == 1 else "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{ending}"


def name_some(names: Sequence[str], *, most: int = 3, separator: str = ", ") -> str:
    """List the first ``most`` names and the number of the others: ``a, b, c and 4 more``."""
    more = len(names) - most
    return separator.join(names[:most]) + (f" and {more} more" if more > 0 else "")


def told_node(name: str) -> str:
    """Return the name of a node for people: `HERE` when it is empty or ``localhost``."""
    return HERE if name in ("", "localhost") else name


def split_target(text: str) -> tuple[str | None, str, str | None, bool]:
    """Split ``[user@]host[:port]`` into user, host, port and whether the host was in brackets; nothing is checked."""
    if match := _TARGET.fullmatch(text):
        user, address, host, port = match.groups()
        return user, host if address is None else address, port, address is not None
    user, at, host = text.rpartition("@")
    return user if at else None, host, None, False


def table_lines(rows: Sequence[Sequence[str]], *, num_right: int = 0, min_widths: Sequence[int] = ()) -> list[str]:
    """Lay out ``rows`` in columns, the first ``num_right`` aligned right; ``min_widths`` are of the first columns."""
    needed = (max(map(len, column)) for column in zip(*rows))
    widths = [max(both) for both in itertools.zip_longest(needed, min_widths, fillvalue=0)]
    sides = [str.rjust] * num_right + [str.ljust] * len(widths)
    return ["  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths)).rstrip() for row in rows]


class CopyProgress:
    """The progress of a copy as one line: a bar, per cent, bytes, bytes per second.

    Call it with the files done, the bytes done and the bytes in all; it draws the line a few times per second.
    """

    def __init__(self, what: str, draw: Callable[[str], object], *, now: Callable[[], float] = time.monotonic) -> None:
        self._what = what
        self._draw = draw
        self._now = now
        self._drawn_at: float | None = None
        self._times = deque([(now(), 0)])  # time, bytes done by then

    def __call__(self, files: int, done: int, total: int) -> None:
        now = self._now()
        is_done = bool(total) and done >= total
        if self._drawn_at is None or now - self._drawn_at >= _REDRAW_S or is_done:
            self._drawn_at = now
            self._draw(self._line(now, files, done, total))

    def _line(self, now: float, files: int, done: int, total: int) -> str:
        self._times.append((now, done))
        while len(self._times) > 2 and self._times[1][0] <= now - _RATE_S:
            self._times.popleft()
        since, before = self._times[0]
        rate = f", {format_size((done - before) / (now - since))}/s" if now > since else ""
        share = min(1.0, done / total) if total else 0.0
        full = int(_BAR_CHARS * share)
        bar = "#" * full + "." * (_BAR_CHARS - full)
        counted = "1 file" if files == 1 else f"{files:,} files"
        return (
            f"{self._what} [{bar}] {int(100 * share):3} %, {format_size(done)} of {format_size(total)}{rate}, {counted}"
        )


class ShownAsText:
    """An object that a front end shows as its ``str``, in a monospaced font."""

    def _repr_html_(self) -> str:
        return html_text(str(self))

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls._repr_pretty_ = _print_text  # type: ignore[attr-defined]  # else IPython prefers the __repr__ of the class


def _print_text(shown: object, printer: Any, cycle: bool) -> None:
    printer.text(str(shown))


def html_text(text: str) -> str:
    """Write text as HTML in the font and size in which a front end shows printed output."""
    style = "margin:0;font-size:var(--jp-code-font-size, inherit);word-break:normal;overflow-wrap:anywhere"
    return f"<pre style='{style}'>{html.escape(text)}</pre>"


def html_cells(texts: Iterable[str], *, tag: str = "td", style: str = "") -> str:
    """Write the cells of a row, escaped."""
    opened = f"<{tag} style='{style}'>" if style else f"<{tag}>"
    return "".join(f"{opened}{html.escape(text)}</{tag}>" for text in texts)


def html_table(head: str, *bodies: str, caption: Iterable[str] = ()) -> str:
    """Build a table: ``head`` holds cells, each body rows; ``caption`` holds lines of text, which are escaped.

    The caption is a block above the table, as wide as the page: a <caption> would wrap at the width of the table.
    """
    lines = "<br>".join(map(html.escape, caption))
    top = f"<div>{lines}</div>" if lines else ""
    return f"{top}<table><thead><tr>{head}</tr></thead>{''.join(f'<tbody>{body}</tbody>' for body in bodies)}</table>"
