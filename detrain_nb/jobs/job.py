"""One job, wherever it runs: asked, followed, stopped, fetched from. It goes on whatever becomes of this process."""

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
_MOST_BYTES, _MOST_SHOWN_BYTES = 2_000_000_000, 20_000_000  # of what is kept in memory


class Job(ShownAsText):
    """A job that was submitted; ``find_job`` gives it back in any later process of this user on this machine."""

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
        """No ``nodes``: the job runs on this machine. ``notices``: what the user should know of its submission."""
        self.id, self.name, self.notices = job_id, name, tuple(notices)
        self._nodes = tuple(nodes)
        self._record = record
        self._ask_passphrase = ask_passphrase
        self._reached: list[Transport] = []
        self._watch: Watch | None = None
        self._watching = threading.Lock()

    @property
    def spec(self) -> PipelineSpec:
        """What was submitted. Raises: SpecError where another release has written what this one cannot read."""
        from ..spec import PipelineSpec

        return PipelineSpec.from_dict(json.loads(self._record.get(self.id).spec))

    @property
    def world_size(self) -> int | None:
        """How many ranks it was started with; None where that is not known."""
        return self._record.get(self.id).world_size

    def __repr__(self) -> str:
        return f"<Job {self.id}>"

    def __str__(self) -> str:
        row = self._record.get(self.id)
        where = ", ".join(map(label, self._transports()))
        return f"job {self.id}: {describe_state(row.state, row.exit_code)}, on {where}"

    # ---- how it is

    def status(self, *, limit_s: float = _STATUS_LIMIT_S) -> JobStatus:
        """Ask all nodes. One that does not answer in ``limit_s`` is named in ``silent``."""
        said = try_on_all(self._transports(), self._ask_node, limit_s=limit_s)
        return self._note(said)

    def last_known(self) -> JobStatus:
        """As it was when its nodes were asked last; nobody is asked."""
        return known_status(self._record.get(self.id))

    def wait(self, timeout_s: float | None = None) -> JobStatus:
        """Wait until the job is over; ``.check()`` of what is returned raises where it failed. Raises: TimeoutError."""
        return self._follow(Wanted(has_logs=False), limit_s=timeout_s)

    def show(self) -> JobReport:
        """How it is, for people: its nodes, its plan, and the last it has logged."""
        status = self.status()
        kept = Kept(self.id, _MOST_SHOWN_BYTES)
        if any(each.metrics for each in status.reports.values()):
            wanted = Wanted(has_logs=False, has_metrics=True, is_once=True, tail=SHOWN_STEPS)
            with contextlib.suppress(DetrainError, TimeoutError):  # what has come until then is shown
                self._follow(wanted, on_metrics=kept.add_metrics, limit_s=_STATUS_LIMIT_S)
        return JobReport(status, self._plan_of(status), kept.by_step())

    def _plan_of(self, status: JobStatus) -> Plan | None:
        nodes = [node for node in self._transports() if label(node) in status.reports]
        with contextlib.suppress(SpecError):  # another release has written it
            return plan_as_made(self.spec, nodes, world_size=self.world_size, limit_s=_STATUS_LIMIT_S)
        return None

    def on_change(self, on_news: OnNews) -> Callable[[], None]:
        """Call ``on_news`` with a `JobNews` now, and whenever something has changed, in a thread of the job's own.

        It comes back at once. What it returns ends the calls: threads are there, and nodes are asked, at most once a
        second, as long as somebody listens and the job is not over. What ``on_news`` raises ends the calls, too.
        """
        with self._watching:
            stop = self._watch.add(on_news) if self._watch else None
            while stop is None:
                judge = Noting(self.id, self.name, list(map(label, self._transports())), self._record)
                self._watch = Watch(self._transports(), self.id, num_ranks=self.world_size, judge=judge)
                stop = self._watch.add(on_news)
        return stop

    # ---- what it prints

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
        """Follow all it prints to its end, from the beginning. An interrupt ends that, and the job goes on.

        Of the last lines of what failed, what is returned has the very last alone where the others were followed.
        ``tail`` is as in `logs`.
        ``on_metrics`` gets what its ranks log, ``on_reports`` several times a second what each node says of it.
        ``on_piece`` gets what ranks print in place of ``on_line``: as it comes, bars and colours in it, not cleaned.
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
        """What it has printed so far, of one node or rank or of all; with ``follow`` to its end.

        ``torchrun``: what that says, too. ``tail``: of what there is so many last lines of each rank, at most 4 MB.
        ``on_line`` gets each line as it comes, and none is kept then; ``on_piece`` as in `attach`.
        Another thread ends it by ``cancel``.
        """
        kept = Kept(self.id, _MOST_BYTES)
        wanted = Wanted(self._positions(node), rank, has_torchrun=torchrun, is_once=not follow, tail=tail)
        self._follow(wanted, on_line=on_line or kept.add_line, on_piece=on_piece, cancel=cancel)
        return JobLog(tuple(kept.lines) if follow else in_order(kept.lines))

    def metrics(self, *, rank: int | None = None) -> list[dict[str, Any]]:
        """What all ranks have logged with ``log_metrics``, by step and rank; while the job runs, too."""
        kept = Kept(self.id, _MOST_BYTES)
        self._follow(Wanted(None, rank, has_logs=False, has_metrics=True, is_once=True), on_metrics=kept.add_metrics)
        return kept.by_step()

    def log_before(self, part: LogPart) -> LogPart:
        """The lines of a log that stand before ``part``, which `on_change` gave, or this; at most 64 kB of them.

        Raises: DetrainError.
        """
        node_rank = (self._positions(part.node or None) or [0])[0]
        with open_job_talk(self._transports()[node_rank], patience=_LOOK_BACK) as talk:
            return hear_back(talk, self.id, node_rank, part)

    def plot(self, *names: str) -> Any:
        """Draw the curves of what was logged, with matplotlib; all of it, or that of ``names``."""
        from .curves import plot

        return plot(self.metrics(), *names)

    def write_tensorboard(self, folder: str | os.PathLike[str]) -> list[Path]:
        """Write what was logged for TensorBoard, a folder for each rank, in the place of what it wrote there before.

        Returns the files. Raises: SpecError where nothing was logged, or torch or tensorboard is not installed.
        """
        from .curves import write_tensorboard

        return write_tensorboard(os.fspath(folder), self.metrics())

    # ---- what is done with it

    def stop(self, *, grace_s: float = GRACE_S) -> JobStatus:
        """End all its ranks: by SIGTERM, and after ``grace_s`` by SIGKILL. One that is over already stays as it is."""
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
        """Submit the same spec again as a new job, which goes on from the last checkpoint; a running one is stopped.

        Its source is what is there now, and travels by ``storage``: by default the one that it was submitted with,
        unless that had a password in it. Another thread ends it by ``cancel``: nothing new runs then.
        Raises: SpecError where a secret that it names is not set here.
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
        """List what `fetch` would bring, also while it runs: the first 500 files of each node, unread.

        Files that match a pattern of ``first`` come before all others, in the order of these patterns.
        Raises: DetrainError where no node answers.
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
        """Fetch what it has made into the folder ``to``: what matches ``pattern``, by default the spec's ``artifacts``.

        A file there that differs is kept, unless it is as a fetch of this job has left it, or with ``replace``. Another
        thread ends it by ``cancel``.
        Raises: JobError where one was kept, once all else has come; where it is not over, or did not succeed:
        ``anyway`` fetches what there is, of the nodes that answer.
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
        """Run a shell command on all its nodes, in its folder and with its environment, but for its secrets."""
        return execute(self._transports(), command, job=self.id, timeout_s=timeout_s, on_line=on_line)

    def remove(self, *, anyway: bool = False) -> None:
        """Remove its folders on all nodes, and what is known of it here; ``anyway`` also where a node does not answer.

        Raises: JobError while it runs, DetrainError.
        """
        remove_parts(self._transports(), self.status(), anyway=anyway)
        self._record.remove(self.id)

    # ---- its nodes

    def close(self) -> None:
        """Leave its nodes; the job goes on. What is asked later connects anew."""
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
        raise SpecError(f"job {self.id} has no node {node!r}: it has {', '.join(names)}")

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
        """Hear what is ``wanted`` of it, to its end or once, and judge how it is then.

        Raises: JobError where no node has the job, or none answers who asks once; SpecError for a rank it has not.
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
                on_line(LogLine(label(nodes[index]), "", f"not all of it: {failure}"))
        if len(said) < len(nodes) or wanted.is_once:
            return self.status()
        status = self._note([said[index] for index in range(len(nodes))])
        names = [label(node) for node in nodes]
        if status.failed_node and follower.has_shown_end(names.index(status.failed_node), status.failed_rank):
            return dataclasses.replace(status, last_lines=status.last_lines[-1:])
        return status

    def _note(self, said: Sequence[NodeReport | DetrainError | None]) -> JobStatus:
        """Judge what the nodes say, and note it down."""
        by_name = {label(node): each for node, each in zip(self._transports(), said)}
        status = judge(self.id, self.name, by_name, least_nodes=least_nodes(self._record.get(self.id)))
        if status.state != UNKNOWN:
            note_down(status, self._record)
        return status
