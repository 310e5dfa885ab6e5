"""The jobs of a node, for the notebook: a program beside the agent, which serves orders until its input ends.

What it has started goes on without it; what was prepared and not launched is removed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Callable, Mapping
from io import BufferedReader
from typing import Any, TypeAlias, cast

from ...agents import JOBS_MAGIC
from ...copying.json_lines import Failed, FilesError, Talk, Untrue
from ...errors import LaunchError
from .commands import execute
from .ending import remove, stop
from .facts import tell_facts
from .files import list_artifacts, send_artifact
from .following import follow
from .preparing import Preparing
from .reports import report
from .sources import handle_source

_ORDER_BYTES = 1 << 22

_Handler: TypeAlias = Callable[[Talk, dict[str, Any]], None]


def main() -> None:
    """Serve what comes by standard input, until that ends."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    sys.stdout.buffer.write(JOBS_MAGIC)
    sys.stdout.buffer.flush()
    serve(Talk(cast(BufferedReader, sys.stdin.buffer), sys.stdout.buffer), fd=0)


def serve(talk: Talk, *, fd: int) -> None:
    """Serve orders until the other side hangs up; ``fd`` can be read when it says something."""
    with contextlib.closing(Preparing()) as preparing:
        handlers = {**_HANDLERS, "prepare": preparing.prepare, "launch": preparing.launch}
        handlers["follow"] = lambda talk, said: follow(talk, said, wait=lambda limit_s: _has_come(fd, limit_s))
        handlers["exec"] = lambda talk, said: execute(talk, said, fd=fd)
        while _serve_one(talk, handlers):
            pass


def _serve_one(talk: Talk, handlers: Mapping[str, _Handler]) -> bool:
    """False when there is nobody to say more to, or nothing that could be understood."""
    try:
        order = talk.hear(*handlers, most_bytes=_ORDER_BYTES)
        handlers[order["type"]](talk, order)
        talk.flush()
    except Failed:
        return False
    except Untrue as exc:
        _say_failed(talk, str(exc))
        return False
    except (FilesError, LaunchError) as exc:
        return _say_failed(talk, str(exc))
    except (OSError, MemoryError) as exc:
        where = exc.filename if isinstance(exc, OSError) and exc.filename else "our program"
        return _say_failed(talk, f"{where}: {exc}")
    return True


def _say_failed(talk: Talk, text: str) -> bool:
    with contextlib.suppress(Failed):
        talk.say("failed", text=text)
        talk.flush()
        return True
    return False


def _has_come(fd: int, limit_s: float) -> bool:
    return bool(select.select([fd], [], [], limit_s)[0])


_HANDLERS: Mapping[str, _Handler] = {
    "facts": tell_facts,
    "source": handle_source,
    "status": report,
    "stop": stop,
    "remove": remove,
    "artifacts": list_artifacts,
    "read": send_artifact,
}

if __name__ == "__main__":
    os.chdir("/")
    main()
