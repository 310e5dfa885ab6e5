"""What is known of a session and its ranks. The background threads of the links to its nodes fill it."""

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

# The words of these are cleaned as they come; those of the others, where they are used.
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
# What a live view shows is another after these.
_OF_STATE = (CellDone, CellFailed, RankUp, RankEnded, LauncherEnded, Attached, Refused)

_VERY_MANY = 10**9  # messages: no node keeps as many

_Kept = TypeVar("_Kept")
_Of = ParamSpec("_Of")
_log = logging.getLogger("detrain_nb.session")


def agent_of(node: int) -> int:
    """Who answers, where it is no rank but the agent of a node."""
    return -1 - node


def _one_at_a_time(
    method: Callable[Concatenate[SessionState, _Of], _Kept],
) -> Callable[Concatenate[SessionState, _Of], _Kept]:
    """Every node has its own thread. Whoever waits looks again when the method has returned."""

    @functools.wraps(method)
    def in_turn(self: SessionState, *args: _Of.args, **options: _Of.kwargs) -> _Kept:
        with self._changed:
            try:
                return method(self, *args, **options)
            finally:
                self._changed.notify_all()

    return in_turn  # type: ignore[return-value]  # mypy does not see through wraps


class SessionState:
    """What is known of a session: its ranks as their messages tell it, its cells, who has been told what.

    It changes by its own methods, and those of the parts it gives: ``groups``, ``requests``, ``history``, ``logbook``,
    ``notices``, ``owners``, its cells. ``nodes`` are the names of its nodes, in order: all but the first may be lost,
    and the others go on. What comes from ``strangers``, by position, is not from this machine. ``is_attaching``: the
    session is there already, and a node that is lost before it was attached to is ``absent``; those who are so from the
    start are given.
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
        self.requests: Final = Requests()  # the questions that are under way
        self.history: Final = History()  # the cells that were run
        self.logbook: Final = Logbook()  # what they have printed
        self.groups: Final = GroupState(self.requests, lock)
        self.notices: Final = Notices(lock)
        self.owners: Final = RankOwners()
        self.measurements: Final = Measurements()  # of what ranks use, while somebody watches
        self._checks = MessageChecks(self.history, self.owners)
        self._plan = Plan((), "gloo")
        self._lost_nodes: dict[int, str] = {}
        self.lost_nodes: Final = MappingProxyType(self._lost_nodes)  # by position, and why
        self._absent = dict(absent or {})
        self.absent: Final = MappingProxyType(self._absent)  # not attached to, and why; lost when the others have been
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
        self._attached: dict[int, Attached] = {}  # by node: which messages were for an earlier notebook
        self._started_cold: set[int] = set()  # the nodes that have said so
        self._told: dict[int, dict[int, list[RanCell | Unfinished]]] = {}  # by node that is being attached to, and cell
        self._left: set[int] = set()  # cells that an earlier notebook has left running: nobody waits for them
        self._on_end: dict[int, list[Callable[[Cell], None]]] = {}
        # What a cell logs (``Logged``) is no part of it: see ``_take``.
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
        """Its ranks: their nodes and devices, and the backend; none before that is known."""
        return self._plan

    @property
    def world_size(self) -> int:
        return self._plan.world_size

    @property
    def ranks(self) -> range:
        """All of them."""
        return range(self._plan.world_size)

    @property
    def node_of(self) -> Mapping[int, int]:
        """Which node has a rank."""
        return self.owners.node_of

    @property
    def up(self) -> Mapping[int, RankUp]:
        """The interpreters, by rank, as they said when they began."""
        return MappingProxyType(self._up)

    @property
    def lost(self) -> dict[int, RankEnded]:
        """Ranks that ended, and no fresh interpreter is up yet."""
        return dict(self._lost)

    @property
    def fresh(self) -> dict[int, RankEnded]:
        """Ranks that were replaced, and nobody has been told; how the earlier ones ended."""
        return dict(self._fresh)

    @property
    def ends(self) -> dict[int, RankEnded]:
        """How the last process of a rank ended, where nobody had asked for that, until the next cell begins there."""
        return dict(self._ends)

    @property
    def incarnations(self) -> dict[int, int]:
        """Of the interpreters, by rank."""
        return {rank: up.incarnation for rank, up in list(self._up.items())}

    @property
    def hosts(self) -> dict[int, str]:
        """The host of every rank, as far as it has said so."""
        return {rank: up.host for rank, up in list(self._up.items())}

    @property
    def last_seconds(self) -> Mapping[int, float]:
        """What the last cell took, by rank."""
        return MappingProxyType(self._last_seconds)

    @property
    def failure(self) -> DetrainError | None:
        """Why nothing will come from the ranks any more; None while something can."""
        return self._failure

    @property
    def cells(self) -> Mapping[int, Cell]:
        """Those that run, or whose values are under way, and the last one; by number."""
        return MappingProxyType(self._cells)

    @property
    def busy(self) -> dict[int, Cell]:
        """The ranks that run a cell, and which."""
        return {rank: cell for cell in list(self._cells.values()) for rank in cell.running}

    def can_measure(self, node: int) -> bool:
        """Its agent has said that it knows what ``Measure`` asks for; one of an earlier release does not."""
        return self._can(node, "measures")

    def can_tell_variables(self, node: int) -> bool:
        """The same of ``AskVariables``."""
        return self._can(node, "tells_variables")

    def _can(self, node: int, ability: str) -> bool:
        info = self._attached[node].info if node in self._attached and node not in self._lost_nodes else None
        return isinstance(info, dict) and info.get(ability) is True

    def bringing_values(self, ranks: Collection[int]) -> list[Cell]:
        """Cells that some of ``ranks`` have run, whose values are being brought: those of a next one hide them."""
        over = [cell for cell in list(self._cells.values()) if cell.is_done and not cell.values_brought.is_set()]
        return [cell for cell in over if not set(cell.ranks).isdisjoint(ranks)]

    def is_at_home(self, rank: int, *, node_of: Mapping[int, int] | None = None) -> bool:
        """A rank on this machine, or on one that the user trusts as much; ``node_of``: where ranks were then."""
        node = (self.node_of if node_of is None else node_of).get(rank)
        return node is not None and node not in self._strangers

    def wait_for(self, is_so: Callable[[], bool], limit_s: float) -> bool:
        """Wait until ``is_so``, which is asked again whenever something has changed; False when it is not in time."""
        with self._changed:
            return self._changed.wait_for(is_so, max(0.0, limit_s))

    def held(self) -> AbstractContextManager[object]:
        """Nothing is taken meanwhile: between the log and what comes after it nothing is missed."""
        return self._changed

    def expect_attached(self, nodes: Iterable[int]) -> Request:
        """What the agents of ``nodes`` answer when attached to, by ``agent_of``; an absent one has answered."""
        nodes = list(nodes)
        self._attached_to = self.requests.new(map(agent_of, nodes))
        for node in nodes:
            if node in self._absent:
                self._attached_to.take_from(agent_of(node), Refused(self._absent[node]))
        return self._attached_to

    def expect_store(self) -> Request:
        """What the agent of the first node answers when it has opened the socket of the store."""
        self._store_opened = self.requests.new([agent_of(0)])
        return self._store_opened

    def expect_ranks(self) -> Request:
        """What the interpreters of all ranks say when they are up."""
        self._ranks_up = self.requests.new(self.ranks)
        return self._ranks_up

    @_one_at_a_time
    def know_plan(self, plan: Plan) -> None:
        """These are the ranks that there are, and their nodes; what was said of others is forgotten."""
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
        """Cells that an earlier notebook has left running are told of the hosts of their ranks."""
        for cell in self._cells.values():
            cell.know_hosts(self.hosts)

    @_one_at_a_time
    def add_cell(self, cell: Cell) -> bool:
        """A cell is about to be sent, unless a rank of it was lost just now: from here on such a loss is the cell's.

        Of the earlier cells only those matter that still run, or whose values are under way.
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
        """It will not be sent."""
        self._cells = {number: known for number, known in self._cells.items() if known is not cell}
        self.changes.note()

    @_one_at_a_time
    def end_lost(self, cell: Cell, idle: Iterable[int]) -> None:
        """What one rank says arrives in order: the end of a cell on an idle rank has come, or never will."""
        words = "how the cell ended on this rank is not known: that was lost with its last output"
        for rank in set(idle) & set(cell.running):
            has_group = self.groups.has_group(rank)
            lost = CellFailed(rank, cell.number, 0.0, has_group, True, "SessionError", words, [], False)
            self.take(lost, node=self.node_of[rank])

    def tell_end(self, cell: Cell, on_end: Callable[[Cell], None]) -> None:
        """Call ``on_end`` in the background thread when ``cell`` has ended on every rank; inside ``held``."""
        self._on_end.setdefault(cell.number, []).append(on_end)

    @_one_at_a_time
    def pop_losses(self) -> str:
        """What is to be said of ranks that ended since the last cell, and what to do; empty when there is nothing."""
        fresh, self._fresh = self._fresh, {}
        if not fresh:
            return ""
        ended = describe_ends(fresh, hosts=self.hosts)
        return "\n".join([ended, *advice(fresh, world_size=self.world_size, is_told=True)])

    @_one_at_a_time
    def note_told(self, ranks: Iterable[int]) -> None:
        """The user is told now that they were replaced, or has asked for it."""
        for rank in list(ranks):
            self._fresh.pop(rank, None)

    @_one_at_a_time
    def go_on_with_groups(self) -> None:
        """All ranks have the generation that an earlier notebook has begun, but those that are fresh since."""
        known = {rank: incarnation for rank, incarnation in self.incarnations.items() if rank not in self._fresh}
        self.groups.go_on_with(known)

    @_one_at_a_time
    def confirm_missed(self) -> None:
        """What an earlier notebook has missed has been shown."""
        self._is_showing_missed = False

    @_one_at_a_time
    def renumber(self, plan: Plan, number: Mapping[int, int]) -> None:
        """Ranks of ``plan``, all idle, get other numbers; what comes under an old one before the end of that goes."""
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
        """They have their new numbers, or are lost."""
        self._is_renumbering = False
        self.changes.note()

    @_one_at_a_time
    def notice(self, text: str) -> None:
        """Something the user should know; the cell that runs shows it."""
        self.notices.add(text)
        for cell in list(self._cells.values()):
            if cell.running:
                cell.observers.notice(text[:LONGEST_NOTICE])

    @_one_at_a_time
    def fail(self, error: DetrainError) -> None:
        """Nothing will come from the ranks any more: whoever waits is told."""
        self._failure = self._failure or error
        self.requests.fail_all(self._failure)
        for cell in list(self._cells.values()):
            cell.close()
        self.changes.note()

    @_one_at_a_time
    def measure_by(self, first: Attached, noted: Mapping[int, int]) -> None:
        """The first node has been attached to: what it says is the measure for the others, as they are attached to.

        So is ``noted``, which node had which rank, as far as the first agrees.
        """
        world_size = max((up.world_size for up in self._up.values()), default=0)
        self.owners.measure_by(first, world_size=world_size, noted=noted)

    @_one_at_a_time
    def lose_absent(self) -> None:
        """All nodes that are there have been attached to, and the ranks are known: the others are lost."""
        self._is_attaching = False
        for node, reason in self._absent.items():
            self.lose_node(node, reason)

    @_one_at_a_time
    def lose_node(self, node: int, reason: str) -> None:
        """The ranks of a node are gone, and with some nodes the session."""
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
        """The first node has the store of the rendezvous; and before all are up there is no session."""
        is_beginning = not self._up or self._ranks_up.is_open or self._attached_to.is_open
        return node == 0 or is_beginning and not self._is_attaching

    def take(self, message: Message, number: int = 0, node: int = 0) -> None:
        """Take what ``node`` sent. Raises: WireError when a message does not fit what was asked, or that node.

        What it says is read and cleaned before the other nodes have to wait, and only if somebody wants it.
        """
        is_wanted, bundle = self._is_waited_for(message), None
        if is_wanted and isinstance(message, _OF_WORDS):
            message = cleaned(message)
        elif isinstance(message, (Display, CellDone)) and self.node_of.get(message.rank) == node:
            cell = self._cells.get(message.cell)
            bundle = cell.read_bundle(message) if cell else None
        self._take(message, number, node, bundle=bundle, is_wanted=is_wanted)

    def _is_waited_for(self, message: Message) -> bool:
        """It is no answer, or one to a question that somebody has asked."""
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
            if not self._is_renumbering and not is_missed:  # that may be from before ranks had theirs
                raise
            return
        if is_missed and isinstance(message, Logged) and not self.history.knows(message.cell):
            return  # it is too long ago for the agent to know it
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
        """A message with a number that was for an earlier notebook."""
        return node in self._attached and 0 < number <= self._attached[node].last_number

    @_one_at_a_time
    def note_handled(self, missing: int, node: int) -> None:
        """A numbered message was taken; ``missing`` before it have not come, and the node has not said why."""
        if not missing:
            return
        many = f"{missing:,}" if missing < _VERY_MANY else "very many"
        what = "1 message is" if missing == 1 else f"{many} messages are"
        self._notice_of(node, f"of what its ranks said {what} missing")

    @_one_at_a_time
    def break_off(self, node: int) -> None:
        """The connection to a node broke: values that were under way do not arrive."""
        self.changes.note()
        own = [rank for rank, owner in self.node_of.items() if owner == node]
        broken = f"{self._on(node)}the connection broke while values were under way"
        for rank in own:
            self.requests.fail_values(TransportError(f"{broken}: ask for them again"), rank=rank)

    def note_connection(self) -> None:
        """There is one again to a node whose connection broke."""
        self.changes.note()

    @_one_at_a_time
    def close(self, reason: str, node: int = 0) -> None:
        """A node has hung up for good, or was hung up on because what it said cannot be."""
        if node not in self._absent:  # that is known, and told with the ranks that were there
            self.lose_node(node, f"the agent of session {self._session!r} is gone ({reason})")

    @_one_at_a_time
    def mark_shown(self, node: int = 0) -> ShownMark:
        """A moment of what was taken, and the question whether all of it has been shown; for ``node`` to keep."""
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
            message = replace(message, seconds=min(max(0.0, message.seconds), LONGEST_S))  # a cell may patch the clock
            self.groups.note(message.rank, has_group=message.has_group)
            self._last_seconds[message.rank] = message.seconds
            self.history.take_end(message)
        is_missed = self._is_missed(number, node)  # it is in the log, to be shown from there
        is_shown_perhaps = is_missed and number <= self._attached[node].sent
        self._warn(self.logbook.add(message, is_missed=is_missed, is_shown_perhaps=is_shown_perhaps))
        if not is_missed and (cell := self._cells.get(message.cell)):
            self._give(cell, message, bundle)

    def _give(self, cell: Cell, message: Logged | RankEnded, bundle: Bundle | None = None) -> None:
        if isinstance(message, CellFailed) and message.rank in cell.running:
            self.history.fail(cell.number)  # also one that is run again, of which there is no record
        cell.take(message, bundle)
        if cell.is_done:
            for on_end in self._on_end.pop(cell.number, []):
                on_end(cell)

    def _take_told(self, message: RanCell | Unfinished, number: int, node: int) -> None:
        """It counts when the node has been attached to: of one that is absent nothing stays."""
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
        if message.is_taken or self._takes_all_with_it(node):  # a session has one holder, whoever tells us first
            self.fail(SessionError(f"{self._on(node)}{quote(message.reason)}"))
        self.lose_node(node, one_line(message.reason, most_chars=LONGEST_NOTICE))

    def _take_notice(self, message: Notice, number: int, node: int) -> None:
        """Output was lost here: lines that had not ended do not go on with what comes."""
        for cell, rank, stream in self.logbook.unfinished:
            if self.node_of.get(rank, node) == node:
                self._take_of_cell(Output(rank, cell, stream, b"...\n"), number, node)
        if text := self._notice_of(node, quote(message.text[:LONGEST_NOTICE])):
            self.logbook.add_gap(text)

    def _take_cold_start(self, message: StartedCold, number: int, node: int) -> None:
        if node not in self._started_cold:  # it starts once
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
            if is_due and not is_missed:  # one that was missed came before what runs now
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
            self.lose_node(node, f"the ranks of session {self._session!r} ended: {last}")

    def _on(self, node: int) -> str:
        return f"{self.nodes[node]}: " if self.nodes[node] else ""

    def _warn(self, words: str) -> None:
        if words:
            self.notice(words)

    def _notice_of(self, node: int, words: str) -> str:
        """A notice of what a node does, as it was told; empty where the node has said too much."""
        name = self._on(node)
        if text := self.notices.within_bounds(f"{name}{words}", node, name=name)[:LONGEST_NOTICE]:
            self.notice(text)
        return text


def _renumbered(table: Mapping[int, _Kept], number: Mapping[int, int]) -> dict[int, _Kept]:
    return {number[rank]: value for rank, value in table.items() if rank in number}


def _last_words(log: str) -> str:
    """The line of a launcher's log that says most: torchrun ends with a table of the workers that failed."""
    table = log.rpartition("Root Cause")[2] if "Root Cause" in log else ""
    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in table.splitlines())}
    if (rank := fields.get("rank")) and (exit_code := fields.get("exitcode")):
        return f"the worker of rank {rank.split()[0]} ended, exit code {exit_code}"
    lines = [line.strip() for line in log.splitlines() if line.strip(" =-")]
    return lines[-1] if lines else ""
