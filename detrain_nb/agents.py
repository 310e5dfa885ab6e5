"""The agents of one machine: the folders they serve, started, found, connected to.

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
ENDED_PREFIX = ".ended-"  # of the folder of an agent that is ending
GROUPS_FILE = re.compile(r"groups\.([0-9]+)\.[0-9]+(\.end)?")  # where ranks meet to make groups: a file, then a link
_WRITTEN = re.compile(r"agent\.(lock|pid|sock|log)|launcher\.log|holder|steps|(started|uses)\.json|spool\.[0-9]{6,}")
_LAUNCHER_LOGS = "torchelastic"  # the folder that launch.py names to torchrun
AGENT_MODULE = "detrain_nb.node.agent.agent"
JOBS_MODULE = "detrain_nb.node.job.service"  # a program beside the agents
JOBS_MAGIC = b"\ndetrain-nb jobs 1\n"  # what it says first
READY = b"detrain-nb agent ready\n"
_MAX_SOCKET_PATH = 100
_START_LIMIT_S = 30.0
_REMOVE_LIMIT_S = 1.0


def start_agent(
    folder: Path, *, env: Mapping[str, str] | None = None, uses: Sequence[str] = ()
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    """Start the agent that serves the session ``folder``, detached; return it and a socket that is connected to it.

    What dead agents have left beside ``folder`` is removed. ``uses``: folders to keep as long as it lives, see
    node/ssh/cache_cleanup.py.
    Raises: LaunchError when it does not come up, SessionError when a session of that name runs already.
    """
    if sys.platform != "linux":
        raise LaunchError(f"ranks on this machine need Linux: {sys.platform} can drive nodes, not be one")
    lock, agent = claim_folder(folder, uses=uses), None
    try:
        agent = subprocess.Popen(
            [sys.executable, "-X", "utf8", "-c", RUN_MODULE, AGENT_MODULE, str(folder), str(lock)],
            cwd="/",  # nobody else's
            env={**os.environ, **(env or {})},  # not what C libraries have set beside it, as readline does
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=(lock,),
            start_new_session=True,
        )
    except OSError as exc:
        raise LaunchError(f"no process can be started for the agent: {exc.strerror} (ulimit -u says how many)") from exc
    finally:
        os.close(lock)  # the agent has it
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
    """Make ``folder`` and hold its lock, which is its agent's: there is no moment in which that seems to be dead.

    Raises: LaunchError, SessionError.
    """
    remove_dead_agents(folder.parent)
    lock = _take_folder(folder)
    try:
        with open(folder / USES_NAME, "w", encoding="utf-8", opener=open_private) as file:
            json.dump(list(uses), file)
    except OSError as exc:
        os.close(lock)
        remove_dead_agent(folder)
        raise LaunchError(f"the session's folder {folder} cannot be written: {exc}") from exc
    return lock


def _take_folder(folder: Path) -> int:
    """Raises: LaunchError, SessionError."""
    began = time.monotonic()
    while True:
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            require_private(folder)
            lock = take_lock(folder / LOCK_NAME, is_new=True)
        except FileNotFoundError:  # another process removes what a dead agent has left
            lock = None
        except OSError as exc:
            raise LaunchError(f"the session's folder cannot be made: {exc}") from exc
        if lock is not None:
            return lock
        pid, waited_s = live_agent(folder), time.monotonic() - began
        if pid and (is_running(pid) or waited_s > _REMOVE_LIMIT_S):
            raise SessionError(
                f"session {folder.name!r} runs already (agent pid {pid}): %distributed attach {folder.name} goes on "
                "with it, %distributed start --fresh ends it first, --name gives this one another name"
            )
        if waited_s > _START_LIMIT_S:
            raise LaunchError(f"session {folder.name!r} is being started by another process, for too long")
        time.sleep(0.01)


def remove_dead_agents(base: Path) -> None:
    """Remove from ``base`` the folders of agents that were killed, with the machine perhaps, before they could."""
    with contextlib.suppress(OSError), os.scandir(base) as entries:
        for entry in entries:
            if not entry.name.startswith(".") or entry.name.startswith(ENDED_PREFIX):
                remove_dead_agent(Path(entry.path))


def remove_dead_agent(folder: Path) -> None:
    """Remove the folder of an agent, if it is one, and the agent is dead: its lock is free.

    What no agent writes stays, and the folder with it. Who starts an agent there meanwhile makes the folder anew.
    """
    with contextlib.suppress(OSError):
        state = folder.lstat()
        if not stat.S_ISDIR(state.st_mode) or state.st_uid != os.getuid() or state.st_mode & 0o077:
            return
        lock = take_lock(folder / LOCK_NAME)
        if lock is None:
            return
        try:
            shutil.rmtree(folder / _LAUNCHER_LOGS, ignore_errors=True)  # not where it is a link
            _remove_written(folder)
        finally:
            os.close(lock)  # before the folder: NFS keeps a file that is open in it
        folder.rmdir()


def _remove_written(folder: Path) -> None:
    """Remove the files that agents write; the lock as the last one: without it the folder is nobody's."""
    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        for name in sorted(os.listdir(opened), key=LOCK_NAME.__eq__):
            state = os.stat(name, dir_fd=opened, follow_symlinks=False)
            if state.st_uid == os.getuid() and _is_written(name, state.st_mode):
                os.unlink(name, dir_fd=opened)
    finally:
        os.close(opened)


def _is_written(name: str, mode: int) -> bool:
    """Agents, and the ranks of their sessions, make it."""
    if GROUPS_FILE.fullmatch(name):
        return stat.S_ISREG(mode) or stat.S_ISLNK(mode)
    return _WRITTEN.fullmatch(name) is not None and (stat.S_ISREG(mode) or stat.S_ISSOCK(mode))


