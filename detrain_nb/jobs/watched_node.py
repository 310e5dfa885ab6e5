"""One node of a watched job: what it has reported so far; the last part of each log is kept."""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..copying.json_lines import Talk, Untrue, as_size
from ..metrics import read_metrics_line
from ..node.job.terms import LOOK_BACK_BYTES, LOOK_LOG_BYTES, LOOK_METRICS_BYTES, LOOK_METRICS_FILES
from .log_lines import FollowedFile
from .report_checks import (
    STATUS_BYTES,
    NodeReport,
    check_log_name,
    find_part,
    read_checkpoints,
    read_reports,
    read_times,
)

__all__ = ["Checkpoint", "LogPart", "WatchedNode", "hear_back", "read_metrics"]

_KEPT_BYTES = 1 << 24  # of all logs of a node
_LEAST_KEPT_BYTES = 1 << 15  # of each
_MOST_FILES = 80  # in one answer, each once: metrics take many times their bytes in memory
_MOST_LOGS = 256  # in total: a node sends those of its first ranks
_MOST_LINES = 2000  # of a log, in one answer: empty ones take a hundred times their bytes in memory

MetricsPiece = tuple[str, FollowedFile, bytes]  # file name, its state, and the new bytes
Checkpoint = tuple[int, float]  # its step, and when it was complete: seconds since the epoch, by the node's clock


@dataclass(frozen=True)
class LogPart:
    """Consecutive lines of a log. ``begin``: the number of bytes before them in the log, 0 for its first line.

    ``source`` is a rank or "setup"; ``node`` is empty if the job has only one node. ``skipped`` bytes before them were
    not read, but are in the log. ``times``: when each line was printed, in seconds since the epoch by the node's
    clock, None if unknown.
    """

    node: str
    source: str
    begin: int
    lines: tuple[str, ...]
    skipped: int = 0
    times: tuple[float | None, ...] = ()


@dataclass
class _Log:
    file: FollowedFile
    parts: deque[LogPart] = field(default_factory=deque)
    size: int = 0  # of the lines in all parts

    def keep(self, part: LogPart, most_bytes: int) -> None:
        self.parts.append(part)
        self.size += _size_of(part)
        while self.size > most_bytes and len(self.parts) > 1:
            self.size -= _size_of(self.parts.popleft())


def _size_of(part: LogPart) -> int:
    return sum(map(len, part.lines)) + 64 * len(part.lines)


def _note_name(name: str, names: set[str]) -> None:
    """Count another file of one answer. Raises: Untrue."""
    if name in names:
        raise Untrue(f"{name} appears twice in one answer")
    names.add(name)
    if len(names) > _MOST_FILES or sum(map(_is_metrics, names)) > LOOK_METRICS_FILES:
        raise Untrue(f"more than {_MOST_FILES} files, or {LOOK_METRICS_FILES} of metrics, in one answer")


def _is_metrics(name: str) -> bool:
    return name.startswith("metrics/")


