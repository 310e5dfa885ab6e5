"""What a job says of itself in files, and what is so: a runner that is gone cannot say it."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ...copying.json_lines import clean
from ..system.processes import start_ticks
from .folders import read_boot, read_bounded, write_whole
from .order import JobError
from .terms import ENDED, LIVE, LOST, PREPARING, RESTARTED, STOPPED, UNREADABLE

STATUS_NAME, EXIT_NAME = "status.json", "exit.json"
FORMAT = 1
READY = b"ready\n"  # what a runner prints once it is there
_WHY = {
    LOST: "its runner is gone: it was killed, perhaps for want of memory",
    RESTARTED: "the machine, or its container, was started anew while it ran",
}
_RESERVE_NAME = ".reserve"
_RESERVE_BYTES = 1 << 16


@cache
def find_release() -> str:
    """Of the code that this is: it travels with what says so."""
    try:
        return metadata.version("detrain_nb")
    except metadata.PackageNotFoundError:
        return "0"


@dataclass
class Status:
    """status.json. ``pid`` and ``pid_started`` name the runner, ``boot`` the life of the machine it runs in."""

    id: str
    name: str
    node_rank: int
    node: str = ""
    state: str = PREPARING
    pid: int = field(default_factory=os.getpid)
    pid_started: int = field(default_factory=lambda: start_ticks(os.getpid()))
    boot: str = field(default_factory=read_boot)
    started_at: float = field(default_factory=time.time)
    ended_at: float | None = None
    exit_code: int | None = None
    reason: str = ""
    world_size: int = 1
    ranks: list[dict[str, Any]] = field(default_factory=list)
    restarts: int = 0
    updated_at: float = 0.0
    release: str = field(default_factory=find_release)

    def write(self, folder: Path) -> None:
        """Raises: OSError."""
        self.updated_at = time.time()
        write_whole(folder / STATUS_NAME, json.dumps({"format": FORMAT, **asdict(self)}))


@dataclass(frozen=True)
class Exit:
    """exit.json: how it ended. ``exit_code`` is that of the rank that failed first, 128 + n after signal n."""

    exit_code: int
    reason: str = ""
    failed_rank: int | None = None
    last_lines: tuple[str, ...] = ()
    ended_at: float = field(default_factory=time.time)
    state: str = ENDED  # or STOPPED, where the user has ended it

    def write(self, folder: Path) -> None:
        """Raises: OSError."""
        write_whole(folder / EXIT_NAME, json.dumps({"format": FORMAT, **asdict(self)}))


def read_status(folder: Path, *, boot: Callable[[], str] = read_boot) -> dict[str, Any]:
    """What is so: both files, with ``state`` judged. Never fails: what cannot be read is the state "unreadable".

    ``boot`` says which life of the machine this is.
    """
    known = {"id": folder.parent.name, "node_rank": int(folder.name.rpartition("-")[2])}
    try:
        status = {"name": "", **_read(folder / STATUS_NAME), **known}
        if status.get("state") not in (*LIVE, ENDED, STOPPED):
            raise JobError(f"{STATUS_NAME} is damaged")
        if status["state"] in LIVE:
            status["state"] = _judge(status, boot())
            status["reason"] = _WHY.get(status["state"], "")
        if status["state"] not in LIVE and (folder / EXIT_NAME).exists():
            ended = _read(folder / EXIT_NAME)
            status |= {name: ended.get(name) for name in _EXIT_FIELDS}
            status["state"] = STOPPED if ended.get("state") == STOPPED else ENDED
        return status
    except (OSError, JobError) as exc:
        why = str(exc) if isinstance(exc, JobError) else f"{folder.name}: {exc.strerror}"
        return {**known, "name": "", "state": UNREADABLE, "reason": why}


def is_live(status: dict[str, Any]) -> bool:
    """Its runner, or who prepares it, is there."""
    return status["state"] in LIVE


def _judge(status: dict[str, Any], boot: str) -> str:
    if status.get("boot") != boot:
        return RESTARTED
    pid, started = status.get("pid"), status.get("pid_started")
    is_there = type(pid) is int and pid > 0 and started == start_ticks(pid)
    return str(status["state"]) if is_there else LOST


def _read(path: Path) -> dict[str, Any]:
    try:
        said = json.loads(read_bounded(path))
    except (ValueError, RecursionError) as exc:
        raise JobError(f"{path.name} is damaged") from exc
    if not isinstance(said, dict) or type(said.get("format")) is not int:
        raise JobError(f"{path.name} is damaged")
    if said["format"] > FORMAT:
        release = clean(said.get("release", "a later one"))[:40]
        raise JobError(f"{path.name} was written by release {release}: this one ({find_release()}) cannot read it")
    return said


_EXIT_FIELDS = ("exit_code", "reason", "failed_rank", "last_lines", "ended_at")


class Reserve:
    """Room on the disk for the last words of a job, given up when the disk is full."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.take()

    def take(self) -> None:
        """As much as there is room for."""
        with contextlib.suppress(OSError):
            (self._folder / _RESERVE_NAME).write_bytes(os.urandom(_RESERVE_BYTES))  # zeros take none on some disks

    def write(self, said: Status | Exit) -> None:
        """Write a file, if that is possible at all: a job goes on without. The room is there for the next one too."""
        try:
            said.write(self._folder)
        except OSError:
            self.release()
            with contextlib.suppress(OSError):
                said.write(self._folder)
            self.take()

    def release(self) -> None:
        with contextlib.suppress(OSError):
            (self._folder / _RESERVE_NAME).unlink(missing_ok=True)
