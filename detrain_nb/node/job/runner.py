"""The runner of a job on one node: runs the setup lines, then torchrun; writes their output and the job's outcome.

It is detached from the process that started it. None of its own processes outlives it, or the job.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...guarded import make_users_folder
from ...launch import STORE_FD_VARIABLE
from ..system.own_files import PACKAGE
from ..system.processes import (
    adopt_orphans,
    descendants,
    die_with_parent,
    drain,
    end_descendants,
    lead_nowhere,
    watch_children,
)
from .ending import read_grace
from .folders import ORDER_NAME, SETUP_LOG, TORCHRUN_LOG, read_bounded, work_folder
from .launching import first_environment, last_word_command, setup_command, torchrun_command
from .order import JobOrder, JobRefused
from .outputs import Outputs
from .status import READY, Exit, Reserve, Status
from .terms import ENDED, RUNNING, STOPPING
from .verdict import judge, read_told

_NOT_STARTED = 127
_TOUCH_S = 6 * 3600.0
_LAST_WORD_LIMIT_S = 60.0  # it imports torch, perhaps on a busy machine; a stop of the job kills it


def main() -> None:
    """Run the job in the folder of the first argument; secrets are read from standard input."""
    folder, store = Path(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else -1
    order = JobOrder.from_json(read_bounded(folder / ORDER_NAME))
    given = json.loads(sys.stdin.buffer.read())
    runner = Runner(folder, order, given, store)
    os.write(1, READY)
    lead_nowhere(0, 1)
    runner.run()


class Runner:
    """Runner of one node's part of a job."""

    def __init__(self, folder: Path, order: JobOrder, given: Mapping[str, Any], store: int) -> None:
        self._folder, self._order, self._given, self._store = folder, order, given, store
        self._env: Mapping[str, str] = {}
        self._kill_at: float | None = None
        self._is_told = False  # SIGTERM has been sent to the running command
        self._touch_at = 0.0
        adopt_orphans()
        self._children = watch_children()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._ask_to_stop)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        self._outputs = Outputs(folder)
        self._outputs.loop.add(self._children, self._note_ends)
        self._process: subprocess.Popen[bytes] | None = None
        self._reserve = Reserve(folder)
        self._status = Status(order.id, order.name, order.node_rank, order.node, world_size=order.world_size)
        self._status.write(folder)

    @property
    def _is_stopped(self) -> bool:
        return self._kill_at is not None

    def run(self) -> None:
        """Run the job to its end, and write how it ended."""
        ended, code, log = None, _NOT_STARTED, ""
        try:
            code, log = self._run()
        except OSError as exc:
            ended = Exit(_NOT_STARTED, f"{exc.filename or 'the runner'}: {exc.strerror or exc}")
        except JobRefused as exc:
            ended = Exit(_NOT_STARTED, str(exc))
        except Exception as exc:  # noqa: BLE001  a bug of ours: else the runner would seem to have been killed
            traceback.print_exc()
            ended = Exit(_NOT_STARTED, f"the runner failed: {exc!r}")
        end_descendants()
        self._outputs.close()  # all output has been read
        ended = ended or judge(self._outputs, code, folder=self._folder, log=log, stopped=self._is_stopped)
        if ended.state == ENDED and ended.exit_code:
            self._tell_others(ended.reason, code)
        self._reserve.write(ended)
        self._status.state, self._status.ended_at = ended.state, ended.ended_at
        self._status.exit_code, self._status.reason = ended.exit_code, ended.reason
        self._reserve.write(self._status)
        self._reserve.release()

    def _run(self) -> tuple[int, str]:
        """Run setup and torchrun; return the exit code of the last one, and its log. Raises: OSError, JobRefused."""
        order, folder = self._order, self._folder
        env = self._env = first_environment(order, folder, self._given["secrets"])
        cwd = self._find_cwd()
        if order.setup:
            with setup_command(order.setup, folder) as setup:
                code = self._run_command(setup.argv, env, SETUP_LOG, cwd, [setup.told])
                env = self._env = setup.read_environment() or env
            if code or self._is_stopped:
                return code, SETUP_LOG
        self._status.state = STOPPING if self._is_stopped else RUNNING
        self._write_status()
        address, port = self._given["store"]
        argv, env = torchrun_command(order, folder, env, store=(address, port), key=self._given["key"])
        env |= self._outputs.environment()
        handed = []
        if self._store >= 0:
            handed, env[STORE_FD_VARIABLE] = [self._store], str(self._store)
        return self._run_command(argv, env, TORCHRUN_LOG, cwd, handed), TORCHRUN_LOG

    def _tell_others(self, reason: str, code: int) -> None:
        """Report a failure to the other nodes of a fixed rendezvous if torchrun could not.

        Node 0 does not: it hosts the store, which has ended with its torchrun.
        """
        order, has_said = self._order, code <= 128 and self._outputs.outcomes
        if order.node_rank == 0 or order.rendezvous.kind != "fixed" or has_said or read_told(self._folder):
            return
        ours, nothing = os.getpid(), subprocess.DEVNULL
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(
                last_word_command(order, self._given["store"], reason),
                env=dict(self._env),
                stdin=nothing,
                stdout=nothing,
                stderr=nothing,
                timeout=_LAST_WORD_LIMIT_S,
                check=False,  # on failure the others notice that this node is silent
                preexec_fn=lambda: die_with_parent(ours),
            )

    def _find_cwd(self) -> Path:
        """Return the folder in which commands start, and create a ``workdir``. Raises: JobRefused, OSError."""
        folder = work_folder(self._order, self._folder)
        if self._order.workdir:
            make_users_folder(folder)
        return folder

    def _run_command(self, argv: list[str], env: Mapping[str, str], log: str, cwd: Path, handed: list[int]) -> int:
        """Run a command to its end; return its exit code, 128 + n after signal n. Raises: OSError."""
        ours = os.getpid()
        read, write = os.pipe()
        with open(write, "wb", buffering=0) as output:
            self._outputs.add(read, log)
            self._process = process = subprocess.Popen(
                argv,
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=handed,
                start_new_session=True,
                preexec_fn=lambda: die_with_parent(ours),  # noqa: PLW1509  there is one thread
            )
        if self._store in handed:
            os.close(self._store)  # torchrun has it: once that exits, connections must be refused
        self._is_told = False
        while (code := process.poll()) is None:
            self._outputs.loop.once(self._next_moment())
            self._see_to_stop(process)
            if self._outputs.take_news():
                self._status.ranks, self._status.restarts = self._outputs.ranks(), self._outputs.restarts
                self._write_status()
        self._process = None
        return code if code >= 0 else 128 - code

    def _next_moment(self) -> float:
        if time.monotonic() >= self._touch_at:  # else the cache clean-up removes our code as unused
            self._touch_at = time.monotonic() + _TOUCH_S
            with contextlib.suppress(OSError):
                os.utime(os.path.dirname(PACKAGE))
        limit = time.monotonic() + _TOUCH_S
        return limit if self._kill_at is None else min(limit, self._kill_at)

    def _write_status(self) -> None:
        self._reserve.write(self._status)

    # ---- stopping

    def _ask_to_stop(self, *_: object) -> None:
        """Note a request to stop; the signal also wakes the loop."""
        if self._kill_at is None:
            self._kill_at = time.monotonic() + read_grace(self._folder)

    def _see_to_stop(self, process: subprocess.Popen[bytes]) -> None:
        if self._kill_at is None:
            return
        if not self._is_told:
            self._is_told = True
            self._status.state = STOPPING
            self._write_status()
            with contextlib.suppress(ProcessLookupError):  # torchrun forwards it to its ranks
                os.killpg(process.pid, signal.SIGTERM)
        if time.monotonic() >= self._kill_at:
            for pid in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            self._kill_at = time.monotonic() + 0.5  # a process that was just being started may have escaped

    def _note_ends(self) -> None:
        """Reap exited orphans, which this process has adopted."""
        drain(self._children)
        ours = self._process.pid if self._process else 0
        look = os.WEXITED | os.WNOHANG | os.WNOWAIT
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, look)) and ended.si_pid != ours:
                os.waitpid(ended.si_pid, os.WNOHANG)


if __name__ == "__main__":
    main()
