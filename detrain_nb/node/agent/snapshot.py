"""What an agent remembers of its session for a notebook that attaches later: the states of ranks and cells."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from ...wire import (
    Acknowledge,
    CellDone,
    CellFailed,
    GenerationEnded,
    GenerationReady,
    Json,
    Launch,
    Message,
    NewGeneration,
    RanCell,
    RankEnded,
    RankUp,
    Renumber,
    RunCell,
    Unfinished,
)

MOST_REMEMBERED_CHARS = 32 << 20  # of code and lines; a notebook accepts no more from an agent
CHARS_BESIDE = 1000  # counted for each cell and line in addition to its text
_MAX_CELLS = 1000
_LINGER_BEFORE_START_S = 30.0


class Run(NamedTuple):
    """A cell that a rank is running, and when the agent forwarded it (``time.monotonic()``)."""

    cell: int
    began_s: float


class Snapshot:
    """The session's state, taken from the messages that pass through the agent in both directions."""

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.info: Json = None
        self.linger_s = _LINGER_BEFORE_START_S
        self.generation = 0
        self._has_group: dict[int, bool] = {}
        self._state_of: dict[int, list[Message]] = {}  # RankUp, then RankEnded if the rank has ended since
        self._incarnations: dict[int, int] = {}  # of the running ranks
        self._cells: dict[int, RanCell] = {}
        self._runs: dict[int, Run] = {}
        self._chars = 0  # of the cells' code, counted as a notebook does
        self._unfinished: list[Message] = []  # lines that are incomplete at the acknowledged number
        self._unfinished_to_come: list[Message] = []
        self._notebook_handlers: dict[type[Message], Callable[[Any], None]] = {
            RunCell: self._note_run,
            Unfinished: self._note_unfinished,
            Acknowledge: self._note_acknowledged,
            NewGeneration: self._note_generation,
            Renumber: self._renumber,
            Launch: self._note_launch,
        }
        self._rank_handlers: dict[type[Message], Callable[[Any], None]] = {
            RankUp: self._note_rank,
            CellDone: self._note_cell_end,
            CellFailed: self._note_cell_end,
            GenerationReady: self._note_group,
            GenerationEnded: self._note_no_group,
            RankEnded: self._note_rank_end,
        }

    @property
    def with_group(self) -> list[int]:
        return sorted(rank for rank, has in self._has_group.items() if has)

    @property
    def up(self) -> list[RankUp]:
        """The ``RankUp`` messages of the ranks whose process is running."""
        return [said[-1] for said in self._state_of.values() if isinstance(said[-1], RankUp)]

    @property
    def runs(self) -> Mapping[int, Run]:
        """The cells that are running now, by rank."""
        return self._runs

    def take_from_notebook(self, message: Message) -> None:
        """Note a message of the notebook."""
        if handle := self._notebook_handlers.get(type(message)):
            handle(message)

    def _note_run(self, message: RunCell) -> None:
        meant_for = zip(message.ranks, message.incarnations)
        running = sorted(rank for rank, incarnation in meant_for if self._incarnations.get(rank) == incarnation)
        self._runs.update(dict.fromkeys(running, Run(message.cell, time.monotonic())))
        before = self._cells.get(message.cell)
        is_collective = before is not None and before.is_collective
        has_failed = before is not None and before.has_failed
        has_failed |= len(running) < len(message.ranks)  # a rank was lost in the meantime, and will not run it
        self._chars += _chars_of(message) - (_chars_of(before) if before else 0)
        said = message.ranks, message.cell, message.code, message.first_line
        self._cells[message.cell] = RanCell(*said, is_collective, running, has_failed, message.is_replay)
        self._forget_ended_cells()

    def _note_unfinished(self, message: Unfinished) -> None:
        self._unfinished_to_come.append(message)

    def _note_acknowledged(self, _: Acknowledge) -> None:
        self._unfinished, self._unfinished_to_come = self._unfinished_to_come, []

    def _note_generation(self, message: NewGeneration) -> None:
        self.generation = message.number

    def _note_launch(self, message: Launch) -> None:
        self.ranks, self.info, self.linger_s = message.ranks, message.info, message.linger_s

    def _forget_ended_cells(self) -> None:
        """Drop the oldest ended cells while a limit is exceeded; half of the characters are for unfinished lines."""
        while len(self._cells) > _MAX_CELLS or self._chars > MOST_REMEMBERED_CHARS // 2:
            ended = next((cell for cell, ran in self._cells.items() if not ran.running), None)
            if ended is None:
                return
            self._chars -= _chars_of(self._cells.pop(ended))

    def _renumber(self, message: Renumber) -> None:
        """Give idle ranks their new numbers; each then sends ``RankUp`` again, as if it had just started."""
        number = dict(zip(message.ranks, message.numbers))
        self.ranks = [number[rank] for rank in self.ranks if rank in number]
        self._state_of.clear()
        self._incarnations.clear()
        self._has_group.clear()
        self._runs.clear()
        for cell, ran in self._cells.items():
            ranks = [number[rank] for rank in ran.ranks if rank in number]
            self._cells[cell] = replace(ran, ranks=ranks, running=[])

    def take_from_rank(self, message: Message) -> None:
        """Note a message of a rank."""
        if handle := self._rank_handlers.get(type(message)):
            handle(message)

    def _note_rank(self, up: RankUp) -> None:
        self._state_of[up.rank] = [up]
        self._incarnations[up.rank] = up.incarnation

    def _note_cell_end(self, message: CellDone | CellFailed) -> None:
        self._has_group[message.rank] = message.has_group
        self._end_cell(message.cell, message.rank, has_failed=isinstance(message, CellFailed))
        if message.is_collective and message.cell in self._cells:
            self._cells[message.cell] = replace(self._cells[message.cell], is_collective=True)

    def _note_group(self, message: GenerationReady) -> None:
        self._has_group[message.rank] = not message.error

    def _note_no_group(self, message: GenerationEnded) -> None:
        self._has_group[message.rank] = False

    def _note_rank_end(self, message: RankEnded) -> None:
        self._has_group[message.rank] = False
        self._incarnations.pop(message.rank, None)
        self._runs.pop(message.rank, None)
        for cell in self._cells:
            self._end_cell(cell, message.rank, has_failed=True)
        self._state_of[message.rank] = [*self._state_of.get(message.rank, [])[:1], message]

    def _end_cell(self, cell: int, rank: int, *, has_failed: bool) -> None:
        """Note that ``rank`` is no longer running ``cell``, if it was."""
        if (run := self._runs.get(rank)) and run.cell == cell:
            del self._runs[rank]
        ran = self._cells.get(cell)
        if ran and rank in ran.running:
            running = [each for each in ran.running if each != rank]
            self._cells[cell] = replace(ran, running=running, has_failed=ran.has_failed or has_failed)

    def told(self) -> list[Message]:
        """Return the state as messages: every remembered cell, every unfinished line, every rank."""
        return [*self._cells.values(), *self._unfinished, *itertools.chain.from_iterable(self._state_of.values())]


def _chars_of(cell: RunCell | RanCell) -> int:
    return CHARS_BESIDE + len(cell.code)
