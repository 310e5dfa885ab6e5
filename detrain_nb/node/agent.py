"""The agent: one per node and session, detached from what started it. Standard library only.

It listens on one Unix socket in a folder that only its user can enter. The notebook, and the workers that the launcher
starts, connect to it; it hands messages down to the workers, numbers and spools what they say, and gives it to the
notebook at the notebook's pace. It starts the launcher, and with its end ends every process of the session.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import fcntl
import os
import platform
import shutil
import signal
import socket
import struct
import subprocess
import sys
import traceback
import uuid
from pathlib import Path

from ..errors import WireError
from ..launch import usable_cpus
from ..wire import (
    PROTOCOL,
    Attach,
    Attached,
    EndSession,
    Frame,
    Launch,
    LauncherEnded,
    Link,
    LinkClosed,
    Message,
    Piece,
    Refused,
    Value,
    WorkerUp,
    to_frame,
)
from .loop import Loop
from .processes import adopt_orphans, die_with_parent, end_descendants
from .spool import Spool

SOCKET_NAME = "agent.sock"
PID_NAME = "agent.pid"
READY = "detrain-nb agent ready"
_END_LIMIT_S = 4.0
_FULL_BYTES = 16 << 20
_LOG_TAIL_BYTES = 4000


def main(folder: Path) -> None:
    """Serve one session in ``folder``, then remove it."""
    users_umask = os.umask(0o077)
    os.chdir(folder)
    with open("lock", "w", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"another agent serves {folder}")
        agent = _Agent(folder, users_umask)
        Path(PID_NAME).write_text(str(os.getpid()), encoding="ascii")
        os.write(1, f"{READY}\n".encode())  # in one piece: the starter hangs up when it has read it
        _leave_the_starter()
        try:
            agent.run()
        except Exception as exc:
            agent.say_last_words(f"the agent failed: {exc!r}, at {traceback.extract_tb(exc.__traceback__)[-1]}")
            raise
        finally:
            ended = folder.with_name(f".ended-{os.getpid()}")
            folder.rename(ended)  # the name is free from now on
            agent.end()
            shutil.rmtree(ended, ignore_errors=True)


def count_gpus() -> int:
    """The GPUs that a process started here may use, without a CUDA call: NVML counts, nvidia-smi does without it."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        chosen = [device for device in visible.split(",") if device.strip() not in ("", "-1")]
        return min(len(chosen), _count_with_nvml())
    return _count_with_nvml()


def _count_with_nvml() -> int:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return _count_with_nvidia_smi()
    count = ctypes.c_uint(0)
    if nvml.nvmlInit_v2() != 0:
        return 0
    failed = nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    nvml.nvmlShutdown()
    return 0 if failed else count.value


def _count_with_nvidia_smi() -> int:
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=10, check=True)
    except (subprocess.SubprocessError, OSError):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


