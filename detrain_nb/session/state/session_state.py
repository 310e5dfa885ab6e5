"""The state of a session and its ranks. The background threads of the links to its nodes update it."""

from __future__ import annotations

import functools
import itertools
import logging
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from ...errors import DetrainError, LaunchError, NodeLost, RankLost, SessionError, TransportError, WireError
from ...plan import Plan
from ...text import HERE
from ...wire import (
    Attached,
    CellDone,
    CellFailed,
    Completions,
    Display,
    GenerationEnded,
    GenerationReady,
    Inspection,
    LauncherEnded,
    Measured,
    Message,
    Notice,
    Output,
    Piece,
    Position,
    RanCell,
    RankEnded,
    RankUp,
    Refused,
    RequestDone,
    RequestFailed,
    StartedCold,
    StoreOpened,
    Unfinished,
    Value,
)
from ..output.log import Logged
from ..output.logbook import Logbook
from ..output.safe_output import Bundle, cleaned, one_line, quote
from ..output.shown_mark import ShownMark
from .cell import Cell
from .changes import Changes
from .group_state import GroupState
from .history import History
from .measurements import Measurements
from .message_checks import LONGEST_S, MessageChecks
from .notices import LONGEST_NOTICE, Notices
from .rank_deaths import advice, describe_end, describe_ends
from .rank_owners import RankOwners
from .requests import Request, Requests

# The texts in these are cleaned on arrival; the texts in the others, where they are used.
_OF_WORDS = (
    RequestFailed,
    GenerationReady,
    LauncherEnded,
    Refused,
    Notice,
    Inspection,
    Completions,
    RankUp,
    StartedCold,
)
_ANSWERS = (Value, Piece, RequestDone, RequestFailed, Position, Completions, Inspection)
# After these, a live view shows something else.
_OF_STATE = (CellDone, CellFailed, RankUp, RankEnded, LauncherEnded, Attached, Refused)

_VERY_MANY = 10**9  # messages: no node keeps this many

_Kept = TypeVar("_Kept")
_Of = ParamSpec("_Of")
_log = logging.getLogger("detrain_nb.session")


def agent_of(node: int) -> int:
    """Return the negative number by which requests identify the agent of a node among ranks."""
    return -1 - node


def _one_at_a_time(
    method: Callable[Concatenate[SessionState, _Of], _Kept],
) -> Callable[Concatenate[SessionState, _Of], _Kept]:
    """Run ``method`` under the lock, as every node has its own thread, and wake waiting threads when it returns."""

    @functools.wraps(method)
    def in_turn(self: SessionState, *args: _Of.args, **options: _Of.kwargs) -> _Kept:
        with self._changed:
            try:
                return method(self, *args, **options)
            finally:
                self._changed.notify_all()

    return in_turn  # type: ignore[return-value]  # mypy does not see through wraps


