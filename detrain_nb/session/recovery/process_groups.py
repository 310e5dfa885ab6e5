"""The ranks' process groups, one generation after another: made, ended even while ranks wait in them, and recreated."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence

from ...errors import CellInterrupted, CellTimeout, LaunchError, RankLost, format_ranks
from ...text import create_again
from ...wire import Broadcast, EndGeneration, GenerationEnded, GenerationReady, NewGeneration, RequestDone
from ..link.rank_link import RankLink
from ..output.safe_output import quote, variable_names
from ..state.rank_deaths import describe_ends
from ..state.requests import Request

_ATTEMPTS = 3
_MOST_STALE = 100  # variables reported by one rank


class ProcessGroups:
    """The process groups of one session; what is known of them is in its state."""

    def __init__(self, link: RankLink) -> None:
        self._link = link
        self._limits = link.limits
        self._state = link.state
        self._groups = link.state.groups

    def mend_for_some(self) -> str:
        """Recreate the groups for a cell on some ranks, which can run without; returns why that failed, only once."""
        if self._groups.is_given_up(self._state.incarnations) and not self._groups.all_have(self._state.ranks):
            return ""
        try:
            self.mend()
        except (LaunchError, CellTimeout) as exc:
            self._groups.give_up(self._state.incarnations)
            return (
                f"{exc}\nthere is no process group until that rank is replaced (%distributed restart -r RANKS) or its "
                "node is left out (%distributed detach, then attach --without NODE)"
            )
        return ""

    def mend(self) -> None:
        """Recreate the default group when a cell has destroyed it, or its generation was ended.

        Waits until every rank is idle, also for ranks that die in the meantime and restart.
        """
        for attempt in range(_ATTEMPTS):
            if self._groups.all_have(self._state.ranks):
                self._groups.note_made()
                return
            self._link.require_idle(self._state.ranks, waits=True)
            try:
                self.make()
            except (RankLost, LaunchError) as exc:
                if attempt == _ATTEMPTS - 1 or isinstance(exc, LaunchError) and not self._state.fresh:
                    raise

    def make(self, *, tell: Callable[[Collection[int]], None] = lambda ready: None) -> None:
        """Make the default group of the next generation on all ranks; ``tell`` receives the ranks that have it.

        Raises: LaunchError with the ranks' reason; RankLost when one dies meanwhile. No rank is left waiting then.
        """
        self.end()
        number = self._groups.begin(self._state.incarnations)
        ready = self._groups.expect_ready(self._state.ranks)
        for rank, end in self._state.lost.items():  # it was lost before this request
            ready.fail(RankLost(describe_ends({rank: end}, hosts={}), ranks=[rank]), rank=rank)
        self._send_new(number)
        try:
            self._wait_for_group(ready, tell)
        except BaseException:
            self.end()  # frees the ranks that wait for the others
            ready.wait_quietly(self._limits.group_end_s)
            raise
        finally:
            self._state.requests.end(ready)
        failed = _errors(ready)
        if failed:
            self.end()
            raise LaunchError(f"{format_ranks(failed)} could not make the process group: {quote(failed[min(failed)])}")

    def begin(self) -> None:
        """Start a new generation if ranks may differ in their count of the groups that cells have made.

        That is the case when a rank is fresh, the last generation was ended, or the comparison was switched on or off.
        """
        if not self._groups.is_current(self._state.incarnations):
            self.end()
            self._send_new(self._groups.begin(self._state.incarnations))

    def _send_new(self, number: int) -> None:
        self._link.send(NewGeneration(list(self._state.ranks), number, self._groups.is_checked, self._groups.is_wanted))

    def _wait_for_group(self, ready: Request, tell: Callable[[Collection[int]], None]) -> None:
        """Wait for all ranks; when one cannot make the group, end it, as the others would wait in vain."""
        deadline = time.monotonic() + self._limits.group_s
        while not ready.wait_quietly(0.05) and not ready.has_failed:
            if time.monotonic() >= deadline:
                slow = format_ranks(set(self._state.ranks) - ready.answers.keys())
                raise CellTimeout(f"{slow} did not make the process group within {self._limits.group_s:g} s")
            if _errors(ready):
                self.end()
            tell(set(ready.answers))
        ready.wait(0.0, what="making the process group")

    def end(self, *, without_waiting_for: Iterable[int] = ()) -> Sequence[str]:
        """End the present generation on every rank, even while ranks wait in it; returns the variables made with it.

        A rank that does not answer in time, or is not waited for, ends it when it can. Ranks that have ended it may
        have groups again, made by a cell.
        """
        if self._groups.is_ended and not self._state.busy and not self._groups.any_has:
            return []
        lost = self._state.lost
        answering = {rank for rank in self._state.ranks if rank not in lost} - set(without_waiting_for)
        # a starting rank may have received NewGeneration, if that crossed the report of its death
        told = [rank for rank in self._state.ranks if rank not in lost or not lost[rank].down]
        ended = self._groups.expect_end(answering)
        self._link.send(EndGeneration(told, self._groups.number))
        self._groups.note_end()  # after sending: a stop may come in between, and ranks end it only once
        ended.wait_quietly(self._limits.group_end_s if answering else 0.0)
        self._state.requests.end(ended)
        stale: set[str] = set()
        for answer in ended.answers.values():
            if isinstance(answer, GenerationEnded):
                stale.update(variable_names(answer.stale[:_MOST_STALE]))
        self._groups.note_stale(stale)
        return self._groups.stale

    def broadcast(self, names: list[str], ranks: Iterable[int], *, source: int) -> dict[int, list[str]]:
        """Send variables from rank ``source`` directly to ``ranks``; returns their optimizers that now train no model.

        Raises: SessionError when a rank refuses, RankLost, CellTimeout; CellInterrupted after KeyboardInterrupt.
        """
        everyone = sorted({*ranks, source})
        with self._link.request(everyone) as request:
            self._link.send(Broadcast(everyone, request.number, names, source))
            try:
                request.wait(self._limits.value_s, what=f"broadcast of {', '.join(names)}")
                return _orphans(request)
            except (RankLost, CellTimeout, KeyboardInterrupt) as exc:
                self.end()  # the others would wait in vain
                request.leave_as(f"the broadcast of {', '.join(names)}")  # a large value takes time to unpack
                request.wait_quietly(self._limits.group_end_s)
                if not isinstance(exc, KeyboardInterrupt):
                    raise
                groups = describe_new_groups(self._groups.stale, is_wanted=self._groups.is_wanted)
                note = f"broadcast of {', '.join(names)} was interrupted: some ranks may have it; {groups}"
                raise CellInterrupted({}, world_size=self._state.world_size, note=note) from None


def describe_new_groups(stale: Sequence[str], *, is_wanted: bool = True) -> str:
    """Describe what happens after a generation was ended; ``stale`` are the variables made with it."""
    again = create_again(stale) if stale else ""
    if is_wanted:
        return "the process groups are recreated before the next cell" + (f": {again}" if again else "")
    return "the process groups were ended: call dist.init_process_group() again" + (f", then {again}" if again else "")


def _orphans(request: Request) -> dict[int, list[str]]:
    answers = {rank: answer for rank, answer in request.answers.items() if isinstance(answer, RequestDone)}
    return {rank: variable_names(answer.orphans[:_MOST_STALE]) for rank, answer in answers.items()}


def _errors(ready: Request) -> dict[int, str]:
    answers = ready.answers.items()
    return {rank: answer.error for rank, answer in answers if isinstance(answer, GenerationReady) and answer.error}
