"""Agents of one machine and their session folders: start them, find them, connect to them.

Used by transport/local.py on the notebook's machine, and by node/ssh/attach.py on a node.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import selectors
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from .errors import LaunchError, SessionError
from .guarded import RUN_MODULE, describe, find_guest_parent
from .locks import take_lock

SOCKET_NAME = "agent.sock"
PID_NAME = "agent.pid"
HOLDER_NAME = "holder"
LOCK_NAME = "agent.lock"
USES_NAME = "uses.json"
ENDED_PREFIX = ".ended-"  # of the folder of an agent that is exiting
GROUPS_FILE = re.compile(r"groups\.([0-9]+)\.[0-9]+(\.end)?")  # where ranks meet to make groups: a file, then a link
_WRITTEN = re.compile(r"agent\.(lock|pid|sock|log)|launcher\.log|holder|steps|(started|uses)\.json|spool\.[0-9]{6,}")
_LAUNCHER_LOGS = "torchelastic"  # the log folder that launch.py passes to torchrun
AGENT_MODULE = "detrain_nb.node.agent.agent"
JOBS_MODULE = "detrain_nb.node.job.service"  # the service of jobs, which runs next to the agents
JOBS_MAGIC = b"\ndetrain-nb jobs 1\n"  # the first bytes it sends
READY = b"detrain-nb agent ready\n"
_MAX_SOCKET_PATH = 100
_START_LIMIT_S = 30.0
_REMOVE_LIMIT_S = 1.0


def start_agent(
    folder: Path, *, env: Mapping[str, str] | None = None, uses: Sequence[str] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the agent of the session ``folder``, detached; return it and a socket connected to it.

    Folders next to ``folder`` that dead agents left behind are removed. ``uses`` lists folders that must be kept while
    the agent runs, see node/ssh/cache_cleanup.py.
    Raises: LaunchError when the agent does not start, SessionError when a session of that name is already running.
    """
    if sys.platform != "linux":
        raise LaunchError(f"ranks on this machine need Linux: {sys.platform} can drive nodes, not be one")
    lock, agent = claim_folder(folder, uses=uses), None
    try:
        agent = subprocess.Popen(
            [sys.executable, "-X", "utf8", "-c", RUN_MODULE, AGENT_MODULE, str(folder), str(lock)],
            cwd="/",  # a folder that no other user can change
            env={**os.environ, **(env or {})},  # without variables that C libraries, such as readline, set on their own
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(lock,),
            start_new_session=True,
        )
    except OSError as exc:
        raise LaunchError(f"cannot start a process for the agent: {exc.strerror} (ulimit -u shows the limit)") from exc
    finally:
        os.close(lock)  # the agent has inherited it
        if agent is None:
            remove_dead_agent(folder)
    try:
        _wait_until_ready(agent)
        return agent, connect(folder)
    except BaseException:
        agent.kill()
        agent.wait()
        remove_dead_agent(folder)
        raise


def claim_folder(folder: Path, *, uses: Sequence[str] = ()) -> int:
    """Create ``folder`` and take its lock for the agent to inherit, so that the agent never appears to be dead.

    Raises: LaunchError when the folder cannot be created or written, or another process has been starting the session
    for too long; SessionError when a live agent serves it.
    """
    remove_dead_agents(folder.parent)
    lock = _take_folder(folder)
    try:
        with open(folder / USES_NAME, "w", encoding="utf-8", opener=open_private) as file:
            json.dump(list(uses), file)
    except OSError as exc:
        os.close(lock)
        remove_dead_agent(folder)
        raise LaunchError(f"cannot write to the session folder {folder}: {exc}") from exc
    return lock


def _take_folder(folder: Path) -> int:
    """Create the folder and take its lock. Raises: LaunchError, SessionError."""
    began = time.monotonic()
    while True:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            require_private(folder)
            lock = take_lock(folder / LOCK_NAME, is_new=True)
        except FileNotFoundError:  # another process is removing a dead agent's folder
            lock = None
        except OSError as exc:
            raise LaunchError(f"cannot create the session folder: {exc}") from exc
        if lock is not None:
            return lock
        pid, waited_s = live_agent(folder), time.monotonic() - began
        if pid and (is_running(pid) or waited_s > _REMOVE_LIMIT_S):
            raise SessionError(
                f"session {folder.name!r} is already running (agent pid {pid}): continue it with %distributed attach "
                f"{folder.name}, replace it with %distributed start --fresh, or name this one with --name"
            )
        if waited_s > _START_LIMIT_S:
            raise LaunchError(
                f"another process has been starting session {folder.name!r} for {waited_s:.0f} s: "
                "choose another name with --name"
            )
        time.sleep(0.01)


