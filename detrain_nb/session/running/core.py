"""What the parts of a session share: the links to its nodes, its state, its settings, its process groups."""

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
        self.is_left = False  # detached: its ranks continue

    @property
    def is_alive(self) -> bool:
        return self.why_over is None

    @property
    def why_over(self) -> DetrainError | None:
        """Why no more cells can run, and what to do; None while they can."""
        if self.is_stopped and not self.is_left:
            return SessionError(f"session {self.name!r} has ended: start another one")
        return self.state.failure

    def require_alive(self) -> None:
        """Raise the error that ended the session, if it has ended."""
        if self.why_over:
            raise self.why_over

    @property
    def nodes(self) -> tuple[Node, ...] | None:
        """The nodes that the session runs on, each with its number of ranks; None for this machine."""
        placed = zip(nodes_of(self.transports), self.state.plan.nodes)
        return tuple(_placed(node, len(of.ranks)) for node, of in placed if of.ranks) or None

    def note_down(self, started: StartedWith | None = None) -> None:
        """Record the nodes for later notebooks, and how the session was started; None keeps the earlier record."""
        remember(self.name, self.nodes or (), holder=self.holder, started=started)

    def plan_of(self, number: int) -> Plan:
        """Return the plan, with the ranks as they were numbered when cell ``number`` ran."""
        return self.state.logbook.plan_of(number) or self.state.plan

    def choose(self, ranks: Ranks, *, plan: Plan | None = None) -> tuple[int, ...]:
        """Resolve ``ranks`` to ascending rank numbers; they may also be names of nodes. Raises: SpecError.

        A node without a name is called ``this machine``, as in errors. ``plan``: the plan of an earlier cell.
        """
        plan = plan or self.state.plan
        here = dict.fromkeys(self.state.hosts.values(), tuple(range(plan.world_size)))
        return parse_ranks(ranks, world_size=plan.world_size, hosts=plan.hosts or here)

    def choose_idle(
        self, ranks: Ranks, *, waits: bool = False, tell: Callable[[Mapping[int, Cell]], None] | None = None
    ) -> tuple[int, ...]:
        """Resolve ``ranks`` and check that they are idle. Raises: SpecError; SessionError when one is busy or lost.

        With ``waits``, wait for busy ranks: ``tell`` receives them, with their cells, once a second.
        """
        self.require_alive()
        chosen = self.choose(ranks)
        self.link.require_idle(chosen, waits=waits, tell=tell)
        return chosen

    def wait_until_idle(self, ranks: Ranks, observer: CellObserver | None) -> tuple[int, ...]:
        """Wait for the ranks of a cell as ``choose_idle`` does; ``observer`` shows what the cell waits for.

        Raises: also CellInterrupted, when stop was pressed while the cell waited for others.
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
        """Have all ranks make a group, or begin a generation, if ``chosen`` are all ranks or no rank is busy or lost.

        If the others cannot make it, ``chosen`` go on without a group.
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
        """Give the user a notice: in the cell that is about to run, else when notices are next read."""
        if words and observer:
            observer.notice(words)
        elif words:
            self.state.notices.add(words)


def _placed(node: Node, ranks: int) -> Node:
    """Return a copy of a node that asks for the number of ranks that it has."""
    devices = node.devices[:ranks] if isinstance(node.devices, tuple) else node.devices
    return node.model_copy(update={"ranks": ranks, "devices": devices})
