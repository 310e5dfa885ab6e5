"""A stand-in for a node: it answers orders over a real byte stream with whatever the test chooses."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

from detrain_nb.copying.json_lines import Failed, Talk
from detrain_nb.spec.node import Node
from detrain_nb.transport.local import LocalTransport

Answer = Callable[[Talk, dict[str, Any]], None]
ORDERS = (
    *("facts", "source", "prepare", "launch", "status", "follow", "look", "look back"),
    *("stop", "artifacts", "read", "exec", "remove"),
)


class LyingNode(LocalTransport):
    """Answers each order with the function of that name in ``answers``; without one it closes the connection."""

    is_this_machine = False

    def __init__(self, answers: dict[str, Answer], name: str = "") -> None:
        super().__init__(Node(host=name) if name else None)
        self.answers = answers
        self.heard: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def run_jobs(self) -> Iterator[socket.socket]:
        ours, theirs = socket.socketpair()
        thread = threading.Thread(target=self._serve, args=(theirs,), daemon=True)
        with ours:
            thread.start()
            try:
                yield ours
            finally:
                with contextlib.suppress(OSError):
                    ours.shutdown(socket.SHUT_RDWR)
                thread.join(10)

    def _serve(self, sock: socket.socket) -> None:
        broken = contextlib.suppress(Failed, EOFError, BrokenPipeError)
        with broken, sock, sock.makefile("rb") as reader, sock.makefile("wb") as writer:
            talk = Talk(reader, writer)
            while True:
                order = talk.hear(*ORDERS, most_bytes=1 << 22)
                self.heard.append(order)
                if order["type"] not in self.answers:
                    return
                try:
                    self.answers[order["type"]](talk, order)
                finally:
                    with contextlib.suppress(Failed):
                        talk.flush()
