"""What a user does about a job that failed: said where the cause can be told from what is known of it."""

from __future__ import annotations

import re
from collections.abc import Callable

from ..node.job.terms import LOST, RESTARTED, STOPPED, UNREADABLE
from ..text import told_node
from .job_status import JobStatus

__all__ = ["advise", "describe_cause"]

_SIGNALS = {1: "SIGHUP", 2: "SIGINT", 6: "SIGABRT", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}
_MODULE = re.compile(r"No module named '([\w.-]{1,80})'")
_FILE = re.compile(r"FileNotFoundError: .*?: '([^'\n]{1,200})'")
_BY_STATE = {
    LOST: "something has killed the job's runner: look at memory and log of the machine, then run it again",
    RESTARTED: "the machine was started anew: run the job again",
    UNREADABLE: "another release of detrain_nb wrote its files: use that release, or look into the job's folder there",
}


def _of_module(text: str) -> str:
    """No command that installs it: what a node names may be anybody's package, and runs code where it is installed."""
    found = _MODULE.search(text)
    name = f"'{found[1].partition('.')[0]}'" if found else "that name"
    return f"install the package that has the module {name} on every node, say in the spec's setup; then run it again"


def _of_file(text: str) -> str:
    found = _FILE.search(text)
    name = f"'{found[1]}'" if found else "the file"
    return f"have {name} on every node that reads it, or name another one; then run it again"


# What stands in the last lines, and what to do then; the first that fits.
_BY_LINES: tuple[tuple[re.Pattern[str], Callable[[str], str]], ...] = (
    (
        re.compile(r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory"),
        lambda text: "lower batch_size, or split the model further (dp_shard, tp, pp), or have fewer microbatches",
    ),
    (
        re.compile(r"No space left on device|Disk quota exceeded"),
        lambda text: "free disk space there, then run it again",
    ),
    (_MODULE, _of_module),
    (_FILE, _of_file),
    (
        re.compile(r"NCCL (?:error|WARN)|ncclUnhandledCudaError|ncclSystemError"),
        lambda text: "examine the nodes with detrain-nb doctor: NCCL has failed between them or on their GPUs",
    ),
    (
        re.compile(r"Permission denied|PermissionError"),
        lambda text: "let your account there read and write what is named, then run it again",
    ),
)


def advise(status: JobStatus) -> str:
    """One sentence for a job that is over and did not succeed; empty for any other."""
    if not status.is_over or status.exit_code == 0 or status.state == STOPPED:
        return ""
    if status.state in _BY_STATE:
        return _BY_STATE[status.state]
    last = "\n".join(status.last_lines)
    for pattern, say in _BY_LINES:
        if pattern.search(last):
            return say(last)
    if status.exit_code == 137:
        return (
            "it was killed, often for lack of memory: lower batch_size, split the model further, or use a larger node"
        )
    if status.exit_code == 127:
        return "something could not be started: look at the setup lines and at python of the node"
    if status.failed_rank is None:
        return "look at the set-up and at torchrun's log, mend what they name, and run it again"
    return "read its last lines, mend the script, and run it again"


def describe_cause(status: JobStatus) -> str:
    """``rank 3 on gpu1 ended with exit code 3``."""
    rank = "" if status.failed_rank is None else f"rank {status.failed_rank}"
    has_several = len(status.reports) + len(status.silent) > 1
    where = f" on {told_node(status.failed_node)}" if status.failed_node and has_several else ""
    code = status.exit_code
    if code is None:
        return f"the job is {status.state}{where}"
    how = f"exit code {code}"
    if code > 128:
        how += f" (signal {code - 128}{', ' + _SIGNALS[code - 128] if code - 128 in _SIGNALS else ''})"
    return f"{rank or 'the job'}{where} ended with {how}"
