"""Jobs that this user submitted from this machine: their last known state, and what nodes report within 3 s."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import SpecError
from .job import Job
from .job_status import OVER
from .noting import ASK_LIMIT_S, ask_after, nodes_of_row
from .record import Record
from .report import MOST_SHOWN, JobList

if TYPE_CHECKING:
    from ..transport.ssh import AskPassphrase

__all__ = ["find_job", "jobs"]

_MOST_LISTED = 1_000_000_000
_MOST_ASKED = 100  # jobs of a node: their states fit into one line of the talk


def jobs(
    *,
    limit: int = MOST_SHOWN,
    ask: bool = True,
    limit_s: float = ASK_LIMIT_S,
    record: Record | None = None,
    ask_passphrase: AskPassphrase | None = None,
) -> JobList:
    """List the ``limit`` newest jobs; ask nodes about those that are not over, for ``limit_s`` seconds in all.

    ``ask`` False shows the last known states. Raises: SpecError.
    """
    if not 1 <= limit <= _MOST_LISTED:
        raise SpecError(f"limit {limit}: give 1 to {_MOST_LISTED}")
    record = record or Record()
    rows = record.summaries(limit=limit)
    going = [row.id for row in rows if row.state not in OVER] if ask else []
    if going:
        ask_after(going[:_MOST_ASKED], record, limit_s=limit_s, ask_passphrase=ask_passphrase)
        rows = record.summaries(limit=limit)
    return JobList(rows)


def find_job(
    wanted: str | None = None, *, record: Record | None = None, ask_passphrase: AskPassphrase | None = None
) -> Job:
    """Find a job by its id, the beginning of its id, or its name (the newest); by default the last one submitted here.

    job = find_job("fashion")

    No node is contacted. Raises: JobError when there is none, or several ids begin like that.
    """
    record = record or Record()
    row = record.get_last() if wanted is None else record.get(wanted)
    return Job(row.id, row.name, nodes_of_row(row.nodes, row.id), record=record, ask_passphrase=ask_passphrase)
