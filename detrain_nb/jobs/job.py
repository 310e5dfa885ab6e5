"""One job, wherever it runs: query, follow and stop it, fetch from it. It does not depend on this process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..copying.json_lines import Refused
from ..deploy.chosen_nodes import transports_to
from ..deploy.files import OnProgress, Patience, Stop, label
from ..deploy.jobs import open_job_talk
from ..errors import DetrainError, JobError, SpecError
from ..node.job.terms import COMMAND_LIMIT_S, GRACE_S, UNKNOWN, UNREADABLE
from ..text import ShownAsText
from ..transport import Transport
from .asking import plan_as_made, try_on_all
from .ending import remove_parts, stop_parts
from .execution import Executed, execute
from .fetching import Fetched, MadeFile, fetch, list_made, require_success
from .following import Follower, OnPiece, OnReports, Retries, Wanted
from .job_report import SHOWN_STEPS, JobReport
from .job_status import JobStatus, describe_state, judge
from .log_lines import JobLog, Kept, LogLine, in_order
from .noting import Noting, hear_reports, known_status, least_nodes, note_down
from .record import Record
from .report_checks import NodeReport, find_part
from .restarting import start_again
from .watched_node import LogPart, hear_back
from .watching import OnNews, Watch

if TYPE_CHECKING:
    from ..plan import Plan
    from ..spec import PipelineSpec
    from ..spec.node import Node
    from ..transport.ssh import AskPassphrase

__all__ = ["Job", "OnLine"]

OnLine = Callable[[LogLine], object]
OnMetrics = Callable[[dict[str, Any]], object]
_STATUS_LIMIT_S = 30.0
_LOOK_BACK = Patience(silence_s=15.0, answer_s=30.0)
_MOST_BYTES, _MOST_SHOWN_BYTES = 2_000_000_000, 20_000_000  # of output kept in memory


class Job(ShownAsText):
    """A submitted job; ``find_job`` finds it again in any later process of this user on this machine.

    ``id`` is unique, ``name`` is the spec's, and ``notices`` are messages about the submission. Wherever a method takes
    ``node``, give its name, or its number from 0; None means all nodes. ``rank`` None means all ranks.
    """

    def __init__(
        self,
        job_id: str,
        name: str,
        nodes: Sequence[Node | Transport],
        *,
        record: Record,
        ask_passphrase: AskPassphrase | None = None,
        notices: Sequence[str] = (),
    ) -> None:
        """Name the job; without ``nodes`` it runs on this machine. ``notices`` tell the user about its submission."""
        self.id, self.name, self.notices = job_id, name, tuple(notices)
        self._nodes = tuple(nodes)
        self._record = record
        self._ask_passphrase = ask_passphrase
        self._reached: list[Transport] = []
        self._watch: Watch | None = None
        self._watching = threading.Lock()

    @property
    def spec(self) -> PipelineSpec:
        """The submitted spec. Raises: SpecError when another release wrote it and this one cannot read it."""
        from ..spec import PipelineSpec

        return PipelineSpec.from_dict(json.loads(self._record.get(self.id).spec))

    @property
    def world_size(self) -> int | None:
        """The number of ranks it was started with; None if unknown."""
        return self._record.get(self.id).world_size

    def __repr__(self) -> str:
        return f"<Job {self.id}>"

    def __str__(self) -> str:
        row = self._record.get(self.id)
        where = ", ".join(map(label, self._transports()))
        return f"job {self.id}: {describe_state(row.state, row.exit_code)}, on {where}"

    # ---- its status

    def status(self, *, limit_s: float = _STATUS_LIMIT_S) -> JobStatus:
        """Ask all nodes for its status; a node that does not answer within ``limit_s`` s is listed in ``silent``."""
        said = try_on_all(self._transports(), self._ask_node, limit_s=limit_s)
        return self._note(said)

    def last_known(self) -> JobStatus:
        """Return its status as of the last time its nodes were asked; they are not asked now."""
        return known_status(self._record.get(self.id))

    def wait(self, timeout_s: float | None = None) -> JobStatus:
        """Wait until the job is over, whether it succeeded or failed; ``job.wait().check()`` raises if it failed.

        ``timeout_s`` None: no limit. An interrupt ends the wait; the job continues. Raises: TimeoutError.
        """
        return self._follow(Wanted(has_logs=False), limit_s=timeout_s)

    def show(self) -> JobReport:
        """Return a report for people: its nodes, its plan, and the metrics logged last."""
        status = self.status()
        kept = Kept(self.id, _MOST_SHOWN_BYTES)
        if any(each.metrics for each in status.reports.values()):
            wanted = Wanted(has_logs=False, has_metrics=True, is_once=True, tail=SHOWN_STEPS)
            with contextlib.suppress(DetrainError, TimeoutError):  # show what arrived until then
                self._follow(wanted, on_metrics=kept.add_metrics, limit_s=_STATUS_LIMIT_S)
        return JobReport(status, self._plan_of(status), kept.by_step())

    def _plan_of(self, status: JobStatus) -> Plan | None:
        nodes = [node for node in self._transports() if label(node) in status.reports]
        with contextlib.suppress(SpecError):  # written by another release
            return plan_as_made(self.spec, nodes, world_size=self.world_size, limit_s=_STATUS_LIMIT_S)
        return None

    def on_change(self, on_news: OnNews) -> Callable[[], None]:
        """Call ``on_news`` with a `JobNews` now and after each change, in a thread of the job's own; return at once.

        stop_listening = job.on_change(lambda news: print(news.status.state))

        Call the returned function to end the calls; an exception in ``on_news`` ends them, too. While there is a
        listener and the job is not over, threads run and ask each node at most once a second.
        """
        with self._watching:
            stop = self._watch.add(on_news) if self._watch else None
            while stop is None:
                judge = Noting(self.id, self.name, list(map(label, self._transports())), self._record)
                self._watch = Watch(self._transports(), self.id, num_ranks=self.world_size, judge=judge)
                stop = self._watch.add(on_news)
        return stop

    # ---- its output

    def attach(
        self,
        on_line: OnLine = print,
        *,
        node: str | None = None,
        rank: int | None = None,
        torchrun: bool = False,
        tail: int | None = None,
        on_metrics: OnMetrics | None = None,
        on_reports: OnReports | None = None,
        on_piece: OnPiece | None = None,
    ) -> JobStatus:
        """Follow all output of the job, from its beginning to its end; an interrupt ends this, and the job continues.

        Each line is passed to ``on_line`` as a `LogLine`, in this thread. The returned status has only the very last
        line of a failed rank if ``on_line`` already got the others. A failed job raises nothing here: see
        `JobStatus.check`.
        ``torchrun`` and ``tail`` are as in `logs`.
        ``on_metrics`` gets what its ranks log, ``on_reports`` the last report of each node, several times a second.
        ``on_piece`` gets the output of ranks instead of ``on_line``: raw, as it arrives, with its bars and colours.
        """
        has_metrics = on_metrics is not None
        wanted = Wanted(self._positions(node), rank, has_torchrun=torchrun, has_metrics=has_metrics, tail=tail)
        return self._follow(wanted, on_line=on_line, on_metrics=on_metrics, on_reports=on_reports, on_piece=on_piece)

    def logs(
        self,
        *,
        node: str | None = None,
        rank: int | None = None,
        torchrun: bool = False,
        follow: bool = False,
        tail: int | None = None,
        on_line: OnLine | None = None,
        on_piece: OnPiece | None = None,
        cancel: Stop | None = None,
    ) -> JobLog:
        """Return its output so far, of one node or rank or of all; with ``follow``, all output until its end.

        print(job.logs(rank=0, tail=20))

        ``torchrun``: include the log of torchrun. ``tail``: of the output so far, only this number of last lines of
        each rank, at most 4 MB. ``on_line`` gets each line as it arrives, and the result is empty then; ``on_piece`` as
        in `attach`. Another thread can end the call with ``cancel``.
        Raises: SpecError for a node or rank that the job does not have; JobError when no node answers, or the output
        takes more than 2 GB.
        """
        kept = Kept(self.id, _MOST_BYTES)
        wanted = Wanted(self._positions(node), rank, has_torchrun=torchrun, is_once=not follow, tail=tail)
        self._follow(wanted, on_line=on_line or kept.add_line, on_piece=on_piece, cancel=cancel)
        return JobLog(tuple(kept.lines) if follow else in_order(kept.lines))

    def metrics(self, *, rank: int | None = None) -> list[dict[str, Any]]:
        """Return what all ranks have logged with ``log_metrics``, by step and rank; also while the job runs.

        Each dict has ``step``, ``time`` (seconds since the epoch), ``rank`` and the logged values, as `read_metrics`
        returns them.
        """
        kept = Kept(self.id, _MOST_BYTES)
        self._follow(Wanted(None, rank, has_logs=False, has_metrics=True, is_once=True), on_metrics=kept.add_metrics)
        return kept.by_step()

    def log_before(self, part: LogPart) -> LogPart:
        """Return the lines of a log before ``part``, at most 64 kB; ``part`` is from `on_change` or from this method.

        Raises: DetrainError.
        """
        node_rank = (self._positions(part.node or None) or [0])[0]
        with open_job_talk(self._transports()[node_rank], patience=_LOOK_BACK) as talk:
            return hear_back(talk, self.id, node_rank, part)

    def plot(self, *names: str) -> Any:
        """Draw curves of the logged metrics with matplotlib: those of ``names``, by default the first 12.

        Returns the axes. Raises: SpecError when one of ``names``, or any number at all, was never logged, or matplotlib
        is not installed.
        """
        from .curves import plot

        return plot(self.metrics(), *names)

    def write_tensorboard(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write the logged metrics for TensorBoard, one folder per rank, replacing what an earlier call wrote there.

        Returns the files. Raises: SpecError when nothing was logged, or torch or tensorboard is not installed.
        """
        from .curves import write_tensorboard

        return write_tensorboard(os.fspath(folder), self.metrics())

    # ---- actions

    def stop(self, *, grace_s: float = GRACE_S) -> JobStatus:
        """Stop all its ranks: SIGTERM, then SIGKILL after ``grace_s`` s. A job that is already over stays as it is.

        Raises: JobError when a node could not be reached, and the job may still run there.
        """
        failures = stop_parts(self._transports(), self.id, grace_s=grace_s)
        if self._watch:
            self._watch.look_now()
        status = self.status()
        if failures and (not status.is_over or status.state == UNREADABLE):
            raise JobError("\n".join(map(str, failures)))
        return status

    def restart(
        self,
        *,
        storage: str | None = None,
        secrets: dict[str, str] | None = None,
        on_progress: Callable[[str], object] | None = None,
        cancel: Stop | None = None,
    ) -> Job:
        """Submit the same spec again as a new job that resumes from the last checkpoint; stop this one if it runs.

        The source is sent as it is now, through ``storage``: by default the location used at submission, unless its
        URL had a password. Another thread can end the call with ``cancel``; no new job runs then.
        Raises: SpecError when a secret that the spec names is not set here.
        """
        started = start_again(
            self.spec,
            self.id,
            name=self.name,
            nodes=[node for node in self._nodes if isinstance(node, Transport)] or None,
            stop=self.stop,
            storage=storage,
            secrets=secrets,
            record=self._record,
            ask_passphrase=self._ask_passphrase,
            on_progress=on_progress,
            cancel=cancel,
        )
        return Job(
            started.id,
            started.name,
            started.transports,
            record=self._record,
            ask_passphrase=self._ask_passphrase,
            notices=started.notices,
        )

    def list_made(self, pattern: str | Sequence[str] | None = None, *, first: Sequence[str] = ()) -> list[MadeFile]:
        """List what `fetch` would fetch, also while the job runs: at most 500 files of each node, without reading them.

        Files that match a pattern of ``first`` come before all others, in the order of these patterns.
        Raises: DetrainError when no node answers.
        """
        patterns = [pattern] if isinstance(pattern, str) else list(pattern or self.spec.artifacts)
        return list_made(self._transports(), self.id, patterns, first=first)

    def fetch(
        self,
        pattern: str | Sequence[str] | None = None,
        to: str | os.PathLike[str] = ".",
        *,
        anyway: bool = False,
        replace: bool = False,
        on_progress: OnProgress | None = None,
        cancel: Stop | None = None,
    ) -> Fetched:
        """Fetch artifacts into the folder ``to``: those that match ``pattern``, by default the spec's ``artifacts``.

        files = job.fetch("*.pt", "models").files  # ('model.pt',)

        A local file that differs is kept, unless it is as an earlier fetch of this job left it, or ``replace`` is set.
        ``anyway``: fetch what exists, from the nodes that answer, even if the job is not over or failed.
        Another thread can end the call with ``cancel``.
        Raises: JobError when the job is not over or did not succeed, unless ``anyway``; when no node answers or
        nothing matches; after everything else was fetched, when a file was kept. DetrainError when a node fails.
        """
        status = self.status()
        if not anyway:
            require_success(status)
        patterns = [pattern] if isinstance(pattern, str) else list(pattern or self.spec.artifacts)
        positions = [index for index, node in enumerate(self._transports()) if label(node) in status.reports]
        if not positions:
            raise JobError("\n".join(f"{node}: {why}" for node, why in status.silent.items()))
        before = self._record.fetched(self.id)
        try:
            fetched = fetch(
                self._transports(),
                self.id,
                patterns,
                to,
                asked=positions,
                fetched_before=before,
                replace=replace,
                on_progress=on_progress,
                cancel=cancel,
            )
        finally:
            self._record.note_fetched(self.id, before)
        return dataclasses.replace(fetched, silent=tuple(status.silent))

    def execute(self, command: str, *, timeout_s: float = COMMAND_LIMIT_S, on_line: OnLine | None = print) -> Executed:
        """Run a shell command on all its nodes, in its folder and with its environment, without its secrets.

        status = job.execute("nvidia-smi").status  # the largest exit status

        ``on_line`` gets each line as a `LogLine`; None shows nothing. The command is killed after ``timeout_s`` s.
        Raises: SpecError for an empty command. A node that cannot be reached does not raise: see `Executed`.
        """
        return execute(self._transports(), command, job=self.id, timeout_s=timeout_s, on_line=on_line)

    def remove(self, *, anyway: bool = False) -> None:
        """Remove its folders on all nodes, and its record here; with ``anyway`` even if a node does not answer.

        Raises: JobError while it runs, DetrainError.
        """
        remove_parts(self._transports(), self.status(), anyway=anyway)
        self._record.remove(self.id)

    # ---- its nodes

    def close(self) -> None:
        """Disconnect from its nodes; the job continues. A later call connects again."""
        for transport in self._reached:
            transport.leave()

    def _transports(self) -> list[Transport]:
        if not self._reached:
            self._reached = transports_to(list(self._nodes) or None, ask_passphrase=self._ask_passphrase)
        return self._reached

    def _positions(self, node: str | None) -> list[int] | None:
        if node is None:
            return None
        names = [label(each) for each in self._transports()]
        if node in names:
            return [names.index(node)]
        if node.isdecimal() and int(node) < len(names):
            return [int(node)]
        raise SpecError(f"job {self.id} has no node {node!r}: its nodes are {', '.join(names)}")

    def _ask_node(self, index: int) -> NodeReport | None:
        with open_job_talk(self._transports()[index]) as talk:
            return find_part(hear_reports(talk, [self.id]), self.id, index)

    def _follow(
        self,
        wanted: Wanted,
        *,
        on_line: OnLine | None = None,
        on_metrics: OnMetrics | None = None,
        on_reports: OnReports | None = None,
        on_piece: OnPiece | None = None,
        limit_s: float | None = None,
        cancel: Stop | None = None,
    ) -> JobStatus:
        """Follow what is ``wanted``, to the end of the job or once, and return the job's status after that.

        Raises: JobError when no node has the job or, if asked once, none answers; SpecError for a rank it lacks.
        """
        wanted = dataclasses.replace(wanted, num_ranks=self.world_size)
        wanted.check(self.id)
        nodes = self._transports()
        retries = Retries(lost_after_s=0) if wanted.is_once else None
        follower = Follower(
            nodes,
            self.id,
            wanted=wanted,
            on_line=on_line,
            on_metrics=on_metrics,
            on_reports=on_reports,
            on_piece=on_piece,
            retries=retries,
            cancel=cancel,
        )
        said = follower.run(limit_s)
        failed = {index: each for index, each in said.items() if isinstance(each, DetrainError)}
        if len(failed) == len(said) and all(
            wanted.is_once or isinstance(each.__cause__, Refused) for each in failed.values()
        ):
            raise JobError("\n".join(map(str, failed.values())))
        if wanted.is_once and on_line:
            for index, failure in failed.items():
                on_line(LogLine(label(nodes[index]), "", f"output is incomplete: {failure}"))
        if len(said) < len(nodes) or wanted.is_once:
            return self.status()
        status = self._note([said[index] for index in range(len(nodes))])
        names = [label(node) for node in nodes]
        if status.failed_node and follower.has_shown_end(names.index(status.failed_node), status.failed_rank):
            return dataclasses.replace(status, last_lines=status.last_lines[-1:])
        return status

    def _note(self, said: Sequence[NodeReport | DetrainError | None]) -> JobStatus:
        """Derive the status from the nodes' answers, and record it."""
        by_name = {label(node): each for node, each in zip(self._transports(), said)}
        status = judge(self.id, self.name, by_name, least_nodes=least_nodes(self._record.get(self.id)))
        if status.state != UNKNOWN:
            note_down(status, self._record)
        return status
