"""A connection to the handler of "source" orders, as on a node, in a thread of this process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

from detrain_nb.copying.json_lines import Failed, FilesError, Talk
from detrain_nb.node.job.git_program import GitLimits
from detrain_nb.node.job.sources import handle_source


class Sender:
    """A writer without a buffer: no unsent bytes are left when the other side closes the connection."""

    def __init__(self, sock: socket.socket) -> None:
        self.write = sock.sendall

    def flush(self) -> None:
        """Do nothing: there is no buffer."""


@contextlib.contextmanager
def source_talk(cache: Path, *, limits: GitLimits | None = None, limit_s: float = 20.0) -> Iterator[Talk]:
    """Serve orders until one fails, as the job service does; ``cache`` is created."""
    cache.mkdir(parents=True, exist_ok=True)
    ours, theirs = socket.socketpair()
    ours.settimeout(limit_s)

    def serve() -> None:
        with contextlib.suppress(OSError), theirs, theirs.makefile("rb") as reader, theirs.makefile("wb") as writer:
            talk = Talk(reader, writer)
            try:
                while order := talk.hear("source"):
                    handle_source(talk, order, cache=cache, limits=limits)
            except Failed:
                pass
            except FilesError as exc:
                talk.say("failed", text=str(exc))
                talk.flush()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        with ours.makefile("rb") as reader:
            yield Talk(reader, Sender(ours))
    finally:
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_RDWR)
        ours.close()
        thread.join(limit_s)
        assert not thread.is_alive()
