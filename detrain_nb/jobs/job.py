"""One job, wherever it runs: asked, followed, stopped, fetched from. It goes on whatever becomes of this process."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..copying.json_lines import Refused
from ..deploy.chosen_nodes import transports_to
from ..deploy.files import OnProgress, Patience, label
from ..deploy.jobs import open_job_talk
from ..errors import DetrainError, JobError, SpecError
from ..node.job.terms import COMMAND_LIMIT_S, ENDED, GRACE_S, UNKNOWN, UNREADABLE
from ..text import ShownAsText
from ..transport import Transport
from .asking import ask_facts, on_all, try_on_all
from .execution import Executed, execute
from .fetching import Fetched, fetch
from .following import Follower, OnPiece, OnReports, Retries, Wanted
from .job_report import SHOWN_STEPS, JobReport
from .job_status import JobStatus, judge
from .log_lines import JobLog, Kept, LogLine, in_order
from .noting import hear_reports, least_nodes, note_down
from .record import Record
from .report_checks import NodeReport, find_part
from .source import fetch_bundle, plan_source
from .starting import gather_secrets, read_spec, start

if TYPE_CHECKING:
    from ..plan import Plan
    from ..spec import PipelineSpec
    from ..spec.node import Node
    from ..transport.ssh import AskPassphrase

__all__ = ["Job", "OnLine"]

OnLine = Callable[[LogLine], object]
OnMetrics = Callable[[dict[str, Any]], object]
_STATUS_LIMIT_S = 30.0
_STOP_LIMIT_S = 30.0  # beside the grace
_MOST_TAIL_LINES = 1_000_000
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
        code = "" if row.exit_code is None else f", exit {row.exit_code}"
        where = ", ".join(map(label, self._transports()))
        return f"job {self.id}: {row.state}{code}, on {where}"

    # ---- how it is

    def status(self) -> JobStatus:
        """Ask all nodes. One that does not answer is named in ``silent``."""
        said = try_on_all(self._transports(), self._ask_node, limit_s=_STATUS_LIMIT_S)
        return self._note(said)

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
        return JobReport(status, self._plan(status), kept.by_step())

    def _plan(self, status: JobStatus) -> Plan | None:
        """As it was made at the start, if the nodes that answer have as many GPUs as then."""
        nodes = [node for node in self._transports() if label(node) in status.reports]

        def ask(index: int) -> int:
            with open_job_talk(nodes[index]) as talk:
                return ask_facts(talk).gpus

        found = {node.name: each for node, each in zip(nodes, try_on_all(nodes, ask, limit_s=_STATUS_LIMIT_S))}
        try:
            plan = self.spec.plan(gpus={name: each for name, each in found.items() if isinstance(each, int)})
        except SpecError:  # another release has written it, or a node does not say how many it has
            return None
        return plan if plan.world_size == self.world_size else None

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
    ) -> JobLog:
        """What it has printed so far, of one node or rank or of all; with ``follow`` to its end.

        ``torchrun``: what that says, too. ``tail``: of what there is so many last lines of each rank, at most 4 MB.
        ``on_line`` gets each line as it comes, and none is kept then; ``on_piece`` as in `attach`.
        """
        kept = Kept(self.id, _MOST_BYTES)
        wanted = Wanted(self._positions(node), rank, has_torchrun=torchrun, is_once=not follow, tail=tail)
        self._follow(wanted, on_line=on_line or kept.add_line, on_piece=on_piece)
        return JobLog(tuple(kept.lines) if follow else in_order(kept.lines))

    def metrics(self, *, rank: int | None = None) -> list[dict[str, Any]]:
        """What all ranks have logged with ``log_metrics``, by step and rank; while the job runs, too."""
        kept = Kept(self.id, _MOST_BYTES)
        self._follow(Wanted(None, rank, has_logs=False, has_metrics=True, is_once=True), on_metrics=kept.add_metrics)
        return kept.by_step()

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
        if not 0 <= grace_s <= 3600:
            raise SpecError(f"grace {grace_s:g} s: give 0 to 3600")

        patience = Patience(answer_s=grace_s + _STOP_LIMIT_S)

        def stop(index: int) -> None:
            with open_job_talk(self._transports()[index], patience=patience) as talk:
                talk.say("stop", id=self.id, node_rank=index, grace_s=grace_s)
                talk.hear("stopped")

        outcomes = try_on_all(self._transports(), stop)
        failures = [each for each in outcomes if isinstance(each, DetrainError)]
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
    ) -> Job:
        """Submit the same spec again as a new job, which goes on from the last checkpoint; a running one is stopped.

        Its source is what is there now, and travels by ``storage``: by default the one that it was submitted with,
        unless that had a password in it. Raises: SpecError where a secret that it names is not set here.
        """
        spec = self.spec
        gather_secrets(spec, secrets)  # before anything is stopped
        source = fetch_bundle(plan_source(spec), secrets)
        self.stop()
        nodes = [node for node in self._nodes if isinstance(node, Transport)] or None
        if spec.checkpoint is not None:
            spec = spec.with_overrides({"checkpoint.resume": True})
        spec = read_spec(spec, self.name, nodes)
        started = start(
            spec,
            source,
            storage=storage or self._record.get(self.id).storage or None,
            secrets=secrets,
            on_progress=on_progress,
            nodes=nodes,
            record=self._record,
            ask_passphrase=self._ask_passphrase,
            before=self.id,
        )
        return Job(
            started.id,
            started.name,
            started.transports,
            record=self._record,
            ask_passphrase=self._ask_passphrase,
            notices=started.notices,
        )

    def fetch(
        self,
        pattern: str | Sequence[str] | None = None,
        to: str | os.PathLike[str] = ".",
        *,
        anyway: bool = False,
        replace: bool = False,
        on_progress: OnProgress | None = None,
    ) -> Fetched:
        """Fetch what it has made into the folder ``to``: what matches ``pattern``, by default the spec's ``artifacts``.

        A file there that differs is kept, unless it is as a fetch of this job has left it, or with ``replace``.
        Raises: JobError where one was kept, once all else has come; where it is not over, or did not succeed:
        ``anyway`` fetches what there is, of the nodes that answer.
        """
        status = self.status()
        if not anyway and not (status.state == ENDED and status.exit_code == 0):
            code = "" if status.exit_code is None else f" with {status.exit_code}"
            is_going = not status.is_over and status.state != UNKNOWN
            how = f"is {status.state}" if is_going else f"did not succeed, it is {status.state}{code}"
            raise JobError(f"job {self.id} {how}", advice="{} fetches what there is", typed="--anyway")
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

        def remove(index: int) -> None:
            with open_job_talk(self._transports()[index]) as talk:
                talk.say("remove", id=self.id, node_rank=index)
                talk.hear("removed")

        status = self.status()
        if status.state == UNKNOWN and not anyway:
            why = "; ".join(f"{node} does not answer: {each}" for node, each in status.silent.items())
            raise JobError(f"job {self.id}: {why}", advice="{} forgets it here", typed="--anyway")
        if not status.is_over and status.state != UNKNOWN:
            raise JobError(f"job {self.id} is {status.state}", advice="{} ends it first", typed=f"stop {self.id}")
        nodes = [index for index, node in enumerate(self._transports()) if label(node) in status.reports]
        on_all([self._transports()[index] for index in nodes], lambda position: remove(nodes[position]))
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
    ) -> JobStatus:
        """Hear what is ``wanted`` of it, to its end or once, and judge how it is then.

        Raises: JobError where no node has the job, or none answers who asks once; SpecError for a rank it has not.
        """
        size = self.world_size
        if wanted.rank is not None and (wanted.rank < 0 or size is not None and wanted.rank >= size):
            there = "count from 0" if size is None else f"are 0 to {size - 1}"
            raise SpecError(f"job {self.id} has no rank {wanted.rank}: its ranks {there}")
        if wanted.tail is not None and not 0 <= wanted.tail <= _MOST_TAIL_LINES:
            raise SpecError(f"tail {wanted.tail}: give 0 to {_MOST_TAIL_LINES:,}")
        nodes = self._transports()
        retries = Retries(lost_after_s=0) if wanted.is_once else None
        follower = Follower(
            nodes,
            self.id,
            wanted=dataclasses.replace(wanted, num_ranks=self.world_size),
            on_line=on_line,
            on_metrics=on_metrics,
            on_reports=on_reports,
            on_piece=on_piece,
            retries=retries,
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
