"""The ranks of a session: their nodes and devices, what they are doing; single ranks are queried, stopped, replaced."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ..errors import NodeLost, SessionError, format_ranks
from ..plan import Plan
from ..wire import Complete, Completions, Inspect, Inspection, Interrupt, Message, Replace
from .diagnosis.diagnosis import describe_mismatch, judge
from .diagnosis.evidence import Evidence
from .diagnosis.where_report import Whereabouts
from .output.safe_output import safe_completions
from .running.asked import check_text, check_whole
from .running.core import Core, Ranks
from .running.settings import SlotsOnly
from .running.status import describe_over
from .state.rank_deaths import is_gone, what_to_do_about_down

if TYPE_CHECKING:
    from ..spec.node import Node

__all__ = ["SessionRanks"]

_LONGEST_HELP = 1 << 18  # characters
WHERE_GAP_S = 0.1  # between two looks that show which ranks use the processor


class SessionRanks(SlotsOnly):
    """The ranks of a session: ``len(session.ranks)`` is their number, ``for rank in session.ranks`` visits each."""

    __slots__ = ("_core", "_link", "_replaced", "_state")

    def __init__(self, core: Core) -> None:
        self._core = core
        self._link = core.link
        self._state = core.state
        self._replaced: dict[int, int] = {}  # rank -> the incarnation that is being replaced

    def __len__(self) -> int:
        return self._state.world_size

    def __iter__(self) -> Iterator[int]:
        return iter(self._state.ranks)

    def __repr__(self) -> str:
        return f"<{format_ranks(self)} of session {self._core.name!r}>" if len(self) else "<no ranks>"

    @property
    def plan(self) -> Plan:
        """The nodes and devices of the ranks, and the backend."""
        return self._state.plan

    def plan_of(self, cell: int) -> Plan:
        """Return the plan with the ranks as numbered when a cell ran: shrinking a session renumbers them."""
        return self._core.plan_of(cell)

    @property
    def nodes(self) -> tuple[Node, ...] | None:
        """The nodes that the ranks run on, each with its number of ranks; None for this machine."""
        return self._core.nodes

    @property
    def node_names(self) -> dict[int, str]:
        """The name of each rank's node, without nodes that have no name."""
        return self._state.plan.node_names

    def choose(self, ranks: Ranks, *, plan: Plan | None = None) -> tuple[int, ...]:
        """Resolve ``ranks`` to ascending rank numbers: ``choose("0,2-3")`` is ``(0, 2, 3)``. Raises: SpecError.

        A text may also be ``"-1"`` (the last rank), ``"all"``, or the name of a node, for all ranks there.
        ``plan``: for the ranks of an earlier cell, see ``plan_of``.
        """
        return self._core.choose(ranks, plan=plan)

    def where(self) -> Whereabouts:
        """Report where every rank is: line, stack in the cell, the collective it waits in and for how long.

        Call it from another thread while a cell runs; it takes a fraction of a second.
        """
        core, state, link = self._core, self._state, self._link
        if over := describe_over(core):
            silent = judge([Evidence(rank, "no answer") for rank in state.ranks])
            return Whereabouts(core.name, tuple(silent.values()), state.hosts, "", over)
        before = link.locate(state.ranks, stack=False)
        time.sleep(WHERE_GAP_S)
        _, evidence = link.look(state.ranks, before=before, stack=True)
        verdicts, mismatch = tuple(judge(evidence).values()), describe_mismatch(evidence)
        return Whereabouts(core.name, verdicts, state.hosts, mismatch, describe_over(core))

    def interrupt(self, ranks: Ranks = None) -> None:
        """Raise KeyboardInterrupt on those of ``ranks`` (all) that run a cell. Does not wait."""
        self._core.require_alive()
        chosen = self._core.choose(ranks)
        for cell in set(self._state.busy.values()):
            if wanted := [rank for rank in cell.running if rank in chosen]:
                self._link.send(Interrupt(wanted, cell.number))

    def replace(self, ranks: Ranks) -> None:
        """Restart ``ranks``: their variables are lost, those of the others are kept. Does not wait.

        Raises: SessionError for ranks of a lost node; the error that ended the session.
        """
        self._core.require_alive()
        chosen = self._core.choose(ranks)
        gone = {rank: end for rank, end in self._state.lost.items() if rank in chosen and is_gone(end)}
        if gone:
            raise SessionError(what_to_do_about_down(gone))
        self._replaced.update({rank: self._state.up[rank].incarnation for rank in chosen})
        self._link.send(Replace(list(chosen)))

    def wait_until_fresh(self, ranks: Ranks) -> None:
        """Wait until ranks that are being replaced are up. Raises: SessionError."""
        chosen = self._core.choose(ranks)
        wanted = {rank: before for rank, before in self._replaced.items() if rank in chosen}

        def are_up() -> bool:
            return all(self._state.up[rank].incarnation != before for rank, before in wanted.items())

        limit_s = self._link.limits.idle_s
        self._state.wait_for(lambda: self._state.failure is not None or are_up(), limit_s)
        if not are_up():
            late = SessionError(f"{format_ranks(chosen)} did not start again within {limit_s:g} s")
            raise self._state.failure or late
        for rank in chosen:
            self._replaced.pop(rank, None)
        self._state.note_told(chosen)  # the caller asked for it: no notice is needed

    def shrink(self) -> dict[int, int]:
        """Continue without the ranks of lost nodes: the remaining ranks are renumbered from 0 and form a new group.

        They keep their variables except ``rank`` and ``world_size``. Returns the new number of each rank by its old.
        Raises: SessionError when no node is lost, or a remaining rank is busy.
        """
        core = self._core
        core.require_alive()
        gone = [rank for rank, end in self._state.lost.items() if is_gone(end)]
        if not gone:
            raise SessionError("no node is lost: there is nothing to shrink")
        core.choose_idle(sorted(set(self._state.ranks) - set(gone)), waits=True)
        core.process_groups.end()
        plan, number = core.state.plan.without(gone)
        self._link.renumber(number, world_size=plan.world_size)
        self._state.know_plan(plan)
        core.rescue.forget_stopped()
        core.note_down()
        return number

    def complete(self, code: str, position: int, *, ranks: Ranks = None, limit_s: float = 1.0) -> Completions | None:
        """Complete code on the first idle one of ``ranks``; None when none is idle, or it does not answer in time.

        Completions are names, attributes and keys of dicts; each replaces the text from ``start`` to ``position``.
        """
        check_text("code", code)
        position = check_whole("position", position)
        answer = self._ask_idle(lambda rank, number: Complete([rank], number, code, position), limit_s, ranks)
        return safe_completions(answer, code=code, position=position) if isinstance(answer, Completions) else None

    def inspect(self, name: str, detail: int = 0, *, ranks: Ranks = None, limit_s: float = 1.0) -> str | None:
        """Return the help text of a name from the first idle one of ``ranks``; None without an answer in time.

        ``detail`` 1 includes the source, as ``name??`` does in IPython.
        """
        check_text("name", name)
        detail = check_whole("detail", detail)
        answer = self._ask_idle(lambda rank, number: Inspect([rank], number, name, detail), limit_s, ranks)
        return answer.text[:_LONGEST_HELP] or None if isinstance(answer, Inspection) else None

    def _ask_idle(self, ask: Callable[[int, int], Message], limit_s: float, ranks: Ranks) -> Message | None:
        """Send ``ask(rank, number of the request)`` to one idle rank; None when none is idle, or answers in time."""
        idle = set(self.choose(ranks)) - set(self._state.busy) - set(self._state.lost)
        if not idle or not self._core.is_alive:
            return None
        rank = min(idle)
        with self._link.request([rank]) as request:
            with contextlib.suppress(NodeLost):
                self._link.send(ask(rank, request.number))
                request.wait_quietly(limit_s)
            return request.answers.get(rank)
