"""Output and metrics of a job, sent from the notebook's offsets on, until the job has ended."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ...copying.json_lines import Talk, as_size, check_name
from .folders import METRICS_NAME, find_job_folder
from .last_metrics import last_metrics
from .log_file import find_end, find_tail, read_log
from .order import JobRefused, check_id, check_number
from .status import is_live, read_status
from .terms import OUTPUT_NAME

_PIECE_BYTES = 1 << 18
_LOOK_S = 0.05


def follow(talk: Talk, said: dict[str, Any], *, wait: Callable[[float], bool]) -> None:
    """Send new data and states; ``wait`` waits for some seconds and returns whether the notebook has sent a message."""
    folder = find_job_folder(check_id(said.get("id")), check_number(said.get("node_rank", 0)))
    offsets = check_offsets(said.get("offsets") or {})
    is_once, shown, wants = said.get("once") is True, "", _read_wishes(said)
    if said.get("tail") is not None:
        _begin_at_tail(talk, folder, filter(wants, list_streams(folder)), offsets, lines=check_number(said["tail"]))
    # with ``once``, only output from before now is sent: a job may print faster than it is read
    ends = {name: find_end(folder / name) for name in list_streams(folder)} if is_once else None
    while True:
        status = read_status(folder)  # before the files: once it has ended, they hold all output
        if (state := repr((status["state"], status.get("ranks"), status.get("restarts")))) != shown:
            talk.say("status", jobs=[{**status, "metrics": last_metrics(folder)}])
            shown = state
        has_sent = [_send_more(talk, folder, name, offsets, ends) for name in list_streams(folder) if wants(name)]
        if any(has_sent):
            talk.flush()
        elif is_once or not is_live(status):
            talk.say("end")
            return
        else:
            talk.tick()
            talk.flush()
        if wait(0.0 if any(has_sent) else _LOOK_S):
            talk.hear("enough")
            talk.say("end")
            return


def _begin_at_tail(talk: Talk, folder: Path, names: Iterable[str], offsets: dict[str, int], *, lines: int) -> None:
    """Send the first offset of each log, even an empty one, so that a reconnecting notebook continues from there."""
    for name in names:
        offsets[name] = find_tail(folder / name, lines)
        talk.say("data", name=name, offset=offsets[name], size=0)


def _send_more(talk: Talk, folder: Path, name: str, offsets: dict[str, int], ends: Mapping[str, int] | None) -> bool:
    offset = offsets.get(name, 0)
    left = _PIECE_BYTES if ends is None else ends.get(name, 0) - offset
    if left <= 0:
        return False
    at, data = read_log(folder / name, offset, min(left, _PIECE_BYTES))
    if data:
        talk.say("data", name=name, offset=at, size=len(data))
        talk.send(data)
        offsets[name] = at + len(data)
    return bool(data)


def list_streams(folder: Path) -> list[str]:
    """List the log files that exist now, ranks in order, then their metrics files."""
    found: list[str] = []
    for prefix in ("", f"{METRICS_NAME}/"):
        with contextlib.suppress(OSError):
            names = sorted(os.listdir(folder / prefix), key=lambda name: (len(name), name))
            found += [prefix + name for name in names if OUTPUT_NAME.fullmatch(prefix + name)]
    return found


def _read_wishes(said: dict[str, Any]) -> Callable[[str], bool]:
    """Return a filter of file names: only those of ``rank``; no ``logs`` or no ``metrics`` if these are false."""
    rank = said.get("rank")
    of_rank = "" if rank is None else f"rank-{check_number(rank)}."
    has_logs, has_metrics = said.get("logs") is not False, said.get("metrics") is not False

    def wants(name: str) -> bool:
        inner, is_metrics = name.removeprefix(f"{METRICS_NAME}/"), name.startswith(f"{METRICS_NAME}/")
        return (has_metrics if is_metrics else has_logs) and inner.startswith(of_rank)

    return wants


def check_offsets(said: object) -> dict[str, int]:
    """Return offsets by the name of a log or metrics file. Raises: JobRefused, Untrue."""
    if not isinstance(said, dict):
        raise JobRefused("an object of offsets by file name was expected")
    for name, offset in said.items():
        if not OUTPUT_NAME.fullmatch(check_name(name)):
            raise JobRefused(f"{name[:80]!r} is not a log or metrics file of a job")
        as_size(offset)
    return dict(said)
