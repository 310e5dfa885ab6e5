"""The results of a cell: one RankResult per rank, gathered in a CellResult."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ...errors import RemoteError, behind_ours, short_ranks
from ...text import html_cells, html_table
from ..output.log import OutputLog

__all__ = ["CellResult", "RankResult", "TextOnly"]

_SHOWN_CHARS = 2000


class TextOnly(str):
    """The text of a value that cannot travel; ``repr`` shows it without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


@dataclass(frozen=True)
class RankResult:
    """How a cell ended on one rank.

    ``value`` is that of the cell's last expression if it can travel, else its text (``TextOnly``), None if there is
    none; ``bundle`` is its rich form, {mime type: data}, safe to show. ``seconds`` is the time measured on the rank.
    ``error`` is None: when a rank fails, `Session.run_cell` raises RankError, which has the errors of all ranks.
    """

    rank: int
    host: str
    seconds: float
    error: RemoteError | None
    bundle: dict[str, Any] = field(repr=False)
    value: Any
    _log: OutputLog = field(repr=False, compare=False)
    _cell: int = field(repr=False, compare=False)

    @property
    def stdout(self) -> str:
        """All that the rank printed to stdout in this cell."""
        return self._log.text(self._cell, self.rank)

    @property
    def stderr(self) -> str:
        """All that the rank printed to stderr in this cell."""
        return self._log.text(self._cell, self.rank, "stderr")

    @property
    def beginning(self) -> str:
        """What the rank printed to stdout; of long output the first part and a hint to the rest."""
        text, is_cut = self._log.beginning(self._cell, self.rank, limit_bytes=_SHOWN_CHARS)
        return f"{text} ... more in .stdout" if is_cut else text


class CellResult:
    """How a cell ended on every rank that ran it. ``cell`` is its number, as in ``session.log``.

    ``result[3]`` is the RankResult of rank 3; iterating yields those of all ranks, in their order.
    """

    def __init__(self, cell: int, ranks: dict[int, RankResult]) -> None:
        self.cell = cell
        self._ranks = dict(sorted(ranks.items()))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that ran the cell, in ascending order."""
        return tuple(self._ranks)

    @property
    def values(self) -> dict[int, Any]:
        """The value of the cell's last expression, by rank."""
        return {rank: result.value for rank, result in self._ranks.items()}

    @property
    def stdout(self) -> dict[int, str]:
        """What each rank printed to stdout, by rank."""
        return {rank: result.stdout for rank, result in self._ranks.items()}

    @property
    def stderr(self) -> dict[int, str]:
        """What each rank printed to stderr, by rank."""
        return {rank: result.stderr for rank, result in self._ranks.items()}

    @property
    def seconds(self) -> dict[int, float]:
        """How long the cell took on each rank, by rank."""
        return {rank: result.seconds for rank, result in self._ranks.items()}

    def __getitem__(self, rank: int) -> RankResult:
        try:
            return self._ranks[rank]
        except KeyError:
            raise KeyError(f"cell {self.cell} did not run on rank {rank}, only on {short_ranks(self._ranks)}") from None

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> Iterator[RankResult]:
        return iter(self._ranks.values())

    def __repr__(self) -> str:
        lines = [f"CellResult of cell {self.cell}"]
        lines += [f"  [{r.rank}] {r.seconds:.3f} s  {behind_ours(_shown(r))}" for r in self]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        rows = "".join(
            f"<tr>{html_cells((str(r.rank), r.host, f'{r.seconds:.3f}'))}"
            f"<td style='text-align:left'><pre>{html.escape(_shown(r))}</pre></td>"
            f"<td style='text-align:left'><pre>{html.escape(r.beginning)}</pre></td></tr>"
            for r in self
        )
        return html_table(html_cells(("rank", "host", "seconds", "value", "stdout"), tag="th"), rows)


def _shown(result: RankResult) -> str:
    if result.error:
        return _clipped(result.error.summary)
    return _clipped(str(result.bundle.get("text/plain", "")))


def _clipped(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]} ... {len(text) - _SHOWN_CHARS:,} more"
