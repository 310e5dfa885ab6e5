"""The TCP connections of a rank's process groups and its store client, which are shut down to end the groups.

Shutting a connection down frees a rank that waits in a collective or in the store, at both ends. Aborting a group alone
frees no rank while anything else, such as a DDP model, holds a reference to it.

A rank that waits in gloo for a peer to connect has no connection yet, and the peer may have been stopped before it
connected. This process then connects in place of the peer, and disconnects.

Before a group is used, the other ends of its connections are checked: they must belong to the same user.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .far_ends import TCP, borrowed, drop_what_comes, is_listening, ports_listened_at, require_own

_SOCKET_LINK = "socket:["
_CONNECT_LIMIT_S = 1.0  # to a listening socket of this process
_ESTABLISHED = 1
_BYTES_MOVED, _BYTES_MOVED_AT = struct.Struct("@QQ"), 120  # in struct tcp_info: acknowledged, and received
_ROUND_TRIP_US, _ROUND_TRIP_AT = struct.Struct("@I"), 68
_TCP_INFO_BYTES = _BYTES_MOVED_AT + _BYTES_MOVED.size
_PAIR_NUMBER = struct.Struct("@n")  # gloo's peers first send which of the listener's pairs they are, counted from 0


class Flow(NamedTuple):
    """The traffic over all connections of the groups together."""

    moved_bytes: int
    round_trip_s: float


class Connections:
    """The connections that were opened while ``recording``: only these are ever shut, and no listening socket."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}  # descriptor -> identity, as a descriptor may have been reused
        self._before: dict[int, str] | None = None
        self._earlier_ports: set[int] = set()  # a connection queued there may be accepted for the next group

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Record the sockets opened in this block as connections of a group; recordings may nest."""
        if self._before is not None:
            yield
            return
        self._before = _open_sockets()
        try:
            yield
        finally:
            try:
                new = self._new()
                self._known.update(new)
                self._earlier_ports |= ports_listened_at(new)
            finally:  # even if an interrupt strikes here: sockets opened later are the user's
                self._before = None

    def require_own(self) -> None:
        """Check that the other ends of all connections of this recording belong to this user, before they are used.

        Raises: ForeignConnection; SessionError when the owner cannot be found.
        """
        require_own(self._new, earlier_ports=self._earlier_ports)

    def let_nobody_in(self) -> None:
        """Have the kernel drop new connections to the sockets that have been listening since the recording began.

        All peers are connected by now, but gloo keeps listening, accepts any connection, and crashes the process when
        no descriptor is left for one. Does nothing where the kernel lacks the feature. Also affects a server that
        another thread has opened in the meantime, as the two cannot be distinguished.
        """
        for fd, identity in self._new().items():
            if _identity(fd) == identity:
                _drop_what_comes(fd)

    def flow(self) -> Flow:
        """Return the bytes transferred so far, and the longest round-trip time in seconds."""
        known = {**self._known, **self._new()}
        infos = [info for fd, identity in known.items() if (info := _tcp_info(fd, identity))]
        return Flow(
            sum(sum(_BYTES_MOVED.unpack_from(info, _BYTES_MOVED_AT)) for info in infos),
            max((_ROUND_TRIP_US.unpack_from(info, _ROUND_TRIP_AT)[0] * 1e-6 for info in infos), default=0.0),
        )

    def shut(self, most_peers: int) -> int:
        """Shut down all connections, including those of a recording in progress; returns how many.

        A group that is being made stops waiting for its peers, of which there are at most ``most_peers``. May be called
        from any thread, even when a cell has used up all descriptors.
        """
        new = self._new()
        known = {**self._known, **new}
        self._known = {}
        shut = sum(_shut(fd) for fd, identity in known.items() if _identity(fd) == identity)
        for fd, identity in new.items():
            if _identity(fd) == identity:
                _hang_up_on(fd, most_peers)
                _drop_what_comes(fd)  # it keeps listening while anything holds the unfinished group
        return shut

    def _new(self) -> dict[int, str]:
        before = self._before
        if before is None:
            return {}
        return {fd: identity for fd, identity in _open_sockets().items() if before.get(fd) != identity}


def _tcp_info(fd: int, identity: str) -> bytes:
    """Read the kernel's TCP_INFO; empty if ``fd`` is not a connection or has been reused."""
    with contextlib.suppress(OSError), borrowed(fd) as sock:
        if sock.family in TCP and _identity(fd) == identity:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            return info if len(info) == _TCP_INFO_BYTES and info[0] == _ESTABLISHED else b""
    return b""


def _open_sockets() -> dict[int, str]:
    """Return the sockets of this process: descriptor -> the kernel's name of it."""
    try:
        descriptors: Iterable[int] = map(int, os.listdir("/proc/self/fd"))
    except OSError:  # no descriptor is left to read the folder with: try all numbers
        descriptors = range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    identities = ((fd, _identity(fd)) for fd in descriptors)
    return {fd: identity for fd, identity in identities if identity.startswith(_SOCKET_LINK)}


def _identity(fd: int) -> str:
    """Return the kernel's name of a descriptor; empty if it is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _shut(fd: int) -> bool:
    """Shut a connection down; returns False if there was none. The descriptor stays open."""
    with contextlib.suppress(OSError), borrowed(fd) as sock:  # it is closed or no longer connected
        if sock.family in TCP and not is_listening(sock):
            sock.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _drop_what_comes(fd: int) -> None:
    """Drop new connections to a listening socket; those it has accepted have filters of their own."""
    with contextlib.suppress(OSError), borrowed(fd) as sock:
        if is_listening(sock):
            drop_what_comes(sock)


def _hang_up_on(fd: int, most_peers: int) -> None:
    """Connect as each peer that a listening socket of gloo waits for, and disconnect.

    Also connects to a server that another thread has opened in the meantime: the two cannot be distinguished.
    """
    with contextlib.suppress(OSError):  # it was closed in the meantime, or no descriptor is left
        with borrowed(fd) as listener:
            if not is_listening(listener):
                return
            family, address = listener.family, listener.getsockname()
        for number in range(most_peers):
            with socket.socket(family) as peer:
                peer.settimeout(_CONNECT_LIMIT_S)
                peer.connect(address)
                peer.sendall(_PAIR_NUMBER.pack(number))
