"""The ranks' process groups, generation after generation: made, ended whoever waits in them, and made anew."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable

from ...errors import CellInterrupted, CellTimeout, LaunchError, RankLost, format_ranks
from ...wire import Broadcast, EndGeneration, GenerationEnded, GenerationReady, NewGeneration, RequestDone
from ..link.rank_link import VALUE_LIMIT_S, RankLink
from ..output.safe_output import quote, variable_names
from ..state.rank_deaths import describe_ends
from ..state.requests import Request

GROUP_LIMIT_S = 60.0
END_LIMIT_S = 0.8  # a rank whose C code holds the GIL ends it later
_ATTEMPTS = 3
_MOST_STALE = 100  # variables that one rank names


class Generations:
    """Those of one session of ``world_size`` ranks."""

    def __init__(self, ranks: RankLink, *, world_size: int) -> None:
        self.is_wanted = True  # a default group is made where there is none
        self.is_checked = False  # ranks compare collectives before they begin them, in the next generations
        self.stale: list[str] = []  # variables that were made with the generation that ended last
        self._ranks = ranks
        self._inbox = ranks.inbox
        self._world_size = world_size
        self._ended = 0
        self._begun_by: dict[int, int] = {}  # the incarnations of the ranks that know of the present one
        self._begun_checked = False
        self._given_up: dict[int, int] = {}  # the incarnations of ranks that could make no group
        self._times_given_up = 0  # since all had one: a node may say that its ranks are fresh as often as it likes

    def go_on_from(self, number: int) -> None:
        """An earlier notebook has made the generation of that number."""
        self._inbox.generation = number

    def go_on_with_ranks(self) -> None:
        """All ranks have it but those that are fresh since; called when it is known which are."""
        fresh = self._inbox.fresh
        self._begun_by = {rank: known for rank, known in self._incarnations().items() if rank not in fresh}

    def mend_for_some(self, *, limit_s: float) -> str:
        """As ``mend``, for a cell that can do without; says why there is no group. The same ranks are asked once."""
        is_known = self._given_up == self._incarnations() or self._times_given_up >= _ATTEMPTS
        if is_known and not all(self._inbox.has_group.values()):
            return ""
        try:
            self.mend(limit_s=limit_s)
        except (LaunchError, CellTimeout) as exc:
            self._given_up = self._incarnations()
            self._times_given_up += 1
            return (
                f"{exc}\nthere is no process group until it is replaced (%distributed restart -r RANKS), or its node "
                "is left out (%distributed detach, then attach --without NODE)"
            )
        return ""

    def mend(self, *, limit_s: float) -> None:
        """Make the default group anew when a cell has destroyed it, or its generation was ended.

        Needs every rank idle, and waits for them for ``limit_s``. Ranks that are lost meanwhile are waited for again.
        """
        for attempt in range(_ATTEMPTS):
            if all(self._inbox.has_group.get(rank) for rank in range(self._world_size)):
                self._times_given_up = 0
                return
            self._ranks.require_idle(range(self._world_size), limit_s=limit_s)
            try:
                self.make()
            except (RankLost, LaunchError) as exc:
                if attempt == _ATTEMPTS - 1 or isinstance(exc, LaunchError) and not self._inbox.fresh:
                    raise

    def make(self, *, tell: Callable[[int], None] = lambda ready: None) -> None:
        """Let all ranks make the default group of the next generation; ``tell`` gets how many have it.

        Raises: LaunchError with their reason, RankLost when one ends meanwhile. Nobody is left waiting then.
        """
        everyone = list(range(self._world_size))
        self.end()
        self._inbox.generation += 1
        ready = self._inbox.generation_ready = self._inbox.requests.new(everyone)
        for rank, end in list(self._inbox.lost.items()):  # its loss was told before anybody waited for it
            ready.fail(RankLost(describe_ends({rank: end}, hosts={}), ranks=[rank]), rank=rank)
        self._send_new()
        try:
            self._wait_for_group(ready, tell)
        except BaseException:
            self.end()  # those that wait for the others
            ready.wait_quietly(END_LIMIT_S)
            raise
        finally:
            self._inbox.requests.end(ready)
        failed = _errors(ready)
        if failed:
            self.end()
            raise LaunchError(f"{format_ranks(failed)} could not make the process group: {quote(failed[min(failed)])}")

    def begin(self) -> None:
        """Let all ranks count the groups that cells make from one, where they would not do so alike.

        That is where one is fresh, where the last generation was ended, or where it is compared in another way.
        """
        is_of_all = self._begun_by == self._incarnations()
        is_as_wanted = self._begun_checked == self.is_checked or any(self._inbox.has_group.values())
        if self._inbox.generation > self._ended and is_of_all and is_as_wanted:
            return
        self.end()
        self._inbox.generation += 1
        self._send_new()

    def _send_new(self) -> None:
        self._begun_by, self._begun_checked = self._incarnations(), self.is_checked
        everyone, number = list(range(self._world_size)), self._inbox.generation
        self._ranks.send(NewGeneration(everyone, number, self.is_checked, self.is_wanted))

    def _incarnations(self) -> dict[int, int]:
        return {rank: up.incarnation for rank, up in self._inbox.up.items()}

    def _wait_for_group(self, ready: Request, tell: Callable[[int], None]) -> None:
        """Wait for all; when one cannot make it, the others wait in vain."""
        deadline = time.monotonic() + GROUP_LIMIT_S
        while not ready.wait_quietly(0.05) and not ready.has_failed:
            if time.monotonic() >= deadline:
                slow = format_ranks(set(range(self._world_size)) - ready.answers.keys())
                raise CellTimeout(f"{slow} did not make the process group within {GROUP_LIMIT_S:g} s")
            if _errors(ready):
                self.end()
            tell(len(ready.answers))
        ready.wait(0.0, what="making the process group")

    def end(self, *, without_waiting_for: Iterable[int] = ()) -> list[str]:
        """End the present generation in every rank, whoever waits in it; returns the variables that were made with it.

        A rank that does not answer in time, or is not waited for, ends it when it can. One that has ended may have
        groups again, which a cell has made.
        """
        has_none = not self._inbox.busy and not any(self._inbox.has_group.values())
        if self._inbox.generation <= self._ended and has_none:
            return []
        lost = self._inbox.lost.copy()
        answering = {rank for rank in range(self._world_size) if rank not in lost} - set(without_waiting_for)
        # one that starts may have been told to make it, if that crossed the news of a death
        told = [rank for rank in range(self._world_size) if rank not in lost or not lost[rank].down]
        ended = self._inbox.generation_ended = self._inbox.requests.new(answering)
        self._inbox.has_group.clear()
        self._ranks.send(EndGeneration(told, self._inbox.generation))
        self._ended = self._inbox.generation  # after it was sent: a stop may come in between, and ranks end it once
        ended.wait_quietly(END_LIMIT_S if answering else 0.0)
        self._inbox.requests.end(ended)
        stale: set[str] = set()
        for answer in ended.answers.values():
            if isinstance(answer, GenerationEnded):
                stale.update(variable_names(answer.stale[:_MOST_STALE]))
        self.stale = sorted(stale)
        return self.stale

    def broadcast(self, names: list[str], ranks: Iterable[int], *, source: int) -> dict[int, list[str]]:
        """Send variables from rank ``source`` to ``ranks``, directly; returns their optimizers that train no model now.

        Raises: SessionError with what was refused, CellInterrupted after KeyboardInterrupt.
        """
        everyone = sorted({*ranks, source})
        with self._ranks.request(everyone) as request:
            self._ranks.send(Broadcast(everyone, request.number, names, source))
            try:
                request.wait(VALUE_LIMIT_S, what=f"broadcast of {', '.join(names)}")
                return _orphans(request)
            except (RankLost, CellTimeout, KeyboardInterrupt) as exc:
                self.end()  # the others wait for what will not come
                request.left_as = f"the broadcast of {', '.join(names)}"  # a large value takes its time to be unpacked
                request.wait_quietly(END_LIMIT_S)
                if not isinstance(exc, KeyboardInterrupt):
                    raise
                groups = describe_new_groups(self.stale, is_wanted=self.is_wanted)
                note = f"broadcast of {', '.join(names)} was interrupted, some ranks may have it; {groups}"
                raise CellInterrupted({}, world_size=self._world_size, note=note) from None


def describe_new_groups(stale: Iterable[str], *, is_wanted: bool = True) -> str:
    """What the user has to know when a generation was ended; ``stale`` was made with it."""
    again = f"make again what was made with the old ones: {', '.join(stale)}" if stale else ""
    if is_wanted:
        return "the process groups are made anew before the next cell" + (f": {again}" if again else "")
    return "the process groups were ended: call dist.init_process_group() again" + (f", then {again}" if again else "")


def _orphans(request: Request) -> dict[int, list[str]]:
    answers = {rank: answer for rank, answer in request.answers.items() if isinstance(answer, RequestDone)}
    return {rank: variable_names(answer.orphans[:_MOST_STALE]) for rank, answer in answers.items()}


def _errors(ready: Request) -> dict[int, str]:
    answers = ready.answers.items()
    return {rank: answer.error for rank, answer in answers if isinstance(answer, GenerationReady) and answer.error}
