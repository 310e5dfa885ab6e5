"""A session: ranks that keep their state from one cell to the next, driven from this process.

with Session.start(ranks=2) as session:
    result = session.run_cell("x = torch.ones(4) * rank; dist.all_reduce(x); x")
    result.values[0]        # tensor([1., 1., 1., 1.])
    session.pull("x")       # {0: tensor(...), 1: tensor(...)}
"""

from __future__ import annotations

import atexit
import keyword
import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..deploy.bringing_up import attach_to_agents, bring_up_agents, give_up_agents, leave_agents
from ..deploy.chosen_nodes import Nodes, check_session_name, find_nodes, project_of, transports_to
from ..deploy.ending import end_agents
from ..deploy.kept import check_warm, keep
from ..deploy.known import StartedWith, forget
from ..deploy.start_steps import OnStep, ignore_step
from ..errors import (
    DetrainError,
    SessionError,
    SpecError,
    TransportError,
    behind_ours,
    count_ranks,
    format_ranks,
    short_ranks,
)
from ..plan import MOST_RANKS, split_names
from .cell_log import SessionLog
from .files import SessionFiles, current_folder, find_project
from .news import SessionNews
from .ranks import SessionRanks
from .running.asked import check_mapping, check_number, check_seconds, check_text, check_whole, names_of
from .running.board import Board
from .running.cells import Cells
from .running.core import Core, Ranks
from .running.results import CellResult
from .running.settings import SlotsOnly
from .running.start import RankStart, go_on, launch, place
from .running.status import SessionStatus, look
from .running.uncut import run_to_its_end
from .running.variable_facts import Preview
from .running.variable_table import Variables
from .running.variables import list_variables, look_into
from .running.views import Views, Watch
from .state.cell_observer import CellObserver, check_observer
from .state.limits import Limits, checked_limits
from .state.overwritten import OF_ONE_RANK, describe_overwritten

if TYPE_CHECKING:
    from ..transport import Transport
    from ..transport.ssh import AskPassphrase

__all__ = ["LINGER_S", "Session", "end_session"]

LINGER_S = 600.0
GROUP_TIMEOUT_S = 600.0
SPOOL_LIMIT_BYTES = 1 << 30
_MOST_HOSTS = 4  # by name
_SENDING = "bringing the files of the folder to the nodes"
_GROUPS = ("ranks", "log", "news", "files", "settings")  # attributes of a session that have public members


