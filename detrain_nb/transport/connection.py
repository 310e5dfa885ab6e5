"""Interfaces of a connection that runs commands; ssh.py and ssh_stream.py implement them over SSH."""

from __future__ import annotations

import socket
from typing import Protocol

__all__ = ["CommandStream", "Connection"]


class CommandStream(Protocol):
    """Remote command; ``sock`` is its standard input and output, and closing either side closes the other."""

    sock: socket.socket

    def stderr_tail(self) -> str:
        """Return the end of the command's standard error, without control characters."""
        ...

    def exit_status(self, *, limit_s: float = 0.0) -> int | None:
        """Wait for the command's exit status; None when it is still running, or its status is unknown."""
        ...

    def close(self) -> None:
        """Hang up; the command reads end of file."""
        ...


class Connection(Protocol):
    """Open connection to a machine as one of its users; usable from any thread."""

    @property
    def peer_address(self) -> str:
        """Address of that machine, or its name."""
        ...

    @property
    def local_address(self) -> str:
        """Address of this machine on the connection; empty once the connection is closed."""
        ...

    @property
    def is_alive(self) -> bool:
        """True while the connection is open, as far as is known."""
        ...

    def open_stream(self, command: str) -> CommandStream:
        """Run a command, without a terminal, in the user's shell. Raises: TransportError."""
        ...

    def close(self) -> None:
        """Close the connection: streams end, a detached command keeps running."""
        ...
