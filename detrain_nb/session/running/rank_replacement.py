"""The ranks of a session come and go: one is replaced by a fresh one, those of a lost node are gone for good."""

from __future__ import annotations

import time
from collections.abc import Iterable

from ...errors import SessionError, format_ranks
from ...wire import Interrupt, Replace
from ..link.rank_link import IDLE_LIMIT_S
from ..state.rank_deaths import is_gone, what_to_do_about_down
from .core import Core, Ranks


class Members:
    """Those of one session; what is known of them is in ``core``."""

    def __init__(self, core: Core) -> None:
        self._core = core
        self._ranks = core.ranks
        self._inbox = core.inbox
        self._replaced: dict[int, int] = {}  # rank -> the incarnation that is to go

    def interrupt(self, ranks: Ranks) -> None:
        """Raise KeyboardInterrupt on those that run a cell."""
        self._core.require_alive()
        chosen = self._core.choose(ranks)
        for run in set(self._inbox.busy.values()):
            if wanted := [rank for rank in run.running if rank in chosen]:
                self._ranks.send(Interrupt(wanted, run.cell))

    def replace(self, ranks: Ranks) -> None:
        """Have them replaced by fresh ones. Raises: SessionError for those of a lost node."""
        chosen = self._core.choose(ranks)
        gone = {rank: end for rank in chosen if (end := self._inbox.lost.get(rank)) and is_gone(end)}
        if gone:
            raise SessionError(what_to_do_about_down(gone))
        self._replaced.update({rank: self._inbox.up[rank].incarnation for rank in chosen})
        self._ranks.send(Replace(list(chosen)))

    def wait_until_fresh(self, ranks: Ranks) -> None:
        """See Session.wait_until_fresh."""
        chosen = self._core.choose(ranks)
        deadline = time.monotonic() + IDLE_LIMIT_S
        wanted = {rank: before for rank, before in self._replaced.items() if rank in chosen}
        while any(self._inbox.up[rank].incarnation == before for rank, before in wanted.items()):
            if self._inbox.failure:
                raise self._inbox.failure
            if time.monotonic() >= deadline:
                raise SessionError(f"{format_ranks(chosen)} did not start again within {IDLE_LIMIT_S:g} s")
            time.sleep(0.002)
        for rank in chosen:
            self._replaced.pop(rank, None)
            self._inbox.fresh.pop(rank, None)  # it was asked for: that it is so need not be said

    def shrink(self) -> dict[int, int]:
        """See Session.shrink."""
        core = self._core
        core.require_alive()
        gone = [rank for rank, end in self._inbox.lost.items() if is_gone(end)]
        if not gone:
            raise SessionError("no node is lost: all ranks are there")
        core.choose_idle(_others(range(core.world_size), gone), limit_s=IDLE_LIMIT_S)
        core.generations.end()
        plan, number = core.plan.without(gone)
        self._ranks.renumber(core.plan, number, world_size=plan.world_size)
        core.set_plan(plan)
        core.note_down()
        return number


def _others(ranks: Iterable[int], gone: Iterable[int]) -> list[int]:
    return sorted(set(ranks) - set(gone))
