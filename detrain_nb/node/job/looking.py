"""Answers for a notebook that queries a job every second: only news, and little of it, however much the job prints."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...copying.json_lines import Talk, Untrue, as_size
from ...plan.names import CHECKPOINT_FOLDER, CHECKPOINT_NOTE
from .folders import METRICS_NAME, TORCHRUN_LOG, find_job_folder, read_order, work_folder
from .following import check_offsets, list_streams
from .last_metrics import last_metrics
from .log_file import find_end, find_tail, read_log, read_up_to
from .log_times import read_times
from .order import JobRefused, check_id, check_number
from .status import read_status
from .terms import (
    LOOK_BACK_BYTES,
    LOOK_LOG_BYTES,
    LOOK_METRICS_BYTES,
    LOOK_METRICS_FILES,
    LOOK_TIMES,
    MOST_CHECKPOINTS,
    OUTPUT_NAME,
)

_TAIL_LINES = 400
_MOST_LOGS = 64  # sent: those of the first ranks


def look(talk: Talk, said: dict[str, Any]) -> None:
    """Send the job's status, its checkpoints and new bytes of its files after the ``offsets``; then whether ``more``.

    Of a log at most the last lines are sent: if it has grown by more, bytes before them are skipped.
    """
    folder = find_job_folder(check_id(said.get("id")), check_number(said.get("node_rank", 0)))
    offsets = check_offsets(said.get("offsets") or {})
    status = read_status(folder)  # before the files: then output from before the end is in them
    status["metrics"] = last_metrics(folder)
    talk.say("status", jobs=[status], checkpoints=_list_checkpoints(folder))
    logs, metrics = list[str](), list[str]()
    for name in list_streams(folder):
        if name != TORCHRUN_LOG:
            (metrics if name.startswith(f"{METRICS_NAME}/") else logs).append(name)
    for name in logs[:_MOST_LOGS]:
        begin = _begin_of(folder / name, offsets.get(name))
        _send(talk, folder, name, begin, LOOK_LOG_BYTES)
    has_more = [
        _send(talk, folder, name, offsets.get(name, 0), LOOK_METRICS_BYTES) for name in metrics[:LOOK_METRICS_FILES]
    ]
    talk.say("end", more=any(has_more))


def look_back(talk: Talk, said: dict[str, Any]) -> None:
    """Send the bytes of a log before ``end``, at most 64 KiB."""
    folder = find_job_folder(check_id(said.get("id")), check_number(said.get("node_rank", 0)))
    name, end = said.get("name"), as_size(said.get("end"))
    if not isinstance(name, str) or not OUTPUT_NAME.fullmatch(name):
        raise JobRefused("the name of a log was expected")
    end = min(end, find_end(folder / name))
    at, data = read_up_to(folder / name, max(0, end - LOOK_BACK_BYTES), end)
    _say_data(talk, folder, name, at, data)


def _begin_of(log: Path, offset: int | None) -> int:
    """Return the offset to continue at; if that is unknown or too far from the end, the one of the last lines."""
    if offset is None or find_end(log) - offset > LOOK_LOG_BYTES:
        return find_tail(log, _TAIL_LINES, most_bytes=LOOK_LOG_BYTES)
    return offset


def _send(talk: Talk, folder: Path, name: str, offset: int, most: int) -> bool:
    """Send at most ``most`` bytes of a file; return whether there is probably more."""
    at, data = read_log(folder / name, offset, most)
    if data:
        _say_data(talk, folder, name, at, data)
    return len(data) == most


def _say_data(talk: Talk, folder: Path, name: str, at: int, data: bytes) -> None:
    times = read_times(folder / name, at, at + len(data), most=LOOK_TIMES)
    talk.say("data", name=name, offset=at, size=len(data), times=times)
    talk.send(data)


def _list_checkpoints(folder: Path) -> list[tuple[int, float]]:
    """List step and time of the last complete checkpoints; empty if they are not on this disk."""
    try:
        order = read_order(folder)
        url = (order.spec.get("checkpoint") or {}).get("url")
        if not isinstance(url, str) or "://" in url:
            return []
        found = sorted(_read_steps(work_folder(order, folder) / os.path.expanduser(url)))
    except (OSError, JobRefused, Untrue, AttributeError):
        return []
    return found[-MOST_CHECKPOINTS:]


def _read_steps(place: Path) -> Iterator[tuple[int, float]]:
    with contextlib.suppress(OSError), os.scandir(place) as entries:
        for entry in entries:
            if match := CHECKPOINT_FOLDER.fullmatch(entry.name):
                with contextlib.suppress(OSError):
                    yield int(match[1]), os.lstat(place / entry.name / CHECKPOINT_NOTE).st_mtime
