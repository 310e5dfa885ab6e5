"""Logs of all nodes, followed at once: a broken connection is reopened, and no line is lost or repeated."""

from __future__ import annotations

import queue
import re
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..copying.json_lines import Refused, Talk, Untrue, as_size
from ..deploy.files import Stop, label
from ..deploy.jobs import ENDLESS, READING, open_job_talk
from ..errors import DetrainError, NodeLost, SpecError
from ..metrics import read_metrics_line
from ..transport import Transport
from .log_lines import FollowedFile, LogLine
from .report_checks import STATUS_BYTES, NodeReport, check_log_name, read_reports

__all__ = ["Follower", "OnPiece", "OnReports", "Retries", "Wanted"]

OnPiece = Callable[[str, int, bytes], object]  # the node, "" if the job has only one; the rank; the bytes it wrote
OnReports = Callable[[Mapping[str, NodeReport | None]], object]

_MOST_PIECE_BYTES = 1 << 18  # short lines take twenty times as much in memory
_MOST_FILES = 8192  # of a node
_MOST_BATCHES = 32  # waiting to be shown; a node waits while there are that many
_MOST_TAIL_LINES = 1_000_000
_LOOK_GAP_S = 0.2
_RANK_OF = re.compile(r"(?:metrics/)?rank-([0-9]+)\.")


@dataclass(frozen=True)
class Retries:
    """How long to retry a node that does not answer, and the gaps between two attempts."""

    lost_after_s: float = 600.0
    shortest_gap_s: float = 0.5
    longest_gap_s: float = 10.0


@dataclass(frozen=True)
class Wanted:
    """A selection of lines: of ``nodes`` (by position), of ``rank``, and of logs, of metrics, of both or of neither.

    The log of torchrun is left out unless it is wanted: when a rank fails, it has a traceback of torchrun's own code.
    """

    nodes: Collection[int] | None = None
    rank: int | None = None
    has_logs: bool = True
    has_torchrun: bool = False
    has_metrics: bool = False
    is_once: bool = False  # only what exists now
    tail: int | None = None  # of what exists now, only this many last lines of each log
    num_ranks: int | None = None  # of the job, None if unknown

    def check(self, job: str) -> None:
        """Raise SpecError for a rank that the job does not have, or an invalid tail."""
        if self.rank is not None and (self.rank < 0 or (self.num_ranks is not None and self.rank >= self.num_ranks)):
            there = "count from 0" if self.num_ranks is None else f"are 0 to {self.num_ranks - 1}"
            raise SpecError(f"job {job} has no rank {self.rank}: its ranks {there}")
        if self.tail is not None and not 0 <= self.tail <= _MOST_TAIL_LINES:
            raise SpecError(f"tail {self.tail}: give 0 to {_MOST_TAIL_LINES:,}")

    def wants(self, name: str) -> bool:
        rank = _RANK_OF.match(name)
        if rank is not None and self.num_ranks is not None and int(rank[1]) >= self.num_ranks:
            return False
        if self.rank is not None and (rank is None or int(rank[1]) != self.rank):
            return False
        if name == "torchrun.log":
            return self.has_logs and self.has_torchrun
        return self.has_metrics if name.startswith("metrics/") else self.has_logs

    def order(self, *, is_again: bool) -> dict[str, object]:
        """Return the request fields that limit what the node sends. Only the first connection asks for a tail."""
        which: dict[str, object] = {"rank": self.rank, "logs": self.has_logs, "metrics": self.has_metrics}
        return {"once": self.is_once, **which, "tail": None if is_again else self.tail}


@dataclass
class _NodeState:
    files: dict[str, FollowedFile] = field(default_factory=dict)
    report: NodeReport | None = None
    failure: DetrainError | None = None
    answered_at: float | None = None  # over the current connection
    is_done: bool = False


