"""Conversations with the service of jobs on a node (node/job/service.py), in lines and bytes."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from ..copying.json_lines import Talk
from ..transport import Transport
from .files import Patience, Stop, open_stream

__all__ = ["ENDLESS", "PATIENCE", "READING", "REMOVING", "open_job_talk"]

PATIENCE = Patience(answer_s=7200.0)  # a repository may take half an hour to fetch, a job an hour to stop
READING = Patience(answer_s=60.0)  # for reading the output of a job
REMOVING = Patience(answer_s=600.0)  # a folder of many files on a slow disk
ENDLESS = Patience(answer_s=math.inf)  # a job may print nothing for days, while the service reports that it is alive


@contextlib.contextmanager
def open_job_talk(node: Transport, *, stop: Stop | None = None, patience: Patience = PATIENCE) -> Iterator[Talk]:
    """Run the service of jobs on a node and yield the talk with it; the service runs until the end of the block.

    Raises: DetrainError with the name of the node for failures in the block.
    """
    with open_stream(node, node.run_jobs(), stop=stop, patience=patience, answers_while_told=True) as talk:
        yield talk
