"""A node whose agent is a thread of the test: it behaves correctly until the test makes it send something else."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from detrain_nb.errors import TransportError, WireError
from detrain_nb.plan import NodeOffer
from detrain_nb.transport import AgentFolders
from detrain_nb.wire import (
    Attach,
    Attached,
    CellDone,
    EndGeneration,
    EndSession,
    FrameReader,
    GenerationEnded,
    GenerationReady,
    Locate,
    Message,
    NewGeneration,
    Position,
    RankUp,
    RunCell,
    to_frame,
)

INFO = {"device": "cpu", "backend": "gloo", "init": True}


class FakeNode:
    """A transport to an agent with one rank; ``answers`` replaces its answers to messages of a type."""

    is_this_machine = False
    is_trusted = False
    can_resume = False
    shares_paths = True
    python = "python3"
    address = "127.0.0.1"
    interface = "lo"
    reached_from = ""
    is_forwarded = False
    torch = ""
    node = None
    account: object = None
    contact: object = None
    folder_state: tuple[object, object] = ("", "")
    cache = ""
    project = ""

    @property
    def place(self) -> object:
        return self.name

    def __init__(self, name: str, rank: int) -> None:
        self.name, self.rank = name, rank
        self.env: dict[str, str] = {}
        self.answers: dict[type[Message], Callable[[Message], Iterable[Message]]] = {}
        self.attached = Attached(f"{name}-1", 1, name, 0, 1, 0, 0, 0, [rank], [rank], 1, INFO)
        self._number = 0
        self._said: list[socket.socket] = []
        self._ended = threading.Event()

    # ---- as a transport

    def connect_agent(self, session: str) -> socket.socket:
        ours, self._sock = socket.socketpair()
        self._said += [self._sock]
        threading.Thread(target=self._serve, args=(self._sock,), daemon=True).start()
        return ours

    start_agent = connect_agent

    def begin(self, session: str) -> AgentFolders:
        raise TransportError(f"{self.name} keeps nothing")

    def ask_meanwhile(self, work: Collection[Future[Any]]) -> None: ...

    def run_files(self) -> AbstractContextManager[socket.socket]:
        raise TransportError(f"{self.name} has no files")

    def run_jobs(self) -> AbstractContextManager[socket.socket]:
        raise TransportError(f"{self.name} has no jobs")

    def offer(self, gpus: int) -> NodeOffer:
        return NodeOffer(self.name, tuple(range(gpus)))

    def work_folder(self, folder: str) -> str:
        return folder

    def wait_for_end(self, *, limit_s: float, is_ours: bool = True) -> None:
        self.leave()

    def leave(self) -> None:
        for sock in self._said:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    # ---- sending

    def say(self, *messages: Message, is_numbered: bool = True) -> None:
        for message in messages:
            self._number += is_numbered
            self.say_bytes(to_frame(message).to_bytes(number=self._number if is_numbered else 0))

    def say_bytes(self, data: bytes) -> None:
        """Send bytes; does nothing if the connection has been closed."""
        with contextlib.suppress(OSError):
            self._sock.sendall(data)

    def wait_until_hung_up_on(self, limit_s: float = 20.0) -> bool:
        """Return whether the notebook closes the connection within ``limit_s``."""
        return self._ended.wait(limit_s)

    # ---- as an agent

    def _serve(self, sock: socket.socket) -> None:
        reader = FrameReader()
        with contextlib.suppress(OSError, WireError):  # the notebook may acknowledge numbers that no real agent uses
            while data := sock.recv(1 << 16):
                for frame in reader.feed(data):
                    message = frame.message()
                    if isinstance(message, EndSession):
                        sock.shutdown(socket.SHUT_RDWR)
                        continue
                    answer = self.answers.get(type(message), self._answer)
                    for said in answer(message):
                        self.say(said, is_numbered=not isinstance(message, (Attach, Locate)))
        self._ended.set()
        sock.close()

    def _answer(self, message: Message) -> list[Message]:
        rank = self.rank
        if isinstance(message, Attach):
            up = RankUp(rank, 1, 0, 2, 1, self.name, "cpu", "2")
            return [*([up] if self.attached.ranks else []), self.attached]
        if isinstance(message, RunCell):
            return [CellDone(rank, message.cell, 0.1, True, False, b"")]
        if isinstance(message, NewGeneration):
            return [GenerationReady(rank, message.number)]
        if isinstance(message, EndGeneration):
            return [GenerationEnded(rank, message.number, 0, [])]
        if isinstance(message, Locate):
            return [replace(IDLE, rank=rank, request=message.request)]
        return []


IDLE = Position(0, 0, 1, "idle", 0, 0, "", 0.0, 0, [], 0.0, 0.0, {}, -1.0)
