"""The ranks of a session come and go: one is replaced by a fresh one, those of a lost node are gone for good."""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import SessionError, format_ranks
from ...wire import Interrupt, Replace
from ..state.rank_deaths import is_gone, what_to_do_about_down
from .core import Core, Ranks


class RankReplacement:
    """Those of one session; what is known of them is in ``core``."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._link = core.link
        self._state = core.state
        self._replaced: dict[int, int] = {}  # rank -> the incarnation that is to go

    def interrupt(self, ranks: Ranks) -> None:
        """Raise KeyboardInterrupt on those that run a cell."""
        self._core.require_alive()
        chosen = self._core.choose(ranks)
        for cell in set(self._state.busy.values()):
            if wanted := [rank for rank in cell.running if rank in chosen]:
                self._link.send(Interrupt(wanted, cell.number))

    def replace(self, ranks: Ranks) -> None:
        """Have them replaced by fresh ones. Raises: SessionError for those of a lost node."""
        chosen = self._core.choose(ranks)
        gone = {rank: end for rank, end in self._state.lost.items() if rank in chosen and is_gone(end)}
        if gone:
            raise SessionError(what_to_do_about_down(gone))
        self._replaced.update({rank: self._state.up[rank].incarnation for rank in chosen})
        self._link.send(Replace(list(chosen)))

    def wait_until_fresh(self, ranks: Ranks) -> None:
        """See Session.wait_until_fresh."""
        chosen = self._core.choose(ranks)
        wanted = {rank: before for rank, before in self._replaced.items() if rank in chosen}

        def are_up() -> bool:
            return all(self._state.up[rank].incarnation != before for rank, before in wanted.items())

        self._state.wait_for(lambda: self._state.failure is not None or are_up(), self._link.limits.idle_s)
        if self._state.failure:
            raise self._state.failure
        if not are_up():
            raise SessionError(f"{format_ranks(chosen)} did not start again within {self._link.limits.idle_s:g} s")
        for rank in chosen:
            self._replaced.pop(rank, None)
        self._state.note_told(chosen)  # it was asked for: that it is so need not be said

    def shrink(self) -> dict[int, int]:
        """See Session.shrink."""
        core = self._core
        core.require_alive()
        gone = [rank for rank, end in self._state.lost.items() if is_gone(end)]
        if not gone:
            raise SessionError("no node is lost: all ranks are there")
        core.choose_idle(_others(range(core.world_size), gone), limit_s=self._link.limits.idle_s)
        core.groups.end()
        plan, number = core.plan.without(gone)
        self._link.renumber(number, world_size=plan.world_size)
        core.state.know_plan(plan)
        core.rescue.forget_stopped()
        core.note_down()
        return number


def _others(ranks: Iterable[int], gone: Iterable[int]) -> list[int]:
    return sorted(set(ranks) - set(gone))
