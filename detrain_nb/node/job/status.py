"""Status of a job: what its files say, corrected when its runner has died without an update."""

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
from .order import JobRefused
from .terms import ENDED, LIVE, LOST, PREPARING, RESTARTED, STOPPED, UNREADABLE

STATUS_NAME, EXIT_NAME = "status.json", "exit.json"
FORMAT = 1
READY = b"ready\n"  # printed by a runner once it has started
_WHY = {
    LOST: "its runner was killed, possibly for lack of memory",
    RESTARTED: "the machine, or its container, was restarted while the job ran",
}
_RESERVE_NAME = ".reserve"
_RESERVE_BYTES = 1 << 16


@cache
def find_release() -> str:
    """Return the release of this code; its metadata is copied to nodes with it."""
    try:
        return metadata.version("detrain_nb")
    except metadata.PackageNotFoundError:
        return "0"


@dataclass
class Status:
    """Content of status.json. ``pid`` and ``pid_started`` identify the runner, ``boot`` the boot of its machine."""

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
        """Write status.json into ``folder``. Raises: OSError."""
        self.updated_at = time.time()
        write_whole(folder / STATUS_NAME, json.dumps({"format": FORMAT, **asdict(self)}))


@dataclass(frozen=True)
class Exit:
    """Content of exit.json. ``exit_code`` is that of the rank that failed first, 128 + n after signal n."""

    exit_code: int
    reason: str = ""
    failed_rank: int | None = None
    last_lines: tuple[str, ...] = ()
    ended_at: float = field(default_factory=time.time)
    state: str = ENDED  # or STOPPED, by the user

    def write(self, folder: Path) -> None:
        """Write exit.json into ``folder``. Raises: OSError."""
        write_whole(folder / EXIT_NAME, json.dumps({"format": FORMAT, **asdict(self)}))


def read_status(folder: Path, *, boot: Callable[[], str] = read_boot) -> dict[str, Any]:
    """Read both files and correct ``state``. Never fails: if a file is unreadable, the state is "unreadable".

    ``boot`` returns the id of the current boot.
    """
    known = {"id": folder.parent.name, "node_rank": int(folder.name.rpartition("-")[2])}
    try:
        status = {"name": "", **_read(folder / STATUS_NAME), **known}
        if status.get("state") not in (*LIVE, ENDED, STOPPED):
            raise JobRefused(f"{STATUS_NAME} is damaged")
        if status["state"] in LIVE:
            status["state"] = _judge(status, boot())
            status["reason"] = _WHY.get(status["state"], "")
        if status["state"] not in LIVE and (folder / EXIT_NAME).exists():
            ended = _read(folder / EXIT_NAME)
            status |= {name: ended.get(name) for name in _EXIT_FIELDS}
            status["state"] = STOPPED if ended.get("state") == STOPPED else ENDED
        return status
    except (OSError, JobRefused) as exc:
        why = str(exc) if isinstance(exc, JobRefused) else f"{folder.name}: {exc.strerror}"
        return {**known, "name": "", "state": UNREADABLE, "reason": why}


def is_live(status: dict[str, Any]) -> bool:
    """Return whether a job is live: its runner, or the process preparing it, is running."""
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
        raise JobRefused(f"{path.name} is damaged") from exc
    if not isinstance(said, dict) or type(said.get("format")) is not int:
        raise JobRefused(f"{path.name} is damaged")
    if said["format"] > FORMAT:
        release = clean(said.get("release", "a later one"))[:40]
        raise JobRefused(f"{path.name} was written by release {release}: this one ({find_release()}) cannot read it")
    return said


_EXIT_FIELDS = ("exit_code", "reason", "failed_rank", "last_lines", "ended_at")


class Reserve:
    """Reserved disk space for the final status of a job, released when the disk is full."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.take()

    def take(self) -> None:
        """Reserve the space, as far as the disk has room."""
        with contextlib.suppress(OSError):
            (self._folder / _RESERVE_NAME).write_bytes(os.urandom(_RESERVE_BYTES))  # zeros may take no disk space

    def write(self, said: Status | Exit) -> None:
        """Write a file, using the reserve if needed, and reserve again; on failure the job continues without it."""
        try:
            said.write(self._folder)
        except OSError:
            self.release()
            with contextlib.suppress(OSError):
                said.write(self._folder)
            self.take()

    def release(self) -> None:
        """Free the space."""
        with contextlib.suppress(OSError):
            (self._folder / _RESERVE_NAME).unlink(missing_ok=True)
