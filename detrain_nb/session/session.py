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
_GROUPS = ("ranks", "log", "news", "files", "settings")  # of what a session offers


class Session(SlotsOnly):
    """Ranks that run cells. Made by ``Session.start``; ends with ``stop``, or with this process."""

    __slots__ = {
        **dict.fromkeys(("_cells", "_core", "_ending", "_views")),
        "files": "Files: copied to the nodes and back, compared there.",
        "log": "The cells that were run: what they printed, shown, followed, run again.",
        "name": "The name by which ``Session.attach`` finds the session.",
        "news": "What the user should know and no cell has said.",
        "not_ended": "The nodes that ``stop`` did not reach: their ranks end by themselves.",
        "ranks": "The ranks: which there are and where, what they do; single ones are stopped, replaced.",
        "settings": "What can be set while the session runs.",
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
            """Raises: AttributeError, which says where it is, if anywhere."""
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
        """Start ``ranks`` ranks on this machine; by default one a GPU, else two on the CPU.

        With ``nodes`` (a nodes file, ``alice@gpu1,gpu2:2222``, or nodes), ``ranks`` on each of them, over SSH; by
        default one a GPU, else one on the CPU. ``localhost`` among them is this machine, which the others have to
        reach. ``group_timeout_s`` is how long a collective waits for another rank: on several nodes 10 minutes, else as
        long as torch's own. ``ask_passphrase`` gets the path of a key file that needs one.

        ``init`` makes the default process group (``backend``, by default gloo, with NCCL for CUDA tensors). The ranks
        start in ``folder`` (the current one), with ``env`` added to the environment. ``start`` is "fork" (torch is
        imported once) or "exec" (the plain torchrun command). Rank r is seeded with ``seed + r``. The ranks of a node
        share its processors; ``OMP_NUM_THREADS``, in ``env`` or in this process's environment for ranks on this
        machine, is how many threads torch uses in each, and set there.

        With ``sync`` nodes have the files of ``folder`` that .gitignore and .detrainignore do not leave out, before the
        ranks start and before each cell; no keys and tokens, and nothing of a home: ``news.notices`` say so. With
        ``project``, a folder above ``folder``, they have all of that, and the ranks start in the same place in it.

        When this process is gone, or has detached, the ranks wait for the next one for ``linger_s``. What they print
        is kept for it, of more than about ``spool_limit_bytes`` the end; what was lost is announced in its place.

        After ``stop`` each node keeps what its ranks have imported for ``warm_s``: the next start of this process there
        takes a tenth of the time, unless something it depends on has changed. ``stop(cold=True)`` leaves nothing.

        More than 8 ranks on a node, and more than 4 for each of its processors or than its free memory holds, are
        refused unless ``force`` is set. ``limits`` says how long it waits for what. ``on_progress`` gets a line that
        says how far the start is, again and again, in the calling thread; what it raises ends the start. ``on_step``
        gets the same of each node, as a `StartStep`, in any thread.

        Raises: SpecError for numbers that do not fit, LaunchError when the ranks do not come up, SessionError when a
        session of that name runs already. Nothing is left behind then.
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
        """Go on with a session that runs, after its notebook is gone or has detached.

        On which nodes it runs is known where it was started; elsewhere say ``nodes``, in the same order.

        What nobody has shown of its cells is in ``log``; ``log.missed`` says which. The next attach brings it again
        until a cell was run, or ``log.confirm_missed`` called. When the ranks ended meanwhile, ``failure`` says why.
        ``steal`` takes the session from another notebook, which is told. ``sync``: as it was started, if the current
        folder is the one that it was started with. ``without`` names nodes, with commas, that are not connected to:
        their ranks are lost, the others go on. The first node cannot be left out. ``on_progress`` gets a line that says
        which node it waits for, again and again.

        Raises: SessionError when no such session runs, or another notebook holds it; TransportError for a node that
        cannot be reached.
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
            if nodes is None:  # it was known here, and has ended
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
        """Leave agent and ranks to the next notebook; they wait for it for the time given at the start.

        Not ``is_seen``: what was sent to a front end last may not have arrived there, and is shown again.
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
        """Stop the cells that run, as the stop button does; says in words how that went.

        Raises: what ended the session.
        """
        self._core.require_alive()
        return {cell.number: self._core.rescue.stop(cell) for cell in set(self._core.state.busy.values())}

    @property
    def failure(self) -> DetrainError | None:
        """Why the session cannot go on; None while it can, or after it was ended."""
        return None if self._core.is_stopped else self._core.state.failure

    @property
    def is_alive(self) -> bool:
        """The session's agent and launcher run; single ranks may be lost."""
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

        Ranks that were stopped and are still on their way, are being replaced, or run a cell of another thread, are
        waited for. A group that was ended is made anew first.

        ``values`` brings the values of the last expression here, where they can travel. Output is kept in the result
        and in ``log``, and goes to ``observer`` while the cell runs. In errors the cell has ``number`` (or the next one
        that is free), and its lines count from ``first_line``.

        Raises: RankError with every rank's error, CellInterrupted after KeyboardInterrupt, CellTimeout after
        ``timeout_s``, RankLost when a rank's process ended, SessionError when a chosen rank is busy or lost.
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

        Tensors arrive detached, on the CPU. Raises: SessionError when a rank has no such variable, or a value there
        cannot travel.
        """
        wanted = names_of(names)
        chosen = self._core.choose_idle(ranks)
        found = self._core.link.pull(wanted, chosen)
        return {rank: found[rank][names] for rank in chosen} if isinstance(names, str) else found

    def push(self, variables: Mapping[str, Any], *, ranks: Ranks = None) -> None:
        """Set variables on the ranks. Raises: ValueNotSupported when a value cannot travel; nothing is set then."""
        check_mapping("variables", variables)
        for name in variables:
            if not name.isidentifier() or keyword.iskeyword(name) or name == "__builtins__":
                raise SpecError(f"push of {name!r}: give the value a name that a cell can use")
        chosen = self._core.choose_idle(ranks)
        self._core.link.push(variables, chosen)
        self._core.tell(describe_overwritten(dict.fromkeys(chosen, variables), by="push"), None)

    def variables(self, names: str | Iterable[str] = (), *, ranks: Ranks = None, limit_s: float = 5.0) -> Variables:
        """What the user has defined on ``ranks`` (all), as a table: types, shapes, sizes, and whether ranks agree.

        ``names`` chooses some, also by patterns like ``grad_*``. Nothing of the user's classes is run. Checksums tell
        whether ranks have the same; large tensors are compared in a sample. A rank that is busy is named, and left out.
        """
        check_seconds("limit_s", limit_s, is_more_than_0=True)
        return list_variables(self._core, names_of(names) if names else [], ranks, limit_s=limit_s)

    def preview(self, name: str, rank: int = 0, *, limit_s: float = 5.0) -> Preview:
        """A small look into one variable of one rank: a corner of a tensor with statistics, the head of a list or text.

        Only what is shown leaves the rank. Raises: SessionError when the rank is busy, or has no such variable.
        """
        check_text("name", name)
        check_seconds("limit_s", limit_s, is_more_than_0=True)
        return look_into(self._core, name, check_whole("rank", rank, least=0), limit_s=limit_s)

    def status(self, *, limit_s: float = 2.0) -> SessionStatus:
        """Where every rank is: its state, the line of the cell it is at, its memory."""
        check_number("limit_s", limit_s)
        return look(self._core, limit_s=limit_s)

    def on_change(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Call ``callback()`` when a rank's state has changed, a cell has begun or ended, a node was lost or is back,
        or the session has ended; returns what ends that.

        It is called in a background thread, soon after, and at most ten times a second. While a cell runs, the ranks
        are asked once a second where they are: that one waits for another is seen so. One that raises is called no
        more, and a notice says so. Raises: SpecError.
        """
        return self._views.on_change(callback)

    def watch(self, callback: Callable[[Board], object] | None = None, *, every_s: float = 1.0) -> Watch:
        """Have a fresh board every ``every_s``, and as soon as something has changed, until what is returned is closed.

        with session.watch() as watch:
            watch.latest         # a Board, or None before there is one

        ``callback(board)`` is called in a background thread. Meanwhile each node measures what its ranks use, once for
        all that watch. Raises: SpecError.
        """
        return self._views.watch(callback, every_s=every_s)

    def restart(self, ranks: Ranks = None) -> None:
        """Replace ``ranks`` (all) by fresh ones, those that were left down too, and wait until they are up.

        Their variables are lost, those of the others are not. Raises: SessionError.
        """
        chosen = self.ranks.choose(ranks)
        self.ranks.replace(chosen)
        self.ranks.wait_until_fresh(chosen)

    def broadcast(self, names: str | Iterable[str], *, source: int = 0, ranks: Ranks = None) -> None:
        """Give ``ranks`` (all) the variables that rank ``source`` has, directly from rank to rank.

        Several names keep what they share: a model and its optimizer. Raises: SessionError when one cannot be pickled,
        or when a rank lacks the class it is made of: run the cell that defines it there first, with ``replay``;
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
        """End the ranks and everything they started. Does nothing the second time.

        For ``warm_s`` a process stays on each node that has imported torch, for the next start; not if ``cold``.
        An interrupt leaves nothing half-ended: the stop goes on in the background, and the next call waits for it.
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
        is_taken = [link.is_taken for link in links]  # perhaps in this very moment
        self._core.is_stopped = True  # after it was asked for: a stop in between leaves it to be asked for again
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
        """The nodes that are to run a cell have what has changed here."""
        if self.files.is_synced:
            names = self._core.state.plan.node_names
            chosen = self._core.wait_until_idle(ranks, observer)
            on = {names.get(rank, "") for rank in chosen}
            for words in self.files.bring(on):
                self._core.tell(words, observer)


def _describe_orphans(orphans: Mapping[int, Iterable[str]]) -> str:
    """A line for each optimizer that trains no model of its rank, as it came without it, or without the other."""
    ranks_of: dict[str, list[int]] = {}
    for rank, names in orphans.items():
        for name in names:
            ranks_of.setdefault(name, []).append(rank)
    return "\n".join(
        f"on {format_ranks(ranks)} {name} trains parameters that are in no model there: what belongs together comes in "
        f"one line, %broadcast MODEL,{name} -r {short_ranks(ranks)}"
        for name, ranks in ranks_of.items()
    )


def _describe_connecting(transports: Sequence[Transport]) -> str:
    names = [transport.name for transport in transports if transport.name]
    if not names:
        return "starting an agent"
    return f"connecting to {', '.join(names) if len(names) <= _MOST_HOSTS else f'{len(names)} nodes'}"


def end_session(name: str, *, holder: str = "", ask_passphrase: AskPassphrase | None = None) -> None:
    """End a session that this process does not hold, on every node that can be reached.

    Raises: SessionError when it does not run, or another notebook holds it; TransportError for nodes out of reach,
    where the ranks end by themselves.
    """
    check_session_name(name)
    transports = find_nodes(name, ask_passphrase=ask_passphrase)
    failures = end_agents(transports, name, holder=holder or f"pid {os.getpid()}")
    absent = [node for node, error in failures.items() if isinstance(error, SessionError)]
    if unreachable := {node: error for node, error in failures.items() if node not in absent}:
        words = "\n".join(f"{node}: {error}" for node, error in unreachable.items())
        raise TransportError(f"session {name!r} was not told to end there, its ranks end by themselves:\n{words}")
    forget(name)
    if len(absent) == len(transports):
        where = f"{absent[0]}: " if absent[0] else ""
        raise SessionError(f"{where}{behind_ours(str(failures[absent[0]]))}")
