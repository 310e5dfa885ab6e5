"""The cells that were run, and which of them a rank that lost its variables may run again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from ..errors import SpecError, short_ranks
from ..wire import RanCell, RunCell
from .definitions import definitions_of

_LAST_COUNTED = 1 << 31  # a number from here on, which no session reaches, leads nowhere: a node has made it up


class History:
    """One per session; what an earlier notebook ran comes from the agents, which may say anything."""

    def __init__(self) -> None:
        self.collective: set[int] = set()  # cells that needed other ranks
        self.failed: set[int] = set()
        self.last_cell = 0  # the highest number that counts; 0 when nothing was run
        self._ran: dict[int, RanCell] = {}
        self._known: set[int] = {0}  # those that are run again too; 0 is what comes before the first
        self._not_ended_well: set[int] = set()  # stopped, timed out, or still running

    def knows(self, cell: int) -> bool:
        """It was sent from here, or an agent has said that it was sent by an earlier notebook."""
        return cell in self._known

    def next_cell(self, *, at_least: int) -> int:
        """A number that no known cell has."""
        cell = max(self.last_cell + 1, at_least)
        while cell in self._known:
            cell += 1
        return cell

    @property
    def cells(self) -> list[RanCell]:
        """Those that were run, in their order; not what was run once more."""
        return [ran for _, ran in sorted(self._ran.items())]

    def begin(self, message: RunCell) -> None:
        """A cell is about to be sent. One that is run again is there already."""
        self.last_cell = message.cell
        self._known.add(message.cell)
        if not message.is_replay:
            cell, code, first_line = message.cell, message.code, message.first_line
            self._ran[cell] = RanCell(message.ranks, cell, code, first_line, False, [], False)
            self._not_ended_well.add(cell)

    def end_well(self, cell: int) -> None:
        self._not_ended_well.discard(cell)

    def take(self, message: RanCell) -> None:
        """A cell that an earlier notebook has run."""
        self._known.add(message.cell)
        if message.cell < _LAST_COUNTED:
            self.last_cell = max(self.last_cell, message.cell)
        if message.is_replay:
            return
        if earlier := self._ran.get(message.cell):  # another node's part of it
            message = replace(message, ranks=sorted({*earlier.ranks, *message.ranks}))
        self._ran[message.cell] = message
        if message.is_collective:
            self.collective.add(message.cell)
        if message.has_failed:
            self.failed.add(message.cell)

    def renumber(self, number: Mapping[int, int]) -> None:
        """Ranks got other numbers; those without one are gone."""
        for cell, ran in self._ran.items():
            self._ran[cell] = replace(ran, ranks=[number[rank] for rank in ran.ranks if rank in number])

    def to_replay(self, cells: Iterable[int] | None, *, running: Collection[int]) -> list[RanCell]:
        """Those of ``cells``, in their order; by default all that ended well and needed no other rank.

        Of those that did need others, also where they failed, the imports and definitions: later cells need the names.
        Raises: SpecError when one of them was not run.
        """
        if cells is None:
            return [cell for number in sorted(set(self._ran) - set(running)) if (cell := self._alone(number))]
        wanted = sorted(set(cells))
        if unknown := [cell for cell in wanted if cell not in self._ran]:
            known = short_ranks(self._ran) if self._ran else "none so far"
            raise SpecError(f"cell {unknown[0]} was not run on the ranks; cells that were: {known}")
        return [self._ran[cell] for cell in wanted]

    def _alone(self, number: int) -> RanCell | None:
        """What of a cell a rank can run without the others; None for nothing."""
        if number in self.collective:
            code = definitions_of(self._ran[number].code)
            return replace(self._ran[number], code=code) if code else None
        return None if number in self.failed | self._not_ended_well else self._ran[number]
