"""The cells that were run, and which of them a rank that lost its variables may rerun."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from ...errors import SpecError, short_ranks
from ...wire import CellDone, CellFailed, RanCell, RunCell
from .definitions import definitions_of

_MOST_AHEAD = 100_000  # cells that other nodes may have run after the last one of the first node
_LAST_COUNTED = 1 << 31  # no session reaches this number: a node that reports it, or a larger one, has made it up


class History:
    """The cells of one session; agents report what an earlier notebook ran, and may report anything."""

    def __init__(self) -> None:
        self._collective: set[int] = set()
        self._failed: set[int] = set()
        self._last_cell = 0  # the highest number that counts; 0 when nothing was run
        self._last_of_first = 0  # the highest number that the first node has reported
        self._ran: dict[int, dict[tuple[str, int], RanCell]] = {}  # by cell, then by its code: nodes may disagree
        self._known: set[int] = {0}  # includes reruns; 0 is what ran before the first cell
        self._not_ended_well: set[int] = set()  # stopped, timed out, or still running

    @property
    def collective(self) -> frozenset[int]:
        """The cells that needed other ranks."""
        return frozenset(self._collective)

    def knows(self, number: int) -> bool:
        """Return whether a cell was sent from here, or that an agent reported it as sent by an earlier notebook."""
        return number in self._known

    def next_cell(self, *, at_least: int) -> int:
        """Return the first number after the last cell, from ``at_least`` on, that no known cell has."""
        number = max(self._last_cell + 1, at_least)
        while number in self._known:
            number += 1
        return number

    @property
    def cells(self) -> list[RanCell]:
        """The cells that were run, in order, without reruns.

        A cell whose code nodes disagree on is listed once for each version, with the ranks whose node reports it.
        """
        return [part for _, parts in sorted(self._ran.items()) for part in parts.values()]

    def code_of(self, number: int) -> tuple[str, int]:
        """Return the code of a cell and the number of its first line; no code if unknown, or nodes disagree on it."""
        parts = list(self._ran.get(number, {}))
        return parts[0] if len(parts) == 1 else ("", 1)

    @property
    def disputed(self) -> list[int]:
        """The cells whose code nodes disagree on."""
        return sorted(cell for cell, parts in self._ran.items() if len(parts) > 1)

    def begin(self, message: RunCell) -> None:
        """Record a cell that is about to be sent. The code of a rerun is already recorded."""
        self._last_cell = message.cell
        self._known.add(message.cell)
        self._not_ended_well.add(message.cell)
        if not message.is_replay:
            number, code, first_line = message.cell, message.code, message.first_line
            self._ran[number] = {(code, first_line): RanCell(message.ranks, number, code, first_line, False, [], False)}

    def fail(self, number: int) -> None:
        """Record that a cell failed on a rank, or that a rank was lost in it."""
        self._failed.add(number)

    def has_ended_well(self, number: int) -> bool:
        """Return whether a cell failed on no rank, was not stopped, and is not running."""
        return number not in self._failed | self._not_ended_well

    def has_failed(self, number: int) -> bool:
        """Return whether a cell failed or was stopped on a rank, or that a rank was lost in it."""
        return number in self._failed

    def end_well(self, number: int) -> None:
        self._not_ended_well.discard(number)

    def take_end(self, message: CellDone | CellFailed) -> None:
        """Record how a cell ended on a rank. Ignored if the rank did not run the cell: its node has made it up."""
        parts = self._ran.get(message.cell, {}).values()
        if not any(message.rank in part.ranks for part in parts):
            return
        if message.is_collective:
            self._collective.add(message.cell)
        if isinstance(message, CellFailed):
            self._failed.add(message.cell)

    def take(self, message: RanCell, *, is_first: bool) -> None:
        """Record a cell that an earlier notebook ran; its ranks are those of the node that reports it.

        No node can change the code of the ranks of another, or push the next cell number out of bounds: the number of
        a cell counts if it is at most ``_MOST_AHEAD`` after the last cell that the first node reported.
        """
        self._known.add(message.cell)
        if is_first:
            self._last_of_first = max(self._last_of_first, message.cell)
        if message.cell < (_LAST_COUNTED if is_first else min(_LAST_COUNTED, self._last_of_first + _MOST_AHEAD)):
            self._last_cell = max(self._last_cell, message.cell)
        if message.is_replay:
            return
        parts, code = self._ran.setdefault(message.cell, {}), (message.code, message.first_line)
        if earlier := parts.get(code):  # another node reports the same code
            message = replace(message, ranks=sorted({*earlier.ranks, *message.ranks}))
        parts[code] = message
        if message.is_collective:
            self._collective.add(message.cell)
        if message.has_failed:
            self._failed.add(message.cell)

    def renumber(self, number: Mapping[int, int]) -> None:
        """Renumber the ranks; those without a new number are removed."""
        for parts in self._ran.values():
            for code, ran in parts.items():
                parts[code] = replace(ran, ranks=[number[rank] for rank in ran.ranks if rank in number])

    def to_replay(
        self, cells: Iterable[int] | None, *, ranks: Collection[int], running: Collection[int]
    ) -> list[RanCell]:
        """Return what ``ranks`` ran of ``cells``, in order; by default all that succeeded and needed no other rank.

        Of those that needed other ranks, failed ones too, the imports and definitions: later cells need the names.
        Raises: SpecError when one of ``cells`` was not run.
        """
        if cells is None:
            parts = (self._alone(part) for part in self._parts(set(self._ran) - set(running), ranks))
            return [part for part in parts if part]
        wanted = set(cells)
        if unknown := sorted(wanted - self._ran.keys()):
            known = short_ranks(self._ran) if self._ran else "none so far"
            raise SpecError(f"cell {unknown[0]} was not run on the ranks; cells that were: {known}")
        return list(self._parts(wanted, ranks))

    def _parts(self, cells: Iterable[int], ranks: Collection[int]) -> Iterator[RanCell]:
        """Yield what some of ``ranks`` ran of ``cells``, limited to these ranks."""
        for cell in sorted(cells):
            for part in self._ran[cell].values():
                if on := [rank for rank in part.ranks if rank in ranks]:
                    yield replace(part, ranks=on)

    def _alone(self, part: RanCell) -> RanCell | None:
        """Return what a rank can rerun of a cell without the others; None for nothing."""
        if part.cell in self._collective:
            code = definitions_of(part.code)
            return replace(part, code=code) if code else None
        return None if part.cell in self._failed | self._not_ended_well else part
