"""The session of a notebook: started when it is needed, attached to again after a restart of the kernel."""

from __future__ import annotations

import difflib
import getpass
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from IPython.core.error import StdinNotImplementedError, UsageError

from ..deploy.kept import drop_kept
from ..deploy.known import StartedWith, known_sessions, note_left
from ..deploy.start_steps import StartWatch, ignore_step
from ..errors import LaunchError, SessionError, TransportError, count_ranks
from ..plan import DEVICES, parse_ranks
from ..session.session import LINGER_S, Session, end_session
from ..text import HERE
from .candidates import similar_nodes
from .notebook import connection_file, kernel_name, session_name
from .options import Settings
from .progress import redrawn_line
from .waiting import describe_beside, describe_waiting, waiting_sessions

if TYPE_CHECKING:
    from ..spec.node import Node

_NUMBERS = re.compile(r"[-\d,\s]+")  # rank numbers; host names can be checked only once the ranks run
STOP_GAP_S = 0.2  # a front end interrupts a kernel and announces its restart 1 ms later, 180 ms on a busy CPU


@dataclass(frozen=True)
class StartOptions:
    """The options of ``%distributed start``, kept for ``restart``."""

    count: int | None = None
    nodes: str | Sequence[Node] | None = None
    device: str = "auto"
    backend: str | None = None
    name: str | None = None
    no_init: bool = False
    no_sync: bool = False
    project: str = ""
    env: tuple[tuple[str, str], ...] = field(default=(), repr=False)  # it may hold secrets
    seed: int = 0
    start: str = "fork"
    linger: float | None = None
    group_timeout: float | None = None
    fresh: bool = False
    force: bool = False
    env_names: tuple[str, ...] = ()  # set by an earlier kernel; their values are stored nowhere
    is_env_lost: bool = False  # the ranks were restarted without the ``env_names`` that ``env`` lacks
    is_known: bool = True  # False: started by an earlier kernel that left no record

    @classmethod
    def of_earlier(
        cls, name: str, nodes: Sequence[Node] | None, started: StartedWith | None, **otherwise: Any
    ) -> StartOptions:
        """Return the options of an earlier kernel; without a record, the defaults and ``otherwise``."""
        if started is None:
            return cls(**{**otherwise, "name": name, "nodes": nodes or None, "is_known": False})
        return cls(
            started.ranks,
            nodes or None,
            started.device,
            started.backend,
            name,
            no_init=not started.init,
            no_sync=not started.sync,
            project=started.project,
            seed=started.seed,
            start=started.start,
            linger=started.linger_s,
            group_timeout=started.group_timeout_s,
            env_names=started.env,
        )

    def again(self, *, count: int | None, env: Sequence[tuple[str, str]], force: bool) -> StartOptions:
        """Return the options for another start: with ``count`` ranks, if given, and ``env`` added.

        A different count needs ``force`` again to start more ranks than there is room for.
        """
        nodes = self.nodes
        if count and nodes and not isinstance(nodes, str):
            nodes = [node.model_copy(update={"ranks": None}) for node in nodes]
        added = tuple({**dict(self.env), **dict(env)}.items())
        force = force or self.force and count in (None, self.count)
        return replace(self, count=count or self.count, nodes=nodes, env=added, fresh=True, force=force)

    @property
    def linger_s(self) -> float:
        """Seconds that the ranks run without a notebook: as asked, else DETRAIN_NB_LINGER, else the default."""
        return _linger_s() if self.linger is None else self.linger

    def has_env_of(self, before: StartOptions) -> bool:
        """Return whether both set the same variables; of those set by an earlier kernel only the names are known."""
        wanted, known = dict(self.env), dict(before.env)
        names = {*known, *(() if before.is_env_lost else before.env_names)}
        return wanted.keys() == names and all(wanted[name] == value for name, value in known.items())

    @property
    def not_kept(self) -> str:
        """A line with what the user must give again; empty when nothing was lost with an earlier kernel."""
        if not self.is_known:
            return "there is no record of the original start options: those not given now have their defaults"
        missing = [name for name in self.env_names if name not in dict(self.env)]
        if not missing:
            return ""
        again = " ".join(f"--env {name}=..." for name in missing)
        return f"values of --env are not stored; {', '.join(missing)} not set: %distributed restart {again}"


