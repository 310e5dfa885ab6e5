"""A cell from its start to its end: who is waited for, what ends it, and what is raised then."""

from __future__ import annotations

import contextlib
import time

from ...errors import CellInterrupted, CellTimeout, RankLost, format_ranks
from ...wire import Position, RunCell
from ..diagnosis.diagnosis import HangWatch, describe_last
from ..diagnosis.stuck import StuckWatch
from ..link.rank_link import RankLink
from ..recovery.rescue import Rescue
from ..state.cell import Cell
from ..state.rank_deaths import advice, describe_ends

_DID_NOT_FIT = "op.preamble.length"  # in the last words of a rank: gloo names what it has compared
_CHECK = "%distributed config check=on names them before they are sent"


class CellExecution:
    """For one cell. ``hang_s``: how long ranks wait for others before the cell says so; ``stop_gap_s``: see ``run``."""

    def __init__(
        self,
        link: RankLink,
        rescue: Rescue,
        *,
        hang_s: float,
        stop_gap_s: float,
    ) -> None:
        self._link = link
        self._limits = link.limits
        self._state = link.state
        self._rescue = rescue
        self._hang_s = hang_s
        self._stop_gap_s = stop_gap_s

    def run(self, cell: Cell, message: RunCell, timeout_s: float | None, *, is_alone: bool = False) -> str:
        """Send the cell to its ranks and wait until they have ended it.

        Ranks that can only wait for one that has failed are stopped; returns what became of them, in words, or nothing.
        With ``is_alone`` nobody else comes to what they wait in: they are stopped as well.
        Raises: CellTimeout, CellInterrupted, RankLost, NodeLost. After KeyboardInterrupt, ``stop_gap_s`` passes before
        the ranks are interrupted: a front end that restarts its kernel interrupts it first.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        hang = HangWatch(self._hang_s, message_s=self._limits.message_s)
        watch = _Watch(hang, deadline, look_gap_s=self._limits.look_gap_s)
        story = ""
        try:
            self._link.send(message)
            while not cell.wait(watch.seconds_to_next_look(), or_loss=True) and not cell.is_over:
                if cell.lost:
                    break
                if watch.is_over:
                    places = self._link.where(cell.running)
                    story = self._rescue.stop(cell)
                    on = f" on {places}" if places else ""
                    raise CellTimeout(f"the cell did not end within {timeout_s:g} s{on}{_failures(cell)}: {story}")
                failures = _failures(cell)
                if cell.observer or failures or is_alone:
                    waiting = self._who_is_waited_for(cell, watch, failures, is_alone=is_alone)
                    if cell.observer:
                        cell.observer.waiting(waiting)
                if watch.is_hopeless:
                    story = self._rescue.free(cell)
                    if not failures:
                        raise CellTimeout(f"it waited for ranks that do not run it: {story}")
                    break
        except KeyboardInterrupt:
            self._rescue.make_way(cell, gap_s=self._stop_gap_s)
            note = self._rescue.stop(cell)
            if all(end.asked for end in cell.lost.values()):
                self._state.note_told(cell.lost)
                note = "\n".join([note, *advice(cell.lost, world_size=self._state.world_size)])
                raise CellInterrupted(cell.errors(), world_size=len(cell.ranks), note=note) from None
        if cell.is_done:
            with contextlib.suppress(KeyboardInterrupt):  # there is nothing left to stop: what ranks raised is told
                cell.wait_for_ending(self._limits.ending_s)
                cell.wait_for_loss(self._limits.loss_s)
        if cell.lost:
            self._rescue.after_death(cell)
            if not cell.running and cell.lost.keys() <= cell.ending:  # what they raised says why, and where
                return "\n".join(self._told_of_fresh(cell))
            raise self._rank_lost(cell)
        if cell.running and self._state.failure:
            raise self._state.failure
        return story

    def _who_is_waited_for(self, cell: Cell, watch: _Watch, failures: str, *, is_alone: bool) -> str:
        """Which ranks have not ended the cell and where they are, or who waits for whom; empty while all is well."""
        now = time.monotonic()
        unreachable = self._link.describe_unreachable(now=now)
        wants_stack = bool(cell.outcomes) or watch.hang.wants_stack(now=now)
        watch.positions, evidence = self._link.look(self._state.ranks, before=watch.positions, stack=wants_stack)
        self._state.end_lost(cell, [rank for rank, position in watch.positions.items() if position.state == "idle"])
        watch.hang.note(evidence, now=now)
        watch.stuck.note(evidence, now=now)
        may_be_hopeless = is_alone or bool(failures)
        watch.is_hopeless = may_be_hopeless and (
            watch.hang.is_hopeless(evidence, now=now) or watch.stuck.is_certain(now=now)
        )
        hosts = self._link.hosts
        report = watch.hang.report(evidence, running=cell.ranks, now=now, hosts=hosts) if wants_stack else ""
        if not report and cell.outcomes and (running := cell.running):  # else the last has ended during the look
            report = f"waiting for {self._link.describe_places(running, watch.positions)}"
        if unreachable:
            report = f"{unreachable}; {report}" if report else unreachable
        return f"{report}{failures}" if report else ""

    def _rank_lost(self, cell: Cell) -> RankLost:
        """What is known of the ranks that were lost, what became of the others, and what to do."""
        fresh = self._told_of_fresh(cell, is_told=True)
        lines = [describe_ends(cell.lost, hosts=self._state.hosts), *self._told_of_sizes(cell), *fresh]
        kept = [rank for rank in cell.ranks if rank not in cell.lost]
        if still := [rank for rank in kept if rank in cell.running]:
            lines.append(f"{self._link.where(still)} still in the cell: the next cell waits for it")
        elif kept:
            lines.append(f"{format_ranks(kept)} kept {'its' if len(kept) == 1 else 'their'} variables")
        if stale := self._state.groups.stale:
            lines.append(f"make again what was made with the old process groups: {', '.join(stale)}")
        return RankLost("\n".join(lines), ranks=cell.lost)

    def _told_of_sizes(self, cell: Cell) -> list[str]:
        """What the others had begun, where gloo has ended a rank because what came did not fit."""
        if not any(_DID_NOT_FIT in end.stderr_tail for end in cell.lost.values()):
            return []
        _, evidence = self._link.look([rank for rank in cell.ranks if rank not in cell.lost], before={}, stack=False)
        others = describe_last(evidence)
        begun = f"the others had begun {others}: " if others else ""
        what_to_do = "" if self._state.groups.is_checked else f", {_CHECK}"
        return [f"{begun}ranks sent tensors of different sizes in one collective or message{what_to_do}"]

    def _told_of_fresh(self, cell: Cell, *, is_told: bool = False) -> list[str]:
        """What to do about the ranks that were lost: the user is told it now."""
        self._state.note_told(cell.lost)
        return advice(cell.lost, world_size=self._state.world_size, is_told=is_told)


class _Watch:
    """What is remembered from look to look while a cell runs."""

    def __init__(self, hang: HangWatch, deadline: float | None, *, look_gap_s: float) -> None:
        self._look_gap_s = look_gap_s
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
            return self._look_gap_s
        return max(0.0, min(self._look_gap_s, self._deadline - time.monotonic()))


def _failures(cell: Cell) -> str:
    """What has failed while others still run: often the reason why they wait."""
    failed: dict[str, list[int]] = {}
    for rank, error in cell.errors().items():
        if not error.interrupted:
            failed.setdefault(next(iter(error.summary.splitlines()), "an error without a name"), []).append(rank)
    return "".join(f"; {format_ranks(ranks)} failed with {summary}" for summary, ranks in failed.items())
