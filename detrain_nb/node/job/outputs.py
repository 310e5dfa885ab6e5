"""Output of a job, written to its logs, and the reports of its ranks (rank.py), read by one event loop."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...agents import is_same_user
from ..system.loop import Loop
from .log_file import BoundedLog
from .rank import MOST_SAID_BYTES, SOCKET_VARIABLE

_PIECE_BYTES = 1 << 18
_DRAIN_LIMIT_S = 10.0
_MOST_RANKS = 4096  # of one node


@dataclass
class RankOutcome:
    """One start of one rank. ``exit_code`` is negative after a signal, None while it runs.

    ``has_said``: the rank's parent (rank.py) reported its exit; if false at the end, that parent was killed.
    """

    rank: int
    local_rank: int
    restart: int
    pid: int
    exit_code: int | None = None
    ended_at: float = 0.0  # of time.monotonic(), equal in all processes of a machine
    has_said: bool = field(default=False, kw_only=True)


class Outputs:
    """All sources that the runner reads: pipes of output, and sockets of ranks."""

    def __init__(self, folder: Path) -> None:
        self.loop = Loop()
        self.outcomes: list[RankOutcome] = []
        self._folder = folder
        self._logs: dict[str, BoundedLog] = {}
        self._pipes: set[int] = set()
        # An abstract socket name, as the system removes the user's socket folder at logout.
        self._name = f"detrain_nb-job-{secrets.token_hex(16)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(f"\0{self._name}")
        self._listener.listen(_MOST_RANKS)
        self._said: dict[socket.socket, RankOutcome] = {}
        self._has_news = False
        self.loop.add(self._listener.fileno(), self._accept)

    def environment(self) -> dict[str, str]:
        """Return the variable through which a rank connects to us."""
        return {SOCKET_VARIABLE: self._name}

    def add(self, pipe: int, log: str) -> None:
        """Write the data of ``pipe`` to ``log``; takes ownership of the pipe."""
        self._pipes.add(pipe)
        self.loop.add(pipe, lambda: self._read(pipe, log))

    @property
    def restarts(self) -> int:
        """Number of restarts of the ranks of this node."""
        return max((outcome.restart for outcome in self.outcomes), default=0)

    def ranks(self) -> list[dict[str, Any]]:
        """Return the ranks of the last start, for status.json."""
        last = [outcome for outcome in self.outcomes if outcome.restart == self.restarts]
        last.sort(key=lambda outcome: outcome.rank)
        return [{"rank": each.rank, "pid": each.pid, "exit_code": each.exit_code} for each in last]

    def take_news(self) -> bool:
        """Return whether the result of `ranks` has changed since the last call."""
        has_news, self._has_news = self._has_news, False
        return has_news

    def close(self) -> None:
        """Read the remaining output, after all writers have exited, and close the logs."""
        deadline = time.monotonic() + _DRAIN_LIMIT_S
        self.loop.remove(self._listener.fileno())
        self._listener.close()
        while (self._pipes or self._said) and time.monotonic() < deadline:
            self.loop.once(deadline)
        for log in self._logs.values():
            log.close()

    # ---- reading

    def _read(self, pipe: int, log: str) -> None:
        if data := os.read(pipe, _PIECE_BYTES):
            if log not in self._logs:
                self._logs[log] = BoundedLog(self._folder / log)
            self._logs[log].write(data)
            return
        self.loop.remove(pipe)
        self._pipes.discard(pipe)
        os.close(pipe)

    def _accept(self) -> None:
        sock, _ = self._listener.accept()
        if not is_same_user(sock):
            sock.close()
            return
        self.loop.add(sock.fileno(), lambda: self._begin(sock))

    def _begin(self, sock: socket.socket) -> None:
        """Read a rank's first message: its numbers, and the pipe of its output."""
        fds: list[int] = []
        try:
            data, fds, _, _ = socket.recv_fds(sock, MOST_SAID_BYTES, 1)
            said = json.loads(data)
            numbers = [_number(said[name]) for name in ("rank", "local_rank", "restart", "pid")]
            pipe = fds.pop()
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            self._forget(sock)
            for fd in fds:
                os.close(fd)
            return
        outcome = RankOutcome(*numbers)
        self.outcomes = [each for each in self.outcomes if each.restart >= outcome.restart - 1] + [outcome]
        self._said[sock] = outcome
        self._has_news = True
        self.add(pipe, f"rank-{outcome.rank}.log")
        self.loop.add(sock.fileno(), lambda: self._note_end(sock))

    def _note_end(self, sock: socket.socket) -> None:
        outcome = self._said.pop(sock)
        outcome.ended_at, outcome.exit_code = time.monotonic(), -signal.SIGKILL  # unless it reports its exit
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            said = json.loads(sock.recv(MOST_SAID_BYTES))
            outcome.exit_code, outcome.ended_at = int(said["ended"]), float(said["at"])
            outcome.has_said = True
        self._has_news = True
        self._forget(sock)

    def _forget(self, sock: socket.socket) -> None:
        self.loop.remove(sock.fileno())
        sock.close()


def _number(said: object) -> int:
    if type(said) is not int or not 0 <= said < 1 << 31:
        raise ValueError("not a number")
    return said
