"""Scripts that run to their end on all nodes, detached: submitted, followed, stopped, and what they made fetched.

from detrain_nb.jobs import submit

job = submit("train.yaml")
job.attach()
job.fetch("*.pt", "models")
"""

from __future__ import annotations

from .execution import Executed, execute
from .fetching import Fetched, MadeFile
from .job import Job
from .job_list import find_job, jobs
from .job_status import JobStatus
from .log_lines import JobLog, LogLine
from .node_checks import check_here, check_nodes
from .preview import Submission
from .pruning import prune
from .report import JobList
from .submission import submit
from .watched_node import LogPart
from .watching import JobNews

__all__ = [
    "Executed",
    "Fetched",
    "Job",
    "JobList",
    "JobLog",
    "JobNews",
    "JobStatus",
    "LogLine",
    "LogPart",
    "MadeFile",
    "Submission",
    "check_here",
    "check_nodes",
    "execute",
    "find_job",
    "jobs",
    "prune",
    "submit",
]
