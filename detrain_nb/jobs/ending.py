"""Stopping and removing the parts of a job on its nodes."""

from __future__ import annotations

from collections.abc import Sequence

from ..deploy.files import Patience, label
from ..deploy.jobs import REMOVING, open_job_talk
from ..errors import DetrainError, JobError, SpecError
from ..node.job.terms import UNKNOWN
from ..transport import Transport
from .asking import on_all, try_on_all
from .job_status import JobStatus

__all__ = ["remove_parts", "stop_parts"]

_STOP_LIMIT_S = 30.0  # on top of the grace period


def stop_parts(nodes: Sequence[Transport], job: str, *, grace_s: float) -> list[DetrainError]:
    """Stop the ranks of a job on all nodes; return the failures. Raises: SpecError for an invalid ``grace_s``."""
    if not 0 <= grace_s <= 3600:
        raise SpecError(f"grace {grace_s:g} s: give 0 to 3600")
    patience = Patience(answer_s=grace_s + _STOP_LIMIT_S)

    def stop(index: int) -> None:
        with open_job_talk(nodes[index], patience=patience) as talk:
            talk.say("stop", id=job, node_rank=index, grace_s=grace_s)
            talk.hear("stopped")

    return [each for each in try_on_all(nodes, stop) if isinstance(each, DetrainError)]


def remove_parts(nodes: Sequence[Transport], status: JobStatus, *, anyway: bool) -> None:
    """Remove the folders of a job on the nodes that answer.

    Raises: JobError while it runs, or, unless ``anyway``, when its state is unknown as nodes do not answer;
    DetrainError.
    """
    if status.state == UNKNOWN and not anyway:
        why = "; ".join(f"{node} does not answer: {each}" for node, each in status.silent.items())
        raise JobError(f"job {status.id}: {why}", advice="{} forgets the job here", typed="--anyway")
    if not status.is_over and status.state != UNKNOWN:
        raise JobError(f"job {status.id} is {status.state}", advice="stop it first with {}", typed=f"stop {status.id}")
    there = [index for index, node in enumerate(nodes) if label(node) in status.reports]

    def remove(position: int) -> None:
        with open_job_talk(nodes[there[position]], patience=REMOVING) as talk:
            talk.say("remove", id=status.id, node_rank=there[position])
            talk.hear("removed")

    on_all([nodes[index] for index in there], remove)