class Follower:
    """A follower of one job on its nodes; ``run`` returns the last report of each, or why there is none.

    ``on_line`` and ``on_metrics`` are called in the thread that calls ``run``. An exception in them, or an interrupt,
    ends ``run``; the job continues.
    """

    def __init__(
        self,
        nodes: Sequence[Transport],
        job: str,
        *,
        wanted: Wanted | None = None,
        on_line: Callable[[LogLine], object] | None = None,
        on_metrics: Callable[[dict[str, Any]], object] | None = None,
        on_reports: OnReports | None = None,
        on_piece: OnPiece | None = None,
        retries: Retries | None = None,
        cancel: Stop | None = None,
    ) -> None:
        """Prepare to follow; ``on_reports`` gets the last report of each node, by name, several times a second.

        ``on_piece`` gets the output of ranks as it arrives, instead of lines: progress bars have no line end.
        """
        self._nodes = nodes
        self._job = job
        self._wanted = wanted or Wanted()
        self._on_line = on_line or (lambda line: None)
        self._on_metrics = on_metrics or (lambda line: None)
        self._on_reports = on_reports or (lambda reports: None)
        self._on_piece = on_piece
        self._retries = retries or Retries()
        self._states = {
            index: _NodeState()
            for index in range(len(nodes))
            if self._wanted.nodes is None or index in self._wanted.nodes
        }
        self._batches: queue.Queue[tuple[int, str, list[str] | bytes]] = queue.Queue(_MOST_BATCHES)
        self._is_stopped = threading.Event()
        self._stop = cancel or Stop()

    def run(self, limit_s: float | None = None) -> dict[int, NodeReport | DetrainError]:
        """Follow to the end of the job, or for ``limit_s``; return a report or a failure for each node.

        Raises: TimeoutError; TransportError once ``cancel`` was asked.
        """
        deadline = None if limit_s is None else time.monotonic() + limit_s
        threads = [
            threading.Thread(target=self._follow, args=(index,), name="detrain_nb follow", daemon=True)
            for index in self._states
        ]
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads):
                self._stop.check()
                self._show_some()
                self._on_reports({label(self._nodes[index]): each.report for index, each in self._states.items()})
                if deadline is not None and time.monotonic() > deadline:
                    raise TimeoutError(f"the job has not ended within {limit_s:g} s")
            while not self._batches.empty():
                self._show_some()
        finally:
            self._is_stopped.set()
            self._stop.ask()
            self._stop.insist()
        return {index: self._outcome_of(index) for index in self._states}

    def has_shown_end(self, index: int, rank: int | None) -> bool:
        """Return whether the last lines of a failure were shown: those of ``rank``, else of torchrun, else of setup."""
        state = self._states.get(index)
        if rank is not None or state is None:
            return state is not None and self._wanted.wants(f"rank-{rank}.log")
        return self._wanted.wants("torchrun.log" if "torchrun.log" in state.files else "setup.log")

    def _outcome_of(self, index: int) -> NodeReport | DetrainError:
        state = self._states[index]
        if state.failure is not None:
            return state.failure
        return state.report or NodeLost(f"{label(self._nodes[index])}: it sent no report on job {self._job}")

    def _show_some(self) -> None:
        try:
            index, name, lines = self._batches.get(timeout=_LOOK_GAP_S)
        except queue.Empty:
            return
        if name.startswith("metrics/"):
            for line in lines:
                values = read_metrics_line(line) if isinstance(line, str) else None
                if values and name == f"metrics/rank-{values['rank']}.jsonl":
                    self._on_metrics(values)
            return
        node = label(self._nodes[index]) if len(self._nodes) > 1 else ""
        source = name.removesuffix(".log").removeprefix("rank-")
        if isinstance(lines, bytes):
            assert self._on_piece is not None
            self._on_piece(node, int(source), lines)
            return
        for line in lines:
            self._on_line(LogLine(node, source, line))

    # ---- in a thread for each node

    def _follow(self, index: int) -> None:
        state, patience = self._states[index], READING if self._wanted.is_once else ENDLESS
        heard_at, gap_s, has_told = time.monotonic(), self._retries.shortest_gap_s, False
        while not self._is_stopped.is_set():
            offsets, state.answered_at = {name: file.offset for name, file in state.files.items()}, None
            try:
                with open_job_talk(self._nodes[index], stop=self._stop, patience=patience) as talk:
                    if has_told:
                        self._put(index, "", ["connected again"])
                    self._listen(index, talk)
                break
            except DetrainError as exc:
                if isinstance(exc.__cause__, (Refused, Untrue)) or self._is_stopped.is_set():
                    state.failure = exc
                    break
                has_moved = offsets != {name: file.offset for name, file in state.files.items()}
                if has_moved or self._has_held(state):
                    heard_at, gap_s, has_told = time.monotonic(), self._retries.shortest_gap_s, False
                if time.monotonic() - heard_at > self._retries.lost_after_s:
                    state.failure = NodeLost(str(exc))
                    break
                if not has_told:
                    self._put(index, "", [f"connection lost, reconnecting: {exc}"])
                    has_told = True
                self._is_stopped.wait(gap_s)
                gap_s = min(2 * gap_s, self._retries.longest_gap_s)
        for name, file in state.files.items():
            self._put(index, name, file.end())
        state.is_done = True

    def _has_held(self, state: _NodeState) -> bool:
        """Return whether the connection answered and lasted, which resets the retries: a job may be silent."""
        return state.answered_at is not None and time.monotonic() - state.answered_at > self._retries.longest_gap_s

    def _listen(self, index: int, talk: Talk) -> None:
        """Handle the messages of a node until the job ends. Raises: FilesError."""
        state = self._states[index]
        offsets = {name: file.offset for name, file in state.files.items()}
        talk.say(
            "follow",
            id=self._job,
            node_rank=index,
            offsets=offsets,
            **self._wanted.order(is_again=state.report is not None),
        )
        while not self._is_stopped.is_set():
            said = talk.hear("data", "status", "end", most_bytes=STATUS_BYTES)
            state.answered_at = state.answered_at or time.monotonic()
            if said["type"] == "end":
                return
            if said["type"] == "status":
                report = next((each for each in read_reports(said) if each.node_rank == index), state.report)
                if report and state.report and report.restarts > state.report.restarts and self._wanted.has_logs:
                    self._put(index, "", [f"all ranks were restarted: restart {report.restarts}"])
                state.report = report
                continue
            name, offset, size = (
                check_log_name(said.get("name")),
                as_size(said.get("offset")),
                as_size(said.get("size")),
            )
            if size > _MOST_PIECE_BYTES:
                raise Untrue(f"it sent a piece of {size:,} bytes; the limit is {_MOST_PIECE_BYTES:,}")
            data = b"".join(talk.read(size))
            if not self._wanted.wants(name) and name != "torchrun.log":
                continue
            if name not in state.files and len(state.files) >= _MOST_FILES:
                raise Untrue(f"it sent more than {_MOST_FILES:,} files")
            is_begun = self._wanted.tail is not None and not size  # empty: it gives the offset where a tail begins
            file = state.files.setdefault(name, FollowedFile.of(name, offset if is_begun else 0))
            in_pieces = self._on_piece is not None and name.startswith("rank-")
            lines = file.take_piece(offset, data) if in_pieces else file.take(offset, data)
            if self._wanted.wants(name):
                self._put(index, name, lines)

    def _put(self, index: int, name: str, lines: list[str] | bytes) -> None:
        """Queue the lines; wait while the queue is full."""
        while lines and not self._is_stopped.is_set():
            try:
                self._batches.put((index, name, lines), timeout=_LOOK_GAP_S)
                return
            except queue.Full:
                continue
