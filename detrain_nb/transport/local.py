"""This machine as a node: the agent is a detached process, its byte stream is its own socket."""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ..errors import LaunchError, SessionError

_SOCKET_NAME = "agent.sock"
_PID_NAME = "agent.pid"
_AGENT_MODULE = "detrain_nb.node.agent"
_READY = b"detrain-nb agent ready\n"
_MAX_SOCKET_PATH = 100
_START_LIMIT_S = 30.0


class LocalTransport:
    """Brings up an agent on this machine and connects to it."""

    is_this_machine = True
    python = sys.executable
    store_address = "127.0.0.1"

    def __init__(self) -> None:
        self._agent: subprocess.Popen[bytes] | None = None
        self._folder = Path()

    def start_agent(self, session: str) -> socket.socket:
        """Start the agent of ``session`` and return a connected socket.

        Raises: LaunchError when it does not come up, SessionError when a session of that name runs already.
        """
        if sys.platform != "linux":
            raise LaunchError(f"ranks on this machine need Linux: {sys.platform} can drive nodes, not be one")
        folder = self._folder = runtime_folder() / session
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as exc:
            raise LaunchError(f"the session's folder cannot be made: {exc}") from exc
        _require_private(folder)
        if pid := _live_agent(folder):
            raise SessionError(
                f"session {session!r} runs already (agent pid {pid}), held by another notebook: stop it there, "
                "or give this one another name with --name"
            )
        self._agent = subprocess.Popen(
            [sys.executable, "-m", _AGENT_MODULE, str(folder)],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait_until_ready(self._agent)
            return _connect(folder / _SOCKET_NAME)
        except BaseException:
            self._agent.kill()
            self._agent.wait()
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def wait_for_end(self, *, limit_s: float) -> None:
        """Wait until the agent has ended the session; kill it when it does not."""
        if self._agent is None:
            return
        try:
            self._agent.wait(limit_s)
        except subprocess.TimeoutExpired:
            self._agent.kill()
            self._agent.wait()
        if self._agent.returncode:  # it could not tidy up itself
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def agent_exit_code(self) -> int | None:
        """None while the agent runs."""
        return self._agent.poll() if self._agent else None


def runtime_folder() -> Path:
    """The folder of this user's sessions, made if need be; nobody else can enter it.

    ``DETRAIN_NB_RUNTIME_DIR``, or a folder in ``XDG_RUNTIME_DIR``, or one in the system's folder for temporary files.
    Raises: LaunchError when it is not ours, or open to others.
    """
    if chosen := os.environ.get("DETRAIN_NB_RUNTIME_DIR"):
        folder = Path(chosen).expanduser().absolute()
    elif base := os.environ.get("XDG_RUNTIME_DIR"):
        folder = Path(base) / "detrain_nb"
    else:
        user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
        folder = Path(tempfile.gettempdir()) / f"detrain_nb-{user}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise LaunchError(f"the run directory cannot be made: {exc}: set DETRAIN_NB_RUNTIME_DIR") from exc
    _require_private(folder)
    return folder


def is_running(pid: int) -> bool:
    """A process of that number may be there."""
    if sys.platform == "win32":
        return True  # asking with a signal would end it
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # somebody else's
    return True


def running_sessions() -> dict[str, int]:
    """The sessions of this user on this machine: name -> pid of the agent."""
    found: dict[str, int] = {}
    if sys.platform != "linux":
        return found
    for folder in sorted(runtime_folder().iterdir()):
        if not folder.name.startswith(".") and (pid := _live_agent(folder)):
            found[folder.name] = pid
    return found


def _require_private(folder: Path) -> None:
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode):
        raise LaunchError(f"run directory {folder} is not a directory: remove it, or set DETRAIN_NB_RUNTIME_DIR")
    if not hasattr(os, "getuid"):
        return
    if state.st_uid != os.getuid():
        raise LaunchError(f"run directory {folder} belongs to uid {state.st_uid}, not us: set DETRAIN_NB_RUNTIME_DIR")
    if state.st_mode & 0o077:
        mode = stat.S_IMODE(state.st_mode)
        raise LaunchError(f"run directory {folder} is open to others (mode {mode:04o}): chmod 700 {folder}")


def _live_agent(folder: Path) -> int:
    """The pid of the agent that serves ``folder``, 0 when none does: it holds a lock as long as it lives."""
    import fcntl

    with contextlib.suppress(OSError, ValueError), open(folder / "lock", encoding="ascii") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return int((folder / _PID_NAME).read_text(encoding="ascii") or 0)
    return 0


def _wait_until_ready(agent: subprocess.Popen[bytes]) -> None:
    """Read what the agent prints until it says that it listens."""
    assert agent.stdout is not None
    printed = b""
    deadline = time.monotonic() + _START_LIMIT_S
    with agent.stdout, selectors.DefaultSelector() as selector:
        selector.register(agent.stdout, selectors.EVENT_READ)
        while _READY not in printed:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise LaunchError(f"the agent did not come up within {_START_LIMIT_S:.0f} s")
            data = os.read(agent.stdout.fileno(), 4096)
            if not data:
                agent.wait(_START_LIMIT_S)
                last = printed.decode(errors="replace").strip().splitlines()[-1:] or [f"exit {agent.returncode}"]
                raise LaunchError(f"the agent ended at once: {last[0]}")
            printed += data


def _connect(path: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX)
    try:
        if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
            sock.connect(str(path))
        else:  # the path of a socket is short: go through a descriptor of its folder
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                sock.connect(f"/proc/self/fd/{folder}/{path.name}")
            finally:
                os.close(folder)
    except OSError as exc:
        sock.close()
        raise LaunchError(f"the agent's socket {path} does not answer: {exc}") from exc
    return sock
