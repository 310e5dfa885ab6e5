"""What came from the ranks, kept for whoever waits for it. Filled by the background thread of the node's link."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Concatenate, ParamSpec, TypeVar

from ...errors import DetrainError, LaunchError, NodeLost, RankLost, SessionError, TransportError, WireError
from ...plan import Plan
from ...wire import (
    Attached,
    CellDone,
    CellFailed,
    ClearOutput,
    Completions,
    Display,
    GenerationEnded,
    GenerationReady,
    Inspection,
    LauncherEnded,
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
from ..output.checkpoint import Checkpoint
from ..output.log import Logged
from ..output.logbook import Logbook
from ..output.safe_output import Bundle, cleaned, one_line, quote
from .cell_run import CellRun
from .history import History
from .message_checks import Claims
from .rank_deaths import describe_end
from .requests import Requests

# What is shown as it is; the words of the others are cleaned where they are used.
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
_OF_CELLS = (Output, Display, ClearOutput, CellDone, CellFailed)
_MOST_NOTICES, _LONGEST_NOTICE = 1000, 4000
_MOST_OF_NODE = 200

_Kept = TypeVar("_Kept")
_Of = ParamSpec("_Of")
_log = logging.getLogger("detrain_nb.session")


def agent_of(node: int) -> int:
    """Who answers, where it is no rank but the agent of a node."""
    return -1 - node


def _one_at_a_time(method: Callable[Concatenate[Inbox, _Of], _Kept]) -> Callable[Concatenate[Inbox, _Of], _Kept]:
    @functools.wraps(method)
    def in_turn(self: Inbox, *args: _Of.args, **options: _Of.kwargs) -> _Kept:
        with self.taking:
            return method(self, *args, **options)

    return in_turn  # type: ignore[return-value]  # mypy does not see through wraps


class Inbox:
    """The state of a session's ranks as their messages tell it.

    ``nodes`` are the names of its nodes, in order: all but the first may be lost, and the others go on. What comes from
    ``strangers``, by position, is not from this machine. ``is_attaching``: the session is there already, and a node
    that is lost before it was attached to is ``absent``; those who are so from the start are given.
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
        self.nodes = tuple(nodes)
        self._strangers = frozenset(strangers)
        self.lost_nodes: dict[int, str] = {}  # and why
        self.absent = dict(absent or {})  # and why; they are lost when the others have been attached to
        self.is_renumbering = False
        self.requests = Requests()
        self.runs: dict[int, CellRun] = {}
        self._num_notices: dict[int, int] = {}  # of a node, since a cell was begun
        self.up: dict[int, RankUp] = {}
        self.lost: dict[int, RankEnded] = {}  # ended, and no fresh interpreter is up yet
        self.fresh: dict[int, RankEnded] = {}  # replaced, and nobody has been told
        self.history = History()
        self.logbook = Logbook()
        self._claims = Claims(self.history)
        self.has_group: dict[int, bool] = {}
        self.last_seconds: dict[int, float] = {}
        self.notices: list[str] = []
        self.failure: DetrainError | None = None
        self.taking = threading.RLock()  # every node has its own thread; taken before ``following``
        self.following = threading.Lock()  # between the log and who is shown what comes after it
        self.is_showing_missed = is_attaching
        self.attached = self.requests.new(map(agent_of, range(len(nodes))))
        self.store_opened = self.requests.new([])
        self.ranks_up = self.requests.new([])
        self.generation = 0  # the number of the one that was made last
        self.generation_ready = self.requests.new([])
        self.generation_ended = self.requests.new([])
        self._session = session
        self._is_attaching = is_attaching
        self._attached: dict[int, Attached] = {}  # by node: which messages were for an earlier notebook
        self._left: set[int] = set()  # cells that an earlier notebook has left running: nobody waits for them
        self._on_end: dict[int, list[Callable[[CellRun], None]]] = {}

    @property
    def node_of(self) -> dict[int, int]:
        """Which node has a rank."""
        return self._claims.node_of

    @property
    def disputed(self) -> dict[int, tuple[int, int]]:
        """The ranks that two nodes say they have, and these nodes."""
        return dict(self._claims.disputed)  # copied: others may be added meanwhile

    @property
    def busy(self) -> dict[int, CellRun]:
        """The ranks that run a cell, and which."""
        return {rank: run for run in list(self.runs.values()) for rank in run.running}

    def giving(self, ranks: Collection[int]) -> list[CellRun]:
        """Cells that some of ``ranks`` have run, whose values are being brought: those of a next one hide them."""
        over = [run for run in list(self.runs.values()) if run.is_done and not run.has_given.is_set()]
        return [run for run in over if not set(run.ranks).isdisjoint(ranks)]

    @_one_at_a_time
    def know_ranks(self, node_of: dict[int, int]) -> None:
        """These are the ranks that there are, and their nodes; what was said of others is forgotten."""
        if not node_of:
            return
        self._claims.know_ranks(node_of)
        for known in (self.up, self.lost, self.fresh, self.has_group, self.last_seconds):
            for rank in known.keys() - node_of.keys():
                known.pop(rank, None)

    @_one_at_a_time
    def add_run(self, run: CellRun) -> bool:
        """A cell is about to be sent, unless a rank of it was lost just now: from here on such a loss is the cell's.

        Of the earlier cells only those matter that still run, or whose values are under way.
        """
        earlier = {
            number: known for number, known in self.runs.items() if known.running or not known.has_given.is_set()
        }
        self.runs = earlier | {run.cell: run}
        self._num_notices.clear()
        is_fresh = any(self.up[rank].incarnation != run.incarnations[rank] for rank in run.ranks)
        if is_fresh or self.lost.keys() & set(run.ranks):
            self.runs = earlier
            return False
        return True

    @_one_at_a_time
    def remove_run(self, run: CellRun) -> None:
        """It will not be sent."""
        self.runs = {number: known for number, known in self.runs.items() if known is not run}

    def is_at_home(self, rank: int, *, node_of: Mapping[int, int] | None = None) -> bool:
        """A rank on this machine, or on one that the user trusts as much; ``node_of``: where ranks were then."""
        node = (self.node_of if node_of is None else node_of).get(rank)
        return node is not None and node not in self._strangers

    def take(self, message: Message, number: int = 0, node: int = 0) -> None:
        """Take what ``node`` sent. Raises: WireError when a message does not fit what was asked, or that node.

        What it says is read and cleaned before the other nodes have to wait, and only if somebody wants it.
        """
        is_wanted, bundle = self._is_waited_for(message), None
        if is_wanted and isinstance(message, _OF_WORDS):
            message = cleaned(message)
        elif isinstance(message, (Display, CellDone)) and self.node_of.get(message.rank) == node:
            run = self.runs.get(message.cell)
            bundle = run.read_bundle(message) if run else None
        self._take(message, number, node, bundle=bundle, is_wanted=is_wanted)

    def _is_waited_for(self, message: Message) -> bool:
        """It is no answer, or one to a question that somebody has asked."""
        if isinstance(message, _ANSWERS):
            return self.requests.are_open(message.request)
        return not isinstance(message, GenerationReady) or message.number == self.generation

    @_one_at_a_time
    def _take(self, message: Message, number: int, node: int, *, bundle: Bundle | None, is_wanted: bool) -> None:
        if node in self.lost_nodes or node in self.absent:
            return
        missed_up_to = self._attached[node].last_number if node in self._attached else 0
        try:
            self._claims.check_owner(message, node)
        except WireError:
            if not self.is_renumbering and not 0 < number <= missed_up_to:  # that may be from before ranks had theirs
                raise
            return
        if 0 < number <= missed_up_to and isinstance(message, _OF_CELLS) and not self.history.knows(message.cell):
            return  # it is too long ago for the agent to know it
        self._claims.check_time(message, node, is_attached=node in self._attached)
        if not is_wanted:
            return
        if isinstance(message, _OF_CELLS):
            self._take_of_cell(message, number, node, bundle)
        elif isinstance(message, _ANSWERS):
            self.requests.take(message)
        elif isinstance(message, RankEnded):
            self._take_end_of_rank(message, is_missed=number <= missed_up_to)
        elif isinstance(message, GenerationReady):
            if message.number == self.generation:  # not one that was given up
                self.has_group[message.rank] = not message.error
                self.generation_ready.take(message)
        elif isinstance(message, GenerationEnded):
            _log.info(
                "generation %d ended on rank %d: %d connections shut", message.number, message.rank, message.connections
            )
            if message.number == self.generation:
                self.has_group[message.rank] = False
                self.generation_ended.take(message)
        elif isinstance(message, RankUp):
            device, torch = one_line(message.device), one_line(message.torch)
            host = self.nodes[node] or one_line(message.host)
            self.up[message.rank] = replace(message, host=host, device=device, torch=torch)
            self.lost.pop(message.rank, None)
            self.ranks_up.take(message)
        elif isinstance(message, RanCell):
            self._take_ran_cell(message, node)
        elif isinstance(message, Unfinished):
            self._warn(self.logbook.add_beginning(message))
        elif isinstance(message, Attached):
            self._attached[node] = message
            self.has_group.update(dict.fromkeys(message.with_group, True))
            self.attached.take_from(agent_of(node), message)
        elif isinstance(message, StoreOpened):
            self.store_opened.take_from(agent_of(node), message)
        elif isinstance(message, Refused):
            if message.is_taken or self._takes_all_with_it(node):  # a session has one holder, whoever tells us first
                self.fail(SessionError(f"{self._on(node)}{quote(message.reason)}"))
            self.lose_node(node, one_line(message.reason, most_chars=_LONGEST_NOTICE))
        elif isinstance(message, LauncherEnded):
            self._take_end_of_launcher(message, node)
        elif isinstance(message, Notice):
            text = f"{self._on(node)}{quote(message.text[:_LONGEST_NOTICE])}"
            self._take_gap(replace(message, text=text), number, node)
        elif isinstance(message, StartedCold):
            self.notice(f"{self._on(node)}started cold: {one_line(message.reason)}")

    def _on(self, node: int) -> str:
        return f"{self.nodes[node]}: " if self.nodes[node] else ""

    @_one_at_a_time
    def renumber(self, plan: Plan, number: Mapping[int, int]) -> None:
        """Ranks of ``plan``, all idle, get other numbers; until ``is_renumbering`` is over, what comes under an old one
        goes."""
        self.is_renumbering = True
        self.logbook.renumber(plan, number)
        self._claims.know_ranks(_renumbered(self.node_of, number))
        self.up = {rank: replace(up, rank=rank) for rank, up in _renumbered(self.up, number).items()}
        self.last_seconds = _renumbered(self.last_seconds, number)
        self.has_group, self.lost, self.fresh = {}, {}, {}
        self.history.renumber(number)

    @_one_at_a_time
    def notice(self, text: str) -> None:
        """Something the user should know; the cell that runs shows it."""
        text = text[:_LONGEST_NOTICE]
        self.notices.append(text)
        del self.notices[:-_MOST_NOTICES]
        for run in list(self.runs.values()):
            if run.observer and run.running:
                run.observer.notice(text)

    def miss(self, num_messages: int, node: int) -> None:
        """So many messages of a node have not come, and it has not said why."""
        what = "1 message is" if num_messages == 1 else f"{num_messages:,} messages are"
        if text := self._within_bounds(f"{self._on(node)}of what its ranks said {what} missing", node):
            self.notice(text)

    def _warn(self, words: str) -> None:
        if words:
            self.notice(words)

    @_one_at_a_time
    def fail(self, error: DetrainError) -> None:
        """Nothing will come from the node any more: whoever waits is told."""
        self.failure = self.failure or error
        self.requests.fail_all(self.failure)
        for run in list(self.runs.values()):
            run.is_over = True
            run.news.set()

    @_one_at_a_time
    def measure_by(self, first: Attached, noted: Mapping[int, int]) -> None:
        """The first node has been attached to: what it says is the measure for the others, as they are attached to.

        So is ``noted``, which node had which rank, as far as the first agrees.
        """
        world_size = max((up.world_size for up in self.up.values()), default=0)
        self._claims.measure_by(first, world_size=world_size, noted=noted)

    @_one_at_a_time
    def lose_absent(self) -> None:
        """All nodes that are there have been attached to, and the ranks are known: the others are lost."""
        self._is_attaching = False
        for node, reason in self.absent.items():
            self.lose_node(node, reason)

    @_one_at_a_time
    def close(self, reason: str, node: int = 0) -> None:
        """A node has hung up for good, or was hung up on because what it said cannot be."""
        self.lose_node(node, f"the agent of session {self._session!r} is gone ({reason})")

    @_one_at_a_time
    def break_off(self, node: int) -> None:
        """The connection to a node broke: values that were under way do not arrive."""
        own = [rank for rank, owner in self.node_of.items() if owner == node]
        broken = f"{self._on(node)}the connection broke while values were under way"
        for rank in own:
            self.requests.fail_values(TransportError(f"{broken}: ask for them again"), rank=rank)

    def _takes_all_with_it(self, node: int) -> bool:
        """The first node has the store of the rendezvous; and before all are up there is no session."""
        is_beginning = not self.up or self.ranks_up.is_open or self.attached.is_open
        return node == 0 or is_beginning and not self._is_attaching

    @_one_at_a_time
    def lose_node(self, node: int, reason: str) -> None:
        """The ranks of a node are gone, and with some nodes the session."""
        if self.failure or node in self.lost_nodes:
            return
        if self._takes_all_with_it(node):
            self.fail(NodeLost(f"{self._on(node)}{reason}: %distributed restart"))
            return
        if self._is_attaching and node not in self._attached:
            self.absent.setdefault(node, reason)
            self.attached.take_from(agent_of(node), Refused(reason))
            return
        self.lost_nodes[node] = reason
        gone = f"node {self.nodes[node]} is lost"
        for rank in [rank for rank, owner in self.node_of.items() if owner == node]:
            pid = self.up[rank].pid if rank in self.up else 0
            self._take_end_of_rank(
                RankEnded(rank, pid, 0, 0, -1, "", f"{gone}: {reason}", False, gone), is_missed=False
            )

    @_one_at_a_time
    def checkpoint(self, node: int = 0) -> Checkpoint:
        """A moment of what was taken, and the question whether all of it has been shown; for ``node`` to keep."""
        questions = [run.checkpoint() for run in list(self.runs.values())]
        is_waiting, fresh = self.is_showing_missed, self.fresh

        def is_shown() -> bool:
            is_missed_shown = not (is_waiting and self.is_showing_missed)
            is_told = not fresh or self.fresh is not fresh
            return is_missed_shown and is_told and all(question() for question in questions)

        running = {cell for cell, run in list(self.runs.items()) if run.running}
        own = [line for line in self.logbook.unfinished_lines(running) if self.node_of.get(line.rank, node) == node]
        return Checkpoint(own, is_shown)

    def tell_end(self, run: CellRun, on_end: Callable[[CellRun], None]) -> None:
        """Call ``on_end`` in the background thread when ``run`` has ended on every rank; hold ``following``."""
        self._on_end.setdefault(run.cell, []).append(on_end)

    def _take_of_cell(self, message: Logged, number: int, node: int, bundle: Bundle | None = None) -> None:
        if isinstance(message, (CellDone, CellFailed)):
            self.has_group[message.rank] = message.has_group
            self.last_seconds[message.rank] = message.seconds
            self.history.take_end(message)
        attached = self._attached.get(node)
        is_missed = (
            attached is not None and 0 < number <= attached.last_number
        )  # it is in the log, to be shown from there
        is_shown_perhaps = attached is not None and is_missed and number <= attached.sent
        with self.following:
            self._warn(self.logbook.add(message, is_missed=is_missed, is_shown_perhaps=is_shown_perhaps))
            if not is_missed and (run := self.runs.get(message.cell)):
                self._give(run, message, bundle)

    def _give(self, run: CellRun, message: Logged | RankEnded, bundle: Bundle | None = None) -> None:
        run.take(message, bundle)
        if run.is_done:
            for on_end in self._on_end.pop(run.cell, []):
                on_end(run)

    def _take_ran_cell(self, message: RanCell, node: int) -> None:
        self.history.take(message, is_first=node == 0)
        if message.running:
            self._left.add(message.cell)
            others = self.runs[message.cell].ranks if message.cell in self.runs else ()
            running = tuple(sorted({*others, *message.running}))
            earlier = self.runs.get(message.cell)
            self.runs[message.cell] = run = CellRun(message.cell, running, None, {}, is_at_home=self.is_at_home)
            if earlier:
                run.go_on_from(earlier)

    def _take_gap(self, message: Notice, number: int, node: int) -> None:
        """Output was lost here: lines that had not ended do not go on with what comes."""
        for cell, rank, stream in self.logbook.unfinished:
            if self.node_of.get(rank, node) == node:
                self._take_of_cell(Output(rank, cell, stream, b"...\n"), number, node)
        if text := self._within_bounds(message.text, node):
            self.logbook.add_gap(text[:_LONGEST_NOTICE])
            self.notice(text)

    def _within_bounds(self, text: str, node: int) -> str:
        """What is said of what a node does; empty after very much: there is to be room for what others, and we, say."""
        said = self._num_notices[node] = self._num_notices.get(node, 0) + 1
        more = f"{self._on(node)}it says more: that is left out until the next cell"
        return "" if said > _MOST_OF_NODE else more if said == _MOST_OF_NODE else text

    def _take_end_of_rank(self, message: RankEnded, *, is_missed: bool) -> None:
        reason, words = message.reason[:_LONGEST_NOTICE], message.stderr_tail[-_LONGEST_NOTICE:]
        message = replace(message, reason=reason, stderr_tail=words, down=message.down[:_LONGEST_NOTICE])
        self.lost[message.rank] = self.fresh[message.rank] = message
        self.has_group[message.rank] = False
        host = self.up[message.rank].host if message.rank in self.up else "this machine"
        for run in list(self.runs.values()):
            is_due = message.rank in run.ranks and (run.running or run.may_have_lost_a_rank)
            if is_due and not is_missed:  # one that was missed came before what runs now
                self.history.failed.add(run.cell)
                with self.following:
                    self._give(run, message)
                if run.observer and run.cell in self._left:
                    run.observer.notice(describe_end(message, host=host))
        self.requests.fail_all(RankLost(describe_end(message, host=host)), rank=message.rank)

    def _take_end_of_launcher(self, message: LauncherEnded, node: int) -> None:
        last = quote(_last_words(message.log_tail[-_LONGEST_NOTICE:])) or f"exit code {message.exit_code}"
        if self.ranks_up.is_open:
            self.fail(LaunchError(f"{self._on(node)}the ranks did not start: {last}"))
        else:
            self.lose_node(node, f"the ranks of session {self._session!r} ended: {last}")


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
