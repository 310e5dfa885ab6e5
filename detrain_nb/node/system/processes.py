"""Linux functions to stop every process that a rank started, and to read resource use; best effort elsewhere."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterable

from .proc_files import read, read_number

_MFD_CLOEXEC = 1
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_told_fd = -1  # the descriptor to which Python reports signals: there is one per process


def adopt_orphans() -> None:
    """Become the parent of every descendant whose parent exits, so that none escapes ``end_descendants``."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent exits; exit at once if it already has."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def watch_children() -> int:
    """Return a descriptor that becomes readable when a child exits: ``drain`` it, then find out which one."""
    global _told_fd
    ended, _told_fd = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(_told_fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(_told_fd, warn_on_full_buffer=False)
    return ended


def drain(fd: int) -> None:
    """Empty the descriptor of ``watch_children``."""
    with contextlib.suppress(BlockingIOError):
        os.read(fd, 4096)


def forget_children(ended: int) -> None:
    """Close, in a forked process, the descriptors that ``watch_children`` opened in its parent."""
    signal.set_wakeup_fd(-1)  # its return value is not used: from Python 3.12 on, asyncio resets it in the fork
    os.close(_told_fd)
    os.close(ended)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def end_descendants(*, spare: Collection[int] = (), limit_s: float = 5.0) -> None:
    """Kill every descendant of this process except ``spare``, and reap those that have become its children."""
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        below = [pid for pid in descendants(os.getpid()) if pid not in spare]
        if not below:
            return
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.002)  # SIGKILL takes a moment; the next pass finds the remaining ones


def stop_with_descendants(process: subprocess.Popen[bytes], *, limit_s: float = 1.0) -> None:
    """Interrupt a process and its descendants, as a terminal would, and kill those that have not exited in time."""
    below = descendants(process.pid)
    deadline = time.monotonic() + limit_s
    try:
        _send_signal(signal.SIGINT, process, below)
        while (
            process.poll() is None or any(os.path.exists(f"/proc/{pid}") for pid in below)
        ) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        _send_signal(signal.SIGKILL, process, {*below, *descendants(process.pid)})
        with contextlib.suppress(subprocess.TimeoutExpired):  # it runs as another user and cannot be killed
            process.wait(limit_s)


def _send_signal(number: signal.Signals, process: subprocess.Popen[bytes], below: Iterable[int]) -> None:
    for pid in below:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
    with contextlib.suppress(PermissionError):
        process.send_signal(number)  # sends nothing once it is reaped: its pid may have been reused


def descendants(pid: int) -> list[int]:
    """Return the pids of all descendants of ``pid``, read from /proc; empty if that cannot be read."""
    children: dict[int, list[int]] = {}
    with contextlib.suppress(OSError):
        for entry in filter(str.isdigit, os.listdir("/proc")):
            if fields := _stat_fields(entry):
                children.setdefault(int(fields[1]), []).append(int(entry))
    found: list[int] = []
    todo = [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def start_ticks(pid: int) -> int:
    """Return when a process started, in ticks since boot; 0 if none runs. Pid and start time identify a process."""
    fields = _stat_fields(str(pid))
    return int(fields[19]) if len(fields) > 19 and fields[0] not in ("Z", "X") else 0


def has_ended(child: int) -> bool:
    """Return whether a child has exited, without reaping it."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def memory_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it cannot be read."""
    return (read_number(f"/proc/{pid}/statm", r"\d+ ") or 0) * os.sysconf("SC_PAGE_SIZE")


def process_use(pid: int) -> tuple[float, int]:
    """Return the processor time used by all threads of a process, and its resident memory; 0 if unreadable."""
    fields = _stat_fields(str(pid))
    if len(fields) < 22:
        return 0.0, 0
    ticks, pages = int(fields[11]) + int(fields[12]), int(fields[21])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")


def main_thread_seconds(pid: int) -> float:
    """Return the processor time that a process's main thread has used or waited for; 0 if it cannot be read.

    With more threads than processors, a computing thread waits for its turn: that waiting time counts too.
    """
    if scheduled := (read(f"/proc/{pid}/task/{pid}/schedstat") or "").split():
        return (int(scheduled[0]) + int(scheduled[1])) / 1e9
    if fields := _stat_fields(f"{pid}/task/{pid}"):
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def main_thread_asleep_in(pid: int) -> str:
    """Return the kernel function that a process's main thread sleeps in; empty if it is running or unknown."""
    return (read(f"/proc/{pid}/task/{pid}/wchan") or "").partition(".")[0].strip("0\n ")


def _stat_fields(of: str) -> list[str]:
    """Return the fields after the name in the stat file of a process or thread; empty if it cannot be read."""
    return (read(f"/proc/{of}/stat") or "").rpartition(")")[2].split()


def lead_nowhere(*streams: int) -> None:
    """Redirect descriptors of this process to /dev/null."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in streams:
        os.dup2(nothing, stream)
    os.close(nothing)


def close_inherited_sockets(*, keep: set[int]) -> None:
    """Close the sockets that a forked process inherited: shutting one down later would end the parent's connection."""
    for entry in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        fd = int(entry)
        if fd in keep:
            continue
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{entry}").startswith("socket:"):
                os.close(fd)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def open_memory_file(name: str) -> int:
    """Make a file in memory. ``os.memfd_create`` is missing in conda's and uv's Python, built for an older libc.

    Raises: OSError.
    """
    opened: int = ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), _MFD_CLOEXEC)
    if opened < 0:
        raise OSError(ctypes.get_errno(), "a memory file cannot be made")
    return opened
