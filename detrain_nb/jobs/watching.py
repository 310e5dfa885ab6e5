"""A watch on a job: listeners are called when something has changed. Each node is asked at most once a second.

Threads run only while there are listeners and the job is not over: one calls the listeners, and one per node asks that
node, which may take long to time out.
"""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..copying.json_lines import Refused, Talk
from ..deploy.files import Patience, Stop, label
from ..deploy.jobs import open_job_talk
from ..errors import DetrainError, TransportError
from ..transport import Transport
from .job_status import JobStatus
from .live_curves import LiveCurves
from .report_checks import NodeReport
from .watched_node import Checkpoint, LogPart, MetricsPiece, WatchedNode, read_metrics

__all__ = ["JobNews", "OnNews", "Unreached", "Watch"]

_SHORTEST_GAP_S, _LONGEST_GAP_S = 1.0, 5.0  # between two questions to a node: longer while nothing changes
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0  # until a node that did not answer is tried again
_PATIENCE = Patience(silence_s=15.0, answer_s=60.0)
_TELL_GAP_S = 0.3
_NEWS_LIMIT_S = 60.0  # after this long without news, check that the watch still runs
_FIRST_WORD_S = 2.0  # how long the first news waits for all nodes


@dataclass(frozen=True)
class Unreached:
    """A node that does not answer: since when, in seconds since the epoch, and why."""

    since: float
    why: str

    def __str__(self) -> str:
        return f"not reached since {time.strftime('%H:%M', time.localtime(self.since))}"


@dataclass(frozen=True)
class JobNews:
    """A job as it is now. ``parts``: new parts of its logs since the last news; at first, the last part of each log.

    ``curves`` has all logged metrics and grows while the job runs: read it only in the call that passes it.
    ``checkpoints`` are pairs of a step and the time at which it was complete, in seconds since the epoch.
    ``unreached`` nodes are in ``status`` as they were when they last answered. ``begun``: by node and source, the
    unfinished line of a log, such as a moving bar. ``is_last``: all nodes have reported all, and no more news follows.
    """

    status: JobStatus
    unreached: Mapping[str, Unreached]
    curves: LiveCurves
    checkpoints: Sequence[Checkpoint]
    parts: Sequence[LogPart]
    begun: Mapping[tuple[str, str], str] = field(default_factory=dict)
    is_last: bool = False


OnNews = Callable[[JobNews], object]
Judge = Callable[[Sequence[NodeReport | DetrainError | None]], JobStatus]


class _Listener:
    def __init__(self, on_news: OnNews) -> None:
        self.on_news = on_news
        self.has_heard = False


