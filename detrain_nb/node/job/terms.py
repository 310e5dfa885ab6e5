"""What the notebook and a node both say of a job: words for its states, names of its files, times.

It imports nothing of ours: both ends have it from here.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

PREPARING, RUNNING, STOPPING = LIVE = ("preparing", "running", "stopping")
ENDED, STOPPED, LOST, RESTARTED, UNREADABLE = OVER = ("ended", "stopped", "lost", "node restarted", "unreadable")
SUBMITTING, NOT_STARTED, UNKNOWN = "submitting", "not started", "unknown"  # of a whole job: no node says these
OUTPUT_NAME = re.compile(r"rank-[0-9]{1,6}\.log|setup\.log|torchrun\.log|metrics/rank-[0-9]{1,6}\.jsonl")
LOOK_LOG_BYTES = 1 << 16  # of a log, in one answer to who looks every second
LOOK_BACK_BYTES = 1 << 16  # of what stands before that, asked for
LOOK_TIMES = 256  # of a piece of a log: when what of it was printed
LOOK_METRICS_BYTES, LOOK_METRICS_FILES = 1 << 22, 8  # of what a rank has logged, in one answer; of so many ranks
MOST_CHECKPOINTS = 50
FILES_OF_A_LINE = 500  # of artifacts, in one message
GRACE_S = 10.0  # between SIGTERM and SIGKILL, unless the user says otherwise
COMMAND_LIMIT_S = 600.0  # of a command that is run on all nodes
_HIDDEN = re.compile(r"^\.|/\.(?!metadata\Z)")  # a checkpoint of DCP is of no use without its .metadata


def fits(name: str, pattern: str) -> bool:
    """As a user means it: ``*.pt`` in whatever folder, ``out/`` all below it, ``out/*.pt`` from the top.

    As in a shell, what is hidden has to be named: ``*`` brings no ``.bashrc``, and nothing for a ``.git`` that is here;
    but for the ``.metadata`` of a folder.
    """
    pattern = pattern.removeprefix("./")
    if _HIDDEN.search(name) and not _HIDDEN.search(pattern):
        return False
    if pattern.endswith("/"):
        return fnmatchcase(name, f"{pattern}*")
    return fnmatchcase(name, pattern) or ("/" not in pattern and fnmatchcase(name.rpartition("/")[2], pattern))
