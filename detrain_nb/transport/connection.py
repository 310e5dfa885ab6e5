"""What is asked of a connection on which commands can be run; over SSH these are ssh.py and ssh_stream.py."""

from __future__ import annotations

import socket
from typing import Protocol

__all__ = ["CommandStream", "Connection"]


class CommandStream(Protocol):
    """A command there, ``sock`` being its standard input and output: a close on either side closes the other."""

    sock: socket.socket

    def stderr_tail(self) -> str:
        """The last of what it wrote to its standard error, without control characters."""
        ...

    def exit_status(self, *, limit_s: float = 0.0) -> int | None:
        """Wait until it has ended; None when it has not, or nobody knows with what."""
        ...

    def close(self) -> None:
        """Hang up: it reads the end of its input."""
        ...


class Connection(Protocol):
    """An open way to a machine, for one user there; used from any thread."""

    @property
    def peer_address(self) -> str:
        """The address of that machine, or its name."""
        ...

    @property
    def local_address(self) -> str:
        """The address of this machine on the way there; empty where the connection is gone."""
        ...

    @property
    def is_alive(self) -> bool:
        """It has not ended, as far as is known."""
        ...

    def open_stream(self, command: str) -> CommandStream:
        """Run a command, without a terminal, in the user's shell there. Raises: TransportError."""
        ...

    def close(self) -> None:
        """Streams end; a command that is detached goes on."""
        ...