class SessionHolder:
    """The holder of a notebook's session. ``session`` is the one it holds now, or None."""

    def __init__(self, ipython: Any) -> None:
        self.session: Session | None = None
        self._ipython = ipython
        self._stop_gap_s = STOP_GAP_S if getattr(ipython, "kernel", None) else 0.0
        self.settings = Settings.from_env()
        self._kernel = kernel_name(ipython)
        # the notebook's name, or its name before a kernel restart; also the default name of its session
        self.name = _holder_left_by(self._kernel) or session_name(ipython.user_ns, connection_file(ipython))
        self._started_with: StartOptions | None = None
        self._starting = threading.Lock()
        self._ended: Session | None = None  # its stop may have been interrupted before the end

    def start(self, wanted: StartOptions, *, watch: StartWatch | None = None) -> Session:
        """Start the session of this notebook; with ``fresh``, stop first the session that an earlier kernel left.

        A session that was idle when the user restarted the kernel is stopped too: its variables go with the notebook's.
        ``watch`` follows the start in place of the running cell. Raises: SessionError during another start.
        """
        if not self._starting.acquire(blocking=False):
            raise SessionError("a session of this notebook is already being started: wait for it, or cancel it there")
        try:
            return self._start(wanted, watch)
        finally:
            self._starting.release()

    def start_from_form(self, nodes: list[Node], watch: StartWatch) -> Session:
        """Start the session of this notebook on the ``nodes`` of a form. Raises: SessionError when one is running."""
        if self.session is not None and self.session.is_alive:
            raise SessionError(
                f"session {self.session.name!r} of this notebook is already running with "
                f"{count_ranks(len(self.session.ranks))}: %distributed stop first (all variables are lost)"
            )
        return self.start(StartOptions(nodes=nodes), watch=watch)

    @property
    def listed_nodes(self) -> Sequence[Node] | None:
        """The nodes of the form that started the last session, perhaps in no file; None if a line named the nodes."""
        nodes = self._started_with.nodes if self._started_with else None
        return None if isinstance(nodes, str) else nodes

    def _start(self, wanted: StartOptions, watch: StartWatch | None) -> Session:
        say, ask = (watch.say, watch.ask_passphrase) if watch else (print, ask_passphrase)
        if self._ended is not None:
            self._ended.stop()
            self._ended = None
        name = wanted.name or self.name
        refusal: SessionError | None = None
        there = known_sessions().get(name)
        is_left = there is not None and there.is_left and there.holder == self.name
        if there and there.nodes and wanted.nodes is None and not (wanted.fresh or is_left):
            raise SessionError(  # its ranks would keep running, and no longer be found under this name
                f"session {name!r} is already running, {there}: %distributed attach {name} reconnects to it, "
                "%distributed start --fresh stops it first, --name starts this one under another name"
            )
        if there and (wanted.fresh or is_left):
            if is_left and not wanted.fresh:
                say(
                    f"session {name!r}, from before this notebook's kernel was restarted, is stopped: "
                    "new ranks are started, and all variables of the old ones are lost"
                )
            try:
                end_session(name, holder=self.name, ask_passphrase=ask)
            except SessionError as exc:  # another notebook holds it, or it ran on nodes and has ended by itself
                refusal = exc
        for words in describe_beside(self.name, name):
            say(words)
        nodes = _read_nodes(wanted.nodes, say=say)
        try:
            with nullcontext(watch.on_progress) if watch else self._drawn() as draw:
                session = Session.start(
                    wanted.count,
                    nodes=nodes,
                    device=wanted.device,
                    backend=wanted.backend,
                    name=name,
                    init=not wanted.no_init,
                    sync=not wanted.no_sync,
                    project=wanted.project or None,
                    env=dict(wanted.env),
                    seed=wanted.seed,
                    start=wanted.start,
                    linger_s=wanted.linger_s,
                    group_timeout_s=wanted.group_timeout,
                    ask_passphrase=ask,
                    holder=self.name,
                    force=wanted.force,
                    on_progress=draw,
                    on_step=watch.on_step if watch else ignore_step,
                )
        except SessionError as exc:
            raise refusal or exc from None
        except (LaunchError, TransportError) as exc:
            is_typo = isinstance(wanted.nodes, str) and "does not resolve" in str(exc)
            if is_typo and (question := similar_nodes(str(wanted.nodes))):
                raise type(exc)(f"{exc}\n{question}") from exc
            raise
        self._started_with = replace(wanted, is_known=True, is_env_lost=True)
        return self._hold(session, say=say)

    def _drawn(self) -> AbstractContextManager[Callable[[str], None]]:
        return redrawn_line(self._ipython, is_live=self.settings.output == "live")

    def differs(self, wanted: StartOptions) -> list[str]:
        """Return the options of ``wanted`` in which the running session differs."""
        session, before = self.session, self._started_with or StartOptions()
        if session is None:
            return []
        is_same = {
            "-n": wanted.count in (None, before.count)
            or (not session.ranks.nodes and wanted.count == len(session.ranks)),
            "--nodes": _are_same_nodes(wanted.nodes, before.nodes),
            "--name": (wanted.name or self.name) == session.name,
            "--env": wanted.has_env_of(before),
            "--project": os.path.abspath(wanted.project or ".") == os.path.abspath(before.project or "."),
        }
        for name in ("device", "backend", "no_init", "no_sync", "seed", "start", "group_timeout"):
            is_same[f"--{name.replace('_', '-')}"] = getattr(wanted, name) == getattr(before, name)
        is_same["--linger"] = wanted.linger_s == before.linger_s
        return [option for option, same in is_same.items() if not same]

    def restart(
        self, count: int | None, *, env: Sequence[tuple[str, str]] = (), cold: bool = False, force: bool = False
    ) -> Session:
        """Stop the session and start another with the same options, also one that an earlier kernel left.

        ``env`` is added to the variables of the ranks; those whose values are lost are reported. ``cold``: see ``end``.
        """
        if self.session is not None or cold:
            self.end(cold=cold)
        before = self._started_with
        if before is None and (left := known_sessions().get(self.name)):
            before = StartOptions.of_earlier(self.name, left.nodes, left.started)
        wanted = (before or StartOptions()).again(count=count, env=env, force=force)
        if wanted.not_kept:
            print(wanted.not_kept)
        return self.start(wanted)

    def attach(self, name: str | None, *, nodes: str | None, steal: bool, without: str = "") -> Session:
        """Attach to a running session, by default this notebook's or the only one that is known."""
        if self.session is not None and self.session.is_alive:
            raise UsageError(f"%distributed attach: this notebook already holds session {self.session.name!r}")
        there = known_sessions()
        if name is None:
            name = self._left_behind or (next(iter(there)) if len(there) == 1 else self.name)
        elif name not in there and nodes is None:
            raise _unknown_session(name, there)
        started = there[name].started if name in there else None
        with self._drawn() as draw:
            session = Session.attach(
                name,
                nodes=_read_nodes(nodes),
                steal=steal,
                without=without,
                sync=started is None or started.sync,
                ask_passphrase=ask_passphrase,
                holder=self.name,
                on_progress=draw,
            )
        note_left(name, is_left=False)
        self._started_with = StartOptions.of_earlier(
            name,
            session.ranks.nodes,
            started,
            count=len(session.ranks) if session.ranks.nodes is None else None,
            device=session.ranks.plan.device if session.ranks.plan.device in DEVICES else "auto",
            backend=session.ranks.plan.backend,
            no_init=not session.settings.wants_group,
        )
        return self._hold(session)

    def _hold(self, session: Session, *, say: Callable[[str], object] = print) -> Session:
        """Hold ``session`` from now on, in place of one that was taken over or lost."""
        if self.session is not None:
            self.session.detach()  # it has ended, or is this very session under an earlier connection
        session.settings.stop_gap_s = self._stop_gap_s
        words = self.apply_settings(session)
        if words and session.log.cells:  # without a cell, nothing was built on the old process groups
            say(words)
        self.session = session
        for words in session.news.pop_notices():
            say(words)
        return session

    def apply_settings(self, session: Session) -> str:
        """Apply the settings to ``session``; returns when a changed check of collectives takes effect."""
        session.settings.hang_s, session.settings.warm_s = self.settings.hang, self.settings.warm
        return session.settings.check_collectives(self.settings.check == "on") if session.is_alive else ""

    def detach(self) -> None:
        """Leave the session to a later notebook."""
        session, self.session = self.session, None
        if session is not None:
            session.detach()

    def leave_to_restart(self) -> None:
        """Leave the session to the next kernel: the front end drops output while it restarts this one."""
        session, self.session = self.session, None
        if session is not None:
            note_left(session.name, is_left=not session.log.running_cells, kernel=self._kernel)
            session.detach(is_seen=False)

    def end(self, name: str | None = None, *, cold: bool = False) -> None:
        """Stop the session, if one is running; with ``name``, one that this notebook does not hold.

        ``cold``: keep no process for the next start, not even that of an earlier session.
        """
        if name is not None and (self.session is None or self.session.name != name):
            if name not in (there := known_sessions()):
                raise _unknown_session(name, there)
            end_session(name, holder=self.name, ask_passphrase=ask_passphrase)
        elif ended := self.session or self._ended:
            self._ended, self.session = ended, None
            ended.stop(cold=cold)
            self._ended = None
            if ended.not_ended:
                nodes = ", ".join(ended.not_ended)
                print(f"{nodes} could not be reached; the ranks there exit after --linger (default {LINGER_S:.0f} s)")
        elif self.name in known_sessions():
            end_session(self.name, holder=self.name, ask_passphrase=ask_passphrase)
        if cold:
            drop_kept()

    def end_own(self) -> None:
        """Stop the session that this notebook holds, and no other."""
        drop_kept()
        if self.session is not None:
            self.end(cold=True)

    def running(self) -> Session:
        """Return the session. Raises: UsageError when there is none."""
        if self.session is None:
            if there := self.what_is_there:
                raise UsageError(f"this notebook holds no session\n{there}")
            raise UsageError("no session is running: start one with %%distributed or %distributed start")
        return self.session

    def for_cell(self, count: int | None, ranks: str | None = None, *, force: bool = False) -> Session:
        """Return the session, started if needed. Raises: SessionError; UsageError for another number of ranks."""
        if self.session is None:
            wanted = self._wanted_by_cell(count, force=force)
            if ranks and not wanted.nodes:
                self._require_no_hosts(ranks)
            if wanted.count and not wanted.nodes and ranks and _NUMBERS.fullmatch(ranks):
                parse_ranks(ranks, world_size=wanted.count)  # before ranks are started that the cell cannot use
            return self.start(wanted)
        if not self.session.is_alive:
            raise self.session.failure or SessionError(
                f"session {self.session.name!r} has ended: start another with %distributed restart"
            )
        before = self._started_with.count if self._started_with else None  # with nodes: ranks per node
        asked_for = (None, len(self.session.ranks), before)
        if count not in asked_for:
            raise UsageError(
                f"%%distributed: the session has {count_ranks(len(self.session.ranks))}; "
                f"to have {count}, %distributed restart -n {count} (all variables are lost)"
            )
        return self.session

    def _require_no_hosts(self, ranks: str) -> None:
        """Raise UsageError when ``ranks`` names hosts: a cell starts ranks on this machine alone."""
        parts = [part.strip() for part in ranks.split(",")]
        if hosts := [part for part in parts if part and part not in ("all", HERE) and not _NUMBERS.fullmatch(part)]:
            there = f"\n{self.what_is_there}" if self.what_is_there else ""
            raise UsageError(
                f"no session is running, so no rank or host is called {hosts[0]!r}: start a session on hosts with "
                f"%distributed start --nodes {','.join(hosts)}{there}"
            )

    def _wanted_by_cell(self, count: int | None, *, force: bool) -> StartOptions:
        """Return options for ranks on this machine, or on the hosts where a kernel restart left a session."""
        left = known_sessions().get(self.name)
        if left is None or not (left.nodes and left.is_left and left.holder == self.name):
            return StartOptions(count=count, force=force)
        before = StartOptions.of_earlier(self.name, left.nodes, left.started)
        if before.not_kept:
            print(before.not_kept)
        return replace(before, count=count or before.count, force=force)

    @property
    def what_is_there(self) -> str:
        """Lines about this notebook's sessions that earlier kernels left; empty when there are none."""
        return "" if self.session is not None else "\n".join(describe_waiting(self.name))

    @property
    def _left_behind(self) -> str:
        """The session that an earlier kernel of this notebook left, preferably the one with the default name."""
        return next(iter(waiting_sessions(self.name)), "")


