"""The testbed's access to this machine: commands, processes, network devices, folders, and the lock around them."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

_SIOCBRADDIF = 0x89A2  # from <linux/sockios.h>: plug a device into a bridge
_COMMAND_LIMIT_S = 60.0
_POLL_S = 0.01


class TestbedError(RuntimeError):
    """What is impossible, and why."""

    __test__ = False  # pytest must not collect it


# Commands and processes


def tool_path() -> str:
    """Return PATH with the folders of sshd and ip, which a user's shell may lack."""
    return f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"


def find_tool(name: str) -> str | None:
    return shutil.which(name, path=tool_path())


def python(*arguments: str | Path) -> list[str]:
    """Return the argv of a Python program that needs no packages, with options that make it start faster."""
    return [sys.executable, "-S", *map(str, arguments)]


def run(*command: str | Path, stdin: str = "") -> str:
    """Run a command and return its output; raises TestbedError if its status is not 0 or it takes too long."""
    argv = [str(part) for part in command]
    try:
        done = subprocess.run(
            argv,
            input=stdin,
            env={**os.environ, "PATH": tool_path()},
            capture_output=True,
            text=True,
            timeout=_COMMAND_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        raise TestbedError(f"{' '.join(argv)}: took more than {_COMMAND_LIMIT_S:g} s") from None
    if done.returncode != 0:
        raise TestbedError(f"{' '.join(argv)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout


def start(command: Sequence[str], *, log: Path) -> subprocess.Popen[bytes]:
    """Start a process in its own session, so that Ctrl-C in this terminal does not reach it."""
    with open(log, "ab") as file:
        return subprocess.Popen(
            command,
            cwd="/",
            env={**os.environ, "PATH": tool_path()},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def wait_until(condition: Callable[[], bool], what: str, *, limit_s: float = 30.0) -> None:
    """Wait for an event; raises TestbedError after the deadline."""
    deadline = time.monotonic() + limit_s
    while not condition():
        if time.monotonic() > deadline:
            raise TestbedError(f"waited {limit_s:g} s in vain for {what}")
        time.sleep(_POLL_S)


def kill_all(find: Callable[[], Iterable[int]], what: str) -> None:
    """Kill the processes that ``find`` returns, until it finds none."""

    def kill() -> bool:
        pids = list(find())
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return not pids

    wait_until(kill, what)


# The network


def choose_network(taken: set[str]) -> int:
    """Return a number K for which neither 198.18.K.1 nor 127.K.0.1 is in use or an address of this machine."""
    if find_tool("ip"):
        taken = taken | set(re.findall(r"inet ([\d.]+)/", run("ip", "-4", "-o", "addr")))
    for number in range(2, 250):
        if not {f"198.18.{number}.1", f"127.{number}.0.1"} & taken:
            return number
    raise TestbedError("248 testbeds are up: take some down")


def free_ports(count: int) -> list[int]:
    """Return ports for programs that cannot bind 0: they were free a moment ago, and the OS assigns none of them."""
    found: list[int] = []
    while len(found) < count:
        port = 10000 + secrets.randbelow(10000)  # the OS assigns those from 32768 on; exported Slurm jobs use 20000 on
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found.append(port)
    return found


def plug_in(device: str, *, bridge: str) -> None:
    """Make a device a port of a bridge."""
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCBRADDIF, struct.pack("16si20x", bridge.encode(), socket.if_nametoindex(device)))


def delete_devices(pattern: str) -> None:
    """Delete the network devices whose full name matches."""
    for device in os.listdir("/sys/class/net"):
        if re.fullmatch(pattern, device):
            with contextlib.suppress(TestbedError):  # deleting one end of a cable deletes the other
                run("ip", "link", "delete", device)


# SSH


def make_key(path: Path, *, comment: str) -> None:
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", path)


def does_sshd_punish() -> bool:
    """Return whether this sshd (9.8 and newer) would refuse the notebook for a while after sessions were killed."""
    # Older versions do not know -V, but print their version in the usage error.
    done = subprocess.run([find_tool("sshd") or "sshd", "-V"], capture_output=True, text=True, timeout=_COMMAND_LIMIT_S)
    match = re.search(r"OpenSSH_(\d+)\.(\d+)", done.stdout + done.stderr)
    return match is not None and (int(match[1]), int(match[2])) >= (9, 8)


# Files


def find_base() -> Path:
    """Return the folder of all testbeds of this user. It is not in /tmp, because each host has its own /tmp."""
    return Path(os.environ.get("TESTBED_DIR") or f"/var/tmp/testbed-{os.getuid()}").absolute()


@contextlib.contextmanager
def lock_base() -> Iterator[Path]:
    """Create that folder for the block, and keep it if it is not empty afterwards; other callers wait.

    Two testbeds that come up at the same time therefore use different addresses. The lock is an abstract socket: like
    the addresses, it belongs to a network namespace, and it disappears with the process that holds it.
    """
    with socket.socket(socket.AF_UNIX) as lock:

        def take() -> bool:
            try:
                lock.bind(f"\0testbed-{os.getuid()}")
            except OSError as exc:
                if exc.errno == errno.EADDRINUSE:
                    return False
                raise
            return True

        wait_until(take, "another testbed to come up or go down", limit_s=_COMMAND_LIMIT_S)
        base = find_base()
        base.mkdir(mode=0o700, parents=True, exist_ok=True)
        if base.is_symlink() or base.stat().st_uid != os.getuid():
            raise TestbedError(f"{base} belongs to another user")
        try:
            yield base
        finally:
            with contextlib.suppress(OSError):  # not empty
                base.rmdir()


def write_at_once(path: Path, text: str) -> None:
    """Write a file atomically: no reader sees a part of it."""
    draft = path.with_suffix(".new")
    draft.write_text(text)
    draft.rename(path)


def read_end(log: Path) -> str:
    return log.read_text(errors="replace")[-2000:] if log.exists() else ""


def list_folders_of_python() -> list[str]:
    """Return the folders of this Python and its packages, under each of their names."""
    return [sys.prefix, sys.base_prefix, os.path.realpath(sys.prefix), os.path.realpath(sys.base_prefix)]


def find_folders(paths: Iterable[str | Path]) -> tuple[str, ...]:
    """Return the folders as absolute paths, without repetition; raises TestbedError if one is missing."""
    folders = [Path(path).absolute() for path in paths]
    for folder in folders:
        if not folder.is_dir():
            raise TestbedError(f"cannot share {folder}: it is not a folder")
    return tuple(dict.fromkeys(str(folder) for folder in folders))
