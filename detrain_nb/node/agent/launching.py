"""The agent's control of its launcher, which is either its own process or forked by the warm process.

The warm process has imported everything and stays to fork the launcher of the next session.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from dataclasses import dataclass
from typing import Any

from ...launch import LAUNCHER_MODULE, STORE_FD_VARIABLE, WARM_FD_VARIABLE
from ...wire import LauncherEnded
from ..rank.warm import MOST_ANSWER_BYTES
from ..system.processes import descendants, die_with_parent, end_descendants, open_memory_file
from ..system.surroundings import find_difference, read_surroundings, without_session_variables

_ANSWER_LIMIT_S = 10.0  # for the warm process, which first checks some thousand files for changes
_END_LIMIT_S = 4.0
_LAST_MOMENT_S = 0.1
_IT_ENDED = "the warm process has exited"
_LOG_NAME = "launcher.log"
_LOG_TAIL_BYTES = 4000


@dataclass
class _Order:
    """A launch that has been requested and has not started yet."""

    argv: list[str]
    env: dict[str, str]
    store: socket.socket | None


class Launching:
    """The launcher and the warm process of one agent, across its sessions; the warm process answers on ``channel``."""

    def __init__(self, users_umask: int) -> None:
        self._users_umask = users_umask
        self._process: subprocess.Popen[bytes] | None = None  # the warm process, or plain torchrun
        self.channel, self._its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.setblocking(False)
        self._imported_with: tuple[str, dict[str, str]] | None = None  # Python and environment; None: plain torchrun
        self._order: _Order | None = None
        self._launcher_pid = 0
        self._why_cold = ""
        self.answer_by: float | None = None  # the deadline for the warm process to answer its order

    @property
    def is_warm(self) -> bool:
        """Whether a warm process is running that can fork the next launcher."""
        return self._process is not None and self._process.poll() is None and self._imported_with is not None

    @property
    def is_launched(self) -> bool:
        """Whether a launcher is running or about to run."""
        return bool(self._launcher_pid or self._order)

    def start(
        self, argv: list[str], env: dict[str, str], store: socket.socket | None, *, why_cold: str = ""
    ) -> LauncherEnded | None:
        """Start the launcher ``argv``; returns its end if it cannot be started. Takes ownership of ``store``.

        ``why_cold``: why the running warm process cannot be used. If given, a new one imports everything first.
        """
        order, self.answer_by = _Order(argv, env, store), None
        self._order, self._why_cold = order, why_cold
        try:
            if LAUNCHER_MODULE not in argv:
                self._end_process()
                self._start_process(order)
                self._launcher_pid = self._process.pid if self._process else 0
                self._forget_order()
            elif not self.is_warm:
                self._start_warm_process(order)
            elif why_cold := why_cold or self._find_difference(order):
                self._why_cold = why_cold
                self._start_warm_process(order)
            else:
                self._send_order(order)
                self.answer_by = time.monotonic() + _ANSWER_LIMIT_S
        except OSError as exc:
            self._forget_order()
            return LauncherEnded(127, f"{argv[0]} cannot be started: {exc}")
        return None

    def take_answer(self) -> LauncherEnded | None:
        """Read one answer of the warm process; returns the launcher's end if it reports that."""
        try:
            said: dict[str, Any] = json.loads(self.channel.recv(MOST_ANSWER_BYTES))
        except BlockingIOError:
            return None
        if "started" in said:
            self._launcher_pid = said["started"]
            self._forget_order()
        elif said.get("ended") == self._launcher_pid:  # not the launcher of an earlier session
            self._launcher_pid = 0
            return LauncherEnded(said["exit_code"], _log_tail())
        elif "failed" in said:
            self._forget_order()
            return LauncherEnded(127, said["failed"])
        elif "stale" in said and self._order:
            return self._start_cold(self._order, f"{said['stale']} changed")
        return None

    def take_silence(self) -> LauncherEnded | None:
        """Start cold if the warm process has not answered in time: it may be stopped or waiting for a disk."""
        if self._order is None or self.answer_by is None or time.monotonic() < self.answer_by:
            return None
        return self._start_cold(self._order, f"the warm process has not answered for {_ANSWER_LIMIT_S:.0f} s")

    def take_why_cold(self) -> str:
        """Return, once, why the warm process was not used; empty if it was used or there was none."""
        why, self._why_cold = self._why_cold, ""
        return why

    def take_end(self) -> LauncherEnded | None:
        """Return the launcher's end if the child that has exited was the launcher or the warm process."""
        process = self._process
        if process is None or process.poll() is None:
            return None
        end = self.take_answer()  # its last answer
        if end or self._process is not process:  # a new process has the order now
            return end
        exit_code, had_launcher = process.returncode, self.is_launched
        self._process, self._launcher_pid = None, 0
        self._forget_order()
        return LauncherEnded(exit_code, _log_tail()) if had_launcher else None

    def end(self, *, keep_warm: bool = False) -> None:
        """Stop the launcher and every descendant of the agent; ``keep_warm`` spares a warm process that is ready."""
        is_ready = self.is_warm and self._order is None
        self._forget_order()
        if self._process is not None:
            self._wait_for_workers()
            if not (keep_warm and is_ready):
                self._process.kill()  # not terminate: torchrun's engine would wait for other nodes, which may be lost
        self.end_ranks()
        self._launcher_pid = 0

    def end_ranks(self) -> None:
        """Kill all remaining descendants of the agent except the warm process."""
        end_descendants(spare={self._process.pid} if self.is_warm and self._process else ())

    # ---- starting

    def _start_cold(self, order: _Order, why: str) -> LauncherEnded | None:
        return self.start(order.argv, order.env, order.store, why_cold=why)

    def _start_warm_process(self, order: _Order) -> None:
        """Start a process that imports everything again and then takes ``order``. Raises: OSError."""
        self._end_process()
        for end in (self.channel, self._its_end):  # discard unread messages of the previous process
            with contextlib.suppress(BlockingIOError):
                while end.recv(1, socket.MSG_DONTWAIT):
                    pass
        self._imported_with = _what_imports_see(order)
        try:
            self._start_process(order)
            self._send_order(order)
        except OSError:
            self._end_process()  # without an order it would wait, and take the next session's order as its first
            raise

    def _end_process(self) -> None:
        process, self._process, self._imported_with = self._process, None, None
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_LIMIT_S)

    def _start_process(self, order: _Order) -> None:
        """Start the warm process, or plain torchrun. Raises: OSError."""
        agent_pid = os.getpid()
        env, handed = dict(order.env), []
        if self._imported_with is not None:
            handed.append(self._its_end.fileno())
            env[WARM_FD_VARIABLE] = str(self._its_end.fileno())
        elif order.store:
            handed.append(order.store.fileno())
            env[STORE_FD_VARIABLE] = str(order.store.fileno())
        with open(_LOG_NAME, "wb") as log:
            self._process = subprocess.Popen(
                order.argv,
                env=env,
                cwd="/" if self._imported_with is not None else None,  # each launcher enters its session's folder
                pass_fds=handed,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                umask=self._users_umask,  # files that ranks save keep the user's usual permissions
                preexec_fn=lambda: die_with_parent(agent_pid),  # noqa: PLW1509  the agent has one thread
            )

    def _send_order(self, order: _Order) -> None:
        argv = order.argv[order.argv.index(LAUNCHER_MODULE) + 1 :]
        said = json.dumps({"argv": argv, "env": order.env, "umask": self._users_umask}).encode()
        with contextlib.ExitStack() as opened:
            file = opened.enter_context(open(open_memory_file("order"), "wb"))
            file.write(said)
            file.flush()
            log = opened.enter_context(open(_LOG_NAME, "ab"))
            folder = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
            opened.callback(os.close, folder)
            stores = [order.store.fileno()] if order.store else []
            socket.send_fds(self.channel, [b"o"], [file.fileno(), log.fileno(), folder, *stores])

    def _find_difference(self, order: _Order) -> str:
        """Return how the warm process differs from a newly started one; empty if it does not.

        The warm process itself checks the imported files for changes.
        """
        assert self._process is not None and self._imported_with is not None
        python, env = _what_imports_see(order)
        if python != self._imported_with[0]:
            return "Python changed"
        if names := find_difference(self._imported_with[1], env):
            return f"the environment ({names}) changed"
        try:
            names = find_difference(read_surroundings(self._process.pid), read_surroundings())
        except OSError:  # it has exited
            return _IT_ENDED
        if names:
            with contextlib.suppress(subprocess.TimeoutExpired):  # a process that is exiting shows different values
                self._process.wait(_LAST_MOMENT_S)
                return _IT_ENDED
        return f"inherited process settings ({names}) changed" if names else ""

    # ---- ending

    def _forget_order(self) -> None:
        if self._order and self._order.store:
            self._order.store.close()
        self._order = self.answer_by = None

    def _wait_for_workers(self) -> None:
        """Wait for the launcher's children to exit, as they do once the agent has closed their connections."""
        deadline = time.monotonic() + _END_LIMIT_S
        while self._launcher_pid and descendants(self._launcher_pid) and time.monotonic() < deadline:
            time.sleep(0.01)


def _what_imports_see(order: _Order) -> tuple[str, dict[str, str]]:
    return order.argv[0], without_session_variables(order.env)


def _log_tail() -> str:
    try:
        with open(_LOG_NAME, "rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _LOG_TAIL_BYTES))
            return log.read().decode(errors="replace")
    except OSError as exc:
        return f"the launcher's log cannot be read: {exc}"
