"""Status of a job, derived from the reports of its nodes."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from ..errors import DetrainError, JobFailed, behind_ours, quoted, short_ranks
from ..node.job import terms
from ..node.job.terms import (
    ENDED,
    LOST,
    NOT_STARTED,
    PREPARING,
    RESTARTED,
    RUNNING,
    STOPPED,
    STOPPING,
    SUBMITTING,
    UNKNOWN,
    UNREADABLE,
)
from ..text import ShownAsText, describe_seconds, printable, told_node
from .report_checks import NodeReport

__all__ = ["OVER", "JobStatus", "Sign", "describe_age", "describe_state", "has_failed", "judge", "sign_and_word"]

Sign = Literal["new", "run", "ok", "bad", "stopped", "lost"]  # what a page draws next to the word
OVER = (*terms.OVER, NOT_STARTED)
_SIGNS: Mapping[str, Sign] = {
    SUBMITTING: "new",
    PREPARING: "new",
    RUNNING: "run",
    STOPPING: "new",
    STOPPED: "stopped",
    UNKNOWN: "lost",
}
_GONE = 1  # the exit status of a job without an exit code


@dataclass(frozen=True)
class JobStatus(ShownAsText):
    """Status of one job: its state, and once it is over its exit code, 0 if all ranks succeeded.

    ``state`` is one of submitting, preparing, running, stopping; when it is over ended (also if it failed: see
    ``exit_code``), stopped, lost, node restarted, not started, unreadable; unknown when too few nodes answer.
    ``failed_node``, ``failed_rank``, ``reason`` and ``last_lines`` describe the first failure, if there is one.
    ``started_at`` and ``ended_at`` are in seconds since the epoch. ``metrics`` are those logged last.
    ``reports``: each node's report on its part, by name. ``silent``: the nodes without a report, and why.
    """

    id: str
    name: str
    state: str
    exit_code: int | None = None
    reason: str = ""
    failed_node: str = ""
    failed_rank: int | None = None
    last_lines: tuple[str, ...] = ()
    started_at: float | None = None
    ended_at: float | None = None
    metrics: Mapping[str, int | float | str] | None = None
    reports: Mapping[str, NodeReport] = field(default_factory=dict)
    silent: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_over(self) -> bool:
        """True once the job has ended in any way: no rank runs."""
        return self.state in OVER

    @property
    def exit_status(self) -> int:
        """Exit status for a shell: the exit code of the job, 1 if it has none."""
        return _GONE if self.exit_code is None else self.exit_code

    @property
    def whose_lines(self) -> str:
        """Heading for ``last_lines``; those of setup and of torchrun belong to no rank."""
        lines = "the last line" if len(self.last_lines) == 1 else "the last lines"
        return lines if self.failed_rank is None else f"{lines} of rank {self.failed_rank}"

    def check(self) -> JobStatus:
        """Return itself. Raises: JobFailed, with the rank and its last lines, when the job is over without success."""
        if self.is_over and self.exit_code != 0:
            raise JobFailed(self._failure())
        return self

    def __str__(self) -> str:
        lines = [f"job {self.id}: {self._summary()}"]
        for node, report in self.reports.items():
            ranks = f", ranks {short_ranks(report.ranks)}" if len(report.ranks) > 1 else ""
            state = describe_state(report.state, report.exit_code)
            restarts = f", {report.restarts} restart{'s' * (report.restarts > 1)}" if report.restarts else ""
            reason = f": {behind_ours(report.reason)}" if report.reason else ""
            lines.append(f"  {told_node(node)}: {state}{ranks}{restarts}{reason}")
        lines += [f"  {told_node(node)}: no report: {why}" for node, why in self.silent.items()]
        if self.is_over and self.last_lines:
            lines += [f"{self.whose_lines}:", *map(quoted, self.last_lines)]
        return "\n".join(lines)

    def _summary(self) -> str:
        took = ""
        if self.started_at is not None and self.ended_at is not None:
            took = f" after {describe_seconds(self.ended_at - self.started_at)}"
        return f"{describe_state(self.state, self.exit_code)}{took}"

    def _failure(self) -> str:
        rank = "" if self.failed_rank is None else f"rank {self.failed_rank} "
        where = f" ({rank}on {told_node(self.failed_node)})" if self.failed_node else ""
        why = f": {behind_ours(self.reason)}" if self.reason else ""
        gone = [f"{told_node(node)}: {each}" for node, each in self.silent.items()]
        return "\n".join([f"job {self.id} {self._summary()}{where}{why}", *gone, *map(quoted, self.last_lines)])


def judge(
    job: str, name: str, said: Mapping[str, NodeReport | DetrainError | None], *, least_nodes: int | None = None
) -> JobStatus:
    """Combine the states of all nodes into one; None means that a node does not know the job.

    An elastic job needs only ``least_nodes`` nodes, the first among them: the others may be lost on the way. It
    continues, is stopped and fails together with its first node.
    """
    reports = {node: each for node, each in said.items() if isinstance(each, NodeReport)}
    silent = {node: str(each) for node, each in said.items() if isinstance(each, DetrainError)}
    missing = {node: "it has no such job" for node, each in said.items() if each is None}
    state = _state(reports, has_silent=bool(silent), has_missing=bool(missing))
    if least_nodes is not None:
        state = _state_of_elastic(state, reports, least_nodes)
    done = [each.node_rank for each in reports.values() if each.exit_code == 0]
    is_enough = least_nodes is not None and len(done) >= least_nodes and 0 in done
    if is_enough and state in (*OVER, UNKNOWN):
        state = ENDED
    first = "" if is_enough else _first_failed(reports, state)
    failed = reports.get(first)
    is_over = state in OVER
    started_at, ended_at = _times(reports.values(), is_over=is_over)
    succeeded = is_enough or (bool(reports) and not missing and len(done) == len(reports))
    return JobStatus(
        id=job,
        name=name,
        state=state,
        exit_code=(0 if succeeded else failed.exit_code if failed else None) if is_over else None,
        reason=failed.reason if failed else "",
        failed_node=first,
        failed_rank=failed.failed_rank if failed else None,
        last_lines=failed.last_lines if failed else (),
        started_at=started_at,
        ended_at=ended_at,
        metrics=next((each.metrics for each in reports.values() if each.metrics), None),
        reports=reports,
        silent={**silent, **missing},
    )


def _state(reports: Mapping[str, NodeReport], *, has_silent: bool, has_missing: bool) -> str:
    if not reports:
        return UNKNOWN if has_silent else NOT_STARTED
    states = {each.state for each in reports.values()}
    going = [each.state for each in reports.values() if not each.is_over]
    if going:
        return STOPPING if STOPPING in going or len(going) < len(reports) else max(going)  # running, preparing
    if has_silent:
        return UNKNOWN
    for state in (RESTARTED, LOST, UNREADABLE):
        if state in states:
            return state
    if has_missing:
        return LOST
    return STOPPED if STOPPED in states else ENDED


def _state_of_elastic(state: str, reports: Mapping[str, NodeReport], least_nodes: int) -> str:
    """Adjust ``state``, that of all nodes, when some are over: an elastic job can continue without them."""
    first = next((each for each in reports.values() if each.node_rank == 0), None)
    going = [each.state for each in reports.values() if not each.is_over]
    if first is None or first.is_over and (going or first.exit_code == 0):
        return state
    if first.is_over:
        return first.state
    return max(going) if len(going) >= least_nodes and STOPPING not in going else state


def _times(reports: Iterable[NodeReport], *, is_over: bool) -> tuple[float | None, float | None]:
    """Return when a job began and ended, both by the clock of the slowest node: clocks may differ by days."""
    begun = [(each.started_at, each.ended_at) for each in reports if each.started_at is not None]
    took = [(end - start, start, end) for start, end in begun if end is not None]
    if is_over and took:
        return max(took)[1:]
    return min((start for start, _ in begun), default=None), None


def _first_failed(reports: Mapping[str, NodeReport], state: str) -> str:
    """Return the node whose own rank failed, else one that ended because of another node; empty if none failed.

    For a stopped job, return a node that was stopped: others may have failed because its ranks were missing.
    """

    def order(node: str) -> tuple[bool, bool, float]:
        report = reports[node]
        return report.failed_rank is None, report.state in (ENDED, STOPPED), report.ended_at or math.inf

    failed = [node for node, each in reports.items() if each.is_over and each.exit_code != 0]
    if state == STOPPED:
        failed = [node for node in failed if reports[node].state == STOPPED]
    return min(failed, key=order, default="")


def has_failed(state: str, exit_code: int | None) -> bool:
    """Return whether a job is over, and neither succeeded nor was stopped by the user."""
    return state in OVER and state != STOPPED and exit_code != 0


def sign_and_word(state: str, exit_code: int | None) -> tuple[Sign, str]:
    """Return the sign and the word that show a state to people."""
    if state == ENDED:
        return ("ok", "succeeded") if exit_code == 0 else ("bad", "failed")
    return _SIGNS.get(state, "bad"), printable(state)[:40]


def describe_state(state: str, exit_code: int | None) -> str:
    """Describe a state: ``succeeded``; ``failed, exit 3``; ``stopped``, without the code of the signal; ``lost``."""
    _, word = sign_and_word(state, exit_code)
    return f"{word}, exit {exit_code}" if exit_code and state != STOPPED else word


def describe_age(at: float, *, now: float | None = None) -> str:
    """Describe in words how long ago ``at`` was."""
    seconds = (time.time() if now is None else now) - at
    return "just now" if seconds < 2 else f"{describe_seconds(seconds)} ago"
