"""A single command of the user, with or without a job; its output is sent live."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from ...copying.json_lines import Talk
from ..system.processes import descendants, die_with_parent, drain, forget_children, has_ended, watch_children
from .folders import find_job_folder, list_parts, read_order, work_folder
from .launching import first_environment
from .order import MOST_TEXT_BYTES, JobRefused, check_id, check_number, check_seconds, fits_kernel

TIMED_OUT = 124  # the exit status of timeout(1)
_PIECE_BYTES = 1 << 16
_LINGER_S = 0.3  # for output of background processes that the command has left
_LOOK_S = 1.0


def execute(talk: Talk, said: dict[str, Any], *, fd: int) -> None:
    """Run a command in the folder of a job's ranks, else in the home; kill it with the notebook or at ``timeout_s``.

    ``fd`` becomes readable when the notebook sends a message or disconnects.
    """
    command = said.get("command")
    if not isinstance(command, str) or not command.strip() or not fits_kernel(command):
        raise JobRefused(f"a command of at most {MOST_TEXT_BYTES} bytes was expected")
    limit_s = said.get("timeout_s")
    deadline = time.monotonic() + (1e9 if limit_s is None else check_seconds(limit_s))
    ours = os.getpid()
    cwd, env = _find_place(said.get("id"), said.get("node_rank"))
    process = subprocess.Popen(
        [shutil.which("bash") or "sh", "-c", command],
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        bufsize=0,
        preexec_fn=lambda: die_with_parent(ours),  # noqa: PLW1509  there is one thread
    )
    ended, is_over = watch_children(), False
    try:
        with contextlib.closing(_Output(process)) as output:
            while not is_over and not has_ended(process.pid):
                is_over = time.monotonic() > deadline
                if select.select([fd], [], [], 0)[0]:
                    talk.hear("enough")  # raises when the notebook has disconnected
                    is_over = True
                output.send_to(talk, min(_LOOK_S, max(0.0, deadline - time.monotonic())), ended)
                drain(ended)
            if is_over:
                _end(process)
            lingering = time.monotonic() + _LINGER_S
            while output.is_open and time.monotonic() < lingering:
                output.send_to(talk, max(0.0, lingering - time.monotonic()))
    finally:
        _end(process)  # before wait(): until then no other process can have its pid
        forget_children(ended)
    code = process.wait()
    status = TIMED_OUT if is_over else code if code >= 0 else 128 - code
    talk.say("exit", status=status, timed_out=is_over)


class _Output:
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        self._file = process.stdout
        self.is_open = True

    def send_to(self, talk: Talk, limit_s: float, *ends: int) -> None:
        """Send one piece of output; wait for it at most ``limit_s``, or until one of ``ends`` is readable."""
        sources: list[Any] = [*([self._file] if self.is_open else []), *ends]
        if self._file not in select.select(sources, [], [], limit_s)[0]:
            talk.tick()
            return
        data = os.read(self._file.fileno(), _PIECE_BYTES)
        self.is_open = bool(data)
        if data:
            talk.say("output", size=len(data))
            talk.send(data)
            talk.flush()

    def close(self) -> None:
        self._file.close()


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the command, its process group, and all its descendants."""
    below = descendants(process.pid)
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in below:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _find_place(job: object, node_rank: object) -> tuple[Path, dict[str, str] | None]:
    """Return the folder and environment of a command: those of the job, without its secrets. Raises: JobRefused."""
    if job is None:
        return Path.home(), None
    folder = (
        list_parts(check_id(job))[0] if node_rank is None else find_job_folder(check_id(job), check_number(node_rank))
    )
    order = read_order(folder)
    env = first_environment(order, folder, {})
    return work_folder(order, folder), env
