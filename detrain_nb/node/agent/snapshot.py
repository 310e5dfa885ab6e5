"""What an agent remembers of its session, to tell a notebook that attaches later: how the ranks and the cells stand."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

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
_OF_INTEREST = {CellDone, CellFailed, GenerationEnded, GenerationReady, RankEnded}


class Memory:
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

    @property
    def with_group(self) -> list[int]:
        return sorted(rank for rank, has in self._has_group.items() if has)

    def note_down(self, message: Message) -> None:
        """What the notebook asked for."""
        if isinstance(message, RunCell):
            meant_for = zip(message.ranks, message.incarnations)
            running = {rank for rank, incarnation in meant_for if self._incarnations.get(rank) == incarnation}
            if len(running) < len(message.ranks):  # a rank was lost meanwhile, and leaves it alone
                self._failed_cells.add(message.cell)
            if message.cell in self._cells:
                self._chars -= _chars_of(self._cells[message.cell][0])
            self._cells[message.cell] = (message, running)
            self._chars += _chars_of(message)
            self._forget_ended_cells()
        elif isinstance(message, Unfinished):
            self._unfinished_to_come.append(to_frame(message))
        elif isinstance(message, Acknowledge):
            self._unfinished, self._unfinished_to_come = self._unfinished_to_come, []
        elif isinstance(message, NewGeneration):
            self.generation = message.number
        elif isinstance(message, Renumber):
            self._renumber(dict(zip(message.ranks, message.numbers)))
        elif isinstance(message, Launch):
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

    def _renumber(self, number: dict[int, int]) -> None:
        """Ranks that are idle have other numbers; they say so themselves, as if they had just come up."""
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
        if frame.kind is RankUp:
            up = frame.message()
            assert isinstance(up, RankUp)
            self._state_of[up.rank] = [frame]
            self._incarnations[up.rank] = up.incarnation
        elif frame.kind in _OF_INTEREST:
            self._note(frame, frame.message())

    def _note(self, frame: Frame, message: Message) -> None:
        if isinstance(message, (CellDone, CellFailed)):
            self._has_group[message.rank] = message.has_group
            self._end_cells(message.rank, (message.cell,), has_failed=isinstance(message, CellFailed))
            if message.is_collective:
                self._collective_cells.add(message.cell)
        elif isinstance(message, GenerationReady):
            self._has_group[message.rank] = not message.error
        elif isinstance(message, GenerationEnded):
            self._has_group[message.rank] = False
        elif isinstance(message, RankEnded):
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
