"""The agent's hold on its launcher: started by itself, or forked by the warm process, which stays for the next one."""

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

_ANSWER_LIMIT_S = 10.0  # of a warm process, which has looked at some thousand files then
_END_LIMIT_S = 4.0
_LAST_MOMENT_S = 0.1
_IT_ENDED = "the warm process ended"
_LOG_NAME = "launcher.log"
_LOG_TAIL_BYTES = 4000


@dataclass
class _Order:
    """What is to be launched, until it is."""

    argv: list[str]
    env: dict[str, str]
    store: socket.socket | None


class Launching:
    """One per agent; outlives its sessions. ``channel`` is where a warm process answers."""

    def __init__(self, users_umask: int) -> None:
        self._users_umask = users_umask
        self._process: subprocess.Popen[bytes] | None = None  # the warm process, or plain torchrun
        self.channel, self._its_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.channel.setblocking(False)
        self._imported_with: tuple[str, dict[str, str]] | None = None  # Python and environment; None: plain torchrun
        self._order: _Order | None = None
        self._launcher_pid = 0
        self._why_cold = ""
        self.answer_by: float | None = None  # when the warm process has to have said what becomes of its order

    @property
    def is_warm(self) -> bool:
        """There is a process that can fork the next launcher."""
        return self._process is not None and self._process.poll() is None and self._imported_with is not None

    @property
    def is_launched(self) -> bool:
        """A launcher runs, or is about to."""
        return bool(self._launcher_pid or self._order)

    def start(
        self, argv: list[str], env: dict[str, str], store: socket.socket | None, *, why_cold: str = ""
    ) -> LauncherEnded | None:
        """Start the launcher that ``argv`` is; returns why it cannot be. ``store`` is its own from now on.

        With ``why_cold``, what is wrong with the warm process that is there, everything is imported again first.
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
        """Read what the warm process says; returns the launcher's end, if it is that."""
        try:
            said: dict[str, Any] = json.loads(self.channel.recv(MOST_ANSWER_BYTES))
        except BlockingIOError:
            return None
        if "started" in said:
            self._launcher_pid = said["started"]
            self._forget_order()
        elif said.get("ended") == self._launcher_pid:  # not of an earlier session
            self._launcher_pid = 0
            return LauncherEnded(said["exit_code"], _log_tail())
        elif "failed" in said:
            self._forget_order()
            return LauncherEnded(127, said["failed"])
        elif "stale" in said and self._order:
            return self._start_cold(self._order, f"{said['stale']} changed")
        return None

    def take_silence(self) -> LauncherEnded | None:
        """Where the warm process has not answered in time, stopped perhaps, or waiting for a disk: do without it."""
        if self._order is None or self.answer_by is None or time.monotonic() < self.answer_by:
            return None
        return self._start_cold(self._order, f"the warm process has not answered for {_ANSWER_LIMIT_S:.0f} s")

    def take_why_cold(self) -> str:
        """Why the warm process that was there has not been used; empty where it was, or there was none."""
        why, self._why_cold = self._why_cold, ""
        return why

    def take_end(self) -> LauncherEnded | None:
        """After a child of the agent has ended: the launcher's end, if it was that, or what forks it."""
        process = self._process
        if process is None or process.poll() is None:
            return None
        end = self.take_answer()  # the last it said
        if end or self._process is not process:  # another one has the order now
            return end
        exit_code, had_launcher = process.returncode, self.is_launched
        self._process, self._launcher_pid = None, 0
        self._forget_order()
        return LauncherEnded(exit_code, _log_tail()) if had_launcher else None

    def end(self, *, keep_warm: bool = False) -> None:
        """End the launcher and all below the agent; with ``keep_warm`` not the warm process, if it is ready."""
        is_ready = self.is_warm and self._order is None
        self._forget_order()
        if self._process is not None:
            self._wait_for_workers()
            if not (keep_warm and is_ready):
                self._process.kill()  # torchrun's engine waits for other nodes, which may be lost
        self.end_ranks()
        self._launcher_pid = 0

    def end_ranks(self) -> None:
        """Kill whatever is left below the agent, the warm process aside."""
        end_descendants(spare={self._process.pid} if self.is_warm and self._process else ())

    # ---- starting

    def _start_cold(self, order: _Order, why: str) -> LauncherEnded | None:
        return self.start(order.argv, order.env, order.store, why_cold=why)

    def _start_warm_process(self, order: _Order) -> None:
        """Import everything anew, in a process that then takes ``order``. Raises: OSError."""
        self._end_process()
        for end in (self.channel, self._its_end):  # what the one before has not read, or said too late
            with contextlib.suppress(BlockingIOError):
                while end.recv(1, socket.MSG_DONTWAIT):
                    pass
        self._imported_with = _what_imports_see(order)
        try:
            self._start_process(order)
            self._send_order(order)
        except OSError:
            self._end_process()  # one without an order would take the next, however late, as its first
            raise

    def _end_process(self) -> None:
        process, self._process, self._imported_with = self._process, None, None
        if process is not None:
            process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_END_LIMIT_S)

    def _start_process(self, order: _Order) -> None:
        """Raises: OSError."""
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
                cwd="/" if self._imported_with is not None else None,  # each launcher goes to its session's folder
                pass_fds=handed,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                umask=self._users_umask,  # what a rank saves, others may read as ever
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
        """Why the warm process is not what one that is started now would be; at its files it looks itself."""
        assert self._process is not None and self._imported_with is not None
        python, env = _what_imports_see(order)
        if python != self._imported_with[0]:
            return "Python changed"
        if names := find_difference(self._imported_with[1], env):
            return f"the environment ({names}) changed"
        try:
            names = find_difference(read_surroundings(self._process.pid), read_surroundings())
        except OSError:  # it is gone
            return _IT_ENDED
        if names:
            with contextlib.suppress(subprocess.TimeoutExpired):  # of one that is ending the system says other things
                self._process.wait(_LAST_MOMENT_S)
                return _IT_ENDED
        return f"what a process inherits ({names}) changed" if names else ""

    # ---- ending

    def _forget_order(self) -> None:
        if self._order and self._order.store:
            self._order.store.close()
        self._order = self.answer_by = None

    def _wait_for_workers(self) -> None:
        """Wait until what the launcher has started has ended, as it does when the agent hangs up."""
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
        return f"its log cannot be read: {exc}"