class _Agent:
    def __init__(self, folder: Path, users_umask: int) -> None:
        self._folder = folder
        self._users_umask = users_umask
        self._incarnation = uuid.uuid4().hex
        self._loop = Loop()
        self._spool = Spool(folder)
        self._notebook: Link | None = None
        self._workers: dict[int, Link] = {}
        self._launcher: subprocess.Popen[bytes] | None = None
        self._ranks: list[int] = []
        self._is_ending = False
        self._listener = socket.socket(socket.AF_UNIX)
        Path(SOCKET_NAME).unlink(missing_ok=True)
        self._listener.bind(SOCKET_NAME)  # relative: the path of a folder may be longer than a socket's may be
        self._listener.listen(64)
        self._listener.setblocking(False)
        self._child_ended, child_signal = os.pipe()
        os.set_blocking(self._child_ended, False)
        os.set_blocking(child_signal, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.set_wakeup_fd(child_signal, warn_on_full_buffer=False)
        adopt_orphans()

    def run(self) -> None:
        """Serve until the session ends, or its notebook is gone."""
        self._loop.add(self._listener.fileno(), self._accept)
        self._loop.add(self._child_ended, self._on_child_ended)
        while not self._is_ending:
            self._loop.once()
            self._feed_notebook()
            self._hold_back()

    def _hold_back(self) -> None:
        """Do not read values faster than the other side takes them."""
        if self._notebook:
            for worker in self._workers.values():
                self._loop.pause(worker, self._notebook.waiting_bytes > _FULL_BYTES)
            is_any_full = any(worker.waiting_bytes > _FULL_BYTES for worker in self._workers.values())
            self._loop.pause(self._notebook, is_any_full)

    def say_last_words(self, reason: str) -> None:
        """Tell the notebook why its session ends, as far as that is still possible."""
        if self._notebook:
            with contextlib.suppress(LinkClosed):
                self._notebook.send(Refused(reason))

    def end(self) -> None:
        """End the ranks, the launcher, and whatever else the session started."""
        for link in self._workers.values():
            with contextlib.suppress(LinkClosed):
                link.flush()
            link.close()  # a worker takes this as the end, and ends its rank
        if self._launcher:
            try:
                self._launcher.wait(_END_LIMIT_S)
            except subprocess.TimeoutExpired:
                self._launcher.kill()
        end_descendants()
        self._spool.close()
        self._listener.close()

    # ---- connections

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except BlockingIOError:
            return
        if not _is_same_user(sock):
            sock.close()
            return
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        link = Link(sock)
        self._loop.add(link, lambda: self._first_message(link))

    def _first_message(self, link: Link) -> None:
        """The first message says who connected."""
        try:
            frames = link.receive()
            if not frames:
                return
            message = frames[0].message()
            if isinstance(message, WorkerUp):
                self._workers[message.rank] = link
                self._loop.add(link, lambda: self._from_worker(link))
                self._spool_frames(frames[1:])
            elif isinstance(message, Attach):
                self._attach(link, message)
                for frame in frames[1:]:
                    self._handle(frame)
            else:
                raise WireError(f"{type(message).__name__} does not introduce anybody")
        except WireError:
            self._hang_up(link)

    def _attach(self, link: Link, message: Attach) -> None:
        if self._notebook is not None:
            link.send(Refused(f"a notebook is attached to session {message.session!r} already"))
            self._hang_up(link)
            return
        if message.protocol != PROTOCOL:
            spoken = f"the notebook speaks protocol {message.protocol}, this node {PROTOCOL}"
            link.send(Refused(f"{spoken}: install one version of detrain_nb on both"))
            self._hang_up(link)
            return
        self._notebook = link
        self._loop.add(link, self._from_notebook)
        link.send(
            Attached(
                self._incarnation,
                os.getpid(),
                platform.node(),
                gpus=count_gpus(),
                cpus=usable_cpus(),
                last_number=self._spool.last_number,
                ranks=self._ranks,
            )
        )

    def _hang_up(self, link: Link) -> None:
        self._loop.remove(link)
        link.close()

    # ---- notebook -> workers

    def _from_notebook(self) -> None:
        assert self._notebook is not None
        try:
            for frame in self._notebook.receive():
                self._handle(frame)
        except WireError as exc:
            if not isinstance(exc, LinkClosed):
                self.say_last_words(f"the agent could not read a message: {exc}")
            self._hang_up(self._notebook)
            self._notebook = None
            self._is_ending = True  # its notebook is gone

    def _handle(self, frame: Frame) -> None:
        message = frame.message()
        if isinstance(message, Launch):
            self._launch(message)
        elif isinstance(message, EndSession):
            self._is_ending = True
        else:
            data = frame.to_bytes()
            for rank in getattr(message, "ranks", []):
                self._to_worker(rank, data)

    def _to_worker(self, rank: int, data: bytes) -> None:
        link = self._workers.get(rank)
        if link is not None:
            with contextlib.suppress(LinkClosed):  # its reader meets the end as well
                link.send_bytes(data)

    def _launch(self, message: Launch) -> None:
        agent_pid = os.getpid()
        self._ranks = message.ranks
        with open("launcher.log", "wb") as log:
            try:
                self._launcher = subprocess.Popen(
                    message.argv,
                    env={**os.environ, **message.env},
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    umask=self._users_umask,  # what a rank saves, others may read as ever
                    preexec_fn=lambda: die_with_parent(agent_pid),  # noqa: PLW1509  the agent has one thread
                )
            except OSError as exc:
                self._say(LauncherEnded(127, f"{message.argv[0]} cannot be started: {exc}"))

    # ---- workers -> notebook

    def _from_worker(self, link: Link) -> None:
        try:
            self._spool_frames(link.receive())
        except WireError:
            self._hang_up(link)
            for rank in [rank for rank, worker in self._workers.items() if worker is link]:
                del self._workers[rank]

    def _spool_frames(self, frames: list[Frame]) -> None:
        """Number and keep what ranks say; values that were asked for go to who asked, and are never kept."""
        for frame in frames:
            if frame.header.endswith((b'"type":"Piece"}', b'"type":"Value"}')) and isinstance(
                frame.message(), (Piece, Value)
            ):
                if self._notebook:
                    self._feed_notebook(everything=True)  # the order of what one rank says is kept
                    self._notebook.send_bytes(frame.to_bytes())
            else:
                self._spool.append(frame)

    def _say(self, message: Message) -> None:
        self._spool.append(to_frame(message))

    def _feed_notebook(self, *, everything: bool = False) -> None:
        """Give the notebook what it has not had, as far as it takes it."""
        if self._notebook is None:
            return
        with contextlib.suppress(LinkClosed):  # its reader meets the end as well
            while self._spool.has_more and (everything or not self._notebook.waiting_bytes):
                self._notebook.send_bytes(self._spool.read())

    # ---- the launcher

    def _on_child_ended(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._child_ended, 4096)
        if self._launcher and self._launcher.poll() is not None and not self._is_ending:
            exit_code, self._launcher = self._launcher.returncode, None
            end_descendants()
            self._say(LauncherEnded(exit_code, _log_tail()))


def _log_tail() -> str:
    with open("launcher.log", "rb") as log:
        log.seek(0, os.SEEK_END)
        log.seek(max(0, log.tell() - _LOG_TAIL_BYTES))
        return log.read().decode(errors="replace")


def _is_same_user(sock: socket.socket) -> bool:
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # the folder's mode keeps others out
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.getuid())


def _leave_the_starter() -> None:
    """Keep nothing of who started us: its end must not end us, nor our output reach it."""
    nothing = os.open(os.devnull, os.O_RDWR)
    log = os.open("agent.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(log)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
