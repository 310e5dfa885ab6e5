"""The cells of a session: each begins when its ranks are idle and have a process group, and is run to its end."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ...errors import CellInterrupted, DetrainError, RankError, SessionError, format_ranks
from ...wire import CellDone, RunCell, require_readable
from ..diagnosis.diagnosis import describe_mismatch
from ..recovery.process_groups import describe_new_groups
from ..state.cell import Cell
from ..state.cell_observer import CellObserver
from ..state.rank_deaths import describe_silence
from .cell_execution import CellExecution
from .core import Core, Ranks
from .results import CellResult, RankResult, TextOnly


class Cells:
    """The cells of one session; the state of its ranks is in ``core``."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._link = core.link
        self._state = core.state
        self._beginning = threading.Lock()  # cells of several threads begin one after the other
        self._last_of: dict[int, int] = {}  # the cell that a rank began last

    def run(
        self,
        code: str,
        ranks: Ranks,
        observer: CellObserver | None,
        *,
        at_least: int = 1,
        first_line: int = 1,
        timeout_s: float | None = None,
        is_replay: bool = False,
        values: bool = False,
    ) -> CellResult:
        """Run a cell until all its ranks have ended it; its number is the first free one from ``at_least`` on.

        ``values`` brings the values of the last expression here, where they can travel; until then its ranks begin no
        other cell. Raises: what Session.run_cell does.
        """
        message = RunCell([], [], at_least, code, first_line, is_replay)  # ranks and number are not known yet
        require_readable(message)
        cell, message = self._begin(message, ranks, observer, at_least=at_least, values=values)
        try:
            self._execute(cell, message, timeout_s)
            return self._result(cell, values=values)
        finally:
            cell.values_brought.set()

    def _execute(self, cell: Cell, message: RunCell, timeout_s: float | None) -> None:
        try:
            story = CellExecution(self._core, cell, message, timeout_s).run()
        finally:
            if not cell.observers:  # else they have been told
                self._core.tell(cell.describe_overwritten(), None)
        self._raise_for(cell, story)
        self._state.history.end_well(cell.number)
        if cell.observers.failure:
            raise cell.observers.failure

    def _begin(
        self, message: RunCell, ranks: Ranks, observer: CellObserver | None, *, at_least: int, values: bool
    ) -> tuple[Cell, RunCell]:
        """Wait for idle ranks and make their group; retry when a rank is lost meanwhile, or another cell is faster."""
        core, state = self._core, self._state
        deadline = time.monotonic() + self._link.limits.idle_s
        while True:
            chosen = core.wait_until_idle(ranks, observer)
            for bringing in state.bringing_values(chosen):
                bringing.values_brought.wait(self._link.limits.value_s)
            with self._beginning:
                if state.busy.keys() & set(chosen) or state.bringing_values(chosen):
                    continue
                core.tell(core.rescue.before_a_cell(), observer)
                core.mend_group(chosen, observer)
                cell = Cell(
                    state.history.next_cell(at_least=at_least),
                    chosen,
                    observer,
                    state.hosts,
                    is_at_home=state.is_at_home,
                    incarnations=state.incarnations,
                    brings_values=values,
                )
                try:
                    if state.add_cell(cell):
                        self._last_of.update(dict.fromkeys(cell.ranks, cell.number))
                        incarnations = [cell.incarnations[rank] for rank in chosen]
                        message = replace(message, ranks=list(chosen), incarnations=incarnations, cell=cell.number)
                        self._announce(cell, message)
                        return cell, message
                except BaseException:
                    state.remove_cell(cell)
                    cell.values_brought.set()
                    raise
            if time.monotonic() >= deadline:
                raise SessionError(
                    f"{format_ranks(chosen)} keep dying before the cell can start; see %distributed status"
                )

    def _announce(self, cell: Cell, message: RunCell) -> None:
        """Record that the cell is about to be sent, and tell its observers."""
        self._state.history.begin(message)
        self._state.confirm_missed()  # a user who runs a cell has seen what was missed
        losses = self._state.pop_losses()  # of ranks whose loss no cell has raised
        self._core.tell(losses, cell.observers)
        cell.tell_losses(losses)
        cell.observers.begin(cell.number)

    def _raise_for(self, cell: Cell, story: str) -> None:
        """Raise what the ranks raised; ``story`` describes what happened to ranks that were freed."""
        errors = cell.errors()
        if not errors:
            return
        with contextlib.suppress(KeyboardInterrupt):  # there is nothing left to stop
            story = story or cell.stop_story(self._link.limits.story_s)
        is_stopped = all(error.interrupted for error in errors.values())
        silence = describe_silence(errors)
        have_hung_up = any(error.follows_another and not error.interrupted for error in errors.values())
        mismatch = self._mismatch(cell) if silence or have_hung_up else ""
        if silence:  # gloo has closed its connections: the group is unusable
            stale = self._core.process_groups.end()
            silence = mismatch or silence
            note = f"{silence}\n{story or describe_new_groups(stale, is_wanted=self._state.groups.is_wanted)}"
        else:
            note = "\n".join(filter(None, [mismatch, story or self._core.rescue.after_failure(cell)]))
        kind = CellInterrupted if is_stopped else RankError
        error = kind(errors, world_size=len(cell.ranks), note=note, lost_before=cell.lost_before)
        raise error from cell.observers.failure

    def _mismatch(self, cell: Cell) -> str:
        """Describe which collectives differed between the ranks of ``cell``."""
        _, evidence = self._link.look(cell.ranks, before={}, stack=False)
        return describe_mismatch(evidence, is_over=True)

    def _result(self, cell: Cell, *, values: bool) -> CellResult:
        bundles = cell.bundles()
        latest = [rank for rank in bundles if self._last_of.get(rank) == cell.number]  # else ``_`` is another cell's
        found = self._pull_values(latest) if values else {}
        results, log = {}, self._state.logbook.log
        for rank, outcome in cell.outcomes.items():
            assert isinstance(outcome, CellDone)
            bundle = bundles.get(rank, {})
            value = found.get(rank, TextOnly(bundle["text/plain"]) if bundle else None)
            host = self._state.up[rank].host
            results[rank] = RankResult(rank, host, outcome.seconds, None, bundle, value, log, cell.number)
        return CellResult(cell.number, results)

    def _pull_values(self, ranks: Iterable[int]) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for rank in ranks:
            with contextlib.suppress(DetrainError):  # a value that cannot travel is replaced by its text
                found[rank] = self._link.pull(["_"], self._core.choose_idle(rank))[rank]["_"]
        return found
