"""A cell from its start to its end: which ranks it waits for, what ends it, and what it raises."""

from __future__ import annotations

import contextlib
import time

from ...errors import CellInterrupted, CellTimeout, RankLost, format_ranks
from ...wire import Position, RunCell
from ..diagnosis.diagnosis import HangWatch, describe_last, judge
from ..diagnosis.stuck import StuckWatch
from ..output.safe_output import one_line, without_colours
from ..recovery.process_groups import describe_new_groups
from ..state.cell import Cell
from ..state.rank_deaths import advice, describe_ends
from .core import Core

_DID_NOT_FIT = "op.preamble.length"  # in the stderr of a rank: gloo names the lengths that it compared
_MOST_ERRORS, _MOST_ERROR_CHARS = 3, 100  # of ranks that have failed, before text of ours
_CHECK = "%distributed config check=on reports the mismatch before anything is sent"


class CellExecution:
    """One run of one cell on its ranks."""

    def __init__(self, core: Core, cell: Cell, message: RunCell, timeout_s: float | None) -> None:
        self._cell = cell
        self._message = message
        self._is_alone = message.is_replay and len(cell.ranks) < core.state.world_size  # no rank joins its collectives
        self._link = core.link
        self._limits = core.link.limits
        self._state = core.state
        self._rescue = core.rescue
        self._stop_gap_s = core.settings.stop_gap_s
        self._limit_s = timeout_s
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        # kept from one look to the next
        self._hang = HangWatch(core.settings.hang_s, message_s=self._limits.message_s)
        self._stuck = StuckWatch()
        self._positions: dict[int, Position] = {}
        self._is_hopeless = False

    def run(self) -> str:
        """Send the cell to its ranks and wait until they have ended it.

        Ranks that can only be waiting for a rank that has failed, or that does not run the cell, are stopped; returns
        a description of what happened to them, or an empty string.
        Raises: CellTimeout, CellInterrupted, RankLost, NodeLost. After KeyboardInterrupt, ``stop_gap_s`` passes before
        the ranks are interrupted: a front end that restarts its kernel interrupts it first.
        """
        cell, story = self._cell, ""
        try:
            self._link.send(self._message)
            while not cell.wait(self._seconds_to_next_look(), or_loss=True) and not cell.is_cut_off:
                if cell.lost:
                    break
                failures = _failures(cell)
                if self._deadline is not None and time.monotonic() >= self._deadline:
                    places = self._link.where(cell.running)
                    story = self._rescue.stop(cell)
                    on = f" on {places}" if places else ""
                    raise CellTimeout(f"the cell did not end within {self._limit_s:g} s{on}{_failures(cell)}: {story}")
                if cell.observers or failures or self._is_alone:
                    cell.observers.waiting(self._who_is_waited_for(failures))
                if self._is_hopeless:
                    story = self._rescue.free(cell)
                    if not failures:
                        raise CellTimeout(f"the cell waited for ranks that do not run it: {story}")
                    break
        except KeyboardInterrupt:
            self._rescue.make_way(cell, gap_s=self._stop_gap_s)
            note = self._rescue.stop(cell)
            if all(end.asked for end in cell.lost.values()):
                note = "\n".join([note, *self._told_of_fresh()])
                raise CellInterrupted(cell.errors(), world_size=len(cell.ranks), note=note) from None
        if cell.is_done:
            with contextlib.suppress(KeyboardInterrupt):  # there is nothing left to stop: report what ranks raised
                cell.wait_for_ending(self._limits.ending_s)
                cell.wait_for_loss(self._limits.loss_s)
        if cell.lost:
            self._rescue.after_death(cell)
            if not cell.running and cell.lost.keys() <= cell.ending:  # the errors of these ranks say why, and where
                return "\n".join(self._told_of_fresh())
            raise self._rank_lost()
        if cell.running and self._state.failure:
            raise self._state.failure
        return story

    def _seconds_to_next_look(self) -> float:
        left_s = self._limits.look_gap_s if self._deadline is None else self._deadline - time.monotonic()
        return max(0.0, min(self._limits.look_gap_s, left_s))

    def _who_is_waited_for(self, failures: str) -> str:
        """Describe where the ranks are that still run the cell, or which wait for which; empty while all is well."""
        cell, hang, now = self._cell, self._hang, time.monotonic()
        unreachable = self._link.describe_unreachable(now=now)
        wants_stack = bool(cell.outcomes) or hang.wants_stack(now=now)
        self._positions, evidence = self._link.look(self._state.ranks, before=self._positions, stack=wants_stack)
        self._state.end_lost(cell, [rank for rank, position in self._positions.items() if position.state == "idle"])
        verdicts = judge(evidence)
        hang.note(verdicts, now=now)
        self._stuck.note(verdicts, now=now)
        self._is_hopeless = (self._is_alone or bool(failures)) and (
            hang.is_hopeless(now=now) or self._stuck.is_certain(now=now)
        )
        hosts = self._link.hosts
        report = hang.report(running=cell.ranks, now=now, hosts=hosts) if wants_stack else ""
        if not report and cell.outcomes and (running := cell.running):  # else the last rank ended it during the look
            what = "still running:" if failures else "waiting for"
            report = f"{what} {self._link.describe_places(running, self._positions)}"
        report = "; ".join(filter(None, [unreachable, report]))
        return "; ".join(filter(None, [failures.removeprefix("; "), report])) if report else ""

    def _rank_lost(self) -> RankLost:
        """Build the error: how the lost ranks ended, what happened to the others, and what to do."""
        cell = self._cell
        fresh = self._told_of_fresh(is_told=True)
        lines = [describe_ends(cell.lost, hosts=self._state.hosts), *self._told_of_sizes(), *fresh]
        kept = [rank for rank in cell.ranks if rank not in cell.lost]
        if still := [rank for rank in kept if rank in cell.running]:
            lines.append(f"{self._link.where(still)} still in the cell: the next cell waits for it to end")
        elif kept:
            lines.append(f"{format_ranks(kept)} kept {'its' if len(kept) == 1 else 'their'} variables")
        if stale := self._state.groups.stale:
            lines.append(describe_new_groups(stale, is_wanted=self._state.groups.is_wanted))
        return RankLost("\n".join(lines), ranks=cell.lost)

    def _told_of_sizes(self) -> list[str]:
        """Describe what the others had begun if gloo aborted a rank because a message had the wrong size."""
        lost = self._cell.lost
        if not any(_DID_NOT_FIT in end.stderr_tail for end in lost.values()):
            return []
        _, evidence = self._link.look([rank for rank in self._cell.ranks if rank not in lost], before={}, stack=False)
        others = describe_last(evidence)
        begun = f"the others had begun {others}: " if others else ""
        what_to_do = "" if self._state.groups.is_checked else f"; {_CHECK}"
        return [f"{begun}ranks used tensors of different sizes in one collective or message{what_to_do}"]

    def _told_of_fresh(self, *, is_told: bool = False) -> list[str]:
        """Return advice about the lost ranks, and record that the user has been told.

        ``is_told``: the text before it already says how these ranks ended.
        """
        lost = self._cell.lost
        self._state.note_told(lost)
        return advice(lost, world_size=self._state.world_size, is_told=is_told)


def _failures(cell: Cell) -> str:
    """Describe the errors of ranks that have failed while others still run: often the reason for their wait.

    Text of ours follows on the same line: errors are cut, without colours, and at most three are described.
    """
    failed: dict[str, list[int]] = {}
    for rank, error in cell.errors().items():
        if not error.interrupted:
            summary = next(iter(error.summary.splitlines()), "an unnamed error")
            failed.setdefault(one_line(without_colours(summary), most_chars=_MOST_ERROR_CHARS), []).append(rank)
    described = list(failed.items())[:_MOST_ERRORS]
    return "".join(f"; {format_ranks(ranks)} failed with {summary}" for summary, ranks in described)