def connect(folder: Path) -> socket.socket:
    """Connect to the agent that serves ``folder``. Raises: LaunchError when it does not answer."""
    path = folder / SOCKET_NAME
    sock = socket.socket(socket.AF_UNIX)
    try:
        if len(os.fsencode(path)) <= _MAX_SOCKET_PATH:
            sock.connect(str(path))
        else:  # the path of a socket is short: go through a descriptor of its folder
            opened = os.open(folder, os.O_RDONLY)
            try:
                sock.connect(f"/proc/self/fd/{opened}/{SOCKET_NAME}")
            finally:
                os.close(opened)
    except OSError as exc:
        sock.close()
        raise LaunchError(f"the agent's socket {path} does not answer: {exc}") from exc
    if not is_same_user(sock):
        sock.close()
        raise LaunchError(f"the agent's socket {path} is another user's: set DETRAIN_NB_RUNTIME_DIR to another folder")
    return sock


def runtime_folder() -> Path:
    """The folder of this user's sessions, made if need be; nobody else can enter it, or put another in its place.

    ``DETRAIN_NB_RUNTIME_DIR``, or the first that is fit: a folder in ``XDG_RUNTIME_DIR``, one in the system's folder
    for temporary files, one among the user's caches. Its path has no links.
    Raises: LaunchError when none is fit, with what is wrong with the first.
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
            refused.append(LaunchError(f"the run directory cannot be made: {exc}: set DETRAIN_NB_RUNTIME_DIR"))
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
    if os.path.isabs(caches):  # else the home is not known
        yield Path(caches) / f"detrain_nb-{platform.node()}"  # machines may share the home


def _temporary_folder(name: str) -> Path:
    """Where Python has its temporary files, or would if there were room: another user who fills it hides no session."""
    named = (os.environ.get(variable) for variable in ("TMPDIR", "TEMP", "TMP"))
    first = next((path for path in (*named, "/tmp") if path and os.path.isdir(path)), "")
    is_there = bool(first) and os.path.isdir(os.path.join(first, name))
    return Path(os.path.abspath(first) if is_there else tempfile.gettempdir()) / name


def open_private(path: str, flags: int) -> int:
    """For `open`: a file that it makes is its user's alone, whatever the umask is."""
    return os.open(path, flags, 0o600)


def is_running(pid: int) -> bool:
    """A process of that number may be there."""
    if sys.platform == "win32":
        return True  # asking with a signal would end it
    try:
        os.kill(pid, 0)
    except OSError as exc:
        return not isinstance(exc, ProcessLookupError)  # else it is somebody else's
    return True


def running_sessions() -> dict[str, int]:
    """The sessions of this user on this machine: name -> pid of the agent."""
    if sys.platform != "linux":
        return {}
    folders = sorted(path for path in runtime_folder().iterdir() if not path.name.startswith("."))
    return {folder.name: pid for folder in folders if (pid := live_agent(folder))}


def holder_of(session: str) -> str:
    """Who held a session of this machine last; empty when that is not known."""
    try:
        return (runtime_folder() / session / HOLDER_NAME).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def require_private(folder: Path) -> None:
    """Raises: LaunchError when others can enter ``folder``, or put another one in its place; OSError."""
    _require_safe_parents(folder)
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


def _require_safe_parents(folder: Path) -> None:
    if parent := find_guest_parent(folder):
        raise LaunchError(
            f"run directory {folder}: others can put another one in its place, as {describe(parent)} is theirs to "
            "write: set DETRAIN_NB_RUNTIME_DIR to a folder that is not below it"
        )


def is_same_user(sock: socket.socket) -> bool:
    """Whether a process of this user is at the other end of a Unix socket."""
    if not hasattr(socket, "SO_PEERCRED"):
        return True  # the folder's mode keeps others out
    _, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return bool(uid == os.getuid())


def live_agent(folder: Path) -> int:
    """The pid of the agent that serves ``folder``, 0 when none does."""
    with contextlib.suppress(OSError, ValueError):
        if is_served(folder):
            return int((folder / PID_NAME).read_text(encoding="ascii") or 0)
    return 0


def is_served(folder: Path) -> bool:
    """An agent lives that serves ``folder``, or is starting: the lock is held."""
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
    """Wait until a process that another transport started, or another process, has ended."""
    deadline = time.monotonic() + limit_s
    while pid and is_running(pid) and not _is_zombie(pid) and time.monotonic() < deadline:
        time.sleep(0.02)


def _is_zombie(pid: int) -> bool:
    """The process has ended, and its parent, that goes on, has not taken note of it."""
    with contextlib.suppress(OSError):
        said = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        return said.rpartition(")")[2].split()[0] == "Z"
    return False


def _wait_until_ready(agent: subprocess.Popen[bytes]) -> None:
    """Read what the agent prints until it says that it listens."""
    assert agent.stdout is not None
    printed = b""
    deadline = time.monotonic() + _START_LIMIT_S
    with agent.stdout, selectors.DefaultSelector() as selector:
        selector.register(agent.stdout, selectors.EVENT_READ)
        while READY not in printed:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise LaunchError(f"the agent did not come up within {_START_LIMIT_S:.0f} s")
            data = os.read(agent.stdout.fileno(), 4096)
            if not data:
                agent.wait(_START_LIMIT_S)
                last = printed.decode(errors="replace").strip().splitlines()[-1:] or [f"exit {agent.returncode}"]
                raise LaunchError(f"the agent ended at once: {last[0]}")
            printed += data
