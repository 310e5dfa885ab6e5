"""An agent process on its own, for tests that connect to it as a notebook or a worker would."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from detrain_nb.guarded import RUN_MODULE
from detrain_nb.wire import FrameReader, Message, to_frame


@dataclass
class Agent:
    """A running agent and the folder it serves."""

    process: subprocess.Popen[bytes]
    folder: Path
    sockets: contextlib.ExitStack

    def connect(self) -> Peer:
        sock = self.sockets.enter_context(socket.socket(socket.AF_UNIX))
        sock.settimeout(40)
        sock.connect(str(self.folder / "agent.sock"))
        return Peer(sock)


class Peer:
    """A connection to the agent, as a notebook or a worker opens it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._reader = FrameReader()
        self._arrived: list[Message] = []
        self.numbers: list[int] = []

    def send(self, *messages: Message) -> None:
        self.sock.sendall(b"".join(to_frame(message).to_bytes() for message in messages))

    def receive(self, kind: type[Message] | tuple[type[Message], ...]) -> Message:
        """Return the next message of ``kind`` and drop all others.

        Raises: EOFError when the agent closes the connection.
        """
        while True:
            while self._arrived:
                message = self._arrived.pop(0)
                if isinstance(message, kind):
                    return message
            try:
                data = self.sock.recv(1 << 16)
            except ConnectionResetError:
                data = b""
            if not data:
                raise EOFError
            for frame in self._reader.feed(data):
                self.numbers += [frame.number] if frame.number else []
                self._arrived.append(frame.message())


@contextlib.contextmanager
def agent_running(**env: str) -> Iterator[Agent]:
    """Run an agent in a temporary folder, removed at the end; ``env`` is added to its environment."""
    with tempfile.TemporaryDirectory() as base, contextlib.ExitStack() as sockets:
        folder = Path(base) / "mine"
        folder.mkdir(mode=0o700)
        command = [sys.executable, "-c", RUN_MODULE, "detrain_nb.node.agent.agent", str(folder)]
        environment = {**os.environ, **env}
        process = sockets.enter_context(
            subprocess.Popen(command, cwd="/", stdout=subprocess.PIPE, start_new_session=True, env=environment)
        )
        assert process.stdout is not None
        assert process.stdout.readline() == b"detrain-nb agent ready\n"
        try:
            yield Agent(process, folder, sockets)
        finally:
            process.terminate()
            process.wait(10)
