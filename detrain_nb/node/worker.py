"""The worker: the process of a rank that torchrun's engine knows; one per rank, single-threaded, never touches CUDA.

It forks the interpreter and owns the read ends of its stdout and stderr, so that output, the line a rank is at, and the
news of its death leave the node even while code in the interpreter holds the GIL or hangs.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import functools
import mmap
import os
import re
import selectors
import signal
import socket
import termios
import time
import traceback
from dataclasses import dataclass, field

from ..launch import RankConfig
from ..wire import (
    CellDone,
    CellFailed,
    Frame,
    GenerationReady,
    Interrupt,
    Link,
    LinkClosed,
    Locate,
    Output,
    Position,
    RankEnded,
    RankUp,
    RunCell,
    WorkerUp,
)
from .loop import Loop, Source
from .processes import adopt_orphans, close_inherited_sockets, die_with_parent, end_descendants, memory_bytes

_PIPE_BYTES = 1 << 20
_SMALL_READ_BYTES = 1 << 16
_FULL_BYTES = 16 << 20  # above this the ranks wait in their print until the agent has taken some
_LOCATE_LIMIT_S = 0.5
_DUMP_GAP_S = 0.01
_LEAVE_LIMIT_S = 1.0
_STDERR_TAIL_BYTES = 4000
_LAST_LINES = 10
_CELL_LINE = re.compile(r'File "<cell (\d+)>", line (\d+)')


def main() -> None:
    """What the engine calls, in a process of its own, once per rank; returns when the session ends."""
    launcher_pid = os.getppid()
    config = RankConfig.from_env(os.environ)
    rank = int(os.environ["RANK"])
    agent = socket.socket(socket.AF_UNIX)
    agent.connect(config.agent_socket)
    close_inherited_sockets(keep={agent.fileno()})
    adopt_orphans()
    try:
        _Worker(config, rank, Link(agent)).run()
    finally:
        end_descendants()
        die_with_parent(launcher_pid)  # the engine waits for all workers together, and they for it


@dataclass
class _Interpreter:
    """The interpreter's process as its worker holds it."""

    pid: int
    link: Link
    outputs: dict[str, int]
    where: int
    state: str = "starting"
    cell: int = 0
    since: float = field(default_factory=time.monotonic)
    stderr_tail: bytes = b""

    @property
    def sources(self) -> list[Source]:
        """What it says something through, save where it is."""
        return [self.link, *self.outputs.values()]


