"""Status of the jobs on this node, for a list."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ...copying.json_lines import LINE_BYTES, Talk
from .folders import list_job_folders, list_parts
from .last_metrics import last_metrics
from .order import JobRefused, check_id
from .status import read_status

_MOST_JOBS = 100
_MOST_IDS = 10_000


def _parts_if_any(job: str) -> list[Path]:
    try:
        return list_parts(job)
    except JobRefused:
        return []


def report(talk: Talk, said: dict[str, Any]) -> None:
    """Send the status of the jobs ``ids``, or of the newest ones without their last lines; as many as fit in a line."""
    ids = said.get("ids")
    if ids is not None and (not isinstance(ids, list) or len(ids) > _MOST_IDS):
        raise JobRefused(f"a list of at most {_MOST_IDS} ids was expected")
    folders: Iterable[Path]
    if ids is None:
        folders = (folder for folder, _ in zip(list_job_folders(), range(_MOST_JOBS)))
    else:
        folders = (folder for job in map(check_id, ids) for folder in _parts_if_any(job))
    jobs: list[dict[str, Any]] = []
    room, has_more = LINE_BYTES // 2, False
    for folder in folders:
        talk.tick()
        status = read_status(folder)
        if ids is None:
            status.pop("last_lines", None)
        status["metrics"] = last_metrics(folder)
        room -= len(json.dumps(status))
        if has_more := room < 0 and bool(jobs):
            break
        jobs.append(status)
    talk.say("status", jobs=jobs, more=has_more)
