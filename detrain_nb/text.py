"""How texts for people are made, here and on a node, so that one thing looks the same wherever it is shown."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

__all__ = ["ShownAsText", "format_size", "html_cells", "html_table", "table_lines"]

_UNITS = {"GB": 1e9, "MB": 1e6, "kB": 1e3, "B": 1.0}


def format_size(size_bytes: float, *, smallest: str = "") -> str:
    """Three digits and a unit; with the ``smallest`` unit that there is, tenths, and whole numbers of that one."""
    if smallest:
        unit = next(unit for unit, size in _UNITS.items() if size <= max(size_bytes, _UNITS[smallest]))
        return f"{size_bytes / _UNITS[unit]:,.{int(unit != smallest)}f} {unit}"
    unit = next((unit for unit, size in reversed(_UNITS.items()) if size_bytes < 999.5 * size), "GB")
    number = size_bytes / _UNITS[unit]
    return f"{number:.3g} {unit}" if number < 999.5 else f"{number:,.0f} {unit}"


def table_lines(rows: Sequence[Sequence[str]], *, num_right: int = 0, min_widths: Sequence[int] = ()) -> list[str]:
    """Lay out ``rows``, all of one length, in columns; no line ends in blanks.

    The first ``num_right`` columns are aligned to the right, the others to the left; ``min_widths`` is of the first.
    """
    needed = (max(map(len, column)) for column in zip(*rows))
    widths = [max(both) for both in itertools.zip_longest(needed, min_widths, fillvalue=0)]
    sides = [str.rjust] * num_right + [str.ljust] * len(widths)
    return ["  ".join(side(cell, width) for side, cell, width in zip(sides, row, widths)).rstrip() for row in rows]


class ShownAsText:
    """A front end shows it as the text that it prints as, in columns of one width."""

    def _repr_html_(self) -> str:
        from html import escape  # 2 ms, which no node has to spend

        return f"<pre>{escape(str(self))}</pre>"


def html_cells(texts: Iterable[str], *, tag: str = "td", style: str = "") -> str:
    """Write the cells of a row, escaped."""
    from html import escape

    opened = f"<{tag} style='{style}'>" if style else f"<{tag}>"
    return "".join(f"{opened}{escape(text)}</{tag}>" for text in texts)


def html_table(head: str, *bodies: str, caption: Iterable[str] = ()) -> str:
    """Put a table together: ``head`` is cells, each body is rows; ``caption`` is lines of text, and is escaped."""
    from html import escape

    lines = "<br>".join(map(escape, caption))
    top = f"<caption>{lines}</caption>" if lines else ""
    return f"<table>{top}<thead><tr>{head}</tr></thead>{''.join(f'<tbody>{body}</tbody>' for body in bodies)}</table>"
