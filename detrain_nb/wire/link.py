"""Frames over a connected socket, in both directions."""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Collection

from ..errors import WireError
from .frames import Frame, FrameReader, to_frame
from .messages import MAX_HEADER_BYTES, NUMBERS, Message

_SMALL_READ_BYTES = 1 << 16
_LARGE_READ_BYTES = 1 << 20


class LinkClosed(WireError):
    """The other end of a link has closed the connection."""


class Link:
    """Frames over one connected, non-blocking socket, with a queue of those still to be sent."""

    def __init__(
        self,
        sock: socket.socket,
        *,
        max_header_bytes: int = MAX_HEADER_BYTES,
        kinds: Collection[type[Message]] = NUMBERS.keys(),
    ) -> None:
        sock.setblocking(False)
        self.sock = sock
        self._reader = FrameReader(max_header_bytes=max_header_bytes, kinds=kinds)
        self._waiting: deque[memoryview] = deque()
        self.waiting_bytes = 0
        self._receive_bytes = _SMALL_READ_BYTES

    def fileno(self) -> int:
        return self.sock.fileno()

    def limit_headers(self, max_bytes: int) -> None:
        """Limit the size of headers from now on."""
        self._reader.max_header_bytes = max_bytes

    def send(self, message: Message) -> None:
        self.send_bytes(to_frame(message).to_bytes())

    def send_bytes(self, data: bytes) -> None:
        """Send as much as the socket takes now; ``flush`` sends the rest. Raises: LinkClosed."""
        self.add_bytes(data)
        if len(self._waiting) == 1:
            self.flush()

    def add_bytes(self, data: bytes) -> None:
        """Queue a frame for the next ``flush``."""
        self.waiting_bytes += len(data)
        self._waiting.append(memoryview(data))

    def flush(self) -> bool:
        """Send what is queued; True when the queue is empty. Raises: LinkClosed."""
        while self._waiting:
            try:
                sent = self.sock.send(self._waiting[0])
            except BlockingIOError:
                return False
            except OSError as exc:
                raise LinkClosed(f"the connection broke: {exc}") from exc
            self.waiting_bytes -= sent
            if sent == len(self._waiting[0]):
                self._waiting.popleft()
            else:
                self._waiting[0] = self._waiting[0][sent:]
        self.waiting_bytes = 0
        return True

    def receive(self) -> list[Frame]:
        """Read once and return the frames now complete. Raises: LinkClosed at the end; WireError on invalid data."""
        try:
            data = self.sock.recv(self._receive_bytes)
        except BlockingIOError:
            return []
        except OSError as exc:
            raise LinkClosed(f"the connection broke: {exc}") from exc
        if not data:
            raise LinkClosed("the other end closed the connection")
        # a buffer for a large read slows down small ones: use it only while reads are large
        self._receive_bytes = _SMALL_READ_BYTES if len(data) < self._receive_bytes else _LARGE_READ_BYTES
        return self._reader.feed(data)

    def close(self) -> None:
        self.sock.close()
