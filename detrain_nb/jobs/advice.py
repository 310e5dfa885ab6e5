"""Advice about a failed job, where its state, exit code or last lines reveal the cause."""

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
    LOST: "the job's runner was killed: check the machine's memory and system log, then run the job again",
    RESTARTED: "the machine, or its container, was restarted: run the job again",
    UNREADABLE: "another release of detrain_nb wrote the job's files: use that release, or inspect its folder there",
}


def _of_module(text: str) -> str:
    """Name no install command: the node chooses the module name, and installing a stranger's package runs its code."""
    found = _MODULE.search(text)
    name = f"'{found[1].partition('.')[0]}'" if found else "that name"
    return f"install the package that has the module {name} on every node, e.g. in the spec's setup; then run it again"


def _of_file(text: str) -> str:
    found = _FILE.search(text)
    name = f"'{found[1]}'" if found else "the file"
    return f"put {name} on every node that reads it, or use another path; then run it again"


# Patterns to find in the last lines, and the advice for each; the first match wins.
_BY_LINES: tuple[tuple[re.Pattern[str], Callable[[str], str]], ...] = (
    (
        re.compile(r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory"),
        lambda text: "lower batch_size, split the model further (dp_shard, tp, pp), or use fewer microbatches",
    ),
    (
        re.compile(r"No space left on device|Disk quota exceeded"),
        lambda text: "free disk space on the node, then run it again",
    ),
    (_MODULE, _of_module),
    (_FILE, _of_file),
    (
        re.compile(r"NCCL (?:error|WARN)|ncclUnhandledCudaError|ncclSystemError"),
        lambda text: "NCCL failed between the nodes or on their GPUs: check them with detrain-nb doctor",
    ),
    (
        re.compile(r"Permission denied|PermissionError"),
        lambda text: "give your account on the node access to the path in the last lines, then run it again",
    ),
)


def advise(status: JobStatus) -> str:
    """Return one sentence of advice for a job that is over and did not succeed; empty for any other job."""
    if not status.is_over or status.exit_code == 0 or status.state == STOPPED:
        return ""
    if status.state in _BY_STATE:
        return _BY_STATE[status.state]
    last = "\n".join(status.last_lines)
    for pattern, say in _BY_LINES:
        if pattern.search(last):
            return say(last)
    if status.exit_code == 137:
        return "killed, often for lack of memory: lower batch_size, split the model further, or use a larger node"
    if status.exit_code == 127:
        return "a command could not be started: check the setup lines and the node's python"
    if status.failed_rank is None:
        return "read the setup log and torchrun's log, fix what they report, and run it again"
    return "read its last lines, fix the script, and run it again"


def describe_cause(status: JobStatus) -> str:
    """Describe how a job ended: ``rank 3 on gpu1 exited with code 3``."""
    rank = "" if status.failed_rank is None else f"rank {status.failed_rank}"
    has_several = len(status.reports) + len(status.silent) > 1
    where = f" on {told_node(status.failed_node)}" if status.failed_node and has_several else ""
    code = status.exit_code
    if code is None:
        return f"the job is {status.state}{where}"
    how = f"code {code}"
    if code > 128:
        how += f" (signal {code - 128}{', ' + _SIGNALS[code - 128] if code - 128 in _SIGNALS else ''})"
    return f"{rank or 'the job'}{where} exited with {how}"
