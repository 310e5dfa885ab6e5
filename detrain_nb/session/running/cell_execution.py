"""A cell from its start to its end: who is waited for, what ends it, and what is raised then."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping

from ...errors import CellInterrupted, CellTimeout, RankLost, format_ranks
from ...wire import CellFailed, Position, RunCell
from ..diagnosis.diagnosis import HangWatch, describe_last
from ..diagnosis.stuck import StuckWatch
from ..link.rank_link import RankLink
from ..recovery.process_groups import Generations
from ..recovery.rescue import Rescue
from ..state.cell_run import CellRun
from ..state.rank_deaths import advice, describe_ends

_DID_NOT_FIT = "op.preamble.length"  # in the last words of a rank: gloo names what it has compared
_CHECK = "%distributed config check=on names them before they are sent"
LOOK_GAP_S = 1.0
ENDING_LIMIT_S = 10.0  # from what a rank raised to its end, where that follows: a driver takes back what it had
LOSS_LIMIT_S = 0.5  # from what the others raise to the news that a rank has ended


class Conductor:
    """For one cell. ``hang_s``: how long ranks wait for others before the cell says so; ``stop_gap_s``: see ``run``."""

    def __init__(
        self,
        ranks: RankLink,
        generations: Generations,
        rescue: Rescue,
        *,
        world_size: int,
        hang_s: float,
        stop_gap_s: float,
    ) -> None:
        self._ranks = ranks
        self._inbox = ranks.inbox
        self._generations = generations
        self._rescue = rescue
        self._world_size = world_size
        self._hang_s = hang_s
        self._stop_gap_s = stop_gap_s

    def run(self, run: CellRun, message: RunCell, timeout_s: float | None, *, is_alone: bool = False) -> str:
        """Send the cell to its ranks and wait until they have ended it.

        Ranks that can only wait for one that has failed are stopped; returns what became of them, in words, or nothing.
        With ``is_alone`` nobody else comes to what they wait in: they are stopped as well.
        Raises: CellTimeout, CellInterrupted, RankLost, NodeLost. After KeyboardInterrupt, ``stop_gap_s`` passes before
        the ranks are interrupted: a front end that restarts its kernel interrupts it first.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        watch = _Watch(HangWatch(self._hang_s), deadline)
        story = ""
        try:
            self._ranks.send(message)
            while not run.wait(watch.seconds_to_next_look(), or_loss=True) and not run.is_over:
                if run.lost:
                    break
                if watch.is_over:
                    places = self._ranks.where(run.running)
                    story = self._rescue.stop(run)
                    on = f" on {places}" if places else ""
                    raise CellTimeout(f"the cell did not end within {timeout_s:g} s{on}{_failures(run)}: {story}")
                failures = _failures(run)
                if run.observer or failures or is_alone:
                    waiting = self._who_is_waited_for(run, watch, failures, is_alone=is_alone)
                    if run.observer:
                        run.observer.waiting(waiting)
                if watch.is_hopeless:
                    story = self._rescue.free(run)
                    if not failures:
                        raise CellTimeout(f"it waited for ranks that do not run it: {story}")
                    break
        except KeyboardInterrupt:
            self._rescue.make_way(run, gap_s=self._stop_gap_s)
            note = self._rescue.stop(run)
            if all(end.asked for end in run.lost.values()):
                for rank in run.lost:
                    self._inbox.fresh.pop(rank, None)
                note = "\n".join([note, *advice(run.lost, world_size=self._world_size)])
                raise CellInterrupted(run.errors(), world_size=len(run.ranks), note=note) from None
        if run.is_done:
            with contextlib.suppress(KeyboardInterrupt):  # there is nothing left to stop: what ranks raised is told
                run.wait_for_ending(ENDING_LIMIT_S)
                run.wait_for_loss(LOSS_LIMIT_S)
        if run.lost:
            self._rescue.after_death(run)
            if not run.running and run.lost.keys() <= run.ending:  # what they raised says why, and where
                return "\n".join(self._told_of_fresh(run))
            raise self._rank_lost(run)
        if run.running and self._inbox.failure:
            raise self._inbox.failure
        return story

    def _who_is_waited_for(self, run: CellRun, watch: _Watch, failures: str, *, is_alone: bool) -> str:
        """Which ranks have not ended the cell and where they are, or who waits for whom; empty while all is well."""
        now = time.monotonic()
        unreachable = self._ranks.describe_unreachable(now=now)
        wants_stack = bool(run.outcomes) or watch.hang.wants_stack(now=now)
        watch.positions, evidence = self._ranks.look(range(self._world_size), before=watch.positions, stack=wants_stack)
        self._end_where_that_was_lost(run, watch.positions)
        watch.hang.note(evidence, now=now)
        watch.stuck.note(evidence, now=now)
        may_be_hopeless = is_alone or bool(failures)
        watch.is_hopeless = may_be_hopeless and (
            watch.hang.is_hopeless(evidence, now=now) or watch.stuck.is_certain(now=now)
        )
        hosts = self._ranks.hosts
        report = watch.hang.report(evidence, running=run.ranks, now=now, hosts=hosts) if wants_stack else ""
        if not report and run.outcomes and (running := run.running):  # else the last has ended during the look
            report = f"waiting for {self._ranks.describe_places(running, watch.positions)}"
        if unreachable:
            report = f"{unreachable}; {report}" if report else unreachable
        return f"{report}{failures}" if report else ""

    def _end_where_that_was_lost(self, run: CellRun, positions: Mapping[int, Position]) -> None:
        """What one rank says arrives in order: the end of the cell on an idle rank has come, or never will."""
        words = "how the cell ended on this rank is not known: that was lost with its last output"
        for rank, position in positions.items():
            with self._inbox.taking:
                if position.state == "idle" and rank in run.running:
                    has_group = self._inbox.has_group.get(rank, False)
                    lost = CellFailed(rank, run.cell, 0.0, has_group, True, "SessionError", words, [], False)
                    self._inbox.take(lost, node=self._inbox.node_of[rank])

    def _rank_lost(self, run: CellRun) -> RankLost:
        """What is known of the ranks that were lost, what became of the others, and what to do."""
        hosts = {rank: up.host for rank, up in self._inbox.up.items()}
        fresh = self._told_of_fresh(run, is_told=True)
        lines = [describe_ends(run.lost, hosts=hosts), *self._told_of_sizes(run), *fresh]
        kept = [rank for rank in run.ranks if rank not in run.lost]
        if still := [rank for rank in kept if rank in run.running]:
            lines.append(f"{self._ranks.where(still)} still in the cell: the next cell waits for it")
        elif kept:
            lines.append(f"{format_ranks(kept)} kept {'its' if len(kept) == 1 else 'their'} variables")
        if stale := self._generations.stale:
            lines.append(f"make again what was made with the old process groups: {', '.join(stale)}")
        return RankLost("\n".join(lines), ranks=run.lost)

    def _told_of_sizes(self, run: CellRun) -> list[str]:
        """What the others had begun, where gloo has ended a rank because what came did not fit."""
        if not any(_DID_NOT_FIT in end.stderr_tail for end in run.lost.values()):
            return []
        _, evidence = self._ranks.look([rank for rank in run.ranks if rank not in run.lost], before={}, stack=False)
        others = describe_last(evidence)
        begun = f"the others had begun {others}: " if others else ""
        what_to_do = "" if self._generations.is_checked else f", {_CHECK}"
        return [f"{begun}ranks sent tensors of different sizes in one collective or message{what_to_do}"]

    def _told_of_fresh(self, run: CellRun, *, is_told: bool = False) -> list[str]:
        """What to do about the ranks that were lost: the user is told it now."""
        for rank in run.lost:
            self._inbox.fresh.pop(rank, None)
        return advice(run.lost, world_size=self._world_size, is_told=is_told)


class _Watch:
    """What is remembered from look to look while a cell runs."""

    def __init__(self, hang: HangWatch, deadline: float | None) -> None:
        self.hang = hang
        self.stuck = StuckWatch()
        self.positions: dict[int, Position] = {}
        self.is_hopeless = False
        self._deadline = deadline

    @property
    def is_over(self) -> bool:
        return self._deadline is not None and time.monotonic() >= self._deadline

    def seconds_to_next_look(self) -> float:
        if self._deadline is None:
            return LOOK_GAP_S
        return max(0.0, min(LOOK_GAP_S, self._deadline - time.monotonic()))


def _failures(run: CellRun) -> str:
    """What has failed while others still run: often the reason why they wait."""
    failed: dict[str, list[int]] = {}
    for rank, error in run.errors().items():
        if not error.interrupted:
            failed.setdefault(next(iter(error.summary.splitlines()), "an error without a name"), []).append(rank)
    return "".join(f"; {format_ranks(ranks)} failed with {summary}" for summary, ranks in failed.items())
