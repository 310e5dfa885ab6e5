"""The job service of a node: a program separate from the agent that serves the notebook's orders until EOF.

Launched jobs keep running without it; a job that was prepared but not launched is removed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Mapping
from io import BufferedReader
from typing import cast

from ...agents import JOBS_MAGIC
from ...copying.json_lines import Failed, Talk, Untrue
from ...copying.serving import Handler, serve_order
from ...errors import LaunchError
from ..system.processes import lead_nowhere
from .commands import execute
from .ending import remove, stop
from .facts import tell_facts
from .files import list_artifacts, send_artifact
from .following import follow
from .looking import look, look_back
from .preparing import Preparing
from .reports import report
from .sources import handle_source


def main() -> None:
    """Serve orders from standard input until EOF."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    try:
        sys.stdout.buffer.write(JOBS_MAGIC)
        sys.stdout.buffer.flush()
    except BrokenPipeError:  # the notebook has already disconnected
        lead_nowhere(1)
        return
    serve(Talk(cast(BufferedReader, sys.stdin.buffer), sys.stdout.buffer), fd=0)


def serve(talk: Talk, *, fd: int) -> None:
    """Serve orders until the notebook disconnects or sends an invalid one; ``fd`` is readable when it sends."""
    with contextlib.closing(Preparing()) as preparing:
        handlers = {**_HANDLERS, "prepare": preparing.prepare, "launch": preparing.launch}
        handlers["follow"] = lambda talk, said: follow(talk, said, wait=lambda limit_s: _has_come(fd, limit_s))
        handlers["exec"] = lambda talk, said: execute(talk, said, fd=fd)
        while not isinstance(serve_order(talk, handlers, errors=(LaunchError,)), (Failed, Untrue)):
            pass


def _has_come(fd: int, limit_s: float) -> bool:
    return bool(select.select([fd], [], [], limit_s)[0])


_HANDLERS: Mapping[str, Handler] = {
    "facts": tell_facts,
    "source": handle_source,
    "status": report,
    "look": look,
    "look back": look_back,
    "stop": stop,
    "remove": remove,
    "artifacts": list_artifacts,
    "read": send_artifact,
}

if __name__ == "__main__":
    os.chdir("/")
    main()
