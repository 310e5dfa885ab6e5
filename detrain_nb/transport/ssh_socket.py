"""TCP connections below SSH, with limits on data from unverified hosts and on concurrent connects to one sshd."""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import TransportError
from ..text import printable
from .ssh_config import HostSettings

if TYPE_CHECKING:
    import paramiko

__all__ = ["OUR_DOORS", "Doors", "StrangersSocket", "clean", "dial"]

_TCP_LIMIT_S = 5.0
_TCP_SILENCE_S = 15.0
_STRANGERS_BYTES = 256 << 10  # a handshake takes some 5000
_CONNECTS_AT_A_TIME = 8  # sshd's MaxStartups starts to drop connections at 10


def dial(settings: HostSettings, *, deadline: float) -> socket.socket:
    """Connect to a host; an address that does not answer is retried until the deadline. Raises: TransportError."""
    began = time.monotonic()
    try:
        addresses = socket.getaddrinfo(settings.hostname, settings.port, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError) as exc:
        raise TransportError(
            f"{settings.where}: the name {settings.hostname} does not resolve: check it, or give its address "
            "(HostName in ~/.ssh/config)"
        ) from exc
    while True:
        errors: list[OSError] = []
        for family, kind, protocol, _, address in addresses:
            with contextlib.ExitStack() as on_failure:
                try:
                    sock = on_failure.enter_context(socket.socket(family, kind, protocol))
                    _tune(sock)
                    sock.settimeout(max(0.1, min(_TCP_LIMIT_S, deadline - time.monotonic())))
                    sock.connect(address)
                    on_failure.pop_all()
                    return sock
                except OSError as exc:
                    errors.append(exc)
        error = next((error for error in errors if isinstance(error, TimeoutError)), errors[-1])
        if not isinstance(error, TimeoutError) or time.monotonic() >= deadline:
            reason = _describe(error, settings.port, waited_s=time.monotonic() - began)
            raise TransportError(f"{settings.where}: {reason}") from error


class StrangersSocket:
    """Socket that accepts no more data than a handshake needs until the host is verified.

    paramiko would buffer a whole line or packet of any length before it checks it.
    """

    def __init__(self, sock: socket.socket | paramiko.Channel) -> None:
        self._sock = sock
        self._left_bytes = _STRANGERS_BYTES
        self.recv: Callable[[int], bytes] = self._recv_some
        self.send = sock.send

    @property
    def has_said_too_much(self) -> bool:
        return self._left_bytes <= 0

    def trust(self) -> None:
        """Remove the limit: the host is verified."""
        self.recv = self._sock.recv

    def _recv_some(self, size: int) -> bytes:
        if self.has_said_too_much:
            raise ConnectionAbortedError(errno.ECONNABORTED, "too much data before the host key")
        data = self._sock.recv(min(size, self._left_bytes))
        self._left_bytes -= len(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


class Doors:
    """Limit on concurrent connects per sshd: no more of ours authenticate at one time than sshd admits."""

    def __init__(self) -> None:
        self._places: dict[tuple[tuple[str, int] | None, str, int], threading.BoundedSemaphore] = {}
        self._changing = threading.Lock()

    @contextlib.contextmanager
    def place_at(self, settings: HostSettings, *, through: HostSettings | None) -> Iterator[None]:
        """Wait for one of the host's places and hold it during the block; ``through`` is the jump host, if any."""
        reached = (through.hostname, through.port) if through else None
        door = (reached, settings.hostname, settings.port)
        with self._changing:
            places = self._places.setdefault(door, threading.BoundedSemaphore(_CONNECTS_AT_A_TIME))
        with places:
            yield


# One for the whole process: an sshd counts the connections of all sessions, copies and doctors together.
OUR_DOORS = Doors()


def _tune(sock: socket.socket) -> None:
    """Disable Nagle, and detect a peer that stops acknowledging; SO_KEEPALIVE would prevent that detection."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform == "linux":
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_TCP_SILENCE_S * 1000))


def _describe(error: OSError, port: int, *, waited_s: float) -> str:
    if isinstance(error, ConnectionRefusedError):
        return f"connection refused: nothing listens on port {port}: check that sshd runs on this port"
    if isinstance(error, TimeoutError):
        return f"no answer within {waited_s:.0f} s: check that the host is up and no firewall blocks port {port}"
    return f"cannot be reached: {error.strerror or error}: check the address and the network"


def clean(said: object) -> str:
    """Return text of the other side, cleaned and cut to fit one line."""
    return printable(str(said) or type(said).__name__, " ")[:200]
