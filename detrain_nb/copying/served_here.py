"""The other end of a copy when the node is this machine: a thread in place of the program on other nodes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from .json_lines import Talk
from .remote_program import serve

__all__ = ["served_here"]

_END_LIMIT_S = 5.0  # in case the disk hangs: the thread ends once the disk responds


@contextlib.contextmanager
def served_here() -> Iterator[socket.socket]:
    """Serve one order in a thread; yields the byte stream to it. After the block no incomplete files are left."""
    with contextlib.ExitStack() as stack:
        ours, theirs = map(stack.enter_context, socket.socketpair())
        thread = threading.Thread(target=_serve, args=(theirs,), name="detrain_nb copy", daemon=True)
        thread.start()
        try:
            yield ours
        finally:
            with contextlib.suppress(OSError):  # the thread has hung up
                ours.shutdown(socket.SHUT_RDWR)
            thread.join(_END_LIMIT_S)


def _serve(sock: socket.socket) -> None:
    with (
        contextlib.suppress(OSError),  # the other end no longer reads
        sock.makefile("rb") as reader,
        sock.makefile("wb") as writer,
    ):
        try:
            serve(Talk(reader, writer))
        finally:
            sock.shutdown(socket.SHUT_WR)
