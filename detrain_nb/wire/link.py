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
    """The other end of a link is gone."""


class Link:
    """Frames over one connected, non-blocking socket, with a queue of what is still to be sent."""

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
        """From now on."""
        self._reader.max_header_bytes = max_bytes

    def send(self, message: Message) -> None:
        self.send_bytes(to_frame(message).to_bytes())

    def send_bytes(self, data: bytes) -> None:
        """Send now what the socket takes; the rest goes with ``flush``. Raises: LinkClosed."""
        self.add_bytes(data)
        if len(self._waiting) == 1:
            self.flush()

    def add_bytes(self, data: bytes) -> None:
        """Send a frame with the next ``flush``."""
        self.waiting_bytes += len(data)
        self._waiting.append(memoryview(data))

    def flush(self) -> bool:
        """Send what waits; True when nothing waits any more. Raises: LinkClosed."""
        while self._waiting:
            try:
                sent = self.sock.send(self._waiting[0])
            except BlockingIOError:
                return False
            except OSError as exc:
                raise LinkClosed(f"the other end is gone: {exc}") from exc
            self.waiting_bytes -= sent
            if sent == len(self._waiting[0]):
                self._waiting.popleft()
            else:
                self._waiting[0] = self._waiting[0][sent:]
        self.waiting_bytes = 0
        return True

    def receive(self) -> list[Frame]:
        """Read once; the frames that are now complete. Raises: LinkClosed at the end, WireError on nonsense."""
        try:
            data = self.sock.recv(self._receive_bytes)
        except BlockingIOError:
            return []
        except OSError as exc:
            raise LinkClosed(f"the other end is gone: {exc}") from exc
        if not data:
            raise LinkClosed("the other end closed the connection")
        # room for a large read costs time at every small one: make it while large ones come
        self._receive_bytes = _SMALL_READ_BYTES if len(data) < self._receive_bytes else _LARGE_READ_BYTES
        return self._reader.feed(data)

    def close(self) -> None:
        self.sock.close()
