"""The cells that were run, and which of them a rank that lost its variables may run again."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from ...errors import SpecError, short_ranks
from ...wire import CellDone, CellFailed, RanCell, RunCell
from .definitions import definitions_of

_MOST_AHEAD = 100_000  # cells of a session in which the first node had no rank
_LAST_COUNTED = 1 << 31  # a number from here on, which no session reaches, leads nowhere: a node has made it up


class History:
    """One per session; what an earlier notebook ran comes from the agents, which may say anything."""

    def __init__(self) -> None:
        self._collective: set[int] = set()
        self._failed: set[int] = set()
        self._last_cell = 0  # the highest number that counts; 0 when nothing was run
        self._last_of_first = 0  # of those that the first node has said
        self._ran: dict[int, dict[tuple[str, int], RanCell]] = {}  # what of a cell ran as which code: nodes may differ
        self._known: set[int] = {0}  # those that are run again too; 0 is what comes before the first
        self._not_ended_well: set[int] = set()  # stopped, timed out, or still running

    @property
    def collective(self) -> frozenset[int]:
        """The cells that needed other ranks."""
        return frozenset(self._collective)

    def knows(self, number: int) -> bool:
        """It was sent from here, or an agent has said that it was sent by an earlier notebook."""
        return number in self._known

    def next_cell(self, *, at_least: int) -> int:
        """A number that no known cell has."""
        number = max(self._last_cell + 1, at_least)
        while number in self._known:
            number += 1
        return number

    @property
    def cells(self) -> list[RanCell]:
        """Those that were run, in their order; not what was run once more.

        A cell whose code nodes do not agree on is there once for each, with the ranks whose node says so.
        """
        return [part for _, parts in sorted(self._ran.items()) for part in parts.values()]

    def code_of(self, number: int) -> tuple[str, int]:
        """The code of a cell and the number of its first line; no code where none is known, or nodes do not agree."""
        parts = list(self._ran.get(number, {}))
        return parts[0] if len(parts) == 1 else ("", 1)

    @property
    def disputed(self) -> list[int]:
        """The cells whose code nodes do not agree on."""
        return sorted(cell for cell, parts in self._ran.items() if len(parts) > 1)

    def begin(self, message: RunCell) -> None:
        """A cell is about to be sent. One that is run again is there already."""
        self._last_cell = message.cell
        self._known.add(message.cell)
        self._not_ended_well.add(message.cell)
        if not message.is_replay:
            number, code, first_line = message.cell, message.code, message.first_line
            self._ran[number] = {(code, first_line): RanCell(message.ranks, number, code, first_line, False, [], False)}

    def fail(self, number: int) -> None:
        """It has failed on a rank, or one was lost in it."""
        self._failed.add(number)

    def has_ended_well(self, number: int) -> bool:
        """It failed on no rank, was not stopped, and does not run."""
        return number not in self._failed | self._not_ended_well

    def has_failed(self, number: int) -> bool:
        """It has failed, or was stopped, on a rank; or a rank was lost in it."""
        return number in self._failed

    def end_well(self, number: int) -> None:
        self._not_ended_well.discard(number)

    def take_end(self, message: CellDone | CellFailed) -> None:
        """How a cell ended on a rank. That of one that did not run it counts for nothing: its node has made it up."""
        parts = self._ran.get(message.cell, {}).values()
        if not any(message.rank in part.ranks for part in parts):
            return
        if message.is_collective:
            self._collective.add(message.cell)
        if isinstance(message, CellFailed):
            self._failed.add(message.cell)

    def take(self, message: RanCell, *, is_first: bool) -> None:
        """A cell that an earlier notebook has run; its ranks are those of the node that says so.

        What one node says of it gives the ranks of another no other code, nor its cells numbers that are not counted:
        of what the first one has not said, a number counts up to some distance.
        """
        self._known.add(message.cell)
        if is_first:
            self._last_of_first = max(self._last_of_first, message.cell)
        if message.cell < (_LAST_COUNTED if is_first else min(_LAST_COUNTED, self._last_of_first + _MOST_AHEAD)):
            self._last_cell = max(self._last_cell, message.cell)
        if message.is_replay:
            return
        parts, code = self._ran.setdefault(message.cell, {}), (message.code, message.first_line)
        if earlier := parts.get(code):  # another node says the same
            message = replace(message, ranks=sorted({*earlier.ranks, *message.ranks}))
        parts[code] = message
        if message.is_collective:
            self._collective.add(message.cell)
        if message.has_failed:
            self._failed.add(message.cell)

    def renumber(self, number: Mapping[int, int]) -> None:
        """Ranks got other numbers; those without one are gone."""
        for parts in self._ran.values():
            for code, ran in parts.items():
                parts[code] = replace(ran, ranks=[number[rank] for rank in ran.ranks if rank in number])

    def to_replay(
        self, cells: Iterable[int] | None, *, ranks: Collection[int], running: Collection[int]
    ) -> list[RanCell]:
        """What ``ranks`` ran of ``cells``, in their order; by default of all that ended well and needed no other rank.

        Of those that did need others, also where they failed, the imports and definitions: later cells need the names.
        Raises: SpecError when one of them was not run.
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
        """What some of ``ranks`` ran of ``cells``, with those alone."""
        for cell in sorted(cells):
            for part in self._ran[cell].values():
                if on := [rank for rank in part.ranks if rank in ranks]:
                    yield replace(part, ranks=on)

    def _alone(self, part: RanCell) -> RanCell | None:
        """What of it a rank can run without the others; None for nothing."""
        if part.cell in self._collective:
            code = definitions_of(part.code)
            return replace(part, code=code) if code else None
        return None if part.cell in self._failed | self._not_ended_well else part
