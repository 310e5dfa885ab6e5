"""Read processes, their sockets and their network namespaces from /proc."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
from pathlib import Path
from typing import Literal, NamedTuple

_LISTEN = 0x0A  # a TCP state, from the kernel's tcp_states.h


class Stat(NamedTuple):
    """Identity of a process: a pid is reused, but not within the same clock tick."""

    pid: int
    state: str
    started: int


def read_stat(path: Path) -> Stat:
    """Read a /proc/PID/stat, or a copy of one."""
    start, _, rest = path.read_text().rpartition(")")  # the process name before it may contain anything
    fields = rest.split()
    return Stat(pid=int(start.split()[0]), state=fields[0], started=int(fields[19]))


def read_argvs(proc: Path) -> dict[int, list[str]]:
    """Return the argv of every process by pid; processes without an argv, such as zombies, are omitted."""
    found = {}
    for pid in _list_pids(proc):
        with contextlib.suppress(OSError):  # the process has exited meanwhile
            if argv := (proc / f"{pid}/cmdline").read_text(errors="replace").rstrip("\0"):
                found[pid] = argv.split("\0")
    return found


def find_by_environment(setting: str) -> list[int]:
    """Return the pids of the processes that were started with ``NAME=value`` in their environment."""
    found = []
    for pid in _list_pids(Path("/proc")):
        with contextlib.suppress(OSError):  # it has exited, or belongs to another user
            if setting.encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.append(pid)
    return found


class TcpSocket(NamedTuple):
    address: str
    port: int
    is_listening: bool
    inode: int


def read_tcp_sockets(pid: int | Literal["self"]) -> list[TcpSocket]:
    """Read the TCP sockets of the network namespace of a process."""
    sockets = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):  # a kernel without IPv6
            for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                _, local, _, state, *_, inode = line.split()[:10]
                address, port = local.split(":")
                is_listening = int(state, 16) == _LISTEN
                sockets.append(TcpSocket(_decode_address(address), int(port, 16), is_listening, int(inode)))
    return sockets


def _decode_address(digits: str) -> str:
    """Decode an address that is printed as 32-bit words in this machine's byte order."""
    words = [int(digits[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(digits), 8)]
    return socket.inet_ntop(socket.AF_INET if len(words) == 1 else socket.AF_INET6, b"".join(words))


def find_holders(inodes: set[int]) -> set[int]:
    """Return the pids of the processes that have one of these sockets open."""
    wanted = {f"socket:[{inode}]" for inode in inodes - {0}}  # 0: a socket without a process
    holders = set()
    for pid in _list_pids(Path("/proc")) if wanted else ():
        with contextlib.suppress(OSError):  # it has exited, or belongs to another user
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                    if os.readlink(f"/proc/{pid}/fd/{fd}") in wanted:
                        holders.add(pid)
    return holders


def _list_pids(proc: Path) -> list[int]:
    return sorted(int(name) for name in os.listdir(proc) if name.isdigit())