def remove_dead_agents(base: Path) -> None:
    """Remove from ``base`` the folders that agents left when they were killed, or when the machine went down."""
    with contextlib.suppress(OSError), os.scandir(base) as entries:
        for entry in entries:
            if not entry.name.startswith(".") or entry.name.startswith(ENDED_PREFIX):
                remove_dead_agent(Path(entry.path))


def remove_dead_agent(folder: Path) -> None:
    """Remove an agent's folder if the agent is dead, which shows in its lock being free.

    Files that no agent writes stay, and the folder with them. A process that starts an agent there in the meantime
    recreates the folder.
    """
    with contextlib.suppress(OSError):
        state = folder.lstat()
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
            return
        lock = take_lock(folder / LOCK_NAME)
        if lock is None:
            return
        try:
            shutil.rmtree(folder / _LAUNCHER_LOGS, ignore_errors=True)  # does not follow a link
            _remove_written(folder)
        finally:
            os.close(lock)  # before rmdir: NFS keeps an open file in the folder
        folder.rmdir()


def _remove_written(folder: Path) -> None:
    """Remove the files that agents write, the lock last: without it the folder does not count as an agent's."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in sorted(os.listdir(opened), key=LOCK_NAME.__eq__):
            state = os.stat(name, dir_fd=opened, follow_symlinks=False)
            if state.st_uid == os.getuid() and _is_written(name, state.st_mode):
                os.unlink(name, dir_fd=opened)
    finally:
        os.close(opened)


def _is_written(name: str, mode: int) -> bool:
    """Return whether agents, or the ranks of their sessions, write such a file."""
    if GROUPS_FILE.fullmatch(name):
        return stat.S_ISREG(mode) or stat.S_ISLNK(mode)
    return _WRITTEN.fullmatch(name) is not None and (stat.S_ISREG(mode) or stat.S_ISSOCK(mode))


def connect(folder: Path) -> socket.socket:
    """Connect to the agent that serves ``folder``.

    Raises: LaunchError when its socket does not answer, or belongs to another user.
    """
    path = folder / SOCKET_NAME
    sock = socket.socket(socket.AF_UNIX)
    try:
        if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
            sock.connect(str(path))
        else:  # a socket path is limited to about 100 bytes: go through a descriptor of its folder
            opened = os.open(folder, os.O_RDONLY)
            try:
                sock.connect(f"/proc/self/fd/{opened}/{SOCKET_NAME}")
            finally:
                os.close(opened)
    except OSError as exc:
        sock.close()
        raise LaunchError(f"agent socket {path} does not answer: {exc}") from exc
    if not is_same_user(sock):
        sock.close()
        raise LaunchError(f"agent socket {path} belongs to another user: set DETRAIN_NB_RUNTIME_DIR to another folder")
    return sock


def runtime_folder() -> Path:
    """Return the folder of this user's sessions, created if missing; no other user can enter or replace it.

    It is ``DETRAIN_NB_RUNTIME_DIR``, or the first usable one of: a folder in ``XDG_RUNTIME_DIR``, one in the system's
    temporary folder, one in the user's cache folder. The returned path has no links.
    Raises: LaunchError when none is usable, with the reason for the first.
    """
    refused = []
    for wanted in _possible_folders():
        folder = Path(os.path.realpath(wanted.parent), wanted.name)
        try:
            _require_safe_parents(folder)
            for path in (*reversed(folder.parents), folder):
                if not path.is_dir():
                    path.mkdir(mode=0o700, exist_ok=True)
            require_private(folder)
            return folder
        except OSError as exc:
            refused.append(LaunchError(f"cannot create the run directory: {exc}: set DETRAIN_NB_RUNTIME_DIR"))
        except LaunchError as exc:
            refused.append(exc)
    raise refused[0]


def _possible_folders() -> Iterator[Path]:
    if chosen := os.environ.get("DETRAIN_NB_RUNTIME_DIR"):
        yield Path(os.path.expanduser(chosen)).absolute()
        return
    if base := os.environ.get("XDG_RUNTIME_DIR"):
        yield Path(base).absolute() / "detrain_nb"
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    yield _temporary_folder(f"detrain_nb-{user}")
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(caches):  # else the home folder is unknown
        yield Path(caches) / f"detrain_nb-{platform.node()}"  # machines may share the home folder


def _temporary_folder(name: str) -> Path:
    """Return the folder ``name`` in Python's temporary folder, also when that is full.

    Python skips a folder that it cannot write to; a full disk would then hide a session that is already there.
    """
    named = (os.environ.get(variable) for variable in ("TMPDIR", "TEMP", "TMP"))
    first = next((path for path in (*named, "/tmp") if path and os.path.isdir(path)), "")
    is_there = bool(first) and os.path.isdir(os.path.join(first, name))
    return Path(os.path.abspath(first) if is_there else tempfile.gettempdir()) / name


def open_private(path: str, flags: int) -> int:
    """Open a file as an ``opener`` of `open`; a new file is private to its user, whatever the umask."""
    return os.open(path, flags, 0o600)


def is_running(pid: int) -> bool:
    """Return whether a process with this pid may exist."""
    if sys.platform == "win32":
        return True  # os.kill would end it
    try:
        os.kill(pid, 0)
    except OSError as exc:
        return not isinstance(exc, ProcessLookupError)  # any other error: it belongs to another user
    return True


def running_sessions() -> dict[str, int]:
    """Return the sessions of this user on this machine: name -> pid of the agent."""
    if sys.platform != "linux":
        return {}
    folders = sorted(path for path in runtime_folder().iterdir() if not path.name.startswith("."))
    return {folder.name: pid for folder in folders if (pid := live_agent(folder))}


def holder_of(session: str) -> str:
    """Return who last held a session of this machine; empty when unknown."""
    try:
        return (runtime_folder() / session / HOLDER_NAME).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def require_private(folder: Path) -> None:
    """Check that other users can neither enter nor replace ``folder``. Raises: LaunchError when they can; OSError."""
    _require_safe_parents(folder)
    state = folder.lstat()
    if not stat.S_ISDIR(state.st_mode):
        raise LaunchError(f"run directory {folder} is not a directory: remove it, or set DETRAIN_NB_RUNTIME_DIR")
    if not hasattr(os, "getuid"):
        return
    if state.st_uid != os.getuid():
        raise LaunchError(
            f"run directory {folder} belongs to uid {state.st_uid}, not to this user: set DETRAIN_NB_RUNTIME_DIR"
        )
    if state.st_mode & 0o077:
        mode = stat.S_IMODE(state.st_mode)
        raise LaunchError(f"run directory {folder} is open to others (mode {mode:04o}): chmod 700 {folder}")


def _require_safe_parents(folder: Path) -> None:
    if parent := find_guest_parent(folder):
        raise LaunchError(
            f"run directory {folder} can be replaced by other users, who can write to {describe(parent)}: "
            "set DETRAIN_NB_RUNTIME_DIR to a folder outside it"
        )


def is_same_user(sock: socket.socket) -> bool:
    """Return whether the peer of a Unix socket is a process of this user."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # the folder's mode keeps other users out
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.getuid())