class SessionState:
    """The state of a session: its ranks as their messages report it, its cells, what the user has been told.

    Only its own methods change it, and those of its parts: ``groups``, ``requests``, ``history``, ``logbook``,
    ``notices``, ``owners``, the cells. ``nodes`` are the names of its nodes, in order: any but the first may be lost,
    and the others continue. Nodes in ``strangers``, by position, are not this machine. ``is_attaching``: the session
    exists already, and a node that is lost before it was attached to is ``absent``; the argument ``absent`` has those
    that were unreachable from the start, with the reason.
    """

    def __init__(
        self,
        session: str,
        nodes: Sequence[str] = ("",),
        *,
        strangers: Collection[int] = (),
        absent: Mapping[int, str] | None = None,
        is_attaching: bool = False,
    ) -> None:
        self._session = session
        self.nodes: Final = tuple(nodes)  # their names, in order
        self._strangers = frozenset(strangers)
        self._is_attaching = is_attaching
        lock = threading.RLock()
        self._changed = threading.Condition(lock)
        self.changes: Final = Changes()  # of what live views show
        self.requests: Final = Requests()  # in progress
        self.history: Final = History()  # the cells that were run
        self.logbook: Final = Logbook()  # what they have printed
        self.groups: Final = GroupState(self.requests, lock)
        self.notices: Final = Notices(lock)
        self.owners: Final = RankOwners()
        self.measurements: Final = Measurements()  # of resource use, while a live view is open
        self._checks = MessageChecks(self.history, self.owners)
        self._plan = Plan((), "gloo")
        self._lost_nodes: dict[int, str] = {}
        self.lost_nodes: Final = MappingProxyType(self._lost_nodes)  # the reasons, by position
        self._absent = dict(absent or {})
        self.absent: Final = MappingProxyType(self._absent)  # reasons of nodes not attached to; lost after the attach
        self._is_renumbering = False
        self._cells: dict[int, Cell] = {}
        self._up: dict[int, RankUp] = {}
        self._lost: dict[int, RankEnded] = {}
        self._fresh: dict[int, RankEnded] = {}
        self._ends: dict[int, RankEnded] = {}
        self._last_seconds: dict[int, float] = {}
        self._failure: DetrainError | None = None
        self._is_showing_missed = is_attaching
        self._attached_to = Request(0, map(agent_of, range(len(nodes))))
        self._store_opened = self._ranks_up = Request(0, ())
        self._attached: dict[int, Attached] = {}  # by node: says which messages were for an earlier notebook
        self._started_cold: set[int] = set()  # the nodes that have reported it
        self._told: dict[int, dict[int, list[RanCell | Unfinished]]] = {}  # by node being attached to, and by cell
        self._left: set[int] = set()  # cells that an earlier notebook left running: no thread waits for them
        self._on_end: dict[int, list[Callable[[Cell], None]]] = {}
        # For all messages but those of cells (``Logged``), which ``_take_of_cell`` handles.
        self._handlers: dict[type[Message], Callable[[Any, int, int], None]] = {
            RankEnded: lambda message, number, node: self._take_end_of_rank(
                message, is_missed=node not in self._attached or self._is_missed(number, node)
            ),
            GenerationReady: lambda message, number, node: self.groups.take_ready(message),
            GenerationEnded: self._take_end_of_generation,
            RankUp: self._take_rank_up,
            RanCell: self._take_told,
            Unfinished: self._take_told,
            Attached: self._take_attached,
            StoreOpened: lambda message, number, node: self._store_opened.take_from(agent_of(node), message),
            Refused: self._take_refusal,
            LauncherEnded: self._take_end_of_launcher,
            Notice: self._take_notice,
            StartedCold: self._take_cold_start,
            Measured: lambda message, number, node: self.measurements.take(message, node),
        }
        self._handlers |= dict.fromkeys(_ANSWERS, lambda message, number, node: self.requests.take(message))

    @property
    def plan(self) -> Plan:
        """The nodes and devices of the ranks, and the backend; empty until that is known."""
        return self._plan

    @property
    def world_size(self) -> int:
        return self._plan.world_size

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self._plan.world_size)

    @property
    def node_of(self) -> Mapping[int, int]:
        """The node of each rank, by position."""
        return self.owners.node_of

    @property
    def up(self) -> Mapping[int, RankUp]:
        """The interpreters, by rank, as they reported themselves at their start."""
        return MappingProxyType(self._up)

    @property
    def lost(self) -> dict[int, RankEnded]:
        """Ranks that died and whose new interpreter is not up yet."""
        return dict(self._lost)

    @property
    def fresh(self) -> dict[int, RankEnded]:
        """Ranks that were replaced without the user having been told yet; how the earlier process ended."""
        return dict(self._fresh)

    @property
    def ends(self) -> dict[int, RankEnded]:
        """How the last process of a rank died, unless on request, until the next cell begins there."""
        return dict(self._ends)

    @property
    def incarnations(self) -> dict[int, int]:
        """The incarnations of the interpreters, by rank."""
        return {rank: up.incarnation for rank, up in list(self._up.items())}

    @property
    def hosts(self) -> dict[int, str]:
        """The host of every rank that is up or was."""
        return {rank: up.host for rank, up in list(self._up.items())}

    @property
    def last_seconds(self) -> Mapping[int, float]:
        """The duration of the last cell, by rank."""
        return MappingProxyType(self._last_seconds)

    @property
    def failure(self) -> DetrainError | None:
        """Why no more messages of the ranks will arrive; None while they can."""
        return self._failure

    @property
    def cells(self) -> Mapping[int, Cell]:
        """The cells that run or whose values are being brought, and the last one; by number."""
        return MappingProxyType(self._cells)

    @property
    def busy(self) -> dict[int, Cell]:
        """The ranks that run a cell, with the cell."""
        return {rank: cell for cell in list(self._cells.values()) for rank in cell.running}

    def can_measure(self, node: int) -> bool:
        """Return whether the agent of a node supports ``Measure``; the agent of an earlier release does not."""
        return self._can(node, "measures")

    def can_tell_variables(self, node: int) -> bool:
        """Return whether the agent of a node supports ``AskVariables``."""
        return self._can(node, "tells_variables")

    def _can(self, node: int, ability: str) -> bool:
        info = self._attached[node].info if node in self._attached and node not in self._lost_nodes else None
        return isinstance(info, dict) and info.get(ability) is True

    def bringing_values(self, ranks: Collection[int]) -> list[Cell]:
        """Return ended cells of ``ranks`` whose values are still being brought: a next cell would overwrite ``_``."""
        over = [cell for cell in list(self._cells.values()) if cell.is_done and not cell.values_brought.is_set()]
        return [cell for cell in over if not set(cell.ranks).isdisjoint(ranks)]

    def is_at_home(self, rank: int, *, node_of: Mapping[int, int] | None = None) -> bool:
        """Return whether a rank is on this machine, or on one as trusted; ``node_of``: the nodes of an earlier plan."""
        node = (self.node_of if node_of is None else node_of).get(rank)
        return node is not None and node not in self._strangers

    def wait_for(self, is_so: Callable[[], bool], limit_s: float) -> bool:
        """Wait until ``is_so`` returns True, checked after each change; returns False after ``limit_s``."""
        with self._changed:
            return self._changed.wait_for(is_so, max(0.0, limit_s))

    def held(self) -> AbstractContextManager[object]:
        """Return a lock that keeps messages from being handled, so that none is missed after reading the log."""
        return self._changed

    def expect_attached(self, nodes: Iterable[int]) -> Request:
        """Return the request that the agents of ``nodes`` answer, as ``agent_of``; absent ones count as answered."""
        nodes = list(nodes)
        self._attached_to = self.requests.new(map(agent_of, nodes))
        for node in nodes:
            if node in self._absent:
                self._attached_to.take_from(agent_of(node), Refused(self._absent[node]))
        return self._attached_to

    def expect_store(self) -> Request:
        """Return the request that the agent of the first node answers when it has opened the socket of the store."""
        self._store_opened = self.requests.new([agent_of(0)])
        return self._store_opened

    def expect_ranks(self) -> Request:
        """Return the request that the interpreter of each rank answers when it is up."""
        self._ranks_up = self.requests.new(self.ranks)
        return self._ranks_up

    @_one_at_a_time
    def know_plan(self, plan: Plan) -> None:
        """Set the ranks and their nodes; forget all other ranks."""
        self._plan = plan
        self.changes.note()
        if not plan.node_of:
            return
        self.owners.know(plan.node_of)
        for known in (self._up, self._lost, self._fresh, self._ends, self._last_seconds):
            for rank in known.keys() - plan.node_of.keys():
                known.pop(rank, None)
        self.groups.keep_ranks(plan.node_of)

    @_one_at_a_time
    def know_hosts(self) -> None:
        """Tell cells that an earlier notebook left running the hosts of their ranks."""
        for cell in self._cells.values():
            cell.know_hosts(self.hosts)

    @_one_at_a_time
    def add_cell(self, cell: Cell) -> bool:
        """Add a cell that is about to be sent; returns False if one of its ranks was just lost.

        From here on, a loss of its ranks is an error of the cell. Earlier cells are kept while they still run, or
        their values are being brought.
        """
        earlier = {
            number: known for number, known in self._cells.items() if known.running or not known.values_brought.is_set()
        }
        self._cells = earlier | {cell.number: cell}
        self.notices.begin_cell()
        is_fresh = any(self._up[rank].incarnation != cell.incarnations[rank] for rank in cell.ranks)
        if is_fresh or self._lost.keys() & set(cell.ranks):
            self._cells = earlier
            return False
        for rank in cell.ranks:
            self._ends.pop(rank, None)
        self.changes.note()
        return True

    @_one_at_a_time
    def remove_cell(self, cell: Cell) -> None:
        """Remove a cell that will not be sent."""
        self._cells = {number: known for number, known in self._cells.items() if known is not cell}
        self.changes.note()

    @_one_at_a_time
    def end_lost(self, cell: Cell, idle: Iterable[int]) -> None:
        """End ``cell`` on ``idle`` ranks: messages of a rank arrive in order, so their end of the cell was lost."""
        words = "the outcome of the cell on this rank is unknown: it was lost with its last output"
        for rank in set(idle) & set(cell.running):
            has_group = self.groups.has_group(rank)
            lost = CellFailed(rank, cell.number, 0.0, has_group, True, "SessionError", words, [], False)
            self.take(lost, node=self.node_of[rank])

    def tell_end(self, cell: Cell, on_end: Callable[[Cell], None]) -> None:
        """Call ``on_end`` in the background thread when ``cell`` has ended on every rank; inside ``held``."""
        self._on_end.setdefault(cell.number, []).append(on_end)

    @_one_at_a_time
    def pop_losses(self) -> str:
        """Return a report of ranks that died since the last cell, and what to do; empty when there are none."""
        fresh, self._fresh = self._fresh, {}
        if not fresh:
            return ""
        ended = describe_ends(fresh, hosts=self.hosts)
        return "\n".join([ended, *advice(fresh, world_size=self.world_size, is_told=True)])

    @_one_at_a_time
    def note_told(self, ranks: Iterable[int]) -> None:
        """Note that the user is being told of the replacement of these ranks, or has asked for it."""
        for rank in list(ranks):
            self._fresh.pop(rank, None)

    @_one_at_a_time
    def go_on_with_groups(self) -> None:
        """Set the ranks that know the generation which an earlier notebook began: all that were not replaced since."""
        known = {rank: incarnation for rank, incarnation in self.incarnations.items() if rank not in self._fresh}
        self.groups.go_on_with(known)

    @_one_at_a_time
    def confirm_missed(self) -> None:
        """Note that output which an earlier notebook missed has been shown."""
        self._is_showing_missed = False

    @_one_at_a_time
    def renumber(self, plan: Plan, number: Mapping[int, int]) -> None:
        """Renumber the idle ranks of ``plan``; messages under old numbers are dropped until ``end_renumbering``."""
        self._is_renumbering = True
        self.logbook.renumber(plan, number)
        self.owners.know(_renumbered(self.node_of, number))
        self._up = {rank: replace(up, rank=rank) for rank, up in _renumbered(self._up, number).items()}
        self._last_seconds = _renumbered(self._last_seconds, number)
        self._lost, self._fresh, self._ends = {}, {}, {}
        self.measurements.forget()
        self.groups.forget_ranks()
        self.history.renumber(number)

    @_one_at_a_time
    def end_renumbering(self) -> None:
        """End the renumbering: all ranks have their new numbers, or are lost."""
        self._is_renumbering = False
        self.changes.note()

    @_one_at_a_time
    def notice(self, text: str) -> None:
        """Add a notice for the user, and show it in the running cells."""
        self.notices.add(text)
        for cell in list(self._cells.values()):
            if cell.running:
                cell.observers.notice(text[:LONGEST_NOTICE])

    @_one_at_a_time
    def fail(self, error: DetrainError) -> None:
        """Fail the session: wake all waiting threads, as no more messages of the ranks will arrive."""
        self._failure = self._failure or error
        self.requests.fail_all(self._failure)
        for cell in list(self._cells.values()):
            cell.close()
        self.changes.note()

    @_one_at_a_time
    def measure_by(self, first: Attached, noted: Mapping[int, int]) -> None:
        """Check the other nodes against the first one, which has been attached to, when they are attached to.

        ``noted``, the recorded owners of the ranks, is used too, if the first node agrees with it.
        """
        world_size = max((up.world_size for up in self._up.values()), default=0)
        self.owners.measure_by(first, world_size=world_size, noted=noted)

    @_one_at_a_time
    def lose_absent(self) -> None:
        """End the attach: all reachable nodes are attached to and the ranks are known, so absent nodes are lost."""
        self._is_attaching = False
        for node, reason in self._absent.items():
            self.lose_node(node, reason)

    @_one_at_a_time
    def lose_node(self, node: int, reason: str) -> None:
        """Lose a node with its ranks; fail the session if it is the first node, or if a start is not complete."""
        if self._failure or node in self._lost_nodes:
            return
        if self._takes_all_with_it(node):
            self.fail(NodeLost(f"{self._on(node)}{reason}: %distributed restart"))
            return
        if self._is_attaching and node not in self._attached:
            self._absent.setdefault(node, reason)
            self._told.pop(node, None)
            self._attached_to.take_from(agent_of(node), Refused(reason))
            return
        self._lost_nodes[node] = reason
        self.changes.note()
        gone = f"node {self.nodes[node]} is lost"
        for rank in [rank for rank, owner in self.node_of.items() if owner == node]:
            pid = self._up[rank].pid if rank in self._up else 0
            self._take_end_of_rank(
                RankEnded(rank, pid, 0, 0, -1, "", f"{gone}: {reason}", False, gone), is_missed=False
            )

    def _takes_all_with_it(self, node: int) -> bool:
        """Return whether the loss of a node fails the session: it has the rendezvous store, or ranks are not up."""
        is_beginning = not self._up or self._ranks_up.is_open or self._attached_to.is_open
        return node == 0 or is_beginning and not self._is_attaching

    def take(self, message: Message, number: int = 0, node: int = 0) -> None:
        """Take a message of ``node``. Raises: WireError when it does not fit a request, or that node.

        Its content is read and cleaned before the lock is taken, and only if it is wanted.
        """
        is_wanted, bundle = self._is_waited_for(message), None
        if is_wanted and isinstance(message, _OF_WORDS):
            message = cleaned(message)
        elif isinstance(message, (Display, CellDone)) and self.node_of.get(message.rank) == node:
            cell = self._cells.get(message.cell)
            bundle = cell.read_bundle(message) if cell else None
        self._take(message, number, node, bundle=bundle, is_wanted=is_wanted)

    def _is_waited_for(self, message: Message) -> bool:
        """Return whether a message is not an answer, or answers an open request."""
        if isinstance(message, _ANSWERS):
            return self.requests.are_open(message.request)
        return not isinstance(message, GenerationReady) or message.number == self.groups.number

    @_one_at_a_time
    def _take(self, message: Message, number: int, node: int, *, bundle: Bundle | None, is_wanted: bool) -> None:
        if node in self._lost_nodes or node in self._absent:
            return
        is_missed = self._is_missed(number, node)
        try:
            self._checks.check_owner(message, node)
        except WireError:
            if not self._is_renumbering and not is_missed:  # else it may have a rank's old number
                raise
            return
        if is_missed and isinstance(message, Logged) and not self.history.knows(message.cell):
            return  # the agent no longer remembers this old cell
        self._checks.check_time(message, node, is_attached=node in self._attached)
        if not is_wanted:
            return
        if isinstance(message, Logged):
            self._take_of_cell(message, number, node, bundle)
        elif handle := self._handlers.get(type(message)):
            handle(message, number, node)
        if isinstance(message, _OF_STATE):
            self.changes.note()

    def _is_missed(self, number: int, node: int) -> bool:
        """Return whether a numbered message was meant for an earlier notebook."""
        return node in self._attached and 0 < number <= self._attached[node].last_number

    @_one_at_a_time
    def note_handled(self, missing: int, node: int) -> None:
        """Report a gap of ``missing`` messages before a numbered one, which the node has not explained."""
        if not missing:
            return
        many = f"{missing:,}" if missing < _VERY_MANY else "very many"
        what = "1 message" if missing == 1 else f"{many} messages"
        self._notice_of(node, f"{what} of its ranks were lost")

    @_one_at_a_time
    def break_off(self, node: int) -> None:
        """Fail the requests for values of a node whose connection broke."""
        self.changes.note()
        own = [rank for rank, owner in self.node_of.items() if owner == node]
        broken = f"{self._on(node)}the connection broke while values were being transferred"
        for rank in own:
            self.requests.fail_values(TransportError(f"{broken}: pull them again"), rank=rank)

    def note_connection(self) -> None:
        """Note that the connection to a node was restored."""
        self.changes.note()

    @_one_at_a_time
    def close(self, reason: str, node: int = 0) -> None:
        """Lose a node that closed its connection for good, or was disconnected because of an invalid message."""
        if node not in self._absent:  # an absent node is reported with its ranks
            self.lose_node(node, f"the connection to the agent of session {self._session!r} was closed ({reason})")

    @_one_at_a_time
    def mark_shown(self, node: int = 0) -> ShownMark:
        """Return a mark that tells when all taken so far has been shown, with the unfinished lines of ``node``."""
        questions = [cell.shown_so_far() for cell in list(self._cells.values())]
        is_waiting, fresh = self._is_showing_missed, self._fresh

        def is_shown() -> bool:
            is_missed_shown = not (is_waiting and self._is_showing_missed)
            is_told = not fresh or self._fresh is not fresh
            return is_missed_shown and is_told and all(question() for question in questions)

        running = {number for number, cell in list(self._cells.items()) if cell.running}
        own = [line for line in self.logbook.unfinished_lines(running) if self.node_of.get(line.rank, node) == node]
        return ShownMark(own, is_shown)

    def _take_of_cell(self, message: Logged, number: int, node: int, bundle: Bundle | None = None) -> None:
        if isinstance(message, (CellDone, CellFailed)):
            message = replace(message, seconds=min(max(0.0, message.seconds), LONGEST_S))  # cells may patch the clock
            self.groups.note(message.rank, has_group=message.has_group)
            self._last_seconds[message.rank] = message.seconds
            self.history.take_end(message)
        is_missed = self._is_missed(number, node)  # then it is shown from the log
        is_shown_perhaps = is_missed and number <= self._attached[node].sent
        self._warn(self.logbook.add(message, is_missed=is_missed, is_shown_perhaps=is_shown_perhaps))
        if not is_missed and (cell := self._cells.get(message.cell)):
            self._give(cell, message, bundle)

    def _give(self, cell: Cell, message: Logged | RankEnded, bundle: Bundle | None = None) -> None:
        if isinstance(message, CellFailed) and message.rank in cell.running:
            self.history.fail(cell.number)  # also a rerun, which the history does not list
        cell.take(message, bundle)
        if cell.is_done:
            for on_end in self._on_end.pop(cell.number, []):
                on_end(cell)

    def _take_told(self, message: RanCell | Unfinished, number: int, node: int) -> None:
        """Keep what a node remembers until it has been attached to; nothing is kept of an absent node."""
        told = self._told.setdefault(node, {})
        if isinstance(message, Unfinished) and message.cell not in told:
            self._checks.check_cell(message)
        told.setdefault(message.cell, []).append(message)

    def _take_ran_cell(self, message: RanCell, node: int) -> None:
        self.history.take(message, is_first=node == 0)
        if message.running:
            self._left.add(message.cell)
            earlier = self._cells.get(message.cell)
            running = sorted({*(earlier.ranks if earlier else ()), *message.running})
            self._cells[message.cell] = cell = Cell(message.cell, running, None, {}, is_at_home=self.is_at_home)
            if earlier:
                cell.go_on_from(earlier)

    def _take_rank_up(self, message: RankUp, number: int, node: int) -> None:
        device, torch = one_line(message.device), one_line(message.torch)
        host = self.nodes[node] or HERE
        self._up[message.rank] = replace(message, host=host, device=device, torch=torch)
        self._lost.pop(message.rank, None)
        self._ranks_up.take(message)

    def _take_end_of_generation(self, message: GenerationEnded, number: int, node: int) -> None:
        _log.info(
            "generation %d ended on rank %d: %d connections shut", message.number, message.rank, message.connections
        )
        self.groups.take_end(message)

    def _take_attached(self, message: Attached, number: int, node: int) -> None:
        self._attached[node] = message
        for told in itertools.chain.from_iterable(self._told.pop(node, {}).values()):
            if isinstance(told, RanCell):
                self._take_ran_cell(told, node)
            else:
                self._warn(self.logbook.add_beginning(told))
        for rank in message.with_group:
            self.groups.note(rank, has_group=True)
        self._attached_to.take_from(agent_of(node), message)

    def _take_refusal(self, message: Refused, number: int, node: int) -> None:
        if message.is_taken or self._takes_all_with_it(node):  # a session has one holder; any node may report it first
            self.fail(SessionError(f"{self._on(node)}{quote(message.reason)}"))
        self.lose_node(node, one_line(message.reason, most_chars=LONGEST_NOTICE))

    def _take_notice(self, message: Notice, number: int, node: int) -> None:
        """Show the notice of a node, about lost output: end the unfinished lines of its ranks with ``...``."""
        for cell, rank, stream in self.logbook.unfinished:
            if self.node_of.get(rank, node) == node:
                self._take_of_cell(Output(rank, cell, stream, b"...\n"), number, node)
        if text := self._notice_of(node, quote(message.text[:LONGEST_NOTICE])):
            self.logbook.add_gap(text)

    def _take_cold_start(self, message: StartedCold, number: int, node: int) -> None:
        if node not in self._started_cold:  # a node starts once
            self._started_cold.add(node)
            self._notice_of(node, f"started cold: {one_line(message.reason)}")

    def _take_end_of_rank(self, message: RankEnded, *, is_missed: bool) -> None:
        reason, words = message.reason[:LONGEST_NOTICE], message.stderr_tail[-LONGEST_NOTICE:]
        message = replace(message, reason=reason, stderr_tail=words, down=message.down[:LONGEST_NOTICE])
        self._lost[message.rank] = self._fresh[message.rank] = message
        if message.asked or is_missed:
            self._ends.pop(message.rank, None)
        else:
            self._ends[message.rank] = message
        self.groups.note(message.rank, has_group=False)
        host = self._up[message.rank].host if message.rank in self._up else HERE
        for cell in list(self._cells.values()):
            is_due = message.rank in cell.ranks and (cell.running or cell.may_have_lost_a_rank)
            if is_due and not is_missed:  # a missed one arrived before the running cell began
                self.history.fail(cell.number)
                self._give(cell, message)
                if cell.number in self._left:
                    cell.observers.notice(describe_end(message, host=host))
        self.requests.fail_all(RankLost(describe_end(message, host=host)), rank=message.rank)

    def _take_end_of_launcher(self, message: LauncherEnded, number: int, node: int) -> None:
        last = quote(_last_words(message.log_tail[-LONGEST_NOTICE:])) or f"exit code {message.exit_code}"
        if self._ranks_up.is_open:
            self.fail(LaunchError(f"{self._on(node)}the ranks did not start: {last}"))
        else:
            self.lose_node(node, f"the ranks of session {self._session!r} exited: {last}")

    def _on(self, node: int) -> str:
        return f"{self.nodes[node]}: " if self.nodes[node] else ""

    def _warn(self, words: str) -> None:
        if words:
            self.notice(words)

    def _notice_of(self, node: int, words: str) -> str:
        """Give a notice about a node and return its text; empty when the node has had too many."""
        name = self._on(node)
        if text := self.notices.within_bounds(f"{name}{words}", node, name=name)[:LONGEST_NOTICE]:
            self.notice(text)
        return text


def _renumbered(table: Mapping[int, _Kept], number: Mapping[int, int]) -> dict[int, _Kept]:
    return {number[rank]: value for rank, value in table.items() if rank in number}


def _last_words(log: str) -> str:
    """Return the most telling line of a launcher's log: torchrun ends it with a table of the failed workers."""
    table = log.rpartition("Root Cause")[2] if "Root Cause" in log else ""
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in table.splitlines())}
    if (rank := fields.get("rank")) and (exit_code := fields.get("exitcode")):
        return f"the worker of rank {rank.split()[0]} exited with code {exit_code}"
    lines = [line.strip() for line in log.splitlines() if line.strip(" =-")]
    return lines[-1] if lines else ""
