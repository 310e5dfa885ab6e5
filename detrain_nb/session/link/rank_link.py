"""The connection of a session to its ranks: it sends messages, requests answers, and transfers values."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ... import values
from ...deploy.bringing_up import End
from ...errors import CellTimeout, NodeLost, RankLost, SessionError, TransportError, format_ranks
from ...wire import PIECE_BYTES, Locate, Message, Piece, Position, Pull, Push, RankEnded, Renumber, RequestDone, RunCell
from ..diagnosis.diagnosis import ranks_on_hosts
from ..diagnosis.evidence import Evidence, gather
from ..state.cell import Cell
from ..state.limits import Limits
from ..state.rank_deaths import advice, what_to_do_about_down
from ..state.requests import Request
from ..state.session_state import SessionState
from .node_link import NodeLink

_MOST_TURNS = 10  # of other threads' cells that a cell waits for
_REFUSED_AGAIN_S = 5.0  # between a refused cell and the next one of "run all"
_TELL_AFTER_S = 0.1


class RankLink:
    """The ranks of one session, reached over the links to their nodes. What they send is kept in ``state``."""

    def __init__(self, session: str, ends: Sequence[End], *, is_attaching: bool, limits: Limits) -> None:
        trusted = [end.transport.is_this_machine or end.transport.is_trusted for end in ends]
        strangers = [node for node, is_trusted in enumerate(trusted) if not is_trusted]
        names = [end.transport.name for end in ends]
        absent = {node: end.absent for node, end in enumerate(ends) if end.absent}
        self.limits = limits
        self.state = SessionState(session, names, strangers=strangers, absent=absent, is_attaching=is_attaching)
        self._session = session
        self._refused: set[tuple[int, int, int]] = set()  # what last blocked a cell: rank, cell, presses
        self._refused_until = 0.0
        self.node_links = [self._link_to(node, end) for node, end in enumerate(ends)]

    def _link_to(self, node: int, end: End) -> NodeLink:
        can_resume = end.transport.can_resume and not end.absent
        connect = functools.partial(end.transport.connect_agent, self._session) if can_resume else None
        return NodeLink(end.sock, self.state, node, connect=connect, limits=self.limits)

    def send(self, message: Message) -> None:
        """Send ``message`` to its ranks. Raises: NodeLost, or the error that ended the session before."""
        ranks: list[int] = message.ranks  # type: ignore[attr-defined]  # every message to ranks has it
        for node in sorted({self.state.node_of[rank] for rank in ranks} - self.state.lost_nodes.keys()):
            own = [rank for rank in ranks if self.state.node_of[rank] == node]
            self.send_to(node, _share(message, own) if isinstance(message, RunCell) else message)

    def send_to(self, node: int, message: Message) -> None:
        """Send ``message`` to the agent of a node. Raises: NodeLost, or the error that ended the session before."""
        try:
            self.node_links[node].send(message)
        except TransportError as exc:
            self.node_links[node].wait_for_end(limit_s=self.limits.last_words_s)
            if self.state.failure or node not in {*self.state.lost_nodes, *self.state.absent}:
                gone = NodeLost(f"the connection to the agent of session {self._session!r} was closed: {exc}")
                raise self.state.failure or gone from exc

    def end(self, *, limit_s: float, keep_s: float = 0.0) -> list[int]:
        """Ask the agents to end everything, and wait until they have; returns the nodes whose agent has not.

        With ``keep_s``, an agent may stay that many seconds for another session: its link ``is_kept`` then.
        """
        for link in self.node_links:
            with contextlib.suppress(TransportError):
                link.end(keep_s=keep_s)
        deadline = time.monotonic() + limit_s
        for link in self.node_links:
            link.wait_for_end(limit_s=max(0.0, deadline - time.monotonic()))
        self._close(is_seen=True)
        return [node for node, link in enumerate(self.node_links) if not link.is_hung_up_on and not link.is_kept]

    def _close(self, *, is_seen: bool) -> None:
        for link in self.node_links:
            link.begin_to_close(is_seen=is_seen)
        deadline = time.monotonic() + self.limits.close_s
        for link in self.node_links:
            link.wait_for_end(limit_s=max(0.0, deadline - time.monotonic()))

    def wait_for_number(self, node: int, number: int, *, by: float, tell: Callable[[float], None]) -> None:
        """Wait until the messages of a node up to ``number`` have arrived; return too when the node is lost.

        ``tell`` receives the share that has arrived, once a second.

        Raises: CellTimeout when less than a twentieth of them arrives within ``catch_up_s``, or not all by ``by``;
        NodeLost when the loss of the node ends the session, or the error that ended it before.
        """
        link, limit_s = self.node_links[node], self.limits.catch_up_s
        deadline, enough = time.monotonic() + limit_s, link.last_number + 1
        first, tell_at = link.last_number, time.monotonic() + self.limits.tell_gap_s
        step = max(1, (number - first) // 20)
        while link.last_number < number:
            if link.is_closed:
                link.wait_for_end(limit_s=self.limits.last_words_s)
                if node in self.state.lost_nodes and not self.state.failure:
                    return
                raise self.state.failure or NodeLost(f"node {self.state.nodes[node]} is lost: it closed the connection")
            if link.last_number >= enough:
                deadline, enough = time.monotonic() + limit_s, link.last_number + step
            if time.monotonic() >= min(deadline, by):
                took_s = limit_s if deadline <= by else self.limits.catch_up_all_s
                who = self.state.nodes[node] or f"session {self._session!r}"
                raise CellTimeout(f"{who} has sent too little of the missed output in {took_s:g} s")
            if time.monotonic() >= tell_at:
                tell((link.last_number - first) / (number - first))
                tell_at = time.monotonic() + self.limits.tell_gap_s
            until = min(number, enough)
            self.state.wait_for(
                lambda: link.is_closed or link.last_number >= until,  # noqa: B023
                min(deadline, by, tell_at) - time.monotonic(),
            )

    @property
    def caught_up_by(self) -> float:
        """The time by which all nodes that are attached to now must have sent what was missed."""
        return time.monotonic() + self.limits.catch_up_all_s

    def hang_up(self, node: int, reason: str) -> None:
        """Close the connection to a node, which is then lost for this session."""
        self.state.lose_node(node, reason)
        self.node_links[node].close(is_seen=False)

    @property
    def is_closed(self) -> bool:
        """Whether ranks can no longer be reached."""
        return self.node_links[0].is_closed

    def detach(self, *, is_seen: bool) -> None:
        """Hang up; agents and ranks continue. ``is_seen``: see ``NodeLink.close``."""
        left = f"this kernel has disconnected from session {self._session!r}, whose ranks keep running"
        self.state.fail(SessionError(f"{left}: %distributed attach {self._session} reconnects to them"))
        self._close(is_seen=is_seen)

    def describe_unreachable(self, *, now: float) -> str:
        """Describe the nodes that are not connected now; empty when all are."""
        parts = []
        for node, since_s in self.broken_s(now=now).items():
            ranks = [rank for rank, owner in list(self.state.node_of.items()) if owner == node]
            name, go_on = self.state.nodes[node], "continues" if len(ranks) == 1 else "continue"
            words = f"no connection to {name} for {since_s:.0f} s, trying again: {format_ranks(ranks)} {go_on}"
            why = self.node_links[node].why_broken
            parts.append(f"{words} ({why})" if why else words)
        return "; ".join(parts)

    def broken_s(self, *, now: float) -> dict[int, float]:
        """Return for how many seconds nodes have been disconnected, by the position of the node."""
        times = {node: link.broken_at for node, link in enumerate(self.node_links) if not link.is_closed}
        return {node: now - broken_at for node, broken_at in times.items() if broken_at is not None}

    def is_reachable(self, rank: int) -> bool:
        """Return whether the node of ``rank`` is connected."""
        return self.node_links[self.state.node_of.get(rank, 0)].broken_at is None

    def require_idle(
        self,
        chosen: Iterable[int],
        *,
        waits: bool,
        tell: Callable[[Mapping[int, Cell]], None] | None = None,
    ) -> None:
        """Wait for ranks that are starting; with ``waits``, also for those still in a cell or a broadcast.

        ``tell`` is called once a second while the latter are waited for, with those that run a cell. If a cell has just
        waited in vain for the same ranks, the next one of "run all" does not wait again.

        Raises: SessionError when a rank is down, is not idle after ``idle_s`` or, without ``waits``, is busy; the
        error that ended the session.
        """
        wanted = set(chosen)
        waited_for: set[int] = set()
        began, limit_s = time.monotonic(), self.limits.idle_s if waits else 0.0
        deadline, tell_at = began + limit_s, began + _TELL_AFTER_S
        while True:
            if self.state.failure:
                raise self.state.failure
            down = {rank: end for rank, end in self.state.lost.items() if rank in wanted and end.down}
            if down:
                raise SessionError("\n".join(advice(down, world_size=len(self.state.node_of))))
            in_the_way = self._in_the_way(wanted)
            if in_the_way.is_nothing:
                return
            if in_the_way.cells - waited_for:  # another thread's cell was first
                deadline = min(time.monotonic() + limit_s, began + _MOST_TURNS * limit_s)
            waited_for |= in_the_way.cells
            started_by = max(deadline, began + self.limits.idle_s)
            self._give_up_waiting(in_the_way, deadline, started_by, waits=waits)
            if tell and (in_the_way.busy or in_the_way.left) and time.monotonic() >= tell_at:
                tell(in_the_way.busy)
                tell_at = time.monotonic() + self.limits.tell_gap_s
            moments, now = (deadline, started_by, tell_at), time.monotonic()
            wait_s = min((at - now for at in moments if at > now), default=self.limits.tell_gap_s)
            self.state.wait_for(
                lambda: self.state.failure is not None or self._in_the_way(wanted) != in_the_way,  # noqa: B023
                wait_s,
            )

    def _in_the_way(self, wanted: Collection[int]) -> _InTheWay:
        """Return what the wanted ranks still do."""
        busy = {rank: cell for rank, cell in self.state.busy.items() if rank in wanted}
        starting = {rank: end for rank, end in self.state.lost.items() if rank in wanted}
        return _InTheWay(busy, starting, self.state.requests.left(wanted))

    def _give_up_waiting(self, found: _InTheWay, deadline: float, started_by: float, *, waits: bool) -> None:
        """Check the deadlines. Raises: SessionError when one has passed."""
        now = time.monotonic()
        pressed = {(rank, cell.number, cell.presses) for rank, cell in found.busy.items()}
        is_known = waits and pressed <= self._refused and now < self._refused_until
        if found.busy and (is_known or now >= deadline):
            self._refused, self._refused_until = pressed, now + _REFUSED_AGAIN_S
            short = ",".join(map(str, sorted(found.busy)))
            raise SessionError(
                f"{self.where(found.busy)} still in cell {next(iter(found.busy.values())).number}: wait for it, stop "
                f"it with %distributed interrupt, or replace it with %distributed interrupt --kill {short}"
            )
        if found.left and now >= deadline:
            raise SessionError(
                f"{format_ranks(found.left)} still in {next(iter(found.left.values()))}: wait for it, or replace it "
                f"with %distributed interrupt --kill {','.join(map(str, sorted(found.left)))}"
            )
        if found.starting and now >= started_by:
            raise SessionError(f"{format_ranks(found.starting)} did not start again within {self.limits.idle_s:g} s")

    def renumber(self, number: Mapping[int, int], *, world_size: int) -> None:
        """Renumber idle ranks, from old to new, in a smaller world. A node whose ranks fail to do so is lost.

        Raises: CellTimeout for the first node, RankLost; the session has then ended.
        """
        node_of = dict(self.state.node_of)
        self.state.renumber(self.state.plan, number)
        try:
            with self.request(number.values()) as request:
                for node in sorted({node_of[rank] for rank in number}):
                    old = [rank for rank in number if node_of[rank] == node]
                    self.send_to(node, Renumber(old, request.number, [number[rank] for rank in old], world_size))
                deadline = time.monotonic() + self.limits.idle_s
                try:
                    request.wait(self.limits.idle_s, what="new numbers")
                except (CellTimeout, NodeLost, RankLost, SessionError):
                    request.wait_quietly(max(0.0, deadline - time.monotonic()))  # let the others finish
                    done = {rank for rank, answer in request.answers.items() if isinstance(answer, RequestDone)}
                    wrong = {node_of[old] for old, new in number.items() if new not in done}
                    if 0 in wrong or self.state.failure:
                        raise
                    for node in wrong - self.state.lost_nodes.keys():
                        self.hang_up(node, f"its ranks did not take their new numbers within {self.limits.idle_s:g} s")
        except BaseException:
            self.state.fail(SessionError("not all ranks took their new numbers: run %distributed restart"))
            raise
        finally:
            self.state.end_renumbering()

    def pull(self, names: list[str], ranks: tuple[int, ...]) -> dict[int, dict[str, Any]]:
        """Fetch variables from ranks: rank -> name -> value. Raises: SessionError when a rank refuses; CellTimeout."""
        with self.request(ranks, names) as request:
            self.send(Pull(list(ranks), request.number, names))
            request.wait(self.limits.value_s, what=f"pull of {', '.join(names)}")
            return {rank: {name: request.value(rank, name) for name in names} for rank in ranks}

    def push(self, variables: Mapping[str, Any], ranks: tuple[int, ...]) -> None:
        """Set variables on ranks. Raises: ValueNotSupported before anything is set; CellTimeout, SessionError."""
        packed = [(name, *values.pack(value, name=name)) for name, value in variables.items()]
        nodes = {self.state.node_of[rank] for rank in ranks}
        for name, description, buffers in packed:
            with self.request(ranks) as request:
                self.send(Push(list(ranks), request.number, name, description))
                for index, buffer in enumerate(buffers):
                    for start in range(0, len(buffer), PIECE_BYTES):
                        body = bytes(buffer[start : start + PIECE_BYTES])
                        self.send(Piece(list(ranks), request.number, name, index, body))
                        for node in nodes:
                            if not self.node_links[node].wait_for_room(self.limits.room_s):
                                who = self.state.nodes[node] or "the node"
                                raise CellTimeout(
                                    f"push of {name}: {who} received nothing for {self.limits.room_s:g} s"
                                )
                request.wait(self.limits.value_s, what=f"push of {name}")

    def locate(self, ranks: Iterable[int], *, limit_s: float | None = None, stack: bool = True) -> dict[int, Position]:
        """Return where ranks are, without those that do not answer in time."""
        with self.locating(ranks, stack=stack) as request:
            if request.is_open:
                request.wait_quietly(self.limits.locate_s if limit_s is None else limit_s)
            return positions_in(request)

    @contextlib.contextmanager
    def locating(self, ranks: Iterable[int], *, stack: bool = True) -> Iterator[Request]:
        """Request the positions of ranks without waiting: answers arrive while the context is open."""
        asked = [rank for rank in ranks if rank not in self.state.lost and self.is_reachable(rank)]
        with self.request(asked) as request:
            try:
                if asked:
                    self.send(Locate(asked, request.number, stack))
            except NodeLost as exc:
                request.fail(exc)
            yield request

    def look(
        self, ranks: Iterable[int], *, before: Mapping[int, Position], stack: bool
    ) -> tuple[dict[int, Position], list[Evidence]]:
        """Locate ranks and gather evidence of what they do, also from the positions of an earlier look, ``before``."""
        wanted = list(ranks)
        return self.gather_evidence(wanted, self.locate(wanted, stack=stack), before=before)

    def gather_evidence(
        self, wanted: Iterable[int], positions: dict[int, Position], *, before: Mapping[int, Position]
    ) -> tuple[dict[int, Position], list[Evidence]]:
        """Gather what ``look`` returns from positions that have arrived."""
        world_size, evidence = max(self.state.node_of, default=-1) + 1, []
        for rank in wanted:
            if rank in positions:
                is_cuda, earlier = rank in self.state.plan.cuda_ranks, before.get(rank)
                evidence.append(gather(positions[rank], world_size=world_size, before=earlier, is_cuda=is_cuda))
                positions[rank] = replace(positions[rank], collectives={}, stack=[])  # these may be large
            else:
                evidence.append(Evidence(rank, "starting" if rank in self.state.lost else "no answer"))
        return positions, evidence

    def where(self, ranks: Iterable[int]) -> str:
        """Describe ranks and the line each is at, grouped by line: ``ranks 0, 2 (line 7), rank 1 (line 3)``.

        With several nodes, their names are included: ``rank 1 on gpu2 (line 3)``.
        """
        return self.describe_places(ranks, self.locate(ranks))

    def describe_places(self, ranks: Iterable[int], positions: Mapping[int, Position]) -> str:
        """Describe ranks as ``where`` does, from known positions."""
        places: dict[str, list[int]] = {}
        for rank in ranks:
            line = positions[rank].line if rank in positions else 0
            places.setdefault(f" (line {line})" if line else "", []).append(rank)
        hosts = self.hosts
        return ", ".join(ranks_on_hosts(group, hosts) + place for place, group in places.items())

    @property
    def hosts(self) -> dict[int, str]:
        """The node of every rank, by the user's name for it; empty if there is only one node."""
        names = self.state.nodes
        return {rank: names[node] for rank, node in list(self.state.node_of.items())} if len(names) > 1 else {}

    @contextlib.contextmanager
    def request(
        self, ranks: Iterable[int], names: Iterable[str] = (), *, limit_bytes: int = values.MAX_BYTES
    ) -> Iterator[Request]:
        """Open a request to ``ranks``; answers are accepted while the context is open, later ones are dropped."""
        request = self.state.requests.new(ranks, names, limit_bytes=limit_bytes)
        for rank, end in list(self.state.lost.items()):  # it was lost before this request
            if end.down:
                request.fail(RankLost(what_to_do_about_down({rank: end}), ranks=[rank]), rank=rank)
        try:
            yield request
        finally:
            self.state.requests.end(request)


def positions_in(request: Request) -> dict[int, Position]:
    """Return the positions of the ranks that have answered."""
    return {rank: answer for rank, answer in list(request.answers.items()) if isinstance(answer, Position)}


@dataclass(frozen=True)
class _InTheWay:
    """What keeps ranks from being idle: cells they run, how restarting ones ended, unfinished broadcasts."""

    busy: dict[int, Cell]
    starting: dict[int, RankEnded]
    left: dict[int, str]

    @property
    def is_nothing(self) -> bool:
        return not self.busy and not self.starting and not self.left

    @property
    def cells(self) -> set[int]:
        return {cell.number for cell in self.busy.values()}


def _share(message: RunCell, ranks: list[int]) -> RunCell:
    """Return the part of a cell message that concerns ``ranks``."""
    incarnation = dict(zip(message.ranks, message.incarnations))
    return replace(message, ranks=ranks, incarnations=[incarnation[rank] for rank in ranks])
