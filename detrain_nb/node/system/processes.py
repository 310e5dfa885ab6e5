"""What Linux offers to end every process that a rank started, and to see what one uses. Elsewhere: best effort."""

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

_told_fd = -1  # where Python is to tell of signals: there is one such place in a process


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends: none escapes ``end_descendants``."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent_pid: int) -> None:
    """Get SIGKILL when the parent ends; leave at once when it already has."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(1)


def watch_children() -> int:
    """A descriptor that can be read when a child has ended: ``drain`` it, then see which."""
    global _told_fd
    ended, _told_fd = os.pipe()
    os.set_blocking(ended, False)
    os.set_blocking(_told_fd, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(_told_fd, warn_on_full_buffer=False)
    return ended


def drain(fd: int) -> None:
    """Read what ``watch_children`` tells."""
    with contextlib.suppress(BlockingIOError):
        os.read(fd, 4096)


def forget_children(ended: int) -> None:
    """In a forked process: close what ``watch_children`` of its parent has opened."""
    signal.set_wakeup_fd(-1)  # since Python 3.12 asyncio has done so in the fork: it does not say what it was
    os.close(_told_fd)
    os.close(ended)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def end_descendants(*, spare: Collection[int] = (), limit_s: float = 5.0) -> None:
    """Kill every process below this one, and reap those that became its children; ``spare`` are left alone."""
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
        time.sleep(0.002)  # SIGKILL is under way; the next pass sees who is left


def stop_with_descendants(process: subprocess.Popen[bytes], *, limit_s: float = 1.0) -> None:
    """Interrupt a process and all below it, as a terminal would, and kill those that have not ended in time."""
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
        with contextlib.suppress(subprocess.TimeoutExpired):  # it has another user's rights
            process.wait(limit_s)


def _send_signal(number: signal.Signals, process: subprocess.Popen[bytes], below: Iterable[int]) -> None:
    for pid in below:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
    with contextlib.suppress(PermissionError):
        process.send_signal(number)  # none when it has been reaped: its number may be another's


def descendants(pid: int) -> list[int]:
    """The processes below ``pid``, read from /proc; empty where that cannot be read."""
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
    """When a process was started, in ticks since the machine was: with its number it names it. 0 where none runs."""
    fields = _stat_fields(str(pid))
    return int(fields[19]) if len(fields) > 19 and fields[0] not in ("Z", "X") else 0


def has_ended(child: int) -> bool:
    """A child has ended, and still has its number."""
    return os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def memory_bytes(pid: int) -> int:
    """Resident memory of a process, 0 where it cannot be read."""
    return (read_number(f"/proc/{pid}/statm", r"\d+ ") or 0) * os.sysconf("SC_PAGE_SIZE")


def process_use(pid: int) -> tuple[float, int]:
    """Processor time that all threads of a process have used, and its resident memory; 0 where it cannot be read."""
    fields = _stat_fields(str(pid))
    if len(fields) < 22:
        return 0.0, 0
    ticks, pages = int(fields[11]) + int(fields[12]), int(fields[21])
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")


def main_thread_seconds(pid: int) -> float:
    """Processor time that the main thread of a process has used, or could have used; 0 where it cannot be read.

    Where more threads run than there are processors, one that computes waits for its turn: that counts too.
    """
    if scheduled := (read(f"/proc/{pid}/task/{pid}/schedstat") or "").split():
        return (int(scheduled[0]) + int(scheduled[1])) / 1e9
    if fields := _stat_fields(f"{pid}/task/{pid}"):
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def main_thread_asleep_in(pid: int) -> str:
    """The function of the kernel that the main thread of a process sleeps in; empty where it runs, or is not known."""
    return (read(f"/proc/{pid}/task/{pid}/wchan") or "").partition(".")[0].strip("0\n ")


def _stat_fields(of: str) -> list[str]:
    """What stands behind its name in the line of a process, or a thread; empty where that cannot be read."""
    return (read(f"/proc/{of}/stat") or "").rpartition(")")[2].split()


def lead_nowhere(*streams: int) -> None:
    """Let descriptors of this process have nothing to read, and lose what is written."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in streams:
        os.dup2(nothing, stream)
    os.close(nothing)


def close_inherited_sockets(*, keep: set[int]) -> None:
    """Close the sockets that a forked process got from its parent: shutting one would end it for the parent too."""
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
    """Make a file on no disk. Not by `os`: Python of conda, or of uv, was built for an older libc, and lacks it there.

    Raises: OSError.
    """
    opened: int = ctypes.CDLL(None, use_errno=True).memfd_create(name.encode(), _MFD_CLOEXEC)
    if opened < 0:
        raise OSError(ctypes.get_errno(), "no file in memory can be made")
    return opened
