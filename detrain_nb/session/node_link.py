"""The session's end of the byte stream to one node: any thread sends, one background thread receives."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
from collections.abc import Callable

from ..errors import TransportError, WireError
from ..wire import Link, LinkClosed, Message


class NodeLink:
    """``on_message`` and, once at the end, ``on_closed`` are called in the background thread."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        on_message: Callable[[Message], None],
        on_gap: Callable[[str], None],
        on_closed: Callable[[str], None],
    ) -> None:
        self._link = Link(sock)
        self._on_message = on_message
        self._on_gap = on_gap
        self._on_closed = on_closed
        self._sending = threading.Lock()
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._is_closed = False
        self._last_number = 0
        self._thread = threading.Thread(target=self._run, name="detrain_nb node link", daemon=True)
        self._thread.start()

    def send(self, message: Message) -> None:
        """Send now what the node takes; the background thread sends the rest. Raises: TransportError."""
        with self._sending:
            if self._is_closed:
                raise TransportError("the node is gone")
            try:
                self._link.send(message)
            except LinkClosed as exc:
                raise TransportError(f"the node is gone: {exc}") from exc
            if self._link.waiting_bytes:
                with contextlib.suppress(OSError):
                    self._wake.send(b"w")

    def wait_for_end(self, *, limit_s: float) -> bool:
        """Wait until the node has hung up."""
        self._thread.join(limit_s)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Hang up."""
        self._is_closed = True
        with contextlib.suppress(OSError):
            self._wake.send(b"w")
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _run(self) -> None:
        reason = "closed"
        with selectors.DefaultSelector() as selector:
            selector.register(self._link, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            events = selectors.EVENT_READ
            try:
                while not self._is_closed:
                    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._link.waiting_bytes else 0)
                    if wanted != events:
                        selector.modify(self._link, wanted)
                        events = wanted
                    for key, ready in selector.select():
                        if key.fileobj is self._woken:
                            self._woken.recv(4096)
                        else:
                            self._serve(ready)
            except WireError as exc:
                reason = str(exc)
        with self._sending:
            self._is_closed = True
            self._link.close()
        for sock in (self._wake, self._woken):
            sock.close()
        self._on_closed(reason)

    def _serve(self, ready: int) -> None:
        if ready & selectors.EVENT_WRITE:
            with self._sending:
                self._link.flush()
        if ready & selectors.EVENT_READ:
            for frame in self._link.receive():
                if frame.number:
                    self._check_number(frame.number)
                self._on_message(frame.message())

    def _check_number(self, number: int) -> None:
        """The agent numbers what it keeps for us without a gap."""
        missing = number - self._last_number - 1
        if missing:
            self._on_gap(f"{missing} messages from the ranks are missing")
        self._last_number = number