def live_agent(folder: Path) -> int:
    """Return the pid of the agent that serves ``folder``, 0 when none does."""
    with contextlib.suppress(OSError, ValueError):
        if is_served(folder):
            return int((folder / PID_NAME).read_text(encoding="ascii") or 0)
    return 0


def is_served(folder: Path) -> bool:
    """Return whether an agent serves ``folder`` or is starting there, which shows in its lock being held."""
    import fcntl

    try:
        with open(folder / LOCK_NAME, encoding="ascii") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except (FileNotFoundError, NotADirectoryError):
        pass
    return False


def wait_for_pid(pid: int, *, limit_s: float) -> None:
    """Wait, at most ``limit_s`` seconds, until a process that need not be a child of this one has exited."""
    deadline = time.monotonic() + limit_s
    while pid and is_running(pid) and not _is_zombie(pid) and time.monotonic() < deadline:
        time.sleep(0.02)


def _is_zombie(pid: int) -> bool:
    """Return whether the process has exited and its living parent has not waited for it yet."""
    with contextlib.suppress(OSError):
        said = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return said.rpartition(")")[2].split()[0] == "Z"
    return False


def _wait_until_ready(agent: subprocess.Popen[bytes]) -> None:
    """Read the agent's output until it reports that it is listening. Raises: LaunchError."""
    assert agent.stdout is not None
    printed = b""
    deadline = time.monotonic() + _START_LIMIT_S
    with agent.stdout, selectors.DefaultSelector() as selector:
        selector.register(agent.stdout, selectors.EVENT_READ)
        while READY not in printed:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise LaunchError(f"the agent did not start within {_START_LIMIT_S:.0f} s")
            data = os.read(agent.stdout.fileno(), 4096)
            if not data:
                agent.wait(_START_LIMIT_S)
                last = printed.decode(errors="replace").strip().splitlines()[-1:] or [f"exit {agent.returncode}"]
                raise LaunchError(f"the agent exited at once: {last[0]}")
            printed += data
