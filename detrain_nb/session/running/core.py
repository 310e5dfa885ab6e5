"""What the parts of a session share: its nodes and ranks, what came from them, their plan, their process groups."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ...deploy.bringing_up import End
from ...deploy.chosen_nodes import nodes_of
from ...deploy.known import StartedWith, remember
from ...errors import CellInterrupted, DetrainError, SessionError
from ...plan import Plan, parse_ranks
from ..link.rank_link import RankLink
from ..recovery.process_groups import ProcessGroups
from ..recovery.rescue import Rescue
from ..state.cell import Cell
from ..state.cell_observer import CellObserver
from ..state.limits import Limits
from .settings import SessionSettings

if TYPE_CHECKING:
    from ...spec.node import Node

Ranks = str | int | Iterable[int] | None


class Core:
    """One per session. It has no ranks until it has a plan."""

    def __init__(
        self,
        name: str,
        ends: Sequence[End],
        *,
        holder: str,
        is_attaching: bool = False,
        limits: Limits,
    ) -> None:
        self.name = name
        self.holder = holder or f"pid {os.getpid()}"
        self.transports = [end.transport for end in ends]
        self.link = RankLink(name, ends, is_attaching=is_attaching, limits=limits)
        self.state = self.link.state
        self.process_groups = ProcessGroups(self.link)
        self.rescue = Rescue(self.link, self.process_groups)
        self.settings = SessionSettings(self.link, self.process_groups, self.require_alive)
        self.is_stopped = False
        self.is_left = False  # its ranks go on

    @property
    def is_alive(self) -> bool:
        return self.why_over is None

    @property
    def why_over(self) -> DetrainError | None:
        """Why nothing can be run any more, and what to do; None while it can."""
        if self.is_stopped and not self.is_left:
            return SessionError(f"session {self.name!r} has ended: start another one")
        return self.state.failure

    def require_alive(self) -> None:
        """Raises: what ended the session."""
        if self.why_over:
            raise self.why_over

    @property
    def nodes(self) -> tuple[Node, ...] | None:
        """The nodes that it runs on, with as many ranks as each has; None for this machine."""
        placed = zip(nodes_of(self.transports), self.state.plan.nodes)
        return tuple(_placed(node, len(of.ranks)) for node, of in placed if of.ranks) or None

    def note_down(self, started: StartedWith | None = None) -> None:
        """A later notebook finds its nodes again, and how it was started: what was noted of that before, if None."""
        remember(self.name, self.nodes or (), holder=self.holder, started=started)

    def plan_of(self, number: int) -> Plan:
        """The ranks as they were numbered when the cell of that number ran."""
        return self.state.logbook.plan_of(number) or self.state.plan

    def choose(self, ranks: Ranks, *, plan: Plan | None = None) -> tuple[int, ...]:
        """The ranks that are meant, in ascending order; names of nodes are choices too. Raises: SpecError.

        Where nodes have no name, that is what errors call this machine. ``plan``: of earlier ranks.
        """
        plan = plan or self.state.plan
        here = dict.fromkeys(self.state.hosts.values(), tuple(range(plan.world_size)))
        return parse_ranks(ranks, world_size=plan.world_size, hosts=plan.hosts or here)

    def choose_idle(
        self, ranks: Ranks, *, waits: bool = False, tell: Callable[[Mapping[int, Cell]], None] | None = None
    ) -> tuple[int, ...]:
        """The ranks that were chosen. Raises: SpecError, or SessionError when one of them cannot be spoken to now.

        With ``waits`` those that are busy are waited for: ``tell`` gets these, with their cells, once a second.
        """
        self.require_alive()
        chosen = self.choose(ranks)
        self.link.require_idle(chosen, waits=waits, tell=tell)
        return chosen

    def wait_until_idle(self, ranks: Ranks, observer: CellObserver | None) -> tuple[int, ...]:
        """``choose_idle`` for a cell, which says meanwhile what it waits for.

        Raises: CellInterrupted, too, where stop was pressed while the cell waited for others.
        """
        is_told = False

        def tell(busy: Mapping[int, Cell]) -> None:
            nonlocal is_told
            if observer:
                is_told = True
                observer.waiting(self.rescue.describe_in_the_way(busy))

        try:
            return self.choose_idle(ranks, waits=True, tell=tell)
        except KeyboardInterrupt:
            chosen = self.choose(ranks)
            in_the_way = {cell for rank, cell in self.state.busy.items() if rank in chosen}
            if not in_the_way:
                raise
            self.rescue.make_way(next(iter(in_the_way)), gap_s=self.settings.stop_gap_s)
            note = f"the cell was not run; {self.rescue.stop_in_the_way(in_the_way)}"
            raise CellInterrupted({}, world_size=len(chosen), note=note) from None
        finally:
            if observer and is_told:
                observer.waiting("")

    def mend_group(self, chosen: Iterable[int], observer: CellObserver | None) -> None:
        """All ranks have a group again, or can make one, if ``chosen`` are all, or the others have time for it.

        Where the others cannot make it, ``chosen`` go on without one.
        """
        is_everybody = len(set(chosen)) == self.state.world_size
        left = self.state.requests.left(self.state.ranks)
        if not is_everybody and (self.state.busy or self.state.lost or left):
            return
        if self.state.groups.is_wanted and not is_everybody:
            self.tell(self.process_groups.mend_for_some(), observer)
        elif self.state.groups.is_wanted:
            self.process_groups.mend()
        else:
            self.process_groups.begin()

    def tell(self, words: str, observer: CellObserver | None) -> None:
        """Say to the user what no cell says: in the cell that is to run, or whenever somebody asks."""
        if words and observer:
            observer.notice(words)
        elif words:
            self.state.notices.add(words)


def _placed(node: Node, ranks: int) -> Node:
    """A node, asked for as many ranks as it has got."""
    devices = node.devices[:ranks] if isinstance(node.devices, tuple) else node.devices
    return node.model_copy(update={"ranks": ranks, "devices": devices})
