"""The cells of a session: each is begun when its ranks are idle and have a group, and run to its end; any that was run
is shown again from the log, or run again on ranks that have lost their variables.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from ...errors import CellInterrupted, CellTimeout, DetrainError, RankError, RemoteError, SessionError, format_ranks
from ...wire import CellDone, RanCell, RunCell
from ..diagnosis.diagnosis import describe_mismatch
from ..link.rank_link import IDLE_LIMIT_S, VALUE_LIMIT_S
from ..recovery.process_groups import describe_new_groups
from ..state.cell_run import CellObserver, CellRun, tell_begin
from ..state.rank_deaths import advice, describe_ends, describe_silence
from .cell_execution import Conductor
from .core import Core, Ranks
from .results import CellResult, RankResult, TextOnly
from .shown_again import ShownAgain, wait_until_shown

_SHOWN_AT_ONCE_BYTES = 1 << 20  # of the log, before it is waited for whoever shows it


class Runs:
    """Those of one session; what is known of its ranks is in ``core``."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._ranks = core.ranks
        self._inbox = core.inbox
        self._beginning = threading.Lock()  # cells of several threads begin one after the other
        self._last_of: dict[int, int] = {}  # the cell that a rank began last

    def next_number(self, *, at_least: int = 1) -> int:
        """What the next cell gets that begins; no two cells of a session have the same."""
        return self._inbox.history.next_cell(at_least=at_least)

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
        """Run a cell to its good end, with the first number from ``at_least`` on that is free when it begins.

        ``values`` brings those of the last expression here, where they can travel; no other cell of its ranks begins
        before. Raises: what Session.run_cell does.
        """

        def write(run: CellRun) -> RunCell:
            incarnations = [run.incarnations[rank] for rank in run.ranks]
            return RunCell(list(run.ranks), incarnations, run.cell, code, first_line, is_replay)

        run, message = self._begin(write, ranks, observer, at_least=at_least, values=values)
        try:
            self._conduct(run, message, timeout_s)
            return self._result(run, values=values)
        finally:
            run.has_given.set()

    def _conduct(self, run: CellRun, message: RunCell, timeout_s: float | None) -> None:
        core, observer = self._core, run.observer
        conductor = Conductor(
            self._ranks,
            core.generations,
            core.rescue,
            world_size=core.world_size,
            hang_s=core.hang_s,
            stop_gap_s=core.stop_gap_s,
        )
        is_alone = message.is_replay and len(run.ranks) < core.world_size
        try:
            story = conductor.run(run, message, timeout_s, is_alone=is_alone)
        finally:
            if not observer:  # else it has been told
                core.tell(run.describe_overwritten(), None)
        self._raise_for(run, story)
        self._inbox.history.end_well(run.cell)

    def _begin(
        self,
        write: Callable[[CellRun], RunCell],
        ranks: Ranks,
        observer: CellObserver | None,
        *,
        at_least: int,
        values: bool,
    ) -> tuple[CellRun, RunCell]:
        """Have the ranks idle and their group made; again where one is lost meanwhile, or another cell was first."""
        core = self._core
        deadline = time.monotonic() + IDLE_LIMIT_S
        while True:
            chosen = core.wait_until_idle(ranks, observer, limit_s=IDLE_LIMIT_S)
            for giving in self._inbox.giving(chosen):
                giving.has_given.wait(VALUE_LIMIT_S)
            with self._beginning:
                if self._inbox.busy.keys() & set(chosen) or self._inbox.giving(chosen):
                    continue
                core.tell(core.rescue.before_a_cell(), observer)
                core.mend_group(chosen, observer)
                run = self._new(self.next_number(at_least=at_least), chosen, observer)
                run.incarnations = {rank: up.incarnation for rank, up in self._inbox.up.items()}
                if values:
                    run.has_given.clear()
                try:
                    if self._inbox.add_run(run):
                        self._last_of.update(dict.fromkeys(run.ranks, run.cell))
                        return run, self._announce(run, write(run))
                except BaseException:
                    self._inbox.remove_run(run)
                    run.has_given.set()
                    raise
            if time.monotonic() >= deadline:
                raise SessionError(f"{format_ranks(chosen)} are lost again and again: %distributed status")

    def _announce(self, run: CellRun, message: RunCell) -> RunCell:
        """Note that it is about to be sent, and tell who shows it."""
        self._inbox.history.begin(message)
        self._inbox.is_showing_missed = False  # whoever runs a cell has seen what was missed
        self._core.tell(self.pop_news(), run.observer)  # of ranks whose loss was no cell's error
        tell_begin(run.observer, run.cell)
        return message

    def _new(self, cell: int, ranks: Iterable[int], observer: CellObserver | None) -> CellRun:
        return CellRun(cell, tuple(ranks), observer, self._core.hosts, is_at_home=self._inbox.is_at_home)

    def _once_more(self, cell: int, ranks: Ranks, observer: CellObserver) -> ShownAgain:
        """For the ranks as they were numbered when the cell ran."""
        plan = self._core.plan_of(cell)
        hosts = self._core.hosts if plan is self._core.plan else plan.node_names
        at_home = partial(self._inbox.is_at_home, node_of=None if plan is self._core.plan else plan.node_of)
        run = CellRun(cell, self._core.choose(ranks, plan=plan), observer, hosts, is_at_home=at_home)
        return ShownAgain(run, self._inbox.logbook.cell(cell))

    def pop_news(self) -> str:
        """What is to be said of ranks that ended since the last cell, and what to do; empty when there is nothing."""
        fresh, self._inbox.fresh = self._inbox.fresh, {}
        if not fresh:
            return ""
        ended = describe_ends(fresh, hosts=self._core.hosts)
        return "\n".join([ended, *advice(fresh, world_size=self._core.world_size, is_told=True)])

    def _raise_for(self, run: CellRun, story: str) -> None:
        """``story``: what became of ranks that were freed."""
        errors = run.errors()
        if not errors:
            return
        is_stopped = all(error.interrupted for error in errors.values())
        silence = describe_silence(errors)
        mismatch = self._mismatch(run) if silence or _have_hung_up(errors) else ""
        if silence:  # gloo has closed its connections: that group is of no more use
            stale = self._core.generations.end()
            silence = mismatch or silence
            note = f"{silence}\n{story or describe_new_groups(stale, is_wanted=self._core.wants_group)}"
        else:
            note = "\n".join(filter(None, [mismatch, story or self._core.rescue.after_failure(run)]))
        raise (CellInterrupted if is_stopped else RankError)(errors, world_size=len(run.ranks), note=note)

    def _mismatch(self, run: CellRun) -> str:
        """Which collectives were not the same on the ranks of ``run``, in words."""
        _, evidence = self._ranks.look(run.ranks, before={}, stack=False)
        return describe_mismatch(evidence, is_over=True)

    # ---- what it gave

    def _result(self, run: CellRun, *, values: bool) -> CellResult:
        bundles = run.bundles()
        latest = [rank for rank in bundles if self._last_of.get(rank) == run.cell]  # another thread's may be the later
        found = self._pull_values(latest) if values else {}
        results, log = {}, self._inbox.logbook.log
        for rank, outcome in run.outcomes.items():
            assert isinstance(outcome, CellDone)
            bundle = bundles.get(rank, {})
            value = found.get(rank, TextOnly(bundle["text/plain"]) if bundle else None)
            host = self._inbox.up[rank].host
            results[rank] = RankResult(rank, host, outcome.seconds, None, bundle, value, log, run.cell)
        return CellResult(run.cell, results)

    def _pull_values(self, ranks: Iterable[int]) -> dict[int, Any]:
        found: dict[int, Any] = {}
        for rank in ranks:
            with contextlib.suppress(DetrainError):  # its text stands for what cannot travel
                found[rank] = self._ranks.pull(["_"], self._core.choose_idle(rank))[rank]["_"]
        return found

    # ---- once more

    def replay(
        self, ranks: Ranks, cells: Iterable[int] | None, observer: Callable[[int], CellObserver] | None
    ) -> dict[int, DetrainError | None]:
        """See Session.replay."""
        self._core.require_alive()
        chosen = self._core.choose(ranks)
        replayed: dict[int, DetrainError | None] = {}
        for earlier in self._inbox.history.to_replay(cells, ranks=chosen, running=self.running):
            shown = observer(earlier.cell) if observer else None
            replayed.setdefault(earlier.cell, None)
            first_line = earlier.first_line
            try:
                self.run(earlier.code, earlier.ranks, shown, first_line=first_line, is_replay=True)
            except CellInterrupted:
                raise
            except (RankError, CellTimeout) as exc:
                replayed[earlier.cell] = exc
        return replayed

    @property
    def known(self) -> list[RanCell]:
        """The cells that were run, in their order."""
        return self._inbox.history.cells

    @property
    def running(self) -> dict[int, tuple[int, ...]]:
        """The cells that still run, and the ranks that run them."""
        return {cell: run.running for cell, run in list(self._inbox.runs.items()) if run.running}

    def show_again(self, cell: int, observer: CellObserver, ranks: Ranks) -> CellRun:
        """See Session.show_again."""
        shown = self._once_more(cell, ranks, observer)
        for message in self._inbox.logbook.log.read(cell):
            shown.give(message)
        shown.end(is_running=False)
        return shown.run

    def follow(self, cell: int, observer: CellObserver, on_end: Callable[[CellRun], None] | None) -> CellRun:
        """See Session.follow."""
        reader = self._inbox.logbook.log.reader(cell)
        shown = self._once_more(cell, None, observer)
        given_bytes = 0
        for message in reader.read():
            shown.give(message)
            given_bytes += len(getattr(message, "body", b""))
            if given_bytes > _SHOWN_AT_ONCE_BYTES:
                wait_until_shown(observer)
                given_bytes = 0
        with self._inbox.following:
            for message in reader.read():
                shown.give(message)
            run = self._inbox.runs.get(cell)
            shown.end(is_running=run is not None and bool(run.running))
            if run is None or not run.running:
                return shown.run
            run.go_on_from(shown.run)
            run.add_observer(observer)
            if on_end:
                self._inbox.tell_end(run, on_end)
            return run

    def unfollow(self, cell: int, observer: CellObserver) -> None:
        """See Session.unfollow."""
        with self._inbox.following:
            if run := self._inbox.runs.get(cell):
                run.remove_observer(observer)


def _have_hung_up(errors: Mapping[int, RemoteError]) -> bool:
    return any(error.follows_another and not error.interrupted for error in errors.values())
