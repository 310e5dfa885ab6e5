"""The worker: the process that torchrun's engine starts for a rank; single-threaded, never uses CUDA.

It forks the interpreter and owns the read ends of its stdout and stderr. The rank's output, its current line and the
report of its death thus leave the node even while code in the interpreter holds the GIL or hangs.
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
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import WireError
from ...launch import RankConfig
from ...wire import (
    FROM_INTERPRETER,
    MAX_ORDER_HEADER_BYTES,
    CellDone,
    CellFailed,
    Collectives,
    EndGeneration,
    Frame,
    GenerationReady,
    Interrupt,
    Link,
    LinkClosed,
    Locate,
    Message,
    Output,
    RankEnded,
    RankUp,
    Renumber,
    Replace,
    RunCell,
    WorkerUp,
)
from ..system.loop import Loop, Source
from ..system.processes import (
    adopt_orphans,
    close_inherited_sockets,
    die_with_parent,
    drain,
    end_descendants,
    forget_children,
    lead_nowhere,
    watch_children,
)
from .locator import WHERE_SIGNAL, Locator
from .oom import OomWatch

_PIPE_BYTES = 1 << 20
_SMALL_READ_BYTES = 1 << 16
# If a rank prints line after line, each read would become a message of a few bytes, and the notebook would fall behind.
_FEW_READS, _FEW_BYTES, _GATHER_S = 100, 1 << 14, 0.005
_FULL_BYTES = 16 << 20  # of messages that the interpreter has not read
# Above this a rank blocks in its print until the agent has read some output. A stopped cell gets the higher limit, as
# its end can only be seen after its output has been read.
_FULL_OUTPUT_BYTES, _FULL_STOPPED_BYTES = 1 << 20, 3 << 20
_STOP_S = 1.0  # from the first stop of a cell to its rank's replacement: presses of stop may arrive all at once
_LEAVE_LIMIT_S = 1.0
_STDERR_TAIL_BYTES = 4000
_LAST_LINES = 10
_CELL_LINE = re.compile(r'File "<cell \d+>", line \d+')
_NOT_THE_USERS = re.compile(r"^Extension modules: |/detrain_nb/node/")  # in a dump of a crash
_NO_PYTHON = "  in a thread that runs no Python, such as a thread of gloo"
_MANY_ENDS = 3  # deaths in this time without a completed cell: another interpreter would die too
_MANY_ENDS_S = 60.0


def main(umask: int | None = None) -> None:
    """Run the worker of one rank until the session ends; the engine calls this in a separate process for each rank.

    ``umask``: the user's umask, if this process has a different one.
    """
    if umask is not None:
        os.umask(umask)
    launcher_pid = os.getppid()
    config = RankConfig.from_env(os.environ)
    rank = config.first_rank + int(os.environ["RANK"])
    if config.is_apart:
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(config.world_size))
    agent = socket.socket(socket.AF_UNIX)
    agent.connect(config.agent_socket)
    close_inherited_sockets(keep={agent.fileno()})
    adopt_orphans()
    try:
        _Worker(config, rank, Link(agent, max_header_bytes=MAX_ORDER_HEADER_BYTES)).run()
    finally:
        end_descendants()
        die_with_parent(launcher_pid)  # the engine waits for all workers; they must not outlive it


@dataclass
class _InterpreterProcess:
    """The interpreter's process, as seen by its worker."""

    pid: int
    link: Link
    control: Link
    outputs: dict[str, int]
    where: int
    locator: Locator
    memory: OomWatch
    state: str = "starting"
    cell: int = 0
    since: float = field(default_factory=time.monotonic)
    stderr_tail: bytes = b""
    is_to_be_replaced: bool = False
    end: RankEnded | None = None

    @property
    def sources(self) -> list[Source]:
        """The link and the pipes that carry messages and output, without those for its position."""
        return [self.link, *self.outputs.values()]

    def close(self) -> None:
        """Close all channels; call when everything it sent has been read."""
        self.link.close()
        self.control.close()
        for fd in (*self.outputs.values(), self.where):
            os.close(fd)


