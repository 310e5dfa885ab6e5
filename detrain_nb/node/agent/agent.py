"""The agent: one per node and session, detached from what started it. Standard library only.

The agent listens on one Unix socket in a folder that only its user can enter. The notebook and the workers (started by
the launcher) connect to it. The agent forwards the notebook's messages to the workers. It numbers and spools the
workers' messages and sends them to the notebook at the notebook's pace. When the notebook disconnects, the agent keeps
the ranks for the linger time and sends the next notebook everything that was not acknowledged. It starts the launcher;
when the agent exits, it stops every process of the session.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import platform
import shutil
import signal
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...agents import ENDED_PREFIX, HOLDER_NAME, LOCK_NAME, PID_NAME, READY, SOCKET_NAME, is_same_user
from ...errors import WireError
from ...launch import GPUS_VARIABLE, usable_cpus
from ...locks import take_lock
from ...metrics import STEPS_VARIABLE
from ...wire import (
    ALIVE_GAP_S,
    FROM_NOTEBOOK,
    FROM_WORKER,
    MAX_HEADER_BYTES,
    MAX_ORDER_HEADER_BYTES,
    PROTOCOL,
    Acknowledge,
    Alive,
    Attach,
    Attached,
    EndSession,
    Frame,
    Json,
    Launch,
    LauncherEnded,
    Link,
    LinkClosed,
    Measure,
    Message,
    OpenStore,
    OtherProtocol,
    Piece,
    RankEnded,
    Received,
    Refused,
    Renumber,
    StartedCold,
    StoreOpened,
    Value,
    WorkerUp,
    check_sender,
    to_frame,
)
from ..system.gpus import count_gpus, list_gpus, name_gpus
from ..system.loop import Loop
from ..system.memory_room import free_memory_bytes
from ..system.processes import lead_nowhere
from .gpu_watch import VisibleGpus
from .kept import AgentProcess
from .pace import Pace
from .sampler import Sampler
from .snapshot import Snapshot
from .spool import Spool
from .step_rates import make_places

_ATTACH_LIMIT_S = 30.0
_FULL_BYTES = 16 << 20
_SMALL_BYTES = 1 << 16
_CONFIRM_GAP_S = 0.02
_STORE_BACKLOG = 128


def main(folder: Path, lock: int | None = None) -> None:
    """Serve one session in ``folder``, then remove the folder; serve further sessions if the notebook asked for it.

    ``lock``: the descriptor of the folder's lock, if the process that started the agent already holds it.
    """
    process = AgentProcess(users_umask=os.umask(0o077))
    os.chdir(folder)
    if lock is None:
        lock = take_lock(folder / LOCK_NAME, is_new=True)
        if lock is None:
            sys.exit(f"another agent serves {folder}")
    os.set_inheritable(lock, False)  # a child must not hold the lock longer than the agent lives
    agent: _Agent | None = _Agent(folder, lock, process)
    while agent:
        agent.serve()
        wait_for_next = agent.leave()
        agent = None  # free the finished session's memory before waiting
        agent = wait_for_next()
    process.launching.end()


def _free_the_name(folder: Path) -> Path | None:
    """Rename the folder so that another session can use its name.

    Returns the new path; None if the folder was removed or cannot be renamed.
    """
    ended = folder.with_name(f"{ENDED_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}")
    try:
        if os.path.samestat(folder.lstat(), os.stat(".")):
            folder.rename(ended)
            return ended
    except OSError as exc:
        print(f"the session's folder cannot be renamed, and stays: {exc}", file=sys.stderr)
    return None


class _Agent:
    """One session."""

    def __init__(self, folder: Path, lock: int, process: AgentProcess, link: Link | None = None) -> None:
        """Listen in ``folder``, the current folder. ``link``: a connection whose other end is not known yet."""
        self._folder = folder
        self._lock = lock
        self._process = process
        self._launching = process.launching
        self._keep_s = 0.0  # how long to stay for the notebook's next session
        self._incarnation = uuid.uuid4().hex
        self._loop = Loop()
        self._spool = Spool(Path(), known_as=folder)  # relative: the folder is renamed before it is removed
        self._snapshot = Snapshot()
        self._pace = Pace()
        self._sampler = Sampler()
        self._notebook: Link | None = None
        self._holder = ""
        self._received = 0  # the highest message number from the notebook; 0 if it does not number its messages
        self._measured = b""  # the latest measurement, not yet sent to the notebook
        self._confirm_at: float | None = None  # when to send a confirmation, unless other data carries it earlier
        self._store: socket.socket | None = None
        self._ends_at: float | None = time.monotonic() + _ATTACH_LIMIT_S  # unless a notebook attaches earlier
        self._workers: dict[int, Link] = {}
        self._is_ending = False
        self._notebook_handlers: dict[type[Message], Callable[[Any], None]] = {  # all others are forwarded to ranks
            Acknowledge: self._acknowledge,
            OpenStore: self._open_store,
            Launch: self._launch,
            EndSession: self._end_session,
            Alive: self._answer_alive,
            Renumber: self._renumber,
            Measure: self._measure,
        }
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        self._listener = socket.socket(socket.AF_UNIX)
        Path(SOCKET_NAME).unlink(missing_ok=True)
        self._listener.bind(SOCKET_NAME)  # relative: the full path may exceed the length limit of socket paths
        self._listener.listen(64)
        self._listener.setblocking(False)
        if link:
            self._watch(link)

    def serve(self) -> None:
        """Serve the session to its end, then clean up everything except the connection to the notebook."""
        try:
            Path(PID_NAME).write_text(str(os.getpid()), encoding="ascii")
            os.write(1, READY)  # one write: the process that started the agent reads it; later sessions have no reader
            _write_to_the_log()
            self.run()
        except BaseException as exc:
            self._keep_s = 0.0
            traceback.print_exc()  # into agent.log
            if isinstance(exc, Exception):
                where = traceback.extract_tb(exc.__traceback__)[-1]
                self.say_last_words(f"the agent failed: {exc!r}, at {where}")
            raise
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # already ending
            ended = _free_the_name(self._folder)
            self.end()
            lead_nowhere(1, 2)  # on NFS an open file would keep the folder from being removed
            os.close(self._lock)
            if ended:
                shutil.rmtree(ended, ignore_errors=True)
            os.chdir("/")
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def run(self) -> None:
        """Serve until the session ends, or until no notebook has been attached for the linger time."""
        self._loop.add(self._listener.fileno(), self._accept)
        self._loop.add(self._process.child_ended, lambda: self._note_end(self._process.take_end()))
        self._loop.add(self._launching.channel.fileno(), lambda: self._note_end(self._launching.take_answer()))
        while not self._is_ending:
            moments = self._ends_at, self._confirm_at, self._launching.answer_by, self._pace.lets_go_at
            self._loop.once(*moments, self._sampler.due_at)
            self._note_end(self._launching.take_silence())
            self._measure_what_is_due()
            self._feed_notebook()
            self._hold_back()
            self._is_ending = self._is_ending or (self._ends_at is not None and time.monotonic() >= self._ends_at)

    def _hold_back(self) -> None:
        """Pause reading from a side while the other side has too many bytes waiting to be sent to it."""
        waiting_bytes = self._notebook.waiting_bytes if self._notebook else 0
        has_to_wait = self._pace.has_to_wait(self._spool, waiting_bytes) if self._notebook else False
        for worker in self._workers.values():
            self._loop.pause(worker, has_to_wait or waiting_bytes > _FULL_BYTES)
        if self._notebook:
            is_any_full = any(worker.waiting_bytes > _FULL_BYTES for worker in self._workers.values())
            self._loop.pause(self._notebook, is_any_full)
            if is_any_full and self._confirm_at is None:  # its Alive messages are not read now, but need an answer
                self._confirm_at = time.monotonic() + ALIVE_GAP_S

    def say_last_words(self, reason: str, *, is_taken: bool = False) -> None:
        """Send the notebook the reason why its session ends, if it is still connected."""
        if self._notebook:
            with contextlib.suppress(LinkClosed):
                self._notebook.send(Refused(reason, is_taken))

    def end(self) -> None:
        """Stop the ranks, the launcher and everything else that the session started."""
        self._sampler.end()
        for link in self._workers.values():
            with contextlib.suppress(LinkClosed):
                link.flush()
            link.close()  # a worker then stops its rank and exits
        self._launching.end(keep_warm=self._keep_s > 0)
        self._spool.close()
        self._listener.close()
        self._loop.close()

    def leave(self) -> Callable[[], _Agent | None]:
        """Return a function that waits for the notebook's next session; it returns None if none starts in time."""
        link, process = self._notebook, self._process
        if not self._keep_s or link is None:
            return lambda: None
        make = functools.partial(_Agent, process=process, link=link)
        return functools.partial(process.wait_for_next, link, keep_s=self._keep_s, beside=self._folder, make=make)

    # ---- connections

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        if not is_same_user(sock):
            sock.close()
            return
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        self._watch(Link(sock, max_header_bytes=MAX_ORDER_HEADER_BYTES))

    def _watch(self, link: Link) -> None:
        self._loop.add(link, lambda: self._first_message(link))

    def _first_message(self, link: Link) -> None:
        """Find out from its first message whether a worker or a notebook has connected."""
        try:
            frames = link.receive()
            if not frames:
                return
            message = frames[0].message()
            if isinstance(message, WorkerUp):
                self._workers[message.rank] = link
                link.limit_headers(MAX_HEADER_BYTES)  # the notebook's limit, above which it disconnects
                self._loop.add(link, lambda: self._from_worker(link))
                self._from_worker(link, frames[1:])
            elif isinstance(message, Attach):
                if self._attach(link, message):
                    self._from_notebook(frames[1:])
            else:
                raise WireError(f"{type(message).__name__} is not allowed as the first message")
        except OtherProtocol as exc:
            self._refuse(link, str(exc))
        except WireError:
            self._hang_up(link)

    def _attach(self, link: Link, message: Attach) -> bool:
        """Serve another notebook from now on; returns False if it is refused."""
        if refusal := self._why_refuse(message):
            self._refuse(link, refusal)
            return False
        if self._notebook is not None:
            self.say_last_words(
                f"session {message.session!r} was taken over by {message.holder}: "
                "%distributed attach --steal takes it back",
                is_taken=True,
            )
            self._lose_notebook()
        self._notebook, self._holder, self._ends_at, self._confirm_at = link, message.holder, None, None
        if not message.resumes:
            self._received = 0
        with contextlib.suppress(OSError):  # a full disk
            Path(HOLDER_NAME).write_text(message.holder, encoding="utf-8", errors="replace")
        self._loop.add(link, self._from_notebook)
        sent = self._spool.sent
        self._spool.rewind()
        with contextlib.suppress(LinkClosed):  # reading from it fails too, and is handled there
            for remembered in self._snapshot.told():
                link.send(remembered)
            link.send(self._describe(sent))
        return True

    def _refuse(self, link: Link, reason: str) -> None:
        with contextlib.suppress(LinkClosed):
            link.send(Refused(reason, is_taken=True))
        self._hang_up(link)

    def _why_refuse(self, message: Attach) -> str:
        """Return why the notebook may not attach; empty if it may.

        The holder itself always may: its earlier connection must then be half-open.
        """
        if message.protocol != PROTOCOL:
            spoken = f"the notebook speaks protocol {message.protocol}, this node {PROTOCOL}"
            return f"{spoken}: install one version of detrain_nb on both"
        if message.resumes and message.holder != self._holder:
            return f"session {message.session!r} was taken over by {self._holder} in the meantime"
        if self._notebook is None or message.steal or message.holder == self._holder:
            return ""
        return f"session {message.session!r} is held by {self._holder}: %distributed attach --steal takes it over"

    def _describe(self, sent: int) -> Attached:
        return Attached(
            self._incarnation,
            os.getpid(),
            platform.node(),
            gpus=count_gpus(),
            cpus=usable_cpus(),
            last_number=self._spool.last_number,
            acknowledged=self._spool.acknowledged,
            sent=sent,
            ranks=self._snapshot.ranks,
            with_group=self._snapshot.with_group,
            generation=self._snapshot.generation,
            info=_with_abilities(self._snapshot.info),
            received=self._received,
            free_bytes=free_memory_bytes() or 0,
        )

    def _lose_notebook(self) -> None:
        """Disconnect the notebook; the ranks keep running, and their output is kept, for the linger time."""
        assert self._notebook is not None
        with contextlib.suppress(LinkClosed):
            self._notebook.flush()
        self._hang_up(self._notebook)
        self._notebook = self._confirm_at = None
        self._measured = b""
        self._pace = Pace()
        self._sampler.end()
        self._ends_at = time.monotonic() + self._snapshot.linger_s

    def _hang_up(self, link: Link) -> None:
        self._loop.remove(link)
        link.close()

    # ---- notebook -> workers

    def _from_notebook(self, frames: list[Frame] | None = None) -> None:
        """Handle messages of the notebook: ``frames``, if they arrived with its first one; else what arrives now."""
        assert self._notebook is not None
        try:
            self._handle_all(self._notebook.receive() if frames is None else frames)
        except WireError as exc:
            if not isinstance(exc, LinkClosed):
                self.say_last_words(f"the agent could not read a message: {exc}")
            if self._notebook is not None:
                self._lose_notebook()

    def _handle_all(self, frames: list[Frame]) -> None:
        """Handle the notebook's messages, skipping those that it repeats after reconnecting."""
        received = self._received
        for frame in frames:
            if frame.number == 0 or frame.number > self._received:
                self._received = max(self._received, frame.number)
                self._handle(frame)
        if self._received > received:
            is_large = sum(len(frame.body) for frame in frames) > _SMALL_BYTES  # the notebook waits to send more
            self._confirm_at = min(self._confirm_at or math.inf, time.monotonic() + (0 if is_large else _CONFIRM_GAP_S))

    def _handle(self, frame: Frame) -> None:
        check_sender(frame.kind, FROM_NOTEBOOK)
        message = frame.message()
        self._snapshot.take_from_notebook(message)
        if handle := self._notebook_handlers.get(frame.kind):
            handle(message)
        else:
            self._to_workers(message, frame.to_bytes())

    def _acknowledge(self, message: Acknowledge) -> None:
        self._spool.acknowledge(message.number)

    def _end_session(self, message: EndSession) -> None:
        self._is_ending, self._keep_s = True, max(0.0, message.keep_s)

    def _answer_alive(self, _: Alive) -> None:
        self._confirm_at = time.monotonic()  # answer at once

    def _measure(self, message: Measure) -> None:
        self._sampler.take_order(message)
        if self._sampler.due_at is None:
            self._measured = b""

    def _renumber(self, message: Renumber) -> None:
        self._to_workers(message, to_frame(message).to_bytes())
        self._measured = b""  # it has the old rank numbers
        number = dict(zip(message.ranks, message.numbers))
        self._workers = {number.get(rank, rank): link for rank, link in self._workers.items()}

    def _to_workers(self, message: Message, data: bytes) -> None:
        for rank in getattr(message, "ranks", []):
            if link := self._workers.get(rank):
                with contextlib.suppress(LinkClosed):  # reading from it fails too, and is handled there
                    link.send_bytes(data)

    def _open_store(self, message: OpenStore) -> None:
        """Bind the store's socket in the agent, so that its port is known before any rank has imported torch."""
        address = message.address
        try:
            family = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM)[0][0]
            self._store = socket.create_server((address, 0), family=family, backlog=_STORE_BACKLOG)
            opened = StoreOpened(self._store.getsockname()[1])
        except (OSError, ValueError) as exc:  # ValueError: a host name that cannot be encoded
            opened = StoreOpened(0, f"the store cannot listen on {address} of {platform.node()}: {exc}")
        self._say(opened)

    def _launch(self, message: Launch) -> None:
        self._spool.limit_bytes = message.spool_limit_bytes
        env = {**os.environ, **message.env}
        if "PYTHONPATH" in message.env and (own := os.environ.get("PYTHONPATH")):  # our code may be there
            env["PYTHONPATH"] = os.pathsep.join([own, message.env["PYTHONPATH"]])
        if GPUS_VARIABLE in message.env and "CUDA_VISIBLE_DEVICES" not in message.env:
            env["CUDA_VISIBLE_DEVICES"] = name_gpus(message.env[GPUS_VARIABLE], list_gpus())
        self._sampler.visible = VisibleGpus(env.get("CUDA_VISIBLE_DEVICES"), order=env.get("CUDA_DEVICE_ORDER", ""))
        env[STEPS_VARIABLE] = make_places(len(message.ranks))  # the variable may be inherited from an outer session
        store, self._store = self._store, None
        self._note_end(self._launching.start(message.argv, env, store))

    # ---- workers -> notebook

    def _from_worker(self, link: Link, frames: list[Frame] | None = None) -> None:
        """Handle messages of a worker: ``frames``, if they arrived with its first one; else what arrives now."""
        try:
            self._spool_frames(link.receive() if frames is None else frames)
        except WireError as exc:
            self._hang_up(link)
            for rank in [rank for rank, worker in self._workers.items() if worker is link]:
                del self._workers[rank]
                is_faulty = not isinstance(exc, LinkClosed)  # a worker that exits stops the launcher, which reports it
                if is_faulty and self._launching.is_launched:
                    gone = f"the agent disconnected its worker: {exc}"
                    self._spool_frames([to_frame(RankEnded(rank, 0, 0, 0, -1, "", gone, False, gone))])

    def _spool_frames(self, frames: list[Frame]) -> None:
        """Keep the messages of ranks, numbered; requested values go straight to the notebook and are not kept.

        Raises: WireError for an invalid message, which must not reach the notebook: it would disconnect the whole node.
        """
        for frame in frames:
            check_sender(frame.kind, FROM_WORKER)
            message = frame.message()
            if isinstance(message, (Piece, Value)):
                if self._notebook:
                    self._feed_notebook(everything=True)  # keep the order of each rank's messages
                    with contextlib.suppress(LinkClosed):  # reading from it fails too, and is handled there
                        self._notebook.send_bytes(self._take_measured() + frame.to_bytes())
            else:
                self._snapshot.take_from_rank(message)
                self._spool.append(frame)

    def _say(self, message: Message) -> None:
        self._spool.append(to_frame(message))

    def _feed_notebook(self, *, everything: bool = False) -> None:
        """Send the notebook what it has not received; unless ``everything``, only as fast as it reads."""
        if self._notebook is None:
            return
        with contextlib.suppress(LinkClosed):  # reading from it fails too, and is handled there
            while self._spool.has_more and (everything or not self._notebook.waiting_bytes):
                self._notebook.send_bytes(self._take_measured() + self._confirm() + self._spool.read())
            if self._confirm_at is not None and (self._is_ending or time.monotonic() >= self._confirm_at):
                self._notebook.send_bytes(self._confirm())
            if self._measured and not self._notebook.waiting_bytes:
                self._notebook.send_bytes(self._take_measured())

    def _measure_what_is_due(self) -> None:
        """Measure if it is time. Only the latest measurement is kept; it bypasses the spool and any output in it."""
        due_at = self._sampler.due_at
        measured = self._sampler.measure(self._snapshot.up, self._snapshot.runs) if due_at is not None else None
        if measured and self._notebook:
            self._measured = to_frame(measured).to_bytes()

    def _take_measured(self) -> bytes:
        measured, self._measured = self._measured, b""
        return measured

    def _confirm(self) -> bytes:
        """Return the confirmation of the notebook's messages; empty if none is due to be sent."""
        if self._confirm_at is None:
            return b""
        self._confirm_at = None
        return to_frame(Received(self._received)).to_bytes()

    # ---- the launcher

    def _note_end(self, end: LauncherEnded | None) -> None:
        if why_cold := self._launching.take_why_cold():
            self._say(StartedCold(why_cold))
        if end and not self._is_ending:
            self._launching.end_ranks()
            self._say(end)


def _with_abilities(info: Json) -> Json:
    return {**(info if isinstance(info, dict) else {}), "measures": True, "tells_variables": True}


def _write_to_the_log() -> None:
    """Detach from the process that started the agent, and write output to agent.log."""
    lead_nowhere(0)
    log = os.open("agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
