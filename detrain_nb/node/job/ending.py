"""Stopping and removing jobs. Processes are identified by pid and start time, as pids are reused."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from ...copying.json_lines import Talk
from ...plan.job import JOB_VARIABLE
from ..system.proc_files import read
from ..system.processes import start_ticks
from .folders import find_job_folder, list_parts, read_bounded, remove_job_folder, write_whole
from .order import JobRefused, check_id, check_number, check_seconds
from .status import Exit, is_live, read_status
from .terms import ENDED, GRACE_S, LOST, STOPPED, UNREADABLE

_LAST_GRACE_S = 30.0  # without a stop request, as when the machine shuts down
_STOP_NAME = "stop.json"
_RUNNERS_LIMIT_S = 15.0  # after the grace period, for the runner to write its files
_SWEEP_LIMIT_S = 5.0
_TICK_S, _LOOK_S = 1.0, 0.01


def stop(talk: Talk, said: dict[str, Any]) -> None:
    """Stop a job on this node: SIGTERM, and SIGKILL after ``grace_s``; the answer has the state that it ``was`` in."""
    job, grace_s = check_id(said.get("id")), check_seconds(said.get("grace_s", GRACE_S))
    folders = _find_parts(job, said.get("node_rank"))
    states = [read_status(folder) for folder in folders]
    for status in states:
        if status["state"] == UNREADABLE:
            raise JobRefused(f"job {job} cannot be stopped: {status['reason']}")
    was = [status["state"] for status in states]
    for folder in folders:
        _ask(folder, grace_s)
    for folder in folders:
        _wait_and_kill(folder, grace_s, talk)
    talk.say("stopped", was=was[0], states=was)


def remove(talk: Talk, said: dict[str, Any]) -> None:
    """Remove all files of a job. Raises: JobRefused while it is running."""
    folder = find_job_folder(check_id(said.get("id")), check_number(said.get("node_rank", 0)))
    status = read_status(folder)
    if is_live(status) or (status["state"] == UNREADABLE and _find_marked(_mark_of(folder))):
        raise JobRefused(f"job {folder.parent.name} is running: stop it first")
    remove_job_folder(folder)
    talk.say("removed")


def read_grace(folder: Path) -> float:
    """Return the seconds that the runner gives its ranks when it is stopped."""
    try:
        return check_seconds(json.loads(read_bounded(folder / _STOP_NAME))["grace_s"])
    except (OSError, ValueError, KeyError, TypeError, JobRefused):
        return _LAST_GRACE_S


def _find_parts(job: str, node_rank: object) -> list[Path]:
    if node_rank is not None:
        return [find_job_folder(job, check_number(node_rank))]
    return list_parts(job)


def _ask(folder: Path, grace_s: float) -> None:
    with contextlib.suppress(OSError):  # a full disk: the runner then uses its default grace period
        write_whole(folder / _STOP_NAME, json.dumps({"format": 1, "grace_s": grace_s}))
    status = read_status(folder)
    if is_live(status):
        _signal(status, signal.SIGTERM)


def _wait_and_kill(folder: Path, grace_s: float, talk: Talk) -> None:
    """Wait until the runner has stopped the job; if it fails to, or has exited, kill the job's processes."""
    deadline, state = time.monotonic() + grace_s + _RUNNERS_LIMIT_S, ENDED  # if the runner was lost before
    seen: dict[str, Any] | None = None
    while is_live(status := read_status(folder)):
        seen = status
        if time.monotonic() >= deadline:
            _signal(status, signal.SIGKILL)
            state = STOPPED
            break
        _wait_for(status, min(_TICK_S, max(0.0, deadline - time.monotonic())))
        talk.tick()
    status = read_status(folder)
    if not is_live(status) and status["state"] != LOST:
        if seen:
            _wait_for(seen, _SWEEP_LIMIT_S)  # it writes its exit file before it exits
        return
    _sweep(_mark_of(folder))
    with contextlib.suppress(OSError):
        why = "killed without its runner, which had exited or did not answer"
        Exit(128 + signal.SIGKILL, why, state=state).write(folder)


def _runs(status: dict[str, Any]) -> bool:
    """Return whether its runner runs: a different process with that pid has a different start time."""
    return bool(start_ticks(status["pid"]) == status["pid_started"])


def _signal(status: dict[str, Any], number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        if _runs(status):
            os.kill(status["pid"], number)


def _wait_for(status: dict[str, Any], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while _runs(status) and time.monotonic() < deadline:
        time.sleep(_LOOK_S)  # not a pidfd: older systems, and Python built for them, have none


def _sweep(mark: str) -> None:
    """Kill the remaining processes of a job whose runner has exited."""
    deadline = time.monotonic() + _SWEEP_LIMIT_S
    while time.monotonic() < deadline and (found := _find_marked(mark)):
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)  # SIGKILL takes a moment; the next pass finds what is left


def _mark_of(folder: Path) -> str:
    return f"{folder.parent.name}/{folder.name.rpartition('-')[2]}"


def _find_marked(mark: str) -> list[int]:
    """Find the processes of a job by a variable in their environment, whatever their parents are."""
    wanted = f"{JOB_VARIABLE}={mark}"
    marked = [pid for pid in os.listdir("/proc") if pid.isdigit() and _has(pid, wanted)]
    return [int(pid) for pid in marked if start_ticks(int(pid))]


def _has(pid: str, wanted: str) -> bool:
    return wanted in (read(f"/proc/{pid}/environ") or "").split("\0")