class _Worker:
    def __init__(self, config: RankConfig, rank: int, agent: Link) -> None:
        self._config = config
        self._rank = rank
        self._agent = agent
        self._loop = Loop()
        self._is_holding_back = False
        self._read_bytes = _SMALL_READ_BYTES
        self._reads_of = ("", 0)  # the stream that was read last, and its number of small reads in a row
        self._gathering: tuple[int, float] | None = None  # a descriptor, and the time before which it is not read
        self._incarnations = 0
        self._ends: list[float] = []  # when interpreters have died since a cell was last completed
        self._stopped = 0, 0.0  # the cell that was stopped last, and when it was first stopped
        self._replace_at: float | None = None  # when to replace the interpreter if it still runs that cell
        self._agent_handlers: dict[type[Message], Callable[[Any, Frame], None]] = {  # others go to the interpreter
            Locate: self._locate,
            Replace: self._replace_where_it_runs,
            EndGeneration: self._end_generation,
            Interrupt: self._interrupt,
            Renumber: self._renumber,
            RunCell: self._run_cell,
        }
        self._interpreter_handlers: dict[type[Message], Callable[[Any], None]] = {  # others only go to the agent
            Collectives: self._take_collectives,
            CellDone: self._note_cell_end,
            CellFailed: self._note_cell_end,
            RankUp: self._note_ready,
            GenerationReady: self._note_ready,
        }
        self._child_ended = watch_children()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        self._interrupted_cell = mmap.mmap(-1, 8)  # shared with the interpreter: the cell that a SIGINT is meant for
        self._agent.send(WorkerUp(rank, os.getpid()))
        self._interpreter = self._fork_interpreter()

    def run(self) -> None:
        """Forward messages and output until the agent disconnects."""
        self._loop.add(self._agent, self._from_agent)
        self._loop.add(self._child_ended, self._on_child_ended)
        self._watch(self._interpreter)
        with contextlib.suppress(LinkClosed):
            while True:
                self._wait_once()
        self._leave()

    def _wait_once(self) -> None:
        self._loop.once(self._interpreter.locator.answer_at, self._gathering and self._gathering[1], self._replace_at)
        self._answer()
        self._end_gathering()
        self._hold_back()
        if self._replace_at is not None and time.monotonic() >= self._replace_at:
            self._replace_at = None
            if self._runs(self._stopped[0]):
                self._replace()

    def _hold_back(self) -> None:
        """Pause reading from one side while the other falls behind; a rank then blocks in its print."""
        interpreter = self._interpreter
        self._loop.pause(self._agent, interpreter.link.waiting_bytes > _FULL_BYTES)
        is_stopped = self._runs(self._stopped[0])
        is_full = self._agent.waiting_bytes > (_FULL_STOPPED_BYTES if is_stopped else _FULL_OUTPUT_BYTES)
        if is_full != self._is_holding_back:
            self._is_holding_back = is_full
            for source in interpreter.sources:
                self._loop.pause(source, is_full or source == (self._gathering and self._gathering[0]))

    def _gather(self, name: str, fd: int, num_bytes: int) -> None:
        """Delay the next read after many small ones, so that more output is read at once.

        Not done when the rank alternates between streams: it then waits until its output has been read.
        """
        of, count = self._reads_of
        self._reads_of = (name, count + 1 if of == name and num_bytes < _FEW_BYTES else 0)
        if self._reads_of[1] > _FEW_READS and self._gathering is None:
            self._gathering = fd, time.monotonic() + _GATHER_S
            self._loop.pause(fd, True)

    def _end_gathering(self) -> None:
        if self._gathering and time.monotonic() >= self._gathering[1]:
            self._loop.pause(self._gathering[0], self._is_holding_back)
            self._gathering = None

    # ---- the interpreter's process

    def _fork_interpreter(self) -> _InterpreterProcess:
        """Fork an interpreter. Raises: OSError when no process can be created; nothing is left open then."""
        self._incarnations += 1
        pipes: dict[str, tuple[int, int]] = {}
        parent_pid = os.getpid()
        with contextlib.ExitStack() as opened:
            ours, theirs = map(opened.enter_context, socket.socketpair())
            our_control, their_control = map(opened.enter_context, socket.socketpair())
            for name in ("stdout", "stderr", "where"):
                pipes[name] = os.pipe()
                for fd in pipes[name]:
                    opened.callback(os.close, fd)
            pid = os.fork()
            opened.pop_all()
        if pid == 0:
            status = 1
            try:
                forget_children(self._child_ended)
                writing = {name: write for name, (_, write) in pipes.items()}
                self._become_interpreter(theirs, their_control, writing, parent_pid)
                status = 0
            except BaseException:  # noqa: BLE001  the worker reads the traceback from stderr
                os.write(2, traceback.format_exc().encode(errors="replace"))
            finally:
                os._exit(status)
        theirs.close()
        their_control.close()
        for read, write in pipes.values():
            os.close(write)
            os.set_blocking(read, False)
            with contextlib.suppress(OSError, AttributeError):  # larger pipes let a printing rank run ahead
                fcntl.fcntl(read, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
        outputs = {name: pipes[name][0] for name in ("stdout", "stderr")}
        where, control = pipes["where"][0], Link(our_control, kinds=FROM_INTERPRETER)
        locator = Locator(self._rank, pid, control, where)
        return _InterpreterProcess(
            pid, Link(ours, kinds=FROM_INTERPRETER), control, outputs, where, locator, OomWatch(pid)
        )

    def _become_interpreter(
        self, link: socket.socket, control: socket.socket, pipes: dict[str, int], parent_pid: int
    ) -> None:
        """Close the worker's descriptors in the forked process, and serve cells until the worker disconnects."""
        os.setpgid(0, 0)
        die_with_parent(parent_pid)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("50")  # out of memory, the kernel kills this process before the worker, but large ones first
        lead_nowhere(0)
        os.dup2(pipes["stdout"], 1)
        os.dup2(pipes["stderr"], 2)
        close_inherited_sockets(keep={link.fileno(), control.fileno()})
        faulthandler.register(WHERE_SIGNAL, file=pipes["where"], all_threads=False)
        faulthandler.enable(file=pipes["where"], all_threads=False)  # replaces the handler that torch's engine has set
        from ..cell import interpreter

        lines = interpreter.Lines(link, control, self._interrupted_cell)
        interpreter.serve(self._config, self._rank, self._incarnations, lines)

    def _watch(self, interpreter: _InterpreterProcess) -> None:
        self._loop.add(interpreter.link, functools.partial(self._from_interpreter, interpreter.link))
        self._loop.add(interpreter.control, functools.partial(self._from_interpreter, interpreter.control))
        self._loop.add(interpreter.where, interpreter.locator.on_where)
        for name, fd in interpreter.outputs.items():
            self._loop.add(fd, functools.partial(self._read_output, name, fd))

    def _unwatch(self, interpreter: _InterpreterProcess) -> None:
        self._gathering = None
        for source in (*interpreter.sources, interpreter.control, interpreter.where):
            self._loop.remove(source)

    def _on_child_ended(self) -> None:
        drain(self._child_ended)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:  # includes orphans of the rank
                if ended[0] == self._interpreter.pid:
                    self._report_end(ended[1])
                    return  # the end of its successor sends another signal

    def _report_end(self, wait_status: int) -> None:
        """Report the interpreter's end with its last output, stop what it left running, and fork its successor."""
        interpreter = self._interpreter
        exit_code = os.waitstatus_to_exitcode(wait_status)
        reason = interpreter.memory.reason(signal=max(0, -exit_code))
        self._unwatch(interpreter)
        end_descendants()
        for link in (interpreter.link, interpreter.control):
            with contextlib.suppress(WireError):  # raised after its last message, or at an invalid one
                self._pass_on(_receive(link))
                while self._has_input(link.fileno()):
                    self._pass_on(_receive(link))
        self._drain()
        end = RankEnded(
            self._rank,
            interpreter.pid,
            interpreter.cell,
            signal=max(0, -exit_code),
            exit_code=max(0, exit_code),
            stderr_tail=self._last_words(),
            reason=reason,
            asked=interpreter.is_to_be_replaced,
            down="" if interpreter.is_to_be_replaced else self._why_leave_down(),
        )
        interpreter.close()
        interpreter.state = "down"
        interpreter.end = end if end.down else replace(end, down=self._start_successor())
        self._agent.send(interpreter.end)

    def _why_leave_down(self) -> str:
        """Return why the interpreter is not restarted; empty unless interpreters keep dying."""
        now = time.monotonic()
        self._ends = [*(at for at in self._ends if now - at < _MANY_ENDS_S), now]
        if len(self._ends) < _MANY_ENDS:
            return ""
        return f"it died {_MANY_ENDS} times within {_MANY_ENDS_S:.0f} s without completing a cell"

    def _start_successor(self) -> str:
        """Fork the next interpreter; returns why it cannot be started, empty if it was."""
        try:
            self._interpreter = self._fork_interpreter()
        except OSError as exc:
            return f"no process can be started for it: {exc}"
        self._is_holding_back = False
        self._watch(self._interpreter)
        return ""

    def _replace(self) -> None:
        """Kill the interpreter, whose successor is forked when it is reaped; if it is down, fork one at once."""
        self._ends.clear()
        if self._interpreter.state == "down":
            end = self._interpreter.end
            if (why := self._start_successor()) and end:
                self._agent.send(replace(end, down=why))
        else:
            self._interpreter.is_to_be_replaced = True
            os.kill(self._interpreter.pid, signal.SIGKILL)

    def _last_words(self) -> str:
        """Return the last lines of stderr, as last redrawn; after a crash, also its stack down to the cell's line."""
        dump = self._interpreter.locator.read_dump().decode(errors="replace")
        asked, _, said = dump.partition("Fatal Python error: ")
        crash, _, below = said.partition("\n\n")
        words = (
            self._interpreter.stderr_tail.decode(errors="replace")
            .replace("\r\n", "\n")
            .strip("\n")
            .split("\n")[-_LAST_LINES:]
        )
        words = [line.rpartition("\r")[2] for line in words]
        if crash:
            words.append(f"Fatal Python error: {crash}")
            if not asked and "Stack (most" not in below:  # a crash during a requested dump has no stack either
                words.append(_NO_PYTHON)
            for line in below.splitlines()[1:]:
                if not line.strip() or _NOT_THE_USERS.search(line):
                    continue
                words.append(line)
                if _CELL_LINE.search(line):
                    break
        return "\n".join(words)

    def _leave(self) -> None:
        """End the session: an idle interpreter has 1 s to run its exit functions, any other is killed at once."""
        interpreter = self._interpreter
        if interpreter.state == "down":
            return
        interpreter.link.close()
        deadline = time.monotonic() + (_LEAVE_LIMIT_S if interpreter.state == "idle" else 0)
        with selectors.DefaultSelector() as selector:
            selector.register(self._child_ended, selectors.EVENT_READ)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(interpreter.pid, os.WNOHANG)[0] == 0 and time.monotonic() < deadline:
                    selector.select(deadline - time.monotonic())
                    drain(self._child_ended)

    # ---- agent -> interpreter

    def _from_agent(self) -> None:
        for frame in self._agent.receive():
            message = frame.message()
            if handle := self._agent_handlers.get(frame.kind):
                handle(message, frame)
            elif self._interpreter.state != "down":
                self._to_interpreter(frame)

    def _locate(self, message: Locate, _: Frame) -> None:
        self._interpreter.memory.refresh()
        self._interpreter.locator.ask(message, state=self._interpreter.state)
        self._answer()

    def _replace_where_it_runs(self, message: Replace, _: Frame) -> None:
        if not message.cell:
            self._replace()
        elif self._runs(message.cell):
            self._note_stop(message.cell)
            self._replace_at = self._stopped[1] + _STOP_S

    def _end_generation(self, _: EndGeneration, frame: Frame) -> None:
        if self._interpreter.state != "down":
            with contextlib.suppress(LinkClosed):
                self._interpreter.control.send_bytes(frame.to_bytes())

    def _interrupt(self, message: Interrupt, _: Frame) -> None:
        if self._runs(message.cell):
            self._note_stop(message.cell)
            self._interrupted_cell[:] = message.cell.to_bytes(8, "little")
            os.kill(self._interpreter.pid, signal.SIGINT)

    def _renumber(self, message: Renumber, frame: Frame) -> None:
        self._rank = self._interpreter.locator.rank = message.numbers[message.ranks.index(self._rank)]
        os.environ.update(RANK=str(self._rank), WORLD_SIZE=str(message.world_size))  # for later interpreters
        self._to_interpreter(frame)

    def _run_cell(self, message: RunCell, frame: Frame) -> None:
        if self._interpreter.state == "down":
            return
        if message.incarnations[message.ranks.index(self._rank)] != self._incarnations:
            return  # the notebook is about to learn that the rank was lost
        self._set_state("running", cell=message.cell)
        self._stopped, self._replace_at = (0, 0.0), None
        self._interpreter.stderr_tail = b""
        self._to_interpreter(frame)

    def _note_stop(self, cell: int) -> None:
        if self._stopped[0] != cell:
            self._stopped = cell, time.monotonic()

    def _runs(self, cell: int) -> bool:
        return self._interpreter.state == "running" and self._interpreter.cell == cell

    def _to_interpreter(self, frame: Frame) -> None:
        with contextlib.suppress(LinkClosed):  # it is exiting, which is reported when it is reaped
            self._interpreter.link.send_bytes(frame.to_bytes())

    # ---- interpreter -> agent

    def _from_interpreter(self, link: Link) -> None:
        try:
            said = _receive(link)
        except WireError as exc:
            self._loop.remove(link)
            if not isinstance(exc, LinkClosed):  # a cell has written into the link: nothing after that can be read
                self._interpreter.stderr_tail += f"\nkilled, as it sent an invalid message: {exc}".encode()
                os.kill(self._interpreter.pid, signal.SIGKILL)
            return
        self._pass_on(said)

    def _pass_on(self, said: list[tuple[Frame, Message]]) -> None:
        for frame, message in said:
            if handle := self._interpreter_handlers.get(frame.kind):
                handle(message)
            if frame.kind is not Collectives:
                self._agent.send_bytes(frame.to_bytes())

    def _take_collectives(self, message: Collectives) -> None:
        self._interpreter.locator.take(message)

    def _note_cell_end(self, message: CellDone | CellFailed) -> None:
        self._drain()  # the cell's output must be sent before its end
        self._set_state("idle", cell=message.cell)
        self._ends.clear()

    def _note_ready(self, _: RankUp | GenerationReady) -> None:
        if self._interpreter.state != "running":
            self._set_state("idle", cell=self._interpreter.cell)

    def _drain(self) -> None:
        """Read what is in the pipes now; one read of the pipe's size takes everything."""
        for name, fd in self._interpreter.outputs.items():
            if self._has_input(fd):
                self._read_bytes = _PIPE_BYTES
                self._read_output(name, fd)

    def _has_input(self, fd: int) -> bool:
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
        self._gather(name, fd, len(data))

    # ---- where the rank is

    def _set_state(self, state: str, *, cell: int) -> None:
        self._interpreter.state, self._interpreter.cell = state, cell
        self._interpreter.since = time.monotonic()

    def _answer(self) -> None:
        """Send the rank's position as soon as it is known."""
        interpreter = self._interpreter
        if interpreter.locator.answer_at is not None:
            found = interpreter.locator.answers(state=interpreter.state, cell=interpreter.cell, since=interpreter.since)
            for position in found:
                self._agent.send(position)


def _receive(link: Link) -> list[tuple[Frame, Message]]:
    """Read once. Raises: LinkClosed at the end, WireError on an invalid message."""
    return [(frame, frame.message()) for frame in link.receive()]


if __name__ == "__main__":  # started by the torchrun command, each rank in its own Python process
    from .preload import preload

    preload()
    main()
