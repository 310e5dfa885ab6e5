"""The other end of a copy where the node is this machine: a thread serves what a program of ours would elsewhere."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from .json_lines import Talk
from .remote_program import serve

__all__ = ["served_here"]

_END_LIMIT_S = 5.0  # for a disk that hangs: the thread ends when it answers


@contextlib.contextmanager
def served_here() -> Iterator[socket.socket]:
    """Serve one order; gives the byte stream to who does. After the block nothing is there that is not whole."""
    with contextlib.ExitStack() as stack:
        ours, theirs = map(stack.enter_context, socket.socketpair())
        thread = threading.Thread(target=_serve, args=(theirs,), name="detrain_nb copy", daemon=True)
        thread.start()
        try:
            yield ours
        finally:
            with contextlib.suppress(OSError):  # it has hung up
                ours.shutdown(socket.SHUT_RDWR)
            thread.join(_END_LIMIT_S)


def _serve(sock: socket.socket) -> None:
    with (
        contextlib.suppress(OSError),  # what is left to be said has nobody who hears it
        sock.makefile("rb") as reader,
        sock.makefile("wb") as writer,
    ):
        try:
            serve(Talk(reader, writer))
        finally:
            sock.shutdown(socket.SHUT_WR)
