"""Reports of nodes on jobs, written to the record for callers that cannot ask the nodes."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from ..copying.json_lines import Talk
from ..deploy.chosen_nodes import transports_to
from ..deploy.files import label
from ..deploy.jobs import open_job_talk
from ..errors import DetrainError, JobError
from ..node.job.terms import NOT_STARTED, SUBMITTING, UNKNOWN
from ..transport import Transport
from .asking import try_on_all
from .job_status import OVER, JobStatus, judge
from .record import Changes, JobRow, JobSummary, Record
from .report_checks import STATUS_BYTES, NodeReport, find_part, read_reports
from .submitting import is_being_submitted

if TYPE_CHECKING:
    from ..spec.node import Node
    from ..transport.ssh import AskPassphrase

__all__ = [
    "ASK_LIMIT_S",
    "Noting",
    "ask_after",
    "hear_reports",
    "known_status",
    "least_nodes",
    "nodes_of_row",
    "note_down",
    "running_job",
]

ASK_LIMIT_S = 3.0
_MOST_OF_A_NAME = 100
_SUBMIT_LIMIT_S = 600.0  # for a submission from another machine that shares the record


def note_down(status: JobStatus, record: Record) -> None:
    """Write the status of a job to the record."""
    known: Changes = {
        "state": status.state,
        "exit_code": status.exit_code,
        "started_at": status.started_at,
        "ended_at": status.ended_at,
    }
    if status.metrics:
        known["metrics"] = json.dumps(dict(status.metrics))
    record.update(status.id, **known)


class Noting:
    """Status of one job, derived from the reports of its nodes, and recorded when it has changed."""

    def __init__(self, job: str, name: str, nodes: Sequence[str], record: Record) -> None:
        self._job, self._name, self._nodes, self._record = job, name, nodes, record
        self._least_nodes = least_nodes(record.get(job))
        self._noted: tuple[str, int | None] | None = None

    def __call__(self, said: Sequence[NodeReport | DetrainError | None]) -> JobStatus:
        status = judge(self._job, self._name, dict(zip(self._nodes, said)), least_nodes=self._least_nodes)
        if status.state == UNKNOWN:
            return self._recall(status)
        if (status.state, status.exit_code) != self._noted:
            with contextlib.suppress(JobError):  # another process holds the record: write it the next time
                note_down(status, self._record)
                self._noted = status.state, status.exit_code
        return status

    def _recall(self, unknown: JobStatus) -> JobStatus:
        """Return the recorded status if the job was over: it stays over while its nodes do not answer."""
        with contextlib.suppress(JobError):
            known = known_status(self._record.get(self._job))
            if known.state in OVER:
                return dataclasses.replace(known, reports=unknown.reports, silent=unknown.silent)
        return unknown


def running_job(name: str, *, record: Record, ask_passphrase: AskPassphrase | None = None) -> str | None:
    """Return the id of a job of that name that is not over; its nodes are asked for at most 3 s."""
    going = [row.id for row in record.summaries(limit=_MOST_OF_A_NAME, name=name) if row.state not in OVER]
    if going:
        ask_after(going, record, limit_s=ASK_LIMIT_S, ask_passphrase=ask_passphrase)
    return next((job for job in going if record.get(job).state not in OVER), None)


def least_nodes(row: JobRow) -> int | None:
    """Return how many nodes an elastic job needs; None for any other job."""
    with contextlib.suppress(ValueError, AttributeError):
        found = json.loads(row.spec).get("rendezvous", {}).get("min_nodes")
        return found if isinstance(found, int) else None
    return None


def known_status(row: JobSummary) -> JobStatus:
    """Return the status in the record, which may be out of date."""
    return JobStatus(row.id, row.name, row.state, row.exit_code, started_at=row.started_at, ended_at=row.ended_at)


def nodes_of_row(text: str, job: str) -> list[Node]:
    """Return the nodes of a job from the record; none if it runs on this machine. Raises: JobError."""
    from ..spec.node import Node

    try:
        return [Node(**fields) for fields in json.loads(text)]
    except (ValueError, TypeError) as exc:
        raise JobError(f"the nodes of job {job} cannot be read; another release wrote them: {exc}") from exc


def ask_after(ids: Iterable[str], record: Record, *, limit_s: float, ask_passphrase: AskPassphrase | None) -> None:
    """Record what the nodes report; each node is asked once for all of its jobs."""
    transports: dict[str, Transport] = {}
    parts: dict[str, list[str]] = {}  # by job, the keys of its nodes in order of node rank
    for job in ids:
        try:
            described = nodes_of_row(record.get(job).nodes, job)
            reached = transports_to(described or None, ask_passphrase=ask_passphrase)
        except DetrainError:  # the job is shown as last known
            continue
        keys = [_key_of(transport) for transport in reached]
        transports |= {key: transport for key, transport in zip(keys, reached) if key not in transports}
        parts[job] = keys
    keys = list(transports)
    nodes = [transports[key] for key in keys]

    def ask(index: int) -> list[NodeReport]:
        with open_job_talk(nodes[index]) as talk:
            return hear_reports(talk, [job for job, of_job in parts.items() if keys[index] in of_job])

    try:
        answers = dict(zip(keys, try_on_all(nodes, ask, limit_s=limit_s))) if nodes else {}
    finally:
        for node in nodes:
            node.leave()
    for job, of_job in parts.items():
        _note(job, of_job, transports, answers, record)


def hear_reports(talk: Talk, wanted: Sequence[str]) -> list[NodeReport]:
    """Ask a node for its reports on jobs, in several answers if needed. Raises: FilesError."""
    reports: list[NodeReport] = []
    while wanted:
        talk.say("status", ids=wanted)
        said = talk.hear("status", most_bytes=STATUS_BYTES)
        reports += (more := read_reports(said))
        told = {each.id for each in more}
        left = [job for job in wanted if job not in told]
        wanted = left if said.get("more") is True and len(left) < len(wanted) else []
    return reports


def _note(
    job: str,
    keys: Sequence[str],
    transports: Mapping[str, Transport],
    answers: Mapping[str, list[NodeReport] | DetrainError],
    record: Record,
) -> None:
    said: dict[str, NodeReport | DetrainError | None] = {}
    for node_rank, key in enumerate(keys):
        answer = answers[key]
        said[label(transports[key])] = answer if isinstance(answer, DetrainError) else find_part(answer, job, node_rank)
    row = record.get(job)
    status = judge(job, row.name, said, least_nodes=least_nodes(row))
    if status.state == UNKNOWN or (status.state == NOT_STARTED and _may_come(row)):
        return
    note_down(status, record)


def _may_come(row: JobSummary) -> bool:
    """Return whether another process is still submitting the job, and no node has it yet."""
    if row.state != SUBMITTING:
        return False
    is_at_it = is_being_submitted(row.name)
    return time.time() - row.updated_at < _SUBMIT_LIMIT_S if is_at_it is None else is_at_it


def _key_of(transport: Transport) -> str:
    return json.dumps(transport.node.to_fields()) if transport.node else transport.name