def _holder_left_by(kernel: str) -> str:
    return next((known.holder for known in known_sessions().values() if kernel and known.left_by == kernel), "")


def _are_same_nodes(wanted: str | Sequence[Node] | None, before: str | Sequence[Node] | None) -> bool:
    """Compare nodes; after an attach, ``before`` has the nodes themselves, not the text of the user."""
    if wanted is None or before is None or isinstance(before, str):
        return wanted == before
    read = list(_read_nodes(wanted) or ())
    return len(read) == len(before) and all(map(_is_same_node, read, before))


def _is_same_node(wanted: Node, placed: Node) -> bool:
    """Compare nodes; ``placed`` always has a number of ranks, and devices for these alone."""
    ranks = wanted.ranks or placed.ranks
    devices = wanted.devices[:ranks] if isinstance(wanted.devices, tuple) else wanted.devices
    return wanted.model_copy(update={"ranks": ranks, "devices": devices}) == placed


def _read_nodes(nodes: str | Sequence[Node] | None, *, say: Callable[[str], object] = print) -> Sequence[Node] | None:
    """Return the nodes of the user's text, and show what they run before Python. Raises: SpecError."""
    if isinstance(nodes, str):
        from ..spec.nodes_file import parse_nodes

        nodes = parse_nodes(nodes)
    for node in nodes or ():
        for line in node.setup:
            say(f"{node.name} runs before Python: {line}")
    return nodes


def _unknown_session(name: str, there: Iterable[str]) -> SessionError:
    """Return the error for an unknown session name, with a similar name or all known names."""
    known = list(there)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    advice = f"did you mean {near[0]}?" if near else f"known sessions: {', '.join(known) or 'none'}"
    return SessionError(f"no session {name!r} is running on this machine, or was started from it; {advice}")


def ask_passphrase(path: str) -> str | None:
    """Ask for a passphrase through IPython, with hidden input; returns None where there is no input."""
    try:
        return getpass.getpass(f"passphrase of {path}: ") or None
    except (StdinNotImplementedError, EOFError):
        return None


def _linger_s() -> float:
    """Return DETRAIN_NB_LINGER in seconds, or the default."""
    text = os.environ.get("DETRAIN_NB_LINGER", "")
    try:
        return max(0.0, float(text))
    except ValueError:
        return LINGER_S