class Session(SlotsOnly):
    """Ranks that run cells and keep their state in between. ``Session.start`` makes one, ``stop`` ends it.

    Without ``stop`` it ends with this process. As a context manager it is stopped at the end of the ``with`` block.
    Wherever a method takes ``ranks``, None means all of them; it also accepts a number, a list, or a text such as
    ``"0,2-3"``, ``"-1"`` (the last rank), ``"all"`` or the name of a node.
    """

    __slots__ = {
        **dict.fromkeys(("_cells", "_core", "_ending", "_views")),
        "files": "The files of the nodes: copied there and back, compared.",
        "log": "The cells that were run: their output, shown again or followed, and replays.",
        "name": "The name by which ``Session.attach`` finds the session.",
        "news": "Notices that belong to no cell.",
        "not_ended": "The names of the nodes that ``stop`` did not reach: their ranks exit by themselves.",
        "ranks": "The ranks: their nodes and devices, what they are doing; single ranks are stopped, replaced.",
        "settings": "Settings that can be changed while the session runs.",
    }

    def __init__(self, core: Core, files: SessionFiles) -> None:
        self.name = core.name
        self.not_ended: list[str] = []
        self._ending = threading.Lock()
        self._core = core
        self._cells = Cells(self._core)
        self._views = Views(core)
        self.files = files
        self.ranks = SessionRanks(self._core)
        self.log = SessionLog(self._core, self._cells)
        self.news = SessionNews(self._core.state)
        self.settings = self._core.settings

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Raise an AttributeError that names the right attribute, if there is one."""
            is_of_user = name[0] != "_" and name not in _GROUPS
            found = [of for of in _GROUPS if is_of_user and hasattr(type(getattr(self, of)), name)]
            where = f": it is session.{found[0]}.{name}" if found else ""
            raise AttributeError(f"'Session' object has no attribute {name!r}{where}", name=name, obj=self)

    @classmethod
    def start(
        cls,
        ranks: int | None = None,
        *,
        nodes: Nodes = None,
        device: str = "auto",
        backend: str | None = None,
        name: str | None = None,
        init: bool = True,
        env: Mapping[str, str] | None = None,
        start: str = "fork",
        seed: int = 0,
        folder: str | None = None,
        project: str | None = None,
        linger_s: float = LINGER_S,
        spool_limit_bytes: int = SPOOL_LIMIT_BYTES,
        group_timeout_s: float | None = None,
        sync: bool = True,
        ask_passphrase: AskPassphrase | None = None,
        holder: str = "",
        warm_s: float = 0.0,
        force: bool = False,
        limits: Limits | None = None,
        on_progress: Callable[[str], None] | None = None,
        on_step: OnStep = ignore_step,
    ) -> Session:
        """Start ``ranks`` ranks on this machine; by default one for each GPU, else two on the CPU.

        session = Session.start(ranks=2, device="cpu", seed=1, env={"NCCL_DEBUG": "INFO"})
        session = Session.start(nodes="alice@gpu1,gpu2:2222")

        Where the ranks run:

        - ``nodes``: a nodes file, text such as ``alice@gpu1,gpu2:2222``, or a list of nodes. ``ranks`` ranks start on
          each node over SSH; by default one for each GPU, else one on the CPU. ``localhost`` among them is this
          machine, which the others must be able to reach. None: this machine only.
        - ``device``: "auto" (GPUs if the node has any), "cuda" or "cpu", for nodes that do not set their own devices.
        - ``folder``: the folder that the ranks start in, by default the current one.
        - ``env``: variables added to the environment of the ranks. The ranks of a node share its processors: each has
          ``OMP_NUM_THREADS`` set to its number of torch threads, which can be given in ``env``, or for ranks on this
          machine in this process's environment.
        - ``start``: "fork" (torch is imported once per node) or "exec" (the plain torchrun command).
        - ``force``: more than 8 ranks on a node are refused, unless this is set, when they are more than 4 for each of
          its processors, or more than its free memory holds.

        What they begin with:

        - ``init``: make the default process group, with ``backend``: by default gloo, and NCCL for CUDA tensors.
        - ``group_timeout_s``: the timeout of collectives in seconds; by default 10 minutes on several nodes, else
          torch's default.
        - ``seed``: rank r is seeded with ``seed + r``.
        - ``sync``: nodes receive the files of ``folder`` before the ranks start and before each cell, except those that
          .gitignore and .detrainignore exclude, keys and tokens, and a home folder as a whole: ``news.notices`` say so.
        - ``project``: a folder that contains ``folder``. Nodes receive all of it, and the ranks start in the same place
          in it.

        What outlives this process:

        - ``name``: for `Session.attach`; by default a generated one.
        - ``linger_s``: how many seconds the ranks wait for the next process after this one was killed or detached.
        - ``spool_limit_bytes``: about how much of their latest output, at most, is kept for it; a notice marks where
          output was lost.
        - ``warm_s``: how many seconds each node keeps a process with the imported modules after ``stop``. The next
          start from this process takes a tenth of the time there, unless something it depends on has changed.
          ``stop(cold=True)`` keeps nothing.
        - ``holder``: how this process is named to others that try to attach; by default its pid.

        ``limits`` has the other timeouts. ``ask_passphrase`` receives the path of a key file that needs a passphrase.
        ``on_progress`` is called repeatedly with a line about the progress, in the calling thread; if it raises, the
        start ends. ``on_step`` receives the progress of each node as a `StartStep`, in any thread.

        Raises: SpecError for invalid arguments, LaunchError when the ranks do not come up, TransportError for a node
        that cannot be reached, SessionError when a session of that name is running already, or this process has a
        process group itself. Then nothing is left behind.
        """
        if ranks is not None and type(ranks) is not int:
            raise SpecError(f"ranks {ranks!r}: give a whole number")
        if ranks is not None and not 1 <= ranks <= MOST_RANKS:
            raise SpecError(f"{ranks} ranks: a session needs at least 1, and has at most {MOST_RANKS:,}")
        for what, text in (("device", device), ("backend", backend or ""), ("start", start), ("holder", holder)):
            check_text(what, text)
        check_text("folder", os.fspath(folder) if isinstance(folder, os.PathLike) else folder or "")
        folder = os.path.abspath(folder or current_folder())
        check_text("project", os.fspath(project) if isinstance(project, os.PathLike) else project or "")
        project = find_project(project, folder) if project else ""
        say = on_progress or (lambda line: None)
        connecting = ""

        def say_again() -> None:
            say(connecting)

        transports = transports_to(nodes, ask_passphrase=ask_passphrase, meanwhile=say_again)
        if group_timeout_s is not None:
            check_seconds("group_timeout_s", group_timeout_s, is_more_than_0=True)
        usual_s = GROUP_TIMEOUT_S if len(transports) > 1 else 0.0
        timeout_s = usual_s if group_timeout_s is None else group_timeout_s
        how = RankStart(folder, env or {}, start, seed, init, linger_s, spool_limit_bytes, timeout_s)
        how.check()
        check_warm(warm_s)
        limits = checked_limits(limits)
        name = check_session_name(f"python-{os.getpid()}-{uuid.uuid4().hex[:6]}" if name is None else name)
        files = SessionFiles(transports, folder, project=project, is_synced=sync)
        connecting = _describe_connecting(transports)
        say(connecting)
        ends = bring_up_agents(transports, name, on_step=on_step, meanwhile=say_again, may_be_apart=not init)
        transports = [end.transport for end in ends]
        files.reach_by(transports)
        try:
            core = Core(name, ends, holder=holder, limits=limits)
            session = cls(core, files)
        except BaseException:  # an interrupt
            give_up_agents(ends)
            raise
        try:
            of_env = tuple(env or ())
            asked = StartedWith(
                ranks, device, backend, init, sync, of_env, seed, start, linger_s, group_timeout_s, project
            )
            attached = place(core, ends, asked, is_here=nodes is None, force=force)
            if files.is_synced:
                say(_SENDING)
            for words in [*files.notices, *files.bring(on_step=on_step, meanwhile=lambda: say(_SENDING))]:
                core.state.notices.add(words)
            is_apart = any(end.is_apart for end in ends)
            launch(core, how, attached, say=say, on_step=on_step, is_apart=is_apart)
        except BaseException:
            session.stop(cold=True)
            raise
        session.settings.warm_s = warm_s
        atexit.register(session._end)
        return session

    @classmethod
    def attach(
        cls,
        name: str,
        *,
        nodes: Nodes = None,
        steal: bool = False,
        sync: bool = True,
        without: str | Iterable[str] = (),
        ask_passphrase: AskPassphrase | None = None,
        holder: str = "",
        limits: Limits | None = None,
        on_progress: Callable[[str], None] | None = None,
    ) -> Session:
        """Continue a running session whose notebook has exited or detached.

        The machine that started it knows its nodes; elsewhere give ``nodes``, in the same order.

        Output of its cells that no notebook has shown is in ``log``; ``log.missed`` lists the cells. Each later attach
        receives it again until a cell was run, or ``log.confirm_missed`` was called. If the ranks have exited in the
        meantime, ``failure`` is the reason.

        - ``steal``: take the session from another notebook that holds it; that notebook gets an error.
        - ``sync``: as in `start`, if the current folder is the one of the start.
        - ``without``: names of nodes, separated by commas, to which no connection is made. Their ranks are lost, the
          others continue. The first node cannot be left out.
        - ``on_progress``: called repeatedly with a line that names the nodes it waits for.
        - ``ask_passphrase``, ``holder`` and ``limits``: as in `start`.

        Raises: SessionError when no such session is running, or another notebook holds it; TransportError for a node
        that cannot be reached.
        """
        check_session_name(name)
        check_text("holder", holder)
        limits = checked_limits(limits)
        without = names_of(split_names(without), "without") if without else []
        if nodes is None:
            transports = find_nodes(name, ask_passphrase=ask_passphrase)
        else:
            transports = transports_to(nodes, ask_passphrase=ask_passphrase)
        say = on_progress or (lambda line: None)
        project = project_of(name, folder := current_folder())
        files = SessionFiles(transports, folder, project=project, is_synced=sync, takes_over=False)
        say(_describe_connecting(transports))
        try:
            ends = attach_to_agents(transports, name, without=without)
        except SessionError:
            if nodes is None:  # it is recorded here, and has ended
                forget(name)
            raise
        try:
            core = Core(name, ends, holder=holder, is_attaching=True, limits=limits)
            session = cls(core, files)
        except BaseException:  # an interrupt
            leave_agents(ends)
            raise
        try:
            go_on(core, steal=steal, say=say)
            core.note_down()
            session.log.cells_before = frozenset(ran.cell for ran in session.log.cells)
            for words in files.notices:
                core.state.notices.add(words)
        except BaseException:
            session.detach()
            raise
        atexit.register(session._end)
        return session

    def detach(self, *, is_seen: bool = True) -> None:
        """Leave agents and ranks to the next notebook; they wait for it for the ``linger_s`` of the start.

        ``is_seen`` False: the latest output may not have arrived at the front end, so the next notebook shows it again.
        """
        with self._ending:
            if not self._core.is_stopped:
                self._core.is_stopped = self._core.is_left = True
                atexit.unregister(self._end)
                self._core.link.detach(is_seen=is_seen)
                for transport in self._core.transports:
                    transport.leave()
                self._views.end()

    def stop_cells(self) -> dict[int, str]:
        """Stop the running cells, as the stop button does; returns a description of the outcome, by cell.

        Call it from another thread than the one in which `run_cell` waits; that call raises CellInterrupted or
        RankError. The dict is empty when no cell is running.
        Raises: the error that ended the session.
        """
        self._core.require_alive()
        return {cell.number: self._core.rescue.stop(cell) for cell in set(self._core.state.busy.values())}

    @property
    def failure(self) -> DetrainError | None:
        """Why the session cannot continue; None while it can, or after it was stopped."""
        return None if self._core.is_stopped else self._core.state.failure

    @property
    def is_alive(self) -> bool:
        """True while the session can run cells; single ranks may be lost."""
        return self._core.is_alive

    def run_cell(
        self,
        code: str,
        *,
        ranks: Ranks = None,
        timeout_s: float | None = None,
        observer: CellObserver | None = None,
        values: bool = True,
        number: int | None = None,
        first_line: int = 1,
    ) -> CellResult:
        """Run ``code`` on ``ranks`` (all) and wait until every one of them has ended it.

        result = session.run_cell("x = torch.ones(4) * rank; dist.all_reduce(x); x")
        result.values[0]  # the value of the last expression on rank 0

        Waits first for ranks that were stopped but have not ended their cell, that are being replaced, or that run a
        cell of another thread. A process group that was ended is recreated first. On hosts, changed files of the folder
        are copied to them first, unless the session was started without ``sync``.

        - ``timeout_s``: seconds from the start of the cell until it is stopped; None: no limit.
        - ``observer``: shows output while the cell runs. Without one, output is in the result and in ``log`` only.
        - ``values``: bring the values of the last expression here, if they can travel; False leaves their texts.
        - ``number``, ``first_line``: in errors the cell has this number (or the next free one), and its lines count
          from ``first_line``.

        Raises: RankError with every rank's error, also for invalid Python; CellInterrupted after KeyboardInterrupt;
        CellTimeout after ``timeout_s``, or when the cell waits for ranks that do not run it; RankLost when a rank's
        process died; NodeLost when a node did; SessionError when a chosen rank is busy or lost, or the session has
        ended; SpecError for an empty cell or an invalid argument.
        """
        check_text("the cell", code)
        if not code.strip():
            raise SpecError("the cell is empty: write the code to run below its first line")
        if timeout_s is not None:
            check_seconds("timeout_s", timeout_s, is_more_than_0=True)
        number = 1 if number is None else check_whole("number", number, least=1)
        first_line = check_whole("first_line", first_line, least=0)
        if observer is not None:
            check_observer(observer)
        self._bring_changes(ranks, observer)
        return self._cells.run(
            code, ranks, observer, at_least=number, first_line=first_line, timeout_s=timeout_s, values=values
        )

    def pull(self, names: str | Iterable[str], *, ranks: Ranks = None) -> dict[int, Any]:
        """Bring variables of the ranks here: ``{rank: value}`` for one name, ``{rank: {name: value}}`` for a list.

        Values that can travel are None, bools, numbers, strings, bytes, numpy arrays and scalars, torch tensors, and
        lists, tuples, sets and dicts of these. Tensors arrive detached, on the CPU. A state dict can travel, a model
        cannot: pull ``model.state_dict()`` after assigning it to a variable.
        Raises: SessionError when a rank has no such variable, its value cannot travel, or it is busy or lost;
        CellTimeout after ``settings.limits.value_s``.
        """
        wanted = names_of(names)
        chosen = self._core.choose_idle(ranks)
        found = self._core.link.pull(wanted, chosen)
        return {rank: found[rank][names] for rank in chosen} if isinstance(names, str) else found

    def push(self, variables: Mapping[str, Any], *, ranks: Ranks = None) -> None:
        """Set variables on the ranks: ``session.push({"lr": 0.1})``. The same types can travel as with `pull`.

        Tensors arrive on the CPU of each rank.
        Raises: ValueNotSupported when a value cannot travel; then none is set. SpecError for an invalid name;
        SessionError when a rank is busy or lost; CellTimeout.
        """
        check_mapping("variables", variables)
        for name in variables:
            if not name.isidentifier() or keyword.iskeyword(name) or name == "__builtins__":
                raise SpecError(f"push of {name!r}: give a valid variable name")
        chosen = self._core.choose_idle(ranks)
        self._core.link.push(variables, chosen)
        self._core.tell(describe_overwritten(dict.fromkeys(chosen, variables), by="push"), None)

    def variables(self, names: str | Iterable[str] = (), *, ranks: Ranks = None, limit_s: float = 5.0) -> Variables:
        """Return a table of the user's variables on ``ranks`` (all): types, shapes, sizes, and agreement of the ranks.

        ``names`` selects some, also by patterns such as ``grad_*``. No code of the user's classes is run. Ranks are
        compared by checksums, of a sample for large tensors. A busy rank, or one that does not answer within
        ``limit_s`` seconds, is reported in ``silent`` and left out.
        Raises: SpecError; the error that ended the session.
        """
        check_seconds("limit_s", limit_s, is_more_than_0=True)
        return list_variables(self._core, names_of(names) if names else [], ranks, limit_s=limit_s)

    def preview(self, name: str, rank: int = 0, *, limit_s: float = 5.0) -> Preview:
        """Preview one variable of one rank: a corner of a tensor with statistics, the head of a list or text.

        Only what is shown is sent. Raises: SessionError when the rank is busy, or has no such variable.
        """
        check_text("name", name)
        check_seconds("limit_s", limit_s, is_more_than_0=True)
        return look_into(self._core, name, check_whole("rank", rank, least=0), limit_s=limit_s)

    def status(self, *, limit_s: float = 2.0) -> SessionStatus:
        """Report the state of every rank, the line of the cell that it is executing, and its memory.

        It can be called while a cell runs, and after the end. A rank that does not answer within ``limit_s`` seconds
        has the state "no answer", or "down" or "starting" if that is known.
        """
        check_number("limit_s", limit_s)
        return look(self._core, limit_s=limit_s)

    def on_change(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call ``callback()`` on each change of the session; returns a function that ends this.

        A change is the state of a rank, a cell that has begun or ended, a node that was lost or reconnected, or the end
        of the session. The callback is called in a background thread soon after, at most ten times a second. While a
        cell runs, the ranks are asked once a second where they are, which shows when one waits for another. A callback
        that raises is removed, with a notice. Raises: SpecError.
        """
        return self._views.on_change(callback)

    def watch(self, callback: Callable[[Board], object] | None = None, *, every_s: float = 1.0) -> Watch:
        """Build a fresh board every ``every_s``, and on each change, until the returned `Watch` is closed.

        with session.watch() as watch:
            watch.latest         # a Board, or None before there is one

        ``callback(board)`` is called in a background thread. Meanwhile each node measures the resource use of its
        ranks, once for all watches. Raises: SpecError.
        """
        return self._views.watch(callback, every_s=every_s)

    def restart(self, ranks: Ranks = None) -> None:
        """Restart ``ranks`` (all), including those that were not restarted automatically, and wait until they are up.

        Their variables are lost, those of the others are kept; ``log.replay`` reruns their earlier cells.
        Raises: SessionError.
        """
        chosen = self.ranks.choose(ranks)
        self.ranks.replace(chosen)
        self.ranks.wait_until_fresh(chosen)

    def broadcast(self, names: str | Iterable[str], *, source: int = 0, ranks: Ranks = None) -> None:
        """Copy variables of rank ``source`` to ``ranks`` (all), directly from rank to rank.

        session.broadcast(["model", "optimizer"], source=0)

        Any value that can be pickled is copied. Variables in one call keep what they share, such as a model and its
        optimizer. Waits for busy ranks first. Raises: SessionError when one
        cannot be pickled, or when a rank lacks its class: run the cell that defines it there first, with ``replay``;
        CellInterrupted after KeyboardInterrupt, which ends the process groups.
        """
        wanted = names_of(names)
        check_whole("source", source)
        chosen = self.ranks.choose(ranks)
        (sender,) = self.ranks.choose(source)
        self._core.choose_idle([*chosen, sender], waits=True)
        self._core.mend_group(self._core.state.ranks, None)
        orphans = self._core.process_groups.broadcast(wanted, chosen, source=sender)
        self._core.tell(_describe_orphans(orphans), None)
        others = [rank for rank in chosen if rank != sender]
        self._core.tell(describe_overwritten(dict.fromkeys(others, OF_ONE_RANK & set(wanted)), by="broadcast"), None)

    def stop(self, *, cold: bool = False) -> None:
        """Stop the ranks and everything they started. A second call does nothing.

        For ``settings.warm_s`` seconds (0 by default) a process with torch imported stays on each node for the next
        start, unless ``cold``. After an interrupt the stop continues in the background, and the next call waits for it.
        ``not_ended`` then lists the nodes that were not reached.
        """
        keep_s = 0.0 if cold else self.settings.warm_s
        run_to_its_end(lambda: self._end(keep_s), name="detrain_nb stop")

    def _end(self, keep_s: float = 0.0) -> None:
        with self._ending:
            if self._core.is_stopped:
                return
            self._views.begin_end()
            try:
                self._end_nodes(keep_s)
            finally:
                self._views.end(has_ended=self._core.is_stopped)

    def _end_nodes(self, keep_s: float) -> None:
        limit_s, transports, links = self._core.link.limits.end_s, self._core.transports, self._core.link.node_links
        is_ours = [not link.is_hung_up_on for link in links]
        left = set(self._core.link.end(limit_s=limit_s, keep_s=keep_s)) - self._core.state.lost_nodes.keys()
        is_taken = [link.is_taken for link in links]  # may have happened just now
        self._core.is_stopped = True  # after the request: when interrupted before, the stop can be requested again
        atexit.unregister(self._end)
        self.files.reach_by([])
        self.not_ended = [transports[node].name for node in left if transports[node].can_resume]
        if not self.not_ended and not any(is_taken):
            forget(self.name)
        for node, (transport, link) in enumerate(zip(transports, links)):
            if link.is_kept:
                keep(transport, link.take_socket(), keep_s=keep_s)
            else:
                transport.wait_for_end(limit_s=limit_s, is_ours=is_ours[node] and not is_taken[node])

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        state = "running" if self.is_alive else "ended"
        hosts = [name for name, ranks in self._core.state.plan.hosts.items() if ranks]
        where = f" of {', '.join(hosts) if len(hosts) <= _MOST_HOSTS else f'{len(hosts)} nodes'}" if hosts else ""
        what = f"{count_ranks(self._core.state.world_size)} on {self._core.state.plan.device}{where}, {state}"
        return f"<Session {self.name!r}: {what}>"

    def _bring_changes(self, ranks: Ranks, observer: CellObserver | None) -> None:
        """Copy local changes to the nodes that are about to run a cell."""
        if self.files.is_synced:
            names = self._core.state.plan.node_names
            chosen = self._core.wait_until_idle(ranks, observer)
            on = {names.get(rank, "") for rank in chosen}
            for words in self.files.bring(on):
                self._core.tell(words, observer)