class _Worker:
    def __init__(self, config: RankConfig, rank: int, agent: Link) -> None:
        self._config = config
        self._rank = rank
        self._agent = agent
        self._loop = Loop()
        self._is_holding_back = False
        self._read_bytes = _SMALL_READ_BYTES
        self._locating: list[int] = []  # requests
        self._dump = b""  # what faulthandler has written of the stack so far
        self._answer_at = 0.0
        self._child_ended, child_signal = os.pipe()
        os.set_blocking(self._child_ended, False)
        os.set_blocking(child_signal, False)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(child_signal, warn_on_full_buffer=False)
        self._interrupted_cell = mmap.mmap(-1, 8)  # shared with the interpreter: which cell a SIGINT is meant for
        self._agent.send(WorkerUp(rank, os.getpid()))
        self._interpreter = self._fork_interpreter()

    def run(self) -> None:
        """Pass messages and output on until the agent is gone."""
        self._loop.add(self._agent, self._from_agent)
        self._loop.add(self._child_ended, self._on_child_ended)
        self._watch(self._interpreter)
        with contextlib.suppress(LinkClosed):
            while True:
                self._wait_once()
        self._leave()

    def _wait_once(self) -> None:
        self._loop.once(max(0.0, self._answer_at - time.monotonic()) if self._locating else None)
        if self._locating and time.monotonic() >= self._answer_at:
            self._answer_locate()
        self._hold_back()

    def _hold_back(self) -> None:
        """Do not read faster than the other side takes it; a rank then waits in its print."""
        interpreter = self._interpreter
        self._loop.pause(self._agent, interpreter.link.waiting_bytes > _FULL_BYTES)
        is_full = self._agent.waiting_bytes > _FULL_BYTES
        if is_full != self._is_holding_back:
            self._is_holding_back = is_full
            for source in interpreter.sources:
                self._loop.pause(source, is_full)

    # ---- the interpreter's process

    def _fork_interpreter(self) -> _Interpreter:
        ours, theirs = socket.socketpair()
        pipes = {name: os.pipe() for name in ("stdout", "stderr", "where")}
        parent_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                self._become_interpreter(theirs, {name: write for name, (_, write) in pipes.items()}, parent_pid)
                status = 0
            except BaseException:  # noqa: BLE001  its last words go where the worker reads them
                os.write(2, traceback.format_exc().encode(errors="replace"))
            finally:
                os._exit(status)
        theirs.close()
        for read, write in pipes.values():
            os.close(write)
            os.set_blocking(read, False)
            with contextlib.suppress(OSError, AttributeError):  # more room: a rank that prints runs ahead of us
                fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        outputs = {name: pipes[name][0] for name in ("stdout", "stderr")}
        return _Interpreter(pid, Link(ours), outputs, pipes["where"][0])

    def _become_interpreter(self, link: socket.socket, pipes: dict[str, int], parent_pid: int) -> None:
        """In the forked process: leave the worker's descriptors behind, and serve cells until the worker hangs up."""
        os.setpgid(0, 0)
        die_with_parent(parent_pid)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("500")  # short of memory, the kernel ends this process and not the worker
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing, 0), (pipes["stdout"], 1), (pipes["stderr"], 2)):
            os.dup2(source, target)
        close_inherited_sockets(keep={link.fileno()})
        faulthandler.register(signal.SIGUSR1, file=pipes["where"], all_threads=False)
        faulthandler.enable(file=pipes["where"], all_threads=False)  # a crash says where, not what torch's engine did
        from . import interpreter

        interpreter.serve(self._config, self._rank, link, self._interrupted_cell)

    def _watch(self, interpreter: _Interpreter) -> None:
        self._loop.add(interpreter.link, self._from_interpreter)
        self._loop.add(interpreter.where, self._on_where)
        for name, fd in interpreter.outputs.items():
            self._loop.add(fd, functools.partial(self._read_output, name, fd))

    def _unwatch(self, interpreter: _Interpreter) -> None:
        for source in (*interpreter.sources, interpreter.where):
            self._loop.remove(source)

    def _on_child_ended(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.read(self._child_ended, 4096)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # orphans of the rank come here too
                if ended[0] == self._interpreter.pid:
                    self._report_end(ended[1])

    def _report_end(self, wait_status: int) -> None:
        """The interpreter ended by itself: say so with its last words, and end what it left running."""
        interpreter = self._interpreter
        self._unwatch(interpreter)
        with contextlib.suppress(LinkClosed):
            self._pass_on(interpreter.link.receive())
        end_descendants()
        self._drain()
        interpreter.state = "lost"
        interpreter.link.close()
        exit_code = os.waitstatus_to_exitcode(wait_status)
        self._agent.send(
            RankEnded(
                self._rank,
                interpreter.pid,
                interpreter.cell,
                signal=max(0, -exit_code),
                exit_code=max(0, exit_code),
                stderr_tail=self._last_words(),
            )
        )

    def _last_words(self) -> str:
        """The last lines of stderr, each as it stood when last redrawn; where a crash was, down to the cell's line."""
        self._read_dump()
        crash, _, below = self._dump.decode(errors="replace").partition("Fatal Python error: ")[2].partition("\n\n")
        words = (
            self._interpreter.stderr_tail.decode(errors="replace")
            .replace("\r\n", "\n")
            .strip("\n")
            .split("\n")[-_LAST_LINES:]
        )
        words = [line.rpartition("\r")[2] for line in words]
        if crash:
            words.append(f"Fatal Python error: {crash}")
            for line in below.splitlines()[1:]:
                words.append(line)
                if _CELL_LINE.search(line):
                    break
        return "\n".join(words)

    def _leave(self) -> None:
        """The session ends: an idle interpreter may run its exit functions, whatever still runs then is killed."""
        interpreter = self._interpreter
        if interpreter.state == "lost":
            return
        interpreter.link.close()
        deadline = time.monotonic() + (_LEAVE_LIMIT_S if interpreter.state == "idle" else 0)
        with selectors.DefaultSelector() as selector:
            selector.register(self._child_ended, selectors.EVENT_READ)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(interpreter.pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
                    selector.select(deadline - time.monotonic())
                    with contextlib.suppress(BlockingIOError):
                        os.read(self._child_ended, 4096)

    # ---- agent -> interpreter

    def _from_agent(self) -> None:
        for frame in self._agent.receive():
            message = frame.message()
            if isinstance(message, Locate):
                self._locate(message.request)
            elif isinstance(message, Interrupt):
                if self._interpreter.state == "running" and self._interpreter.cell == message.cell:
                    self._interrupted_cell[:] = message.cell.to_bytes(8, "little")
                    os.kill(self._interpreter.pid, signal.SIGINT)
            elif self._interpreter.state != "lost":
                if isinstance(message, RunCell):
                    self._set_state("running", cell=message.cell)
                    self._interpreter.stderr_tail = b""
                self._to_interpreter(frame)

    def _to_interpreter(self, frame: Frame) -> None:
        with contextlib.suppress(LinkClosed):  # it is ending; its reaping brings the news
            self._interpreter.link.send_bytes(frame.to_bytes())

    # ---- interpreter -> agent

    def _from_interpreter(self) -> None:
        try:
            frames = self._interpreter.link.receive()
        except LinkClosed:
            self._loop.remove(self._interpreter.link)
            return
        self._pass_on(frames)

    def _pass_on(self, frames: list[Frame]) -> None:
        for frame in frames:
            message = frame.message()
            if isinstance(message, (CellDone, CellFailed)):
                self._drain()  # what the cell printed comes before its end
                self._set_state("idle", cell=message.cell)
            elif isinstance(message, (RankUp, GenerationReady)):
                self._set_state("idle", cell=self._interpreter.cell)
            self._agent.send_bytes(frame.to_bytes())

    def _drain(self) -> None:
        """Read what is in the pipes now: one read of its size takes all that a pipe holds."""
        for name, fd in self._interpreter.outputs.items():
            if self._has_output(fd):
                self._read_bytes = _PIPE_BYTES
                self._read_output(name, fd)

    def _has_output(self, fd: int) -> bool:
        waiting = fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0")
        return waiting != b"\0\0\0\0"

    def _read_output(self, name: str, fd: int) -> None:
        try:
            data = os.read(fd, self._read_bytes)
        except BlockingIOError:
            return
        if not data:
            self._loop.remove(fd)
            return
        self._read_bytes = _SMALL_READ_BYTES if len(data) < self._read_bytes else _PIPE_BYTES
        if name == "stderr":
            self._interpreter.stderr_tail = (self._interpreter.stderr_tail + data)[-_STDERR_TAIL_BYTES:]
        self._agent.send(Output(self._rank, self._interpreter.cell, name, data))

    # ---- where the rank is

    def _set_state(self, state: str, *, cell: int) -> None:
        self._interpreter.state, self._interpreter.cell = state, cell
        self._interpreter.since = time.monotonic()

    def _locate(self, request: int) -> None:
        if not self._locating:
            self._read_dump()  # what came too late for the last answer
            self._dump = b""
        self._locating.append(request)
        if self._interpreter.state == "running":
            self._answer_at = time.monotonic() + _LOCATE_LIMIT_S
            os.kill(self._interpreter.pid, signal.SIGUSR1)  # faulthandler answers also while C code holds the GIL
        else:
            self._answer_locate()

    def _on_where(self) -> None:
        """A piece of a dump; there are many, and silence ends them."""
        self._read_dump()
        self._answer_at = min(self._answer_at, time.monotonic() + _DUMP_GAP_S)

    def _read_dump(self) -> None:
        with contextlib.suppress(BlockingIOError):
            self._dump += os.read(self._interpreter.where, 1 << 16)

    def _answer_locate(self) -> None:
        interpreter = self._interpreter
        dump, self._dump = self._dump.decode(errors="replace"), b""
        stack = [line.strip() for line in dump.splitlines() if line.lstrip().startswith("File ")]
        lines = [int(match[2]) for match in _CELL_LINE.finditer(dump) if int(match[1]) == interpreter.cell]
        requests, self._locating = self._locating, []
        for request in requests:
            self._agent.send(
                Position(
                    self._rank,
                    request,
                    interpreter.pid,
                    interpreter.state,
                    interpreter.cell,
                    line=lines[0] if lines else 0,
                    seconds=time.monotonic() - interpreter.since,
                    rss_bytes=memory_bytes(interpreter.pid),
                    stack=stack,
                )
            )


if __name__ == "__main__":  # started by the torchrun command, each rank in a Python of its own
    from .preload import preload

    preload()
    main()
