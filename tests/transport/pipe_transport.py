"""A transport over the standard input and output of a subprocess: all that a new transport must provide, in one file.

It provides what any transport needs that can run commands, as SSH can: a connection that runs a command in a shell and
offers its input and output as a socket. deploy/bootstrapped_node.py does the rest: our code, the agent, and files.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

from detrain_nb.deploy.bootstrapped_node import BootstrappedNode
from detrain_nb.errors import TransportError
from detrain_nb.spec.node import Node

_TAIL_BYTES = 4000
_END_LIMIT_S = 10.0
_DRAIN_LIMIT_S = 1.0


class PipeStream:
    """A command in a shell; ``sock`` is connected to its standard input and output."""

    def __init__(self, command: str, *, home: Path) -> None:
        self.sock, inner = socket.socketpair()
        with inner:
            self._process = subprocess.Popen(
                ["sh", "-c", command],
                stdin=inner,
                stdout=inner,
                stderr=subprocess.PIPE,
                cwd=home,
                env={"HOME": str(home), "PATH": os.environ["PATH"], "TMPDIR": str(home)},
                start_new_session=True,
                bufsize=0,
            )
        self._stderr = b""
        self._watch = threading.Thread(target=self._see_to_its_end, name="detrain_nb pipe", daemon=True)
        self._watch.start()

    def stderr_tail(self) -> str:
        if self._process.poll() is not None:
            self._watch.join(_DRAIN_LIMIT_S)
        text = self._stderr.decode(errors="replace")
        return "".join(char for char in text if char.isprintable() or char in "\n\t")

    def exit_status(self, *, limit_s: float = 0.0) -> int | None:
        try:
            status = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        return status if status >= 0 else None

    def close(self) -> None:
        """Close the socket: the command reads the end of its input."""
        self.sock.close()

    def break_off(self) -> None:
        """Kill the command, as a broken connection would: a reader of ``sock`` gets its end."""
        self._process.kill()
        self._watch.join(_END_LIMIT_S)

    def _see_to_its_end(self) -> None:
        assert self._process.stderr is not None
        with self._process.stderr as said:
            while data := said.read(_TAIL_BYTES):
                self._stderr = (self._stderr + data)[-_TAIL_BYTES:]
        self._process.wait()


class PipeConnection:
    """A connection that runs commands on this machine with another home."""

    peer_address = local_address = "127.0.0.1"

    def __init__(self, home: Path) -> None:
        self.is_alive = True
        self._home = home
        self._streams: list[PipeStream] = []

    def open_stream(self, command: str) -> PipeStream:
        if not self.is_alive:
            raise TransportError("the connection was closed")
        stream = PipeStream(command, home=self._home)
        self._streams.append(stream)
        return stream

    def close(self) -> None:
        self.is_alive = False
        while self._streams:
            self._streams.pop().break_off()


class PipeTransport(BootstrappedNode[PipeConnection]):
    """A node that is this machine, in a home of its own."""

    def __init__(self, name: str, home: Path) -> None:
        super().__init__(Node(host=name, name=name, python=sys.executable))
        self.home = home

    def _connect(self) -> PipeConnection:
        return PipeConnection(self.home)

    def _find_place(self) -> object:
        return self.home
