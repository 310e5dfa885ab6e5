"""Commands on this machine, behind the interface of a connection to another machine."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import tempfile

from ..errors import TransportError
from ..text import HERE, printable
from .connection import CommandStream

__all__ = ["HereConnection"]

_TAIL_BYTES = 4000
_END_LIMIT_S = 10.0


class HereConnection:
    """Stand-in for a connection: its commands run on this machine; see connection.py."""

    peer_address = local_address = "127.0.0.1"

    def __init__(self) -> None:
        self.is_alive = True
        self._streams: list[_Command] = []

    def open_stream(self, command: str) -> CommandStream:
        """Run ``command`` in a shell. Raises: TransportError."""
        try:
            stream = _Command(command)
        except OSError as exc:
            raise TransportError(f"{HERE}: cannot start a process: {exc.strerror}") from exc
        self._streams.append(stream)
        return stream

    def close(self) -> None:
        """Close the commands one after another: end its input, then kill it if it is still running after 10 s."""
        self.is_alive = False
        for stream in self._streams:
            stream.close()


class _Command:
    def __init__(self, command: str) -> None:
        self.sock, theirs = socket.socketpair()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  it is closed with the command
        with theirs:
            try:
                self._process = subprocess.Popen(
                    ["sh", "-c", command],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=self._errors,
                    start_new_session=True,
                )
            except OSError:
                self.sock.close()
                self._errors.close()
                raise

    def stderr_tail(self) -> str:
        if self._errors.closed:
            return ""
        size = os.fstat(self._errors.fileno()).st_size
        said = os.pread(self._errors.fileno(), _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        return printable(said.decode(errors="replace"), lambda char: char if char in "\n\t" else "")

    def exit_status(self, *, limit_s: float = 0.0) -> int | None:
        try:
            status = self._process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        return status if status >= 0 else None

    def close(self) -> None:
        """Close the command's input; kill the command if it is still running after 10 s."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)
        self.sock.close()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()
