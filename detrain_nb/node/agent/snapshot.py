"""What an agent remembers of its session, to tell a notebook that attaches later: how the ranks and the cells stand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

from ...wire import (
    Acknowledge,
    CellDone,
    CellFailed,
    Frame,
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
    to_frame,
)

MOST_REMEMBERED_CHARS = 32 << 20  # of code and lines; a notebook takes no more from an agent
CHARS_BESIDE = 1000  # what each cell and line counts for, beside its text
_MAX_CELLS = 1000
_LINGER_BEFORE_START_S = 30.0


class Snapshot:
    """Fed with what passes through the agent, down to the ranks and up from them."""

    def __init__(self) -> None:
        self.ranks: list[int] = []
        self.info: Json = None
        self.linger_s = _LINGER_BEFORE_START_S
        self.generation = 0
        self._has_group: dict[int, bool] = {}
        self._state_of: dict[int, list[Frame]] = {}  # RankUp, and RankEnded when that came after it
        self._incarnations: dict[int, int] = {}  # of the ranks that are up
        self._cells: dict[int, tuple[RunCell, set[int]]] = {}  # with the ranks that still run it
        self._chars = 0  # of their code, as a notebook counts
        self._collective_cells: set[int] = set()
        self._failed_cells: set[int] = set()
        self._unfinished: list[Frame] = []  # lines that are cut at the number that was acknowledged
        self._unfinished_to_come: list[Frame] = []
        self._down: dict[type[Message], Callable[[Any], None]] = {
            RunCell: self._note_run,
            Unfinished: self._note_unfinished,
            Acknowledge: self._note_acknowledged,
            NewGeneration: self._note_generation,
            Renumber: self._renumber,
            Launch: self._note_launch,
        }
        self._up: dict[type[Message], Callable[[Any, Frame], None]] = {
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

    def note_down(self, message: Message) -> None:
        """What the notebook asked for."""
        if note := self._down.get(type(message)):
            note(message)

    def _note_run(self, message: RunCell) -> None:
        meant_for = zip(message.ranks, message.incarnations)
        running = {rank for rank, incarnation in meant_for if self._incarnations.get(rank) == incarnation}
        if len(running) < len(message.ranks):  # a rank was lost meanwhile, and leaves it alone
            self._failed_cells.add(message.cell)
        if message.cell in self._cells:
            self._chars -= _chars_of(self._cells[message.cell][0])
        self._cells[message.cell] = (message, running)
        self._chars += _chars_of(message)
        self._forget_ended_cells()

    def _note_unfinished(self, message: Unfinished) -> None:
        self._unfinished_to_come.append(to_frame(message))

    def _note_acknowledged(self, _: Acknowledge) -> None:
        self._unfinished, self._unfinished_to_come = self._unfinished_to_come, []

    def _note_generation(self, message: NewGeneration) -> None:
        self.generation = message.number

    def _note_launch(self, message: Launch) -> None:
        self.ranks, self.info, self.linger_s = message.ranks, message.info, message.linger_s

    def _forget_ended_cells(self) -> None:
        """The oldest go, as long as there are more than a notebook takes; lines that are cut need room too."""
        while len(self._cells) > _MAX_CELLS or self._chars > MOST_REMEMBERED_CHARS // 2:
            ended = next((cell for cell, (_, running) in self._cells.items() if not running), None)
            if ended is None:
                return
            self._chars -= _chars_of(self._cells.pop(ended)[0])
            self._collective_cells.discard(ended)
            self._failed_cells.discard(ended)

    def _renumber(self, message: Renumber) -> None:
        """Ranks that are idle have other numbers; they say so themselves, as if they had just come up."""
        number = dict(zip(message.ranks, message.numbers))
        self.ranks = [number[rank] for rank in self.ranks if rank in number]
        self._state_of.clear()
        self._incarnations.clear()
        self._has_group.clear()
        for cell, (run, _) in self._cells.items():
            kept = [
                (number[rank], incarnation) for rank, incarnation in zip(run.ranks, run.incarnations) if rank in number
            ]
            ranks, incarnations = [rank for rank, _ in kept], [incarnation for _, incarnation in kept]
            self._cells[cell] = (replace(run, ranks=ranks, incarnations=incarnations), set())

    def note_up(self, frame: Frame) -> None:
        """What a rank said; decoded only where it matters."""
        if note := self._up.get(frame.kind):
            note(frame.message(), frame)

    def _note_rank(self, up: RankUp, frame: Frame) -> None:
        self._state_of[up.rank] = [frame]
        self._incarnations[up.rank] = up.incarnation

    def _note_cell_end(self, message: CellDone | CellFailed, _: Frame) -> None:
        self._has_group[message.rank] = message.has_group
        self._end_cells(message.rank, (message.cell,), has_failed=isinstance(message, CellFailed))
        if message.is_collective:
            self._collective_cells.add(message.cell)

    def _note_group(self, message: GenerationReady, _: Frame) -> None:
        self._has_group[message.rank] = not message.error

    def _note_no_group(self, message: GenerationEnded, _: Frame) -> None:
        self._has_group[message.rank] = False

    def _note_rank_end(self, message: RankEnded, frame: Frame) -> None:
        self._has_group[message.rank] = False
        self._incarnations.pop(message.rank, None)
        self._end_cells(message.rank, self._cells, has_failed=True)
        self._state_of[message.rank] = [*self._state_of.get(message.rank, [])[:1], frame]

    def _end_cells(self, rank: int, cells: Iterable[int], *, has_failed: bool) -> None:
        """``rank`` has ended those of ``cells`` that it ran."""
        for cell in cells:
            running = self._cells[cell][1] if cell in self._cells else set()
            if rank in running:
                running.discard(rank)
                if has_failed:
                    self._failed_cells.add(cell)

    def told(self) -> list[Frame]:
        """How it stands: every cell that was run, every line that was shown in part, every rank."""
        cells = [to_frame(self._ran_cell(*known)) for known in self._cells.values()]
        ranks = [frame._replace(number=0) for frames in self._state_of.values() for frame in frames]
        return [*cells, *self._unfinished, *ranks]

    def _ran_cell(self, run: RunCell, running: set[int]) -> RanCell:
        is_collective, has_failed = run.cell in self._collective_cells, run.cell in self._failed_cells
        return RanCell(
            run.ranks, run.cell, run.code, run.first_line, is_collective, sorted(running), has_failed, run.is_replay
        )


def _chars_of(run: RunCell) -> int:
    return CHARS_BESIDE + len(run.code)
