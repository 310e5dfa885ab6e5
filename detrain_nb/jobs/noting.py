"""What nodes say of jobs, noted down in the record for who cannot ask them."""

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
_SUBMIT_LIMIT_S = 600.0  # of another machine that shares the record


def note_down(status: JobStatus, record: Record) -> None:
    """Keep how a job is for who cannot ask its nodes."""
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
    """Makes the state of one job of what its nodes say, and notes it down when it has changed."""

    def __init__(self, job: str, name: str, nodes: Sequence[str], record: Record) -> None:
        self._job, self._name, self._nodes, self._record = job, name, nodes, record
        self._least_nodes = least_nodes(record.get(job))
        self._noted: tuple[str, int | None] | None = None

    def __call__(self, said: Sequence[NodeReport | DetrainError | None]) -> JobStatus:
        status = judge(self._job, self._name, dict(zip(self._nodes, said)), least_nodes=self._least_nodes)
        if status.state == UNKNOWN:
            return self._recall(status)
        if (status.state, status.exit_code) != self._noted:
            with contextlib.suppress(JobError):  # another process has held the record: it is noted the next time
                note_down(status, self._record)
                self._noted = status.state, status.exit_code
        return status

    def _recall(self, unknown: JobStatus) -> JobStatus:
        """A job that was over stays over while its nodes say nothing."""
        with contextlib.suppress(JobError):
            known = known_status(self._record.get(self._job))
            if known.state in OVER:
                return dataclasses.replace(known, reports=unknown.reports, silent=unknown.silent)
        return unknown


def running_job(name: str, *, record: Record, ask_passphrase: AskPassphrase | None = None) -> str | None:
    """The id of a job of that name that is not over, as far as is known within 3 s."""
    going = [row.id for row in record.summaries(limit=_MOST_OF_A_NAME, name=name) if row.state not in OVER]
    if going:
        ask_after(going, record, limit_s=ASK_LIMIT_S, ask_passphrase=ask_passphrase)
    return next((job for job in going if record.get(job).state not in OVER), None)


def least_nodes(row: JobRow) -> int | None:
    """How many nodes of an elastic job suffice; None of any other."""
    with contextlib.suppress(ValueError, AttributeError):
        found = json.loads(row.spec).get("rendezvous", {}).get("min_nodes")
        return found if isinstance(found, int) else None
    return None


def known_status(row: JobSummary) -> JobStatus:
    """What the record has, which may be old."""
    return JobStatus(row.id, row.name, row.state, row.exit_code, started_at=row.started_at, ended_at=row.ended_at)


def nodes_of_row(text: str, job: str) -> list[Node]:
    """The nodes of a job, as the record has them; none for one on this machine. Raises: JobError."""
    from ..spec.node import Node

    try:
        return [Node(**fields) for fields in json.loads(text)]
    except (ValueError, TypeError) as exc:
        raise JobError(f"the nodes of job {job} cannot be read, another release has written them: {exc}") from exc


def ask_after(ids: Iterable[str], record: Record, *, limit_s: float, ask_passphrase: AskPassphrase | None) -> None:
    """Note down what the nodes say; each is asked once for all its jobs."""
    transports: dict[str, Transport] = {}
    parts: dict[str, list[str]] = {}  # of a job, the keys of its nodes by node rank
    for job in ids:
        try:
            described = nodes_of_row(record.get(job).nodes, job)
            reached = transports_to(described or None, ask_passphrase=ask_passphrase)
        except DetrainError:  # it is shown as it was last known
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
    """What a node says of jobs, which may take several answers. Raises: FilesError."""
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
    """Another process is at it, and no node has it yet."""
    if row.state != SUBMITTING:
        return False
    is_at_it = is_being_submitted(row.name)
    return time.time() - row.updated_at < _SUBMIT_LIMIT_S if is_at_it is None else is_at_it


def _key_of(transport: Transport) -> str:
    return json.dumps(transport.node.to_fields()) if transport.node else transport.name
