"""Removal of old jobs that are over, on their nodes and here."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from ..errors import DetrainError, SpecError
from .job_list import find_job, jobs
from .job_status import OVER
from .record import Record

if TYPE_CHECKING:
    from ..transport.ssh import AskPassphrase

__all__ = ["prune"]

_DAY_S = 86400.0
_MOST_JOBS = 1_000_000


def prune(
    older_than_days: float,
    *,
    anyway: bool = False,
    on_job: Callable[[str, DetrainError | None], object] | None = None,
    ask_passphrase: AskPassphrase | None = None,
) -> list[str]:
    """Remove the jobs that ended more than ``older_than_days`` ago; return their ids.

    prune(30)

    A job with a node that does not answer is kept; with ``anyway`` it is forgotten here. ``on_job`` gets each id, and
    the error that kept the job, or None. Raises: SpecError for an invalid number.
    """
    if not 0 <= older_than_days <= 100_000:
        raise SpecError(f"older than {older_than_days:g} days: give 0 to 100000")
    record = Record()
    before = time.time() - older_than_days * _DAY_S
    removed: list[str] = []
    for row in jobs(limit=_MOST_JOBS, record=record, ask_passphrase=ask_passphrase).rows:
        if row.state not in OVER or (row.ended_at or row.updated_at) > before:
            continue
        failure: DetrainError | None = None
        try:
            find_job(row.id, record=record, ask_passphrase=ask_passphrase).remove(anyway=anyway)
            removed.append(row.id)
        except DetrainError as exc:
            failure = exc
        if on_job:
            on_job(row.id, failure)
    return removed
