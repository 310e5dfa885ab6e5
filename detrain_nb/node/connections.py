"""The TCP connections that the process groups of a rank and its store client opened, to be shut when all must end.

Shutting is what frees a rank that waits in a collective or in the store, here and at the other end; aborting a group
alone frees nobody while something else, a DDP model say, holds a reference to it.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from collections.abc import Iterable, Iterator

_SOCKET_LINK = "socket:["


class Connections:
    """What was opened while ``recording``: only that is ever shut, never a listening socket or one of the user's."""

    def __init__(self) -> None:
        self._known: dict[int, str] = {}  # descriptor -> identity: a number may have another owner by now
        self._before: dict[int, str] | None = None

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
                self._known.update(self._new())
            finally:  # an interrupt may come here too: what is opened later is the user's
                self._before = None

    def shut(self) -> int:
        """Shut all of them down, those of a recording that still goes on too; returns how many.

        May be called from any thread, also when a cell has used up the descriptors.
        """
        known = {**self._known, **self._new()}
        self._known = {}
        return sum(_shut(fd) for fd, identity in known.items() if _identity(fd) == identity)

    def _new(self) -> dict[int, str]:
        before = self._before
        if before is None:
            return {}
        return {fd: identity for fd, identity in _open_sockets().items() if before.get(fd) != identity}


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
    """True when there was a connection to shut. The descriptor stays open: whoever owns it closes it."""
    try:
        sock = socket.socket(fileno=fd)
    except OSError:
        return False  # closed
    try:
        is_tcp = sock.family in (socket.AF_INET, socket.AF_INET6)
        if not is_tcp or sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return False  # not connected any more
    finally:
        sock.detach()
    return True
