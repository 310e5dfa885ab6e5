"""The warm process between agent and launcher, which has imported torch and IPython and forks the launchers.

It takes orders from its agent on a socket. Each order is one datagram with descriptors: what to run and how (JSON in a
memory file), the launcher's log, the session's folder and, for some, the store's socket. It answers with JSON:
``stale`` (imported files have changed), ``failed`` (no process could be forked), ``started``, ``ended``.
It has a single thread and never uses CUDA, so that the processes it forks can.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import multiprocessing
import os
import select
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from ...launch import STORE_FD_VARIABLE
from ..system.imported import ImportedFiles
from ..system.processes import die_with_parent, drain, forget_children, lead_nowhere, watch_children
from ..system.surroundings import ImportedEnvironment

MOST_ANSWER_BYTES = 1 << 16
_MOST_FDS = 4


class WarmProcess:
    """A process that forks launchers; create it after all imports. ``run``: runs a launcher with its arguments."""

    def __init__(self, channel: socket.socket, run: Callable[[list[str]], None]) -> None:
        self._channel = channel
        self._run = run
        self._environment = ImportedEnvironment()
        self._launcher = 0
        self._files = ImportedFiles()
        self._is_fresh = True  # everything was imported just now: the first order is never refused
        self._child_ended = watch_children()
        signal.signal(signal.SIGINT, signal.SIG_IGN)

    def serve(self) -> None:
        """Fork a launcher for every order, until the agent disconnects."""
        lead_nowhere(0, 1, 2)  # on NFS an open file would keep the session's folder, which is removed earlier
        while True:
            ready, _, _ = select.select([self._channel.fileno(), self._child_ended], [], [])
            if self._child_ended in ready:
                self._reap()
            if self._channel.fileno() in ready and not self._take_order():
                return

    def _take_order(self) -> bool:
        """Carry out one order; returns False if the agent has disconnected."""
        data, fds, _, _ = socket.recv_fds(self._channel, 1, _MOST_FDS)
        if not data:
            return False
        try:
            with open(fds.pop(0), "rb") as file:
                file.seek(0)
                order = json.loads(file.read())
            if not self._is_fresh and (path := self._files.find_changed()):
                self._answer(stale=path)
            else:
                self._fork(order, *fds)
            self._is_fresh = False
        finally:
            for fd in fds:
                os.close(fd)
        return True

    def _fork(self, order: dict[str, Any], log: int, folder: int, store: int | None = None) -> None:
        warm_pid = os.getpid()
        gc.freeze()  # so that the collector of a forked process leaves these pages shared
        try:
            pid = os.fork()
        except OSError as exc:
            self._answer(failed=f"the launcher's process cannot be forked: {exc}")
            return
        if pid == 0:
            self._become_launcher(order, warm_pid, log, folder, store)
        self._launcher = pid
        self._answer(started=pid)

    def _become_launcher(
        self, order: dict[str, Any], warm_pid: int, log: int, folder: int, store: int | None
    ) -> NoReturn:
        """Run the launcher in the forked process, with its own folder, environment, streams and signals."""
        status = 1
        try:
            die_with_parent(warm_pid)
            forget_children(self._child_ended)
            self._channel.close()
            os.umask(order["umask"])
            os.fchdir(folder)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.close(folder)
            os.close(log)
            importlib.invalidate_caches()
            multiprocessing.current_process().authkey = os.urandom(32)
            os.environ.clear()
            os.environ.update(self._environment.applied_to(order["env"]))
            if store is not None:
                os.environ[STORE_FD_VARIABLE] = str(store)
            sys.argv[1:] = order["argv"]
            self._run(order["argv"])
            status = 0
        except SystemExit as exc:
            status = _say_why(exc)
        except BaseException:  # noqa: BLE001  the traceback goes to the log, which the agent reads
            traceback.print_exc()
        finally:
            with contextlib.suppress(Exception):
                atexit._run_exitfuncs()
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError, ValueError):
                    stream.flush()
            os._exit(status)

    def _reap(self) -> None:
        drain(self._child_ended)
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self._launcher:
                    self._launcher = 0
                    self._answer(ended=ended[0], exit_code=os.waitstatus_to_exitcode(ended[1]))

    def _answer(self, **fields: object) -> None:
        with contextlib.suppress(OSError):  # the agent has exited, and this process is about to
            self._channel.send(json.dumps(fields).encode())


def _say_why(exc: SystemExit) -> int:
    """Print the reason as Python does at the end of a program; returns the exit status."""
    if exc.code is None or isinstance(exc.code, int):
        return exc.code or 0
    print(exc.code, file=sys.stderr)
    return 1
