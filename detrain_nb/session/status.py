"""Where every rank of a session is, as a table."""

from __future__ import annotations

import html
from dataclasses import dataclass

_COLUMNS = ("rank", "host", "pid", "device", "state", "line", "memory", "last cell")


@dataclass(frozen=True)
class RankStatus:
    """One rank: ``line`` is the line of the running cell (0: none), ``seconds`` what its last cell took."""

    rank: int
    host: str
    pid: int
    device: str
    state: str
    cell: int
    line: int
    rss_bytes: int
    seconds: float | None

    def cells(self) -> tuple[str, ...]:
        line = f"cell {self.cell}, line {self.line}" if self.line else ""
        memory = f"{self.rss_bytes / 1e6:,.0f} MB" if self.rss_bytes else ""
        last = "" if self.seconds is None else f"{self.seconds:.3f} s"
        return (str(self.rank), self.host, str(self.pid), self.device, self.state, line, memory, last)


@dataclass(frozen=True)
class SessionStatus:
    """A session and its ranks."""

    name: str
    ranks: tuple[RankStatus, ...]

    def __repr__(self) -> str:
        table = [_COLUMNS, *(rank.cells() for rank in self.ranks)]
        widths = [max(len(row[column]) for row in table) for column in range(len(_COLUMNS))]
        lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths)).rstrip() for row in table]
        return "\n".join([f"session {self.name}: {len(self.ranks)} ranks", *lines])

    def _repr_html_(self) -> str:
        head = "".join(f"<th>{column}</th>" for column in _COLUMNS)
        rows = "".join(
            "<tr>" + "".join(f"<td>{html.escape(text)}</td>" for text in rank.cells()) + "</tr>" for rank in self.ranks
        )
        title = f"session {html.escape(self.name)}: {len(self.ranks)} ranks"
        return f"<table><caption>{title}</caption><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
