"""The cells of a session: their code and output, to be shown again, followed, and rerun on ranks."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial

from ..errors import CellInterrupted, CellTimeout, DetrainError, RankError, SpecError, short_ranks
from ..wire import RanCell
from .output.log import Logged
from .output.tail import Tail
from .running.asked import check_whole
from .running.cells import Cells
from .running.core import Core, Ranks
from .running.settings import SlotsOnly
from .running.shown_again import ShownAgain, wait_until_shown
from .state.cell import Cell
from .state.cell_observer import CellObserver, check_observer

__all__ = ["SessionLog"]

_PARTLY = "ran only imports and definitions of {}, as other ranks are needed: variables assigned there are missing"
_SHOWN_AT_ONCE_BYTES = 1 << 20  # of the log, given before waiting for the observer to show it


class SessionLog(SlotsOnly):
    """The cells of a session and their output."""

    __slots__ = {
        **dict.fromkeys(("_cells", "_core", "_output", "_state")),
        "cells_before": "The cells that ran before an attach: output that was shown then is not in this log.",
    }

    def __init__(self, core: Core, cells: Cells) -> None:
        self._core = core
        self._state = core.state
        self._cells = cells
        self._output = core.state.logbook.log
        self.cells_before: frozenset[int] = frozenset()

    @property
    def cells(self) -> list[RanCell]:
        """The cells that were run, in order, with their code and their ranks.

        After an attach, a cell whose code nodes disagree on is listed once for each version.
        """
        return self._state.history.cells

    @property
    def collective_cells(self) -> frozenset[int]:
        """The cells that needed other ranks."""
        return self._state.history.collective

    def has_ended_well(self, cell: int) -> bool:
        """Return whether a cell has ended, failed on no rank and was not stopped. Raises: SpecError: unknown cell."""
        self._require_known(cell)
        return self._state.history.has_ended_well(cell)

    def has_failed(self, cell: int) -> bool:
        """Return whether a cell failed or was stopped on a rank, or lost a rank; False for an unknown cell."""
        return self._state.history.has_failed(cell)

    @property
    def running_cells(self) -> dict[int, tuple[int, ...]]:
        """The cells that still run, and the ranks that run them."""
        return {number: cell.running for number, cell in list(self._state.cells.items()) if cell.running}

    def next_cell(self, *, at_least: int = 1) -> int:
        """Return the number of the next cell to begin; numbers are unique in a session."""
        return self._state.history.next_cell(at_least=at_least)

    def replay(
        self, ranks: Ranks, *, cells: Iterable[int] | None = None, observer: Callable[[int], CellObserver] | None = None
    ) -> dict[int, DetrainError | None]:
        """Rerun earlier cells in order, on those of ``ranks`` that had run them.

        session.restart(1)
        session.log.replay(1)

        A restarted rank gets its imports and definitions back. By default, rerun all cells that succeeded and needed
        no other rank, and of those in ``collective_cells`` the imports and definitions: a collective would wait for
        ranks that do not run it. A cell that waits for them all the same is stopped. ``observer`` returns the observer
        of a cell by its number. Returns the cells that were rerun, each with its error or None: a cell may fail because
        it needs what a skipped cell defines.
        Raises: SpecError for an unknown cell; CellInterrupted, RankLost, NodeLost; the error that ended the session.
        """
        if cells is not None:
            cells = list(cells) if isinstance(cells, Iterable) else [cells]
            for cell in cells:
                check_whole("cell", cell)
        self._core.require_alive()
        chosen = self._core.choose(ranks)
        replayed: dict[int, DetrainError | None] = {}
        for earlier in self._state.history.to_replay(cells, ranks=chosen, running=self.running_cells):
            shown = observer(earlier.cell) if observer else None
            if shown is not None:
                check_observer(shown)
            replayed.setdefault(earlier.cell, None)
            first_line = earlier.first_line
            try:
                self._cells.run(earlier.code, earlier.ranks, shown, first_line=first_line, is_replay=True)
            except CellInterrupted:
                raise
            except (RankError, CellTimeout) as exc:
                replayed[earlier.cell] = exc
        return replayed

    def describe_replay(self, replayed: Mapping[int, DetrainError | None], *, are_chosen: bool = False) -> str:
        """Describe in lines what ``replay`` ran, which cells failed, and what it skipped.

        ``replayed``: what ``replay`` returned; ``are_chosen``: the cells were given.
        """
        failed = {cell for cell, error in replayed.items() if error is not None}
        needs_others = set() if are_chosen else set(self.collective_cells)
        left = set() if are_chosen else {ran.cell for ran in self.cells} - set(replayed)
        lines = [
            (set(replayed) - needs_others - failed, "ran {} again"),
            (needs_others & set(replayed) - failed, _PARTLY),
            (failed, "{} failed"),
            (left & needs_others, "skipped {}, as other ranks are needed (select cells with --cells)"),
            (left - needs_others, "skipped {}, which did not succeed or ran elsewhere"),
        ]
        told = [words.format(_format_cells(cells)) for cells, words in lines if cells]
        return "\n".join(told if replayed else ["no cell was run again", *told])

    def text(self, cell: int, rank: int, stream: str = "stdout") -> str:
        """Return all that one rank printed to one stream in ``cell``, without control sequences.

        Raises: SpecError for an unknown cell, rank or stream.
        """
        self._require_known(cell)
        self._core.choose(check_whole("rank", rank), plan=self._core.plan_of(cell))
        if stream not in ("stdout", "stderr"):
            raise SpecError(f"stream {stream!r} is neither stdout nor stderr")
        return self._output.text(cell, rank, stream)

    def read(self, cell: int) -> Iterator[Logged]:
        """Return the messages of the ranks in ``cell``, in order of arrival. Raises: SpecError for an unknown cell."""
        self._require_known(cell)
        return self._output.read(cell)

    @property
    def printed(self) -> list[int]:
        """The cells with output in the log."""
        return self._output.cells()

    @property
    def lacking(self) -> Mapping[int, str]:
        """The cells whose output, or a part of it, could not be written to disk, and why."""
        return self._output.lacking

    def tail(self, cell: int, rank: int, *, most_lines: int = 200, most_chars: int = 500) -> Tail:
        """Return a `Tail` that reads the last lines of a rank in ``cell`` as they arrive, safe to show.

        ``most_lines`` and the ``most_chars`` of each line are kept. Raises: SpecError for an unknown cell or rank.
        """
        self._require_known(cell)
        self._core.choose(check_whole("rank", rank), plan=self._core.plan_of(cell))
        return Tail(self._output.reader(cell), rank, most_lines=most_lines, most_chars=most_chars)

    def show_again(self, cell: int, observer: CellObserver, *, ranks: Ranks = None) -> Cell:
        """Give ``observer`` all that the log has of a cell; the returned `Cell` has its values and errors.

        Ranks have the numbers that they had when the cell ran: see ``session.ranks.plan_of``.
        """
        check_whole("cell", cell)
        shown = self._once_more(cell, ranks, observer)
        for message in self._output.read(cell):
            shown.give(message)
        shown.end(is_running=False)
        if shown.cell.observers.failure:
            raise shown.cell.observers.failure
        return shown.cell

    def follow(self, cell: int, observer: CellObserver, *, on_end: Callable[[Cell], None] | None = None) -> Cell:
        """Give ``observer`` all that was logged of a cell, as fast as it shows it, then new output as it arrives.

        Returns the running cell, which the caller can ``wait`` for, or the one that has ended. ``on_end``
        is called in a background thread when a running cell has ended.
        """
        reader = self._output.reader(cell)
        shown = self._once_more(cell, None, observer)
        given_bytes = 0
        for message in reader.read():
            shown.give(message)
            given_bytes += len(getattr(message, "body", b""))
            if given_bytes > _SHOWN_AT_ONCE_BYTES:
                wait_until_shown(observer)
                given_bytes = 0
        with self._state.held():
            for message in reader.read():
                shown.give(message)
            running = self._state.cells.get(cell)
            if running is None or not running.running:
                shown.end(is_running=False)
                return shown.cell
            shown.end(is_running=True)
            running.go_on_from(shown.cell)
            running.observers.add(observer)
            if on_end:
                self._state.tell_end(running, partial(running.observers.call, observer, on_end))
            return running

    def unfollow(self, cell: int, observer: CellObserver) -> None:
        """Stop giving ``observer`` the output of a cell, which goes on."""
        with self._state.held():
            if running := self._state.cells.get(cell):
                running.observers.remove(observer)

    @property
    def missed(self) -> dict[int, int]:
        """After ``attach``: the cells with output that no notebook has shown.

        For each cell, the number of those messages that may have been shown after all.
        """
        logged = sorted(self._state.logbook.cells.items())
        return {cell: known.shown_perhaps for cell, known in logged if known.is_missed}

    def confirm_missed(self) -> None:
        """Confirm that the missed output has been shown, so that later notebooks do not receive it."""
        self._state.confirm_missed()

    def _require_known(self, cell: int) -> None:
        check_whole("cell", cell)
        known = {ran.cell for ran in self.cells}.union(self.printed, self._state.cells)
        if cell not in known:
            raise SpecError(f"no cell {cell} has run in this session: known cells: {short_ranks(known) or 'none'}")

    def _once_more(self, number: int, ranks: Ranks, observer: CellObserver) -> ShownAgain:
        """Prepare to show a cell again, with its ranks numbered as when it ran."""
        check_observer(observer)
        plan = self._core.plan_of(number)
        hosts = self._state.hosts if plan is self._state.plan else plan.node_names
        at_home = partial(self._state.is_at_home, node_of=None if plan is self._state.plan else plan.node_of)
        chosen = self._core.choose(ranks, plan=plan)
        cell = Cell(number, chosen, observer, hosts, is_at_home=at_home, is_from_log=True)
        return ShownAgain(cell, self._state.logbook.cell(number))


def _format_cells(cells: Collection[int]) -> str:
    return f"cell{'s' * (len(cells) > 1)} {short_ranks(cells)}"
