"""The TCP connections that the process groups of a rank and its store client opened, to be shut when all must end.

Shutting is what frees a rank that waits in a collective or in the store, here and at the other end; aborting a group
alone frees nobody while something else, a DDP model say, holds a reference to it.

One rank has no connection yet: that which waits in gloo for a peer to connect to it, and the peer was stopped before it
did. Then this process is that peer, and hangs up.

Before a group is used, the other ends of its connections are looked up: they have to be of the same user.
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
_PAIR_NUMBER = struct.Struct("@n")  # what gloo's peers send first: which of the listener's pairs, counted from 0, it is


class Flow(NamedTuple):
    """Over all connections of the groups together."""

    moved_bytes: int
    round_trip_s: float


class Connections:
    """What was opened while ``recording``: only that is ever shut, and no listening socket."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}  # descriptor -> identity: a number may have another owner by now
        self._before: dict[int, str] | None = None
        self._earlier_ports: set[int] = set()  # who stood at one of those may be taken when the next group is made

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Sockets that appear in here are connections of a group; recordings may nest."""
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
            finally:  # an interrupt may come here too: what is opened later is the user's
                self._before = None

    def require_own(self) -> None:
        """Look up who is at the other end of what has been recorded up to now, before it is used.

        Raises: ForeignConnection; SessionError where that cannot be found out.
        """
        require_own(self._new, earlier_ports=self._earlier_ports)

    def let_nobody_in(self) -> None:
        """Have the kernel drop who connects from now on to what listens here since the recording began.

        All peers are there. gloo goes on listening, takes whoever comes, and ends the process when it has no descriptor
        left for that. Where the kernel cannot, all stays as it is. A server that another thread has opened meanwhile
        cannot be told from it.
        """
        for fd, identity in self._new().items():
            if _identity(fd) == identity:
                _drop_what_comes(fd)

    def flow(self) -> Flow:
        """What has gone over them so far, and how long an answer takes at most."""
        known = {**self._known, **self._new()}
        infos = [info for fd, identity in known.items() if (info := _tcp_info(fd, identity))]
        return Flow(
            sum(sum(_BYTES_MOVED.unpack_from(info, _BYTES_MOVED_AT)) for info in infos),
            max((_ROUND_TRIP_US.unpack_from(info, _ROUND_TRIP_AT)[0] * 1e-6 for info in infos), default=0.0),
        )

    def shut(self, most_peers: int) -> int:
        """Shut all of them down, those of a recording that still goes on too; returns how many.

        A group that is being made waits for no peer any more, of ``most_peers`` at most. May be called from any
        thread, also when a cell has used up the descriptors.
        """
        new = self._new()
        known = {**self._known, **new}
        self._known = {}
        shut = sum(_shut(fd) for fd, identity in known.items() if _identity(fd) == identity)
        for fd, identity in new.items():
            if _identity(fd) == identity:
                _hang_up_on(fd, most_peers)
                _drop_what_comes(fd)  # it may be there as long as somebody holds what was half made
        return shut

    def _new(self) -> dict[int, str]:
        before = self._before
        if before is None:
            return {}
        return {fd: identity for fd, identity in _open_sockets().items() if before.get(fd) != identity}


def _tcp_info(fd: int, identity: str) -> bytes:
    """Empty for what is no connection; or has another owner by now."""
    with contextlib.suppress(OSError), borrowed(fd) as sock:
        if sock.family in TCP and _identity(fd) == identity:
            info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
            return info if len(info) == _TCP_INFO_BYTES and info[0] == _ESTABLISHED else b""
    return b""


def _open_sockets() -> dict[int, str]:
    """The sockets of this process: descriptor -> what the kernel calls it."""
    try:
        descriptors: Iterable[int] = map(int, os.listdir("/proc/self/fd"))
    except OSError:  # none is left to read the folder with: all numbers are in use, or nearly
        descriptors = range(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
    identities = ((fd, _identity(fd)) for fd in descriptors)
    return {fd: identity for fd, identity in identities if identity.startswith(_SOCKET_LINK)}


def _identity(fd: int) -> str:
    """Empty when it is closed."""
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _shut(fd: int) -> bool:
    """True when there was a connection to shut. The descriptor stays open."""
    with contextlib.suppress(OSError), borrowed(fd) as sock:  # it is closed, or not connected any more
        if sock.family in TCP and not is_listening(sock):
            sock.shutdown(socket.SHUT_RDWR)
            return True
    return False


def _drop_what_comes(fd: int) -> None:
    """Only on a listening socket: connections that it has made have filters of their own."""
    with contextlib.suppress(OSError), borrowed(fd) as sock:
        if is_listening(sock):
            drop_what_comes(sock)


def _hang_up_on(fd: int, most_peers: int) -> None:
    """Connect as each of the peers that a listening socket of gloo's waits for, and close.

    One that another thread has opened meanwhile cannot be told from it: it is connected to as well.
    """
    with contextlib.suppress(OSError):  # it is closed in the meantime, or no descriptor is left
        with borrowed(fd) as listener:
            if not is_listening(listener):
                return
            family, address = listener.family, listener.getsockname()
        for number in range(most_peers):
            with socket.socket(family) as peer:
                peer.settimeout(_CONNECT_LIMIT_S)
                peer.connect(address)
                peer.sendall(_PAIR_NUMBER.pack(number))
