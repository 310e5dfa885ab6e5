"""The attach program: copies bytes between the notebook's SSH channel (stdin and stdout) and the agent's socket.

It starts the agent if asked to. The agent continues when this program exits. A notebook that no longer sends anything
has disappeared, even if sshd has not noticed: then this program hangs up, and another notebook may take the session.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import select
import socket
import threading
from pathlib import Path
from typing import Any

from ...agents import connect, is_served, remove_dead_agent, require_private, start_agent
from ...copying.sync_manifest import read_state
from ...errors import DetrainError, LaunchError, SessionError
from ...guarded import make_users_folder
from ..rank.preload import EXTRA_PATH_VARIABLE
from .cache_cleanup import clean_up, touch

_READ_BYTES = 1 << 18


def main(order: dict[str, Any], *, cache: str, code: list[str], hold: int) -> None:
    """Serve the notebook until either side hangs up. ``code``: our own folder, then folders to search last.

    ``hold`` keeps others from removing our code until the agent has recorded that it uses it.
    """
    try:
        try:
            sock = _connect(order, Path(cache), code)
        finally:
            os.close(hold)
    except (DetrainError, OSError) as exc:
        kind = type(exc) if isinstance(exc, DetrainError) else LaunchError
        _say(type="failed", kind=kind.__name__, text=str(exc))
        return
    root, digest = read_state(cache, order["work_folder"])
    _say(type="ready", root=root, digest=digest)
    threading.Thread(target=clean_up, args=(Path(cache),), daemon=True).start()
    threading.Thread(target=_copy_in, args=(sock, order["silence_s"]), daemon=True).start()
    _copy_out(sock)
    os._exit(0)  # the other thread waits for the notebook


def _connect(order: dict[str, Any], cache: Path, code: list[str]) -> socket.socket:
    session = order["session"]
    folder = _sessions_folder(cache) / session
    uses = [*code, order["work_folder"]]
    touch(cache, uses)
    if order["action"] == "start":
        try:
            make_users_folder(Path(order["work_folder"]))
        except OSError as exc:
            raise LaunchError(f"the workdir {order['work_folder']} cannot be used: {exc}") from exc
        path = os.pathsep.join([code[0], *filter(None, [os.environ.get("PYTHONPATH")])])
        env = {"PYTHONPATH": path, EXTRA_PATH_VARIABLE: os.pathsep.join(code[1:])}
        return start_agent(folder, env=env, uses=uses)[1]
    if not is_served(folder):  # a disk error proves nothing
        remove_dead_agent(folder)  # a notebook that returns to a lost node learns it here
        raise SessionError(
            f"no session {session!r} is running there: its agent has exited, or the machine was restarted"
        )
    return connect(folder)


def _sessions_folder(cache: Path) -> Path:
    """Return the folder for sessions, one per host: machines may share the home."""
    folder = cache
    for name in ("run", platform.node()):
        folder /= name
        folder.mkdir(mode=0o700, exist_ok=True)
        require_private(folder)
    return folder


def _copy_in(sock: socket.socket, silence_s: float) -> None:
    """Copy until the notebook hangs up, or has sent nothing for ``silence_s`` after its first bytes."""
    is_silent = False
    with contextlib.suppress(OSError):
        while not is_silent and (data := os.read(0, _READ_BYTES)):
            sock.sendall(data)
            is_silent = not select.select([0], [], [], silence_s)[0]
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    if is_silent:
        os._exit(0)  # the other thread may be blocked writing to the dead connection


def _copy_out(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := sock.recv(_READ_BYTES):
            waiting = memoryview(data)
            while waiting:
                waiting = waiting[os.write(1, waiting) :]


def _say(**fields: str) -> None:
    os.write(1, json.dumps(fields).encode() + b"\n")