class Watch:
    """A watch on one job for all listeners of a `Job`. ``judge`` derives the status from reports, and records it."""

    def __init__(self, nodes: Sequence[Transport], job: str, *, num_ranks: int | None, judge: Judge) -> None:
        self._nodes, self._judge = nodes, judge
        self._lock = threading.Lock()
        self._curves = LiveCurves()
        names = [label(node) if len(nodes) > 1 else "" for node in nodes]
        self._watched = [
            WatchedNode(job, index, name=name, num_ranks=num_ranks, lock=self._lock) for index, name in enumerate(names)
        ]
        self._listeners: list[_Listener] = []
        self._began_at = time.time()
        self._has_news, self._is_over, self._stop = threading.Event(), threading.Event(), Stop()
        self._look_now = [threading.Event() for _ in nodes]

    def add(self, on_news: OnNews) -> Callable[[], None] | None:
        """Call ``on_news`` from now on, until the returned function is called; return None if this watch has ended."""
        listener = _Listener(on_news)
        with self._lock:
            if self._is_over.is_set():
                return None
            self._listeners.append(listener)
            is_first = len(self._listeners) == 1
        if is_first:
            self._start()
        self._has_news.set()
        return lambda: self._remove(listener)

    def look_now(self) -> None:
        """Ask the nodes at once: something was done to the job."""
        for event in self._look_now:
            event.set()

    def _start(self) -> None:
        for index in range(len(self._nodes)):
            threading.Thread(target=self._follow, args=(index,), name="detrain_nb watch", daemon=True).start()
        threading.Thread(target=self._tell, name="detrain_nb watch", daemon=True).start()

    def _remove(self, listener: _Listener) -> None:
        with self._lock:
            if listener in self._listeners:
                self._listeners.remove(listener)
            is_last = not self._listeners
            if is_last:
                self._is_over.set()  # `add` returns None from now on, and the caller begins another watch
        if is_last:
            self._end()

    def _end(self) -> None:
        self._is_over.set()
        self._stop.ask()
        self._stop.insist()
        self._has_news.set()
        self.look_now()

    # ---- in a thread for each node

    def _follow(self, index: int) -> None:
        watched, pause_s = self._watched[index], _SHORTEST_PAUSE_S
        while not self._is_over.is_set():
            heard_at = watched.heard_at
            try:
                with open_job_talk(self._nodes[index], stop=self._stop, patience=_PATIENCE) as talk:
                    self._look_to_the_end(index, talk)
                return
            except DetrainError as exc:
                if self._is_over.is_set():
                    return
                with self._lock:
                    if isinstance(exc.__cause__, Refused):  # the node has no such job
                        watched.report, watched.heard_at, watched.is_done = None, time.time(), True
                    else:
                        watched.why_silent = str(exc)
                self._has_news.set()
                if watched.is_done:
                    return
            pause_s = _SHORTEST_PAUSE_S if watched.heard_at != heard_at else min(2 * pause_s, _LONGEST_PAUSE_S)
            self._wait(index, pause_s)

    def _look_to_the_end(self, index: int, talk: Talk) -> None:
        """Ask a node until its part of the job is over. Raises: FilesError."""
        watched, gap_s = self._watched[index], _SHORTEST_GAP_S
        while not self._is_over.is_set():
            has_news, has_more = watched.look(talk)
            if watched.report is not None and watched.report.is_over and not has_more:
                watched.finish()
                self._has_news.set()
                return
            if has_news:
                self._has_news.set()
            gap_s = _SHORTEST_GAP_S if has_news or has_more else min(1.5 * gap_s, _LONGEST_GAP_S)
            self._wait(index, gap_s)
            while watched.is_ahead and not self._is_over.is_set():  # a listener is slow: news would pile up in memory
                self._wait(index, _TELL_GAP_S)

    def _wait(self, index: int, limit_s: float) -> None:
        self._look_now[index].wait(limit_s)
        self._look_now[index].clear()

    # ---- in one thread of the job

    def _tell(self) -> None:
        first_word_by = time.monotonic() + _FIRST_WORD_S
        while not self._is_over.is_set():
            if not self._has_news.wait(_NEWS_LIMIT_S):
                continue
            self._has_news.clear()
            with self._lock:
                is_known = all(each.heard_at is not None or each.why_silent for each in self._watched)
                is_over = all(each.is_done for each in self._watched)
                if is_over:  # a later listener begins another watch
                    self._is_over.set()
            if not is_known and (left_s := first_word_by - time.monotonic()) > 0:
                self._has_news.wait(left_s)
                self._has_news.set()
                continue
            self._tell_all(is_last=is_over)
            self._is_over.wait(_TELL_GAP_S)

    def _tell_all(self, *, is_last: bool) -> None:
        with self._lock:
            listeners = [*self._listeners]
            kept = [part for each in self._watched for part in each.kept_parts()]
            new, metrics = list[LogPart](), list[MetricsPiece]()
            for each in self._watched:
                parts, lines = each.take_new()
                new += parts
                metrics += lines
            status_of = [self._said_by(each) for each in self._watched]
            begun = {whose: line for each in self._watched for whose, line in each.begun_lines().items()}
            checkpoints = {step: at for each in self._watched for step, at in each.checkpoints}
            unreached = {
                label(node): Unreached(each.heard_at or self._began_at, each.why_silent)
                for node, each in zip(self._nodes, self._watched)
                if each.why_silent
            }
        for line in read_metrics(metrics):
            self._curves.add(line)
        status = self._judge(status_of)
        for listener in listeners:
            parts = new if listener.has_heard else kept
            listener.has_heard = True
            news = JobNews(status, unreached, self._curves, sorted(checkpoints.items()), parts, begun, is_last)
            try:
                listener.on_news(news)
            except Exception:  # noqa: BLE001  an error of one listener must not affect the others
                traceback.print_exc()
                self._remove(listener)

    def _said_by(self, each: WatchedNode) -> NodeReport | DetrainError | None:
        """Return the last report of a node, or why there is none; the lock is held."""
        if each.report is not None or each.is_done:
            return each.report
        return TransportError(each.why_silent or "it has not answered yet")