class WatchedNode:
    """Reports of a node, received in one thread, and read in another one under ``lock``."""

    def __init__(self, job: str, node_rank: int, *, name: str, num_ranks: int | None, lock: threading.Lock) -> None:
        """Name the node: ``name`` is shown before its lines, empty if the job has only one node."""
        self.report: NodeReport | None = None
        self.checkpoints: tuple[Checkpoint, ...] = ()
        self.heard_at: float | None = None  # seconds since the epoch
        self.why_silent = ""
        self.is_done = False
        self._job, self._node_rank, self._name, self._num_ranks = job, node_rank, name, num_ranks
        self._lock = lock
        self._logs: dict[str, _Log] = {}
        self._metrics: dict[str, FollowedFile] = {}
        self._begun: dict[str, str] = {}
        self._new_parts: list[LogPart] = []
        self._new_metrics: list[MetricsPiece] = []

    def look(self, talk: Talk) -> tuple[bool, bool]:
        """Ask for news; return two flags: anything was new, and more is available. Raises: FilesError."""
        files = {**{name: log.file for name, log in self._logs.items()}, **self._metrics}
        offsets = {name: file.offset for name, file in files.items()}
        talk.say("look", id=self._job, node_rank=self._node_rank, offsets=offsets)
        said = talk.hear("status", most_bytes=STATUS_BYTES)
        report = find_part(read_reports(said), self._job, self._node_rank)
        checkpoints = tuple(read_checkpoints(said.get("checkpoints")))
        has_news, names = False, set[str]()
        while (piece := talk.hear("data", "end"))["type"] == "data":
            _note_name(check_log_name(piece.get("name")), names)
            has_news |= self._take(talk, piece)
        with self._lock:
            has_news |= (self.report, self.checkpoints, self.why_silent) != (report, checkpoints, "")
            self.report, self.checkpoints = report, checkpoints
            self.heard_at, self.why_silent = time.time(), ""
        return has_news, piece.get("more") is True

    def _take(self, talk: Talk, said: dict[str, Any]) -> bool:
        """Take a piece of a file after those that arrived before."""
        name, offset, size = check_log_name(said.get("name")), as_size(said.get("offset")), as_size(said.get("size"))
        is_metrics = _is_metrics(name)
        if size > (LOOK_METRICS_BYTES if is_metrics else LOOK_LOG_BYTES):
            raise Untrue(f"it sent a piece of {size:,} bytes, more than was requested")
        data = b"".join(talk.read(size))
        if not self._is_of_job(name):
            return False
        if is_metrics:
            return self._take_metrics(name, offset, data)
        return self._take_log(name, offset, data, read_times(said.get("times")))

    def _is_of_job(self, name: str) -> bool:
        """Return whether a file is of setup or of a rank of the job; of very many files, only the first count."""
        known = self._metrics if _is_metrics(name) else self._logs
        if name not in known and len(known) >= _MOST_LOGS:
            return False
        rank = name.rpartition("rank-")[2].partition(".")[0]
        return name != "torchrun.log" and (
            not rank.isdecimal() or self._num_ranks is None or int(rank) < self._num_ranks
        )

    def _take_metrics(self, name: str, offset: int, data: bytes) -> bool:
        """Keep metrics as raw bytes: parsed, they take many times the memory, so they are read line by line later."""
        file = self._metrics.setdefault(name, FollowedFile.of(name))
        if piece := file.take_piece(offset, data):
            with self._lock:
                self._new_metrics.append((name, file, piece))
        return bool(piece)

    def _take_log(self, name: str, offset: int, data: bytes, marks: Sequence[tuple[int, float]]) -> bool:
        begin = _begin_of_last_lines(data)
        offset, data = offset + begin, data[begin:]
        log = self._logs.get(name)
        skipped = offset if log is None else offset - log.file.offset
        if log is None:
            log = self._logs[name] = _Log(FollowedFile(offset))
        elif skipped > 0:  # the piece begins with a whole line
            log.file = FollowedFile(offset)
        begin = log.file.offset - len(log.file.rest)
        new_from = max(offset, log.file.offset)
        lines = tuple(log.file.take(offset, data))
        with self._lock:
            self._begun[_source_of(name)] = log.file.begun()
        if lines:
            times = _times_of(lines, data[new_from - offset :], new_from, marks)
            self._keep(name, LogPart(self._name, _source_of(name), begin, lines, max(0, skipped), times))
        return bool(data)

    def _keep(self, name: str, part: LogPart) -> None:
        with self._lock:
            self._logs[name].keep(part, max(_LEAST_KEPT_BYTES, _KEPT_BYTES // len(self._logs)))
            self._new_parts.append(part)

    def finish(self) -> None:
        """End all logs: an unfinished last line counts as a line."""
        for name, log in self._logs.items():
            begin = log.file.offset - len(log.file.rest)
            if lines := tuple(log.file.end()):
                self._keep(name, LogPart(self._name, _source_of(name), begin, lines))
        with self._lock:
            self._begun.clear()
        self.is_done = True

    # ---- for the thread that calls listeners; the lock is held

    @property
    def is_ahead(self) -> bool:
        """There is news that was not taken yet."""
        return bool(self._new_parts or self._new_metrics)

    def take_new(self) -> tuple[list[LogPart], list[MetricsPiece]]:
        found = self._new_parts, self._new_metrics
        self._new_parts, self._new_metrics = [], []
        return found

    def begun_lines(self) -> dict[tuple[str, str], str]:
        """Return the unfinished line of each log, by node and source."""
        return {(self._name, source): line for source, line in self._begun.items() if line}

    def kept_parts(self) -> list[LogPart]:
        """Return the last part of each log."""
        return [part for log in self._logs.values() for part in log.parts]


def read_metrics(pieces: Iterable[MetricsPiece]) -> Iterator[dict[str, Any]]:
    """Yield the logged metrics, line by line."""
    for name, file, piece in pieces:
        for line in file.to_lines(piece):
            values = read_metrics_line(line)
            if values and name == f"metrics/rank-{values['rank']}.jsonl":
                yield values


def _begin_of_last_lines(data: bytes) -> int:
    at = len(data)
    for _ in range(_MOST_LINES + 1):
        at = data.rfind(b"\n", 0, at)
        if at < 0:
            return 0
    return at + 1


def _source_of(name: str) -> str:
    return name.removesuffix(".log").removeprefix("rank-")


def _times_of(
    lines: Sequence[str], data: bytes, begin: int, marks: Sequence[tuple[int, float]]
) -> tuple[float | None, ...]:
    """Return when each of ``lines``, which end in ``data``, was printed; ``begin`` is the offset of ``data``."""
    offsets, times, end = [offset for offset, _ in marks], list[float | None](), -1
    while (end := data.find(b"\n", end + 1)) >= 0:
        place = bisect_right(offsets, begin + end)
        times.append(marks[place - 1][1] if place else None)
    return tuple([*times, *[None] * len(lines)][: len(lines)])


def hear_back(talk: Talk, job: str, node_rank: int, before: LogPart) -> LogPart:
    """Ask a node for the lines before those of ``before`` in its log. Raises: FilesError."""
    name = f"{before.source}.log" if before.source == "setup" else f"rank-{int(before.source)}.log"
    talk.say("look back", id=job, node_rank=node_rank, name=name, end=before.begin)
    said = talk.hear("data")
    at, size = as_size(said.get("offset")), as_size(said.get("size"))
    if size > LOOK_BACK_BYTES or at + size > before.begin:
        raise Untrue(f"it sent {size:,} bytes from offset {at:,}, not what was requested")
    data = b"".join(talk.read(size))
    whole = data.find(b"\n") + 1 if at else 0  # else it begins in the middle of a line
    if whole == len(data):
        whole = 0  # all of it is one long line
    file = FollowedFile(at + whole)
    lines = (*file.take(at + whole, data[whole:]), *file.end())
    times = _times_of(lines, data[whole:], at + whole, read_times(said.get("times")))
    return LogPart(before.node, before.source, at + whole, lines, before.begin - at - size, times)
