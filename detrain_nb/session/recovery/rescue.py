"""The rescue of a cell that is stopped, or that lost a rank: waiting ranks are freed, computing ranks are left alone.

A first press of stop raises KeyboardInterrupt on every rank. Ranks that wait in a collective or in the store cannot
notice it: their generation of process groups is ended on every rank, and their wait with it. A rank that computes
in C notices it when it returns to Python. A second press ends the generation without checking, a third replaces the
ranks that are left. Presses are counted per cell for as long as a rank runs it, even if the prompt returned in between.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from ...errors import format_ranks, short_ranks
from ...wire import Interrupt, Position, Replace
from ..diagnosis.diagnosis import Verdict, are_in_step, describe_mismatch, describe_wait, judge
from ..diagnosis.evidence import Evidence
from ..link.rank_link import RankLink
from ..state.cell import Cell
from ..state.rank_deaths import advice
from .process_groups import ProcessGroups, describe_new_groups

_PRESSES = 3
# A stop interrupts each rank at a different line: one may have taken the optimizer's step, and another not.
_MAY_BE_APART = (
    "some ranks may have taken one optimizer step more: %broadcast MODEL,OPTIMIZER makes them equal "
    "(if MODEL is a DDP: net = MODEL.module in a cell, then %broadcast net,OPTIMIZER)"
)
_GOES_ON = "%distributed interrupt stops cell {}"


class Rescue:
    """The rescue of stopped cells of one session."""

    def __init__(self, link: RankLink, groups: ProcessGroups) -> None:
        self._link = link
        self._limits = link.limits
        self._state = link.state
        self._groups = groups
        self._unfinished: list[Cell] = []  # stopped, but still running on some rank

    def stop(self, cell: Cell) -> str:
        """Stop ``cell`` on the ranks that still run it; returns a description of the result.

        A further press, during this call or after it, escalates.
        """
        with cell.being_stopped() as told:
            story = self._begin(cell)
            self._press_until_it_ends(story)
            told.append(self._end_of(story))
        return told[0]

    def free(self, cell: Cell) -> str:
        """Free the ranks of ``cell`` that wait, without a press of stop; freed ranks get time to end the cell."""
        story = self._begin(cell)
        try:
            self._press(1, story)
            if not cell.wait(self._limits.free_s) and not cell.is_cut_off:
                cell.note_stop()
                story.verdicts = self._judge(story)
        except KeyboardInterrupt:  # now stop was pressed
            self._press_until_it_ends(story)
        return self._end_of(story)

    def _begin(self, cell: Cell) -> _Story:
        return _Story(cell, is_reachable=self._link.is_reachable)

    def _press_until_it_ends(self, story: _Story) -> None:
        cell = story.cell
        for _ in range(_PRESSES):
            if not cell.running or cell.is_cut_off:
                return
            press = cell.press(at_most=_PRESSES)
            with contextlib.suppress(KeyboardInterrupt):  # the next press
                self._press(press, story)
                return

    def stop_in_the_way(self, runs: Iterable[Cell]) -> str:
        """Press stop once more on those of ``runs`` that were stopped before, as a waiting cell was stopped.

        Returns a line with what happened to each, then advice about replaced ranks. The other cells keep running.
        """
        words, replaced = [], {}
        for cell in sorted(runs, key=lambda cell: cell.number):
            if cell.presses:
                words.append(f"cell {cell.number}: {'; '.join(self.stop(cell).splitlines())}")
                replaced.update({rank: end for rank, end in cell.lost.items() if end.asked})
            elif cell.running:
                words.append(
                    f"{self._link.where(cell.running)} still in cell {cell.number}: {_GOES_ON.format(cell.number)}"
                )
        self._state.note_told(replaced)
        return "\n".join(["; ".join(words), *advice(replaced, world_size=self._state.world_size)])

    def describe_in_the_way(self, busy: Mapping[int, Cell]) -> str:
        """Describe what a cell waits for while its ranks run others, and what a stop does now."""
        parts = []
        for cell in sorted(set(busy.values()), key=lambda cell: cell.number):
            ranks = [rank for rank in busy if busy[rank] is cell]
            parts.append(
                f"waiting for {self._link.where(ranks)}, still in cell {cell.number}; {_next_press(cell, ranks)}"
            )
        left = self._state.requests.left(self._state.ranks)
        parts += [f"waiting for {format_ranks([rank])}, still in {what}" for rank, what in left.items()]
        return "; ".join(parts)

    def make_way(self, cell: Cell, *, gap_s: float) -> None:
        """Give a front end that may be restarting its kernel time to leave the session, after stop was pressed.

        Raises: SessionError when it has left: the cell then continues without us.
        """
        with contextlib.suppress(KeyboardInterrupt):
            cell.wait(gap_s)
        if self._link.is_closed and self._state.failure:
            raise self._state.failure from None

    def _end_of(self, story: _Story) -> str:
        story.cell.observers.waiting("")
        with contextlib.suppress(KeyboardInterrupt):  # it was stopped already
            self._end_what_is_out_of_step(story)
        return story.told()

    def after_failure(self, cell: Cell) -> str:
        """End the process groups if the failed ``cell`` left them out of step; returns words on that, or nothing."""
        story = self._begin(cell)
        with contextlib.suppress(KeyboardInterrupt):  # the cell has ended
            self._end_what_is_out_of_step(story)
        return story.told_of_groups()

    def before_a_cell(self) -> str:
        """End the process groups if cells stopped earlier left them out of step; returns words on that, or nothing.

        Cells that some rank still runs are checked the next time.

        Raises: KeyboardInterrupt when stop is pressed while the groups are checked or ended.
        """
        words = ""
        unfinished, self._unfinished = self._unfinished, []
        for story in map(self._begin, unfinished):
            self._end_what_is_out_of_step(story)
            words = words or story.told_of_groups()
        return words

    def forget_stopped(self) -> None:
        """Forget the stopped cells before ranks are renumbered: all ranks have left them."""
        self._unfinished.clear()

    def after_death(self, cell: Cell) -> None:
        """End the generation after a rank of ``cell`` was lost, and stop the other ranks."""
        if cell.is_cut_off:
            return
        with contextlib.suppress(KeyboardInterrupt):  # already being stopped
            self._free(self._begin(cell))
            cell.wait(self._limits.after_death_s)
        with contextlib.suppress(KeyboardInterrupt):
            self._interrupt(cell)
            cell.wait(self._limits.freed_s)

    def _press(self, press: int, story: _Story) -> None:
        cell = story.cell
        if press == 1:
            self._interrupt(cell)
            if not cell.wait(self._limits.press_s) and not cell.is_cut_off:
                self._free_who_waits(story)
        elif press == 2:
            self._free(story)
            self._interrupt(cell)
            if not cell.wait(2 * self._limits.freed_s):
                story.verdicts = self._judge(story)
        else:
            left = cell.running
            self._link.send(Replace(list(left), cell.number))
            if not cell.wait(self._limits.replace_s):
                story.verdicts = self._judge(story)
            story.replaced = tuple(rank for rank in left if rank in cell.lost)  # the others ended it before

    def _interrupt(self, cell: Cell) -> None:
        if cell.running:
            self._link.send(Interrupt(list(cell.running), cell.number))

    def _free_who_waits(self, story: _Story) -> None:
        """Free the ranks that wait; while none waits, give those that compute some time."""
        cell = story.cell
        deadline = time.monotonic() + self._limits.compute_s
        while cell.running and not cell.is_cut_off:
            story.verdicts = self._judge(story)
            if any(verdict.waits for verdict in story.verdicts.values()):
                self._free(story)
                self._interrupt(cell)
                returning = [rank for rank, verdict in story.verdicts.items() if verdict.kind != "computes"]
                if not cell.wait(self._limits.freed_s, ranks=returning):
                    story.verdicts = self._judge(story)
                return
            if cell.running:
                cell.observers.waiting(story.describe_left(is_cell_shown=True))
            is_any_reachable = any(self._link.is_reachable(rank) for rank in cell.running)
            if time.monotonic() >= deadline or not is_any_reachable:
                return
            cell.wait(max(0.0, min(1.0, deadline - time.monotonic())))

    def _end_what_is_out_of_step(self, story: _Story) -> None:
        """End the groups if one rank may have begun a collective that another has not.

        An interrupt may come right after a collective was begun, before its wait. In the next one, ranks would receive
        what was sent for the earlier one; gloo aborts the process if the sizes differ.
        """
        cell = story.cell
        if story.has_ended_generation or cell.lost or cell.is_cut_off:
            return
        if cell.running:
            self._unfinished.append(cell)
            return
        if not cell.is_collective:
            return
        try:
            evidence = self._look_at_idle()
        except KeyboardInterrupt:  # pressed once more: end them without checking
            self._free(story)
            raise
        if not are_in_step(evidence):
            self._free(story)

    def _look_at_idle(self) -> Sequence[Evidence]:
        """Look at what all ranks have begun with others; ranks that are slow to report it are asked again."""
        deadline = time.monotonic() + self._limits.known_s
        while True:
            _, evidence = self._link.look(self._state.ranks, before={}, stack=False)
            is_worth_asking = any(each.state == "idle" and not each.is_known for each in evidence)
            if not is_worth_asking or time.monotonic() >= deadline:
                return evidence
            time.sleep(0.02)

    def _free(self, story: _Story) -> None:
        story.freed = {rank: verdict for rank, verdict in story.verdicts.items() if verdict.waits}
        computing = [rank for rank, verdict in story.verdicts.items() if verdict.kind == "computes"]
        story.has_ended_generation, story.is_group_wanted = True, self._state.groups.is_wanted
        story.stale = self._groups.end(without_waiting_for=computing)

    def _judge(self, story: _Story) -> dict[int, Verdict]:
        """Judge what the ranks that still run the cell are doing, from two looks."""
        cell = story.cell
        everyone = self._state.ranks
        before: dict[int, Position] = self._link.locate(cell.running, stack=False)
        for rank, position in before.items():
            if position.state == "idle":  # it never got the cell, or its end of the cell, due before this, was lost
                with self._state.held():
                    cell.withdraw(rank)
        cell.wait(self._limits.judge_gap_s)
        _, evidence = self._link.look(everyone, before=before, stack=True)
        verdicts = judge(evidence)
        story.mismatch = story.mismatch or describe_mismatch(evidence)
        return {rank: verdicts[rank] for rank in cell.running if rank in verdicts}


class _Story:
    """A record of what was seen and done while a cell was stopped."""

    def __init__(self, cell: Cell, *, is_reachable: Callable[[int], bool]) -> None:
        self.cell = cell
        self._is_reachable = is_reachable
        self.verdicts: dict[int, Verdict] = {}
        self.freed: dict[int, Verdict] = {}
        self.mismatch = ""
        self.stale: Sequence[str] = []
        self.has_ended_generation = False
        self.is_group_wanted = True
        self.replaced: tuple[int, ...] = ()

    def told(self) -> str:
        """Return the description: one line for each thing the user may have to do."""
        lines = []
        is_open = not self.cell.is_cut_off
        if freed := [verdict for rank, verdict in self.freed.items() if not (is_open and rank in self.cell.running)]:
            lines.append(f"{_waited(freed)}: freed")
        if self.mismatch:
            lines.append(self.mismatch)
        if self.replaced:
            lines.append(f"{format_ranks(self.replaced)} did not stop in time and had to be replaced")
        if self.cell.running and not self.cell.is_cut_off:
            lines.append(self.describe_left())
        elif not self.replaced and not self.cell.lost:
            lines.append("all ranks stopped and kept their variables")
            if self.cell.is_collective and len(self.cell.ranks) > 1:
                lines.append(_MAY_BE_APART)
        if self.has_ended_generation:
            lines.append(self.told_of_groups())
        return "\n".join(lines)

    def told_of_groups(self) -> str:
        """Return what happened to the process groups; empty if they are as before."""
        if not self.has_ended_generation:
            return ""
        return describe_new_groups(self.stale, is_wanted=self.is_group_wanted)

    def describe_left(self, *, is_cell_shown: bool = False) -> str:
        """Describe where the ranks that still run the cell are, and what the user can do.

        ``is_cell_shown``: the notebook waits for them; else it has its prompt again, and its stop button has no effect.
        """
        away = [rank for rank in self.cell.running if not self._is_reachable(rank)]
        left = [rank for rank in self.cell.running if rank not in away]
        if away:
            _, _, their, _ = _pronouns(away)
            words = f"{format_ranks(away)}: no connection to {their} node; the stop takes effect after reconnecting"
            return f"{words}\n{self._describe_there(left, is_cell_shown=is_cell_shown)}" if left else words
        return self._describe_there(left, is_cell_shown=is_cell_shown)

    def _describe_there(self, left: Sequence[int], *, is_cell_shown: bool) -> str:
        verdicts = [self.verdicts[rank] for rank in left if rank in self.verdicts]
        unseen = [rank for rank in left if rank not in self.verdicts]
        seconds = max((verdict.evidence.seconds for verdict in verdicts), default=0.0)
        what = describe_wait(verdicts) or f"{format_ranks(unseen)} did not answer"
        if verdicts and all(verdict.kind == "no answer" for verdict in verdicts):
            return f"{what}: the node is busy, or output of {format_ranks(left)} is still arriving"
        stopped = [verdict.rank for verdict in verdicts if verdict.kind == "stopped"]
        is_in_python = verdicts and not any(verdict.kind == "computes" for verdict in verdicts)
        they, them, their, s = _pronouns(left)
        why = (
            "the cell may catch KeyboardInterrupt, or wait in C code"
            if is_in_python
            else f"{they} stop{s} when {they} return{s} to Python"
        )
        if stopped:
            why = f"kill -CONT PID lets {_pronouns(stopped)[1]} continue and stop (PID: see %distributed status)"
        kill = f"%distributed interrupt --kill {short_ranks(left)}"
        press = "press stop again" if is_cell_shown else "run %distributed interrupt"
        if self.cell.presses < 2:
            advice = f"{press} to free {them} without checking, or {kill} to replace {them}"
        else:
            advice = f"{press} once more while {they} run{s} cell {self.cell.number}, or {kill}, to replace {them}"
        return f"{what} ({seconds:.0f} s): {why}; {advice}: {their} variables are lost"


def _pronouns(ranks: Collection[int]) -> tuple[str, str, str, str]:
    """Return they, them, their, and the ending of a verb after they, for one rank or several."""
    return ("it", "it", "its", "s") if len(ranks) == 1 else ("they", "them", "their", "")


def _next_press(cell: Cell, ranks: Collection[int]) -> str:
    """Describe what a stop does to a cell that another waits for."""
    _, them, their, _ = _pronouns(ranks)
    if cell.presses == 0:
        return f"stop ends only this wait; {_GOES_ON.format(cell.number)}"
    if cell.presses == 1:
        return f"a second stop ends {their} process groups and interrupts {them} again"
    return f"a third stop replaces {them}: {their} variables are lost"


def _waited(verdicts: Iterable[Verdict]) -> str:
    return describe_wait(verdicts).replace(" waits in ", " waited in ").replace(" wait in ", " waited in ")
