"""Remote commands over SSH, with their standard input and output as a socket of this process."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import TYPE_CHECKING

from ..text import printable

if TYPE_CHECKING:
    import paramiko

__all__ = ["Stream"]

_CHUNK_BYTES = 1 << 20
_TAIL_BYTES = 4000
_LOOK_EVERY_S = 1.0
_DRAIN_LIMIT_S = 1.0


class Stream:
    """Remote command; ``sock`` is its standard input (by sending) and output (by receiving).

    Closing either side closes the other; a shutdown for writing arrives as end of file. When the connection breaks,
    ``sock`` reads end of file. The owner of the stream must close ``sock``, not detach it.
    """

    def __init__(self, channel: paramiko.Channel, *, broken: tuple[type[Exception], ...]) -> None:
        """``broken``: exceptions that calls of the channel raise when the connection is broken."""
        self._channel = channel
        self._broken = (*broken, OSError, EOFError)
        self._stderr = b""
        self.sock, self._inner = socket.socketpair()
        channel.settimeout(_LOOK_EVERY_S)
        self._threads = [
            threading.Thread(target=work, name=f"detrain_nb ssh {name}", daemon=True)
            for name, work in (("in", self._pump_in), ("out", self._pump_out), ("stderr", self._keep_stderr))
        ]
        for thread in self._threads:
            thread.start()

    def stderr_tail(self) -> str:
        """Return the end of the command's standard error, without control characters."""
        if self._channel.eof_received or self._channel.closed:
            self._threads[2].join(_DRAIN_LIMIT_S)
        return printable(self._stderr.decode(errors="replace"), lambda char: char if char in "\n\t" else "")

    def exit_status(self, *, limit_s: float = 0.0) -> int | None:
        """Wait for the exit status; None when the command still runs, was killed, or the connection broke."""
        if not self._channel.status_event.wait(limit_s) or self._channel.exit_status < 0:
            return None
        return self._channel.exit_status

    def close(self) -> None:
        """Close ``sock`` and the channel."""
        self.sock.close()
        self._close_channel()

    def _pump_out(self) -> None:
        """Copy from channel to socket; this thread also notices that the socket was closed, and cleans up."""
        try:
            with contextlib.suppress(*self._broken):
                self._forward_output()
            with contextlib.suppress(OSError):
                self._inner.shutdown(socket.SHUT_WR)
            while not self._is_sock_closed() and not self._channel.status_event.wait(_LOOK_EVERY_S):
                pass
        finally:
            self._close_channel()
            with contextlib.suppress(OSError):
                self._inner.shutdown(socket.SHUT_RDWR)
            self._threads[0].join(_DRAIN_LIMIT_S)  # it may be blocked on a host that reads nothing
            self._inner.close()

    def _forward_output(self) -> None:
        while not self._is_sock_closed():
            with contextlib.suppress(TimeoutError):
                data = self._channel.recv(_CHUNK_BYTES)
                if not data:
                    return
                self._inner.sendall(data)

    def _pump_in(self) -> None:
        """Copy from socket to channel; once the channel is closed, discard data, so that the socket closes cleanly."""
        with contextlib.suppress(OSError):
            while data := self._inner.recv(_CHUNK_BYTES):
                with contextlib.suppress(*self._broken):
                    self._send(data)
        with contextlib.suppress(*self._broken):
            self._channel.shutdown_write()

    def _send(self, data: bytes) -> None:
        view = memoryview(data)
        while view and not self._channel.closed:
            with contextlib.suppress(TimeoutError):
                sent = self._channel.send(view)  # type: ignore[arg-type]  # it accepts anything that bytes() accepts
                if not sent:
                    return
                view = view[sent:]

    def _keep_stderr(self) -> None:
        with contextlib.suppress(*self._broken):
            while True:
                with contextlib.suppress(TimeoutError):
                    data = self._channel.recv_stderr(_CHUNK_BYTES)
                    if not data:
                        return
                    self._stderr = (self._stderr + data)[-_TAIL_BYTES:]

    def _close_channel(self) -> None:
        with contextlib.suppress(*self._broken):
            self._channel.close()

    def _is_sock_closed(self) -> bool:
        """Return True when ``sock`` is closed, not just shut down for writing: both look like end of file here."""
        return self.sock.fileno() < 0
