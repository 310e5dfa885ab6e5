"""Nodes of a job watch each other through the job's store: if one fails or goes silent, the others stop and name it.

Node 0 holds the store and judges the others; they judge node 0. Silence is only counted while the judging node runs:
a node that was suspended, or a laptop that slept, does not mistake its own sleep for silence of the others.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from ...launch import JOB_END_VARIABLE
from ...text import printable

_BEAT_S = 0.5
_WORD_LIMIT_S = 5.0  # for a last report to a store that may be down
_POLL_S = 0.02
MOST_REASON_CHARS = 2000
_END_KEY, _BEAT_KEY, _DONE_KEY, _HEARD_KEY = "end", "beat", "done", "heard"


class SharedStore(Protocol):
    """Key-value store that all nodes see. Each method may hang while the node that serves it is silent.

    Raises: ConnectionError when that node is down.
    """

    def set(self, key: str, value: str) -> None: ...

    def set_first(self, key: str, value: str) -> None:
        """Set a key unless it has a value."""

    def get(self, key: str) -> bytes | None: ...


class Watch:
    """The watch of one node. ``open_store`` creates a separate client of the store.

    Without ``is_fixed``, as in elastic jobs, nodes may leave and join: only a node's own report stops the others, and
    `silent` lists the silent nodes.
    ``on_end`` is called once, in a thread, with the reason, if a different node ends the job.
    """

    def __init__(
        self,
        open_store: Callable[[], SharedStore],
        *,
        node_rank: int,
        num_nodes: int,
        names: Sequence[str] = (),
        silence_s: float,
        is_fixed: bool = True,
        on_end: Callable[[str], None],
        beat_s: float = _BEAT_S,
    ) -> None:
        self._open_store, self._store = open_store, open_store()
        self._node_rank, self._names = node_rank, names
        self._others = [rank for rank in range(num_nodes) if rank != node_rank]
        self._silence_s, self._beat_s, self._is_fixed = silence_s, min(beat_s, silence_s / 3), is_fixed
        self._on_end = on_end
        self._rounds = 0
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._over = threading.Event()  # no node is judged any more
        self._heard: dict[int, tuple[bytes | None, float]] = {}  # per other node: its last beat, and seconds since then

    def name(self, node_rank: int) -> str:
        """Return the name of a node for messages."""
        return f"node {self._names[node_rank] if node_rank < len(self._names) else node_rank}"

    def start(self) -> None:
        """Start the threads that watch."""
        self._threads = [
            threading.Thread(target=judge, name="watch", daemon=True) for judge in (self._talk, self._time)
        ]
        for thread in self._threads:
            thread.start()

    def wait_for_all(self, limit_s: float) -> str:
        """Wait until all nodes have joined; return what is wrong, or an empty text. Call it before `start`."""
        deadline = time.monotonic() + limit_s
        self._store.set(f"{_BEAT_KEY}/{self._node_rank}", "0")
        missing = list(self._others)
        while missing and time.monotonic() < deadline:
            missing = [rank for rank in missing if self._store.get(f"{_BEAT_KEY}/{rank}") is None]
            if (end := self._store.get(_END_KEY)) is not None:
                return _read_reason(end)
            if missing:
                time.sleep(_POLL_S)
        if not missing:
            return ""
        names = ", ".join(self.name(rank) for rank in missing)
        return f"{names} did not join the rendezvous within {limit_s:g} s: check there why it did not start"

    def silent(self) -> list[str]:
        """Return the names of the nodes that have become silent; on node 0 only."""
        return [
            self.name(rank)
            for rank, (beat, silent_s) in list(self._heard.items())
            if beat is not None and silent_s >= self._silence_s
        ]

    def tell_done(self, limit_s: float | None = None) -> None:
        """Report that this node's ranks have succeeded. Node 0 waits for the others, which still need its store."""
        self._say(lambda store: store.set(f"{_DONE_KEY}/{self._node_rank}", "1"))
        if self._node_rank == 0:
            self._wait_for_others(_DONE_KEY, limit_s)
        self.leave()

    def tell_end(self, reason: str) -> None:
        """Report why this node's ranks have ended, which stops those of the others; only the first report counts."""
        if self._over.is_set():
            return
        self._over.set()
        self._say(lambda store: say_end(store, reason))
        if self._node_rank == 0:
            self._wait_for_others(_HEARD_KEY, _WORD_LIMIT_S)
        self.leave()

    def leave(self) -> None:
        """Stop watching. No thread may be inside torch when the process exits: Python would abort."""
        self._over.set()
        for thread in self._threads:
            thread.join(4 * self._beat_s)

    def _say(self, word: Callable[[SharedStore], None]) -> None:
        """Run ``word`` over a separate connection, as the other may hang; return after 5 s at the latest."""

        def say() -> None:
            try:
                word(self._open_store())
            except ConnectionError:
                pass  # node 0 is down, and the others have noticed

        saying = threading.Thread(target=say, name="last word", daemon=True)
        saying.start()
        saying.join(_WORD_LIMIT_S)

    def _wait_for_others(self, key: str, limit_s: float | None) -> None:
        """Wait, on node 0, until each node that is not silent has set its ``key``, or is done."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        store = self._open_store()
        left = [rank for rank in self._others if store.get(f"{_BEAT_KEY}/{rank}") is not None]
        while left and (deadline is None or time.monotonic() < deadline):
            left = [rank for rank in left if not self._has_set(store, rank, key)]
            if left:
                time.sleep(_POLL_S)

    def _has_set(self, store: SharedStore, rank: int, key: str) -> bool:
        if any(store.get(f"{said}/{rank}") is not None for said in {key, _DONE_KEY}):
            return True
        return self._heard.get(rank, (None, 0.0))[1] >= self._silence_s

    # ---- judging, each in a thread of its own

    def _talk(self) -> None:
        try:
            before = time.monotonic()
            while not self._over.is_set():
                self._rounds += 1
                self._store.set(f"{_BEAT_KEY}/{self._node_rank}", str(self._rounds))
                if self._node_rank == 0:
                    passed_s, before = time.monotonic() - before, time.monotonic()
                    self._look_at_others(min(passed_s, 2 * self._beat_s))
                if (end := self._store.get(_END_KEY)) is not None:
                    self._store.set(f"{_HEARD_KEY}/{self._node_rank}", "1")
                    self._finish(_read_reason(end))
                self._over.wait(self._beat_s)
        except ConnectionError:
            self._finish(f"{self.name(0)}, which holds the store of the job, is down")

    def _look_at_others(self, passed_s: float) -> None:
        for rank in self._others:
            beat = self._store.get(f"{_BEAT_KEY}/{rank}")
            last, silent_s = self._heard.get(rank, (None, 0.0))
            self._heard[rank] = (beat, silent_s + passed_s if beat == last else 0.0)
            if not self._is_fixed or self._heard[rank][1] < self._silence_s:
                continue
            if self._store.get(f"{_DONE_KEY}/{rank}") is None:
                reason = f"{self.name(rank)} sent no heartbeat for {self._silence_s:g} s"
                say_end(self._store, reason)  # every node reads it there, including this one

    def _time(self) -> None:
        """Judge node 0 by how long its store has not answered, as `_talk` may hang in a call."""
        seen, silent_s, before = 0, 0.0, time.monotonic()
        while not self._over.wait(self._beat_s):
            passed_s, before = time.monotonic() - before, time.monotonic()
            silent_s = silent_s + min(passed_s, 2 * self._beat_s) if self._rounds == seen else 0.0
            seen = self._rounds
            if silent_s >= self._silence_s:
                holder = f"{self.name(0)}, which holds the store of the job,"
                self._finish(f"{holder} did not answer for {self._silence_s:g} s")

    def _finish(self, reason: str) -> None:
        with self._lock:
            if self._over.is_set():
                return
            self._over.set()
        self._on_end(reason)


def say_end(store: SharedStore, reason: str) -> None:
    """Report to all nodes why the job ends; only the first report counts. Raises: ConnectionError."""
    store.set_first(_END_KEY, json.dumps({"reason": reason[:MOST_REASON_CHARS]}))


def end_ranks(reason: str, *, grace_s: float = 20.0) -> None:
    """Write the reason, and stop torchrun, which is this process, with its ranks. Never returns."""
    write_reason(reason)
    os.kill(os.getpid(), signal.SIGTERM)  # torchrun stops its ranks and exits
    time.sleep(grace_s)
    os._exit(1)  # its main thread hangs in a store that does not answer; the runner kills the rest


def write_reason(reason: str) -> None:
    """Write why this node's ranks are stopped: into the log, and into a file for the runner."""
    print(f"detrain_nb: {reason}", file=sys.stderr, flush=True)
    if path := os.environ.get(JOB_END_VARIABLE):
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump({"reason": reason}, file)
        except OSError as exc:
            print(f"detrain_nb: {path} cannot be written: {exc}", file=sys.stderr, flush=True)


def _read_reason(end: bytes) -> str:
    """Read the reason that a node, which is not trusted, has sent."""
    try:
        said = json.loads(end[: 4 * MOST_REASON_CHARS])
        reason = said["reason"] if isinstance(said, dict) else None
    except (ValueError, KeyError, RecursionError):
        reason = None
    if not isinstance(reason, str) or not reason:
        return "another node ended the job without a valid reason"
    return printable(reason[:MOST_REASON_CHARS])
