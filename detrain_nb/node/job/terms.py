"""Terms about jobs that the notebook and the nodes share: states, file names, limits.

Both ends import this module, so it imports nothing else of detrain_nb.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

PREPARING, RUNNING, STOPPING = LIVE = ("preparing", "running", "stopping")
ENDED, STOPPED, LOST, RESTARTED, UNREADABLE = OVER = ("ended", "stopped", "lost", "node restarted", "unreadable")
SUBMITTING, NOT_STARTED, UNKNOWN = "submitting", "not started", "unknown"  # of a whole job: no node reports these
OUTPUT_NAME = re.compile(r"rank-[0-9]{1,6}\.log|setup\.log|torchrun\.log|metrics/rank-[0-9]{1,6}\.jsonl")
LOOK_LOG_BYTES = 1 << 16  # of a log, in one answer to a query every second
LOOK_BACK_BYTES = 1 << 16  # of a log before that, on request
LOOK_TIMES = 256  # marks with the times of a piece of a log
LOOK_METRICS_BYTES, LOOK_METRICS_FILES = 1 << 22, 8  # of the metrics of a rank, in one answer; number of ranks
MOST_CHECKPOINTS = 50
FILES_OF_A_LINE = 500  # of artifacts, in one message
GRACE_S = 10.0  # between SIGTERM and SIGKILL, by default
COMMAND_LIMIT_S = 600.0  # of a command on all nodes
_HIDDEN = re.compile(r"^\.|/\.(?!metadata\Z)")  # a DCP checkpoint is useless without its .metadata


def fits(name: str, pattern: str) -> bool:
    """Match a file name as users expect: ``*.pt`` in any folder, ``out/`` all below it, ``out/*.pt`` from the top.

    As in a shell, hidden files must be named: ``*`` matches no ``.bashrc`` and nothing in a ``.git``. The only
    exception is the ``.metadata`` of a folder.
    """
    pattern = pattern.removeprefix("./")
    if _HIDDEN.search(name) and not _HIDDEN.search(pattern):
        return False
    if pattern.endswith("/"):
        return fnmatchcase(name, f"{pattern}*")
    return fnmatchcase(name, pattern) or ("/" not in pattern and fnmatchcase(name.rpartition("/")[2], pattern))