def _describe_orphans(orphans: Mapping[int, Iterable[str]]) -> str:
    """Return a line for each optimizer on ranks where it trains no model, as it was broadcast without the model."""
    ranks_of: dict[str, list[int]] = {}
    for rank, names in orphans.items():
        for name in names:
            ranks_of.setdefault(name, []).append(rank)
    return "\n".join(
        f"on {format_ranks(ranks)} {name} trains parameters that are in no model there: broadcast both in one line, "
        f"%broadcast MODEL,{name} -r {short_ranks(ranks)}"
        for name, ranks in ranks_of.items()
    )


def _describe_connecting(transports: Sequence[Transport]) -> str:
    names = [transport.name for transport in transports if transport.name]
    if not names:
        return "starting an agent"
    return f"connecting to {', '.join(names) if len(names) <= _MOST_HOSTS else f'{len(names)} nodes'}"


def end_session(name: str, *, holder: str = "", ask_passphrase: AskPassphrase | None = None) -> None:
    """Stop a session that this process does not hold, on every reachable node.

    Raises: SessionError when it is not running, or another notebook holds it; TransportError for unreachable nodes,
    whose ranks exit by themselves.
    """
    check_session_name(name)
    transports = find_nodes(name, ask_passphrase=ask_passphrase)
    failures = end_agents(transports, name, holder=holder or f"pid {os.getpid()}")
    absent = [node for node, error in failures.items() if isinstance(error, SessionError)]
    if unreachable := {node: error for node, error in failures.items() if node not in absent}:
        words = "\n".join(f"{node}: {error}" for node, error in unreachable.items())
        raise TransportError(f"session {name!r} could not be stopped there; its ranks exit by themselves:\n{words}")
    forget(name)
    if len(absent) == len(transports):
        where = f"{absent[0]}: " if absent[0] else ""
        raise SessionError(f"{where}{behind_ours(str(failures[absent[0]]))}")
