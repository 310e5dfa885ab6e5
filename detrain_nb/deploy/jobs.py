"""The jobs of a node, asked about from here: lines and bytes to the service there (node/job/service.py)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator

from ..copying.json_lines import Talk
from ..transport import Transport
from .files import Patience, Stop, open_stream

__all__ = ["ENDLESS", "PATIENCE", "READING", "REMOVING", "open_job_talk"]

PATIENCE = Patience(answer_s=7200.0)  # a repository may take half an hour to fetch, a job an hour to stop
READING = Patience(answer_s=60.0)  # what a job has written so far
REMOVING = Patience(answer_s=600.0)  # a folder of many files on a slow disk
ENDLESS = Patience(answer_s=math.inf)  # a job may print nothing for days, while the service says that it is there


@contextlib.contextmanager
def open_job_talk(node: Transport, *, stop: Stop | None = None, patience: Patience = PATIENCE) -> Iterator[Talk]:
    """Run the service of jobs on a node, which serves orders as long as the block lasts.

    What goes wrong in the block raises DetrainError with the name of the node.
    """
    with open_stream(node, node.run_jobs(), stop=stop, patience=patience, answers_while_told=True) as talk:
        yield talk
