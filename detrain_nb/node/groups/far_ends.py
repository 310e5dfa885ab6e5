"""Who holds the other end of a TCP connection on this machine, as the kernel tells in /proc/net.

Any user of a machine can connect to a port on its loopback. gloo takes whoever comes first for the rank that it
expects, and torch unpickles what comes from a rank. Who connects and says nothing, as a scanner of ports does, is
taken for nobody: it is shut out, and the group is used.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import glob
import ipaddress
import math
import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from ...errors import ForeignConnection, SessionError
from ...guarded import shares_its_number

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
TCP = (socket.AF_INET, socket.AF_INET6)
_ESTABLISHED = "01"
_LEFT = 8  # of the kernel's states: closed by the other end alone
_OPEN_HERE = (1, _LEFT)
_RECEIVED_BYTES, _RECEIVED_BYTES_AT = struct.Struct("@Q"), 128  # in struct tcp_info
_SILENT_BYTES = 1  # the end of a connection may count as one; what gloo's peers say first has eight
_SO_ATTACH_FILTER = 26
_DROP_ALL = ctypes.create_string_buffer(struct.pack("@HBBI", 0x06, 0, 0, 0), 8)  # of a classic filter: return 0 bytes
_WORD_BYTES = 4  # the tables have an address as words of this machine's byte order
_LIMIT_S = 20.0  # for the other end to be taken by its process
_GAP_S = 0.002

Address = tuple[bytes, int]
Ends = tuple[Address, Address]  # the near one, and the far one


@dataclass(frozen=True)
class _Holder:
    """``inode`` is 0 while no process holds the connection: it was not accepted yet, or has been closed already."""

    uid: int
    inode: int
    state: str

    @property
    def is_known(self) -> bool:
        return self.inode != 0 and self.state == _ESTABLISHED


def require_own(find: Callable[[], Iterable[int]], *, earlier_ports: Collection[int] = ()) -> None:
    """Raise unless a process of this user holds the far end of each connection among the sockets that ``find`` gives.

    One that leads to another machine is let be. One that came in at a listening socket among them, or at one of
    ``earlier_ports``, and over which nothing was said, is shut.
    Raises: ForeignConnection; SessionError when it cannot be found out.
    """
    deadline = time.monotonic() + _LIMIT_S
    while connections := {fd: ends for fd in find() if (ends := ends_of(fd))}:
        ports = {*ports_listened_at(find()), *earlier_ports}
        holders = _read_holders({(far, near) for near, far in connections.values()})
        unknown = []
        for fd, (near, far) in connections.items():
            holder = holders.get((far, near))
            is_known = holder is not None and holder.is_known
            if holder is not None and is_known and _is_own(holder):
                continue
            if near[1] in ports and _shut_if_silent(fd, (near, far), is_left=not is_known):
                continue
            if holder is None or not is_known:
                unknown += [far] if holder or _is_here(near, far) else []
            else:
                raise ForeignConnection(
                    f"a process of uid {holder.uid}{_name(holder.uid)} is connected to a process group of this session "
                    f"(its port {far[1]}, ours {near[1]}): the group was ended, nothing of that user was read"
                )
        if not unknown:
            return
        if time.monotonic() > deadline:
            raise SessionError(
                f"a connection of the process group (from port {unknown[0][1]} of this machine) has no owner: "
                "it was closed, or /proc/net does not show it"
            )
        time.sleep(_GAP_S)


def _is_own(holder: _Holder) -> bool:
    """Where others have this user's number too: by the processes that this one may look into."""
    return holder.uid == os.geteuid() and (not shares_its_number() or _is_in_own_process(holder.inode))


def _is_in_own_process(inode: int) -> bool:
    for folder in glob.iglob("/proc/[0-9]*/fd"):
        with contextlib.suppress(OSError):  # another user's, or it has ended
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    if os.readlink(os.path.join(folder, name)) == f"socket:[{inode}]":
                        return True
    return False


@contextlib.contextmanager
def borrowed(fd: int) -> Iterator[socket.socket]:
    """The socket of a descriptor, which stays open: whoever owns it closes it. It needs no other one.

    Raises: OSError where it is no socket, or closed.
    """
    sock = socket.socket(fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()


def is_listening(sock: socket.socket) -> bool:
    """Whether it takes TCP connections. Raises: OSError."""
    return sock.family in TCP and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def ends_of(fd: int) -> Ends | None:
    """The two ends of a TCP connection; None for a socket that is none, not connected, or shut here.

    Needs no descriptor: another user may have used them up. Raises: OSError when it cannot be found out.
    """
    try:
        with borrowed(fd) as sock:
            is_tcp = sock.family in TCP and sock.type == socket.SOCK_STREAM
            if is_tcp and sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] in _OPEN_HERE:
                return _address(sock.getsockname()), _address(sock.getpeername())
    except OSError as exc:
        if exc.errno not in (errno.EBADF, errno.ENOTSOCK, errno.ENOTCONN):
            raise
    return None


def drop_what_comes(sock: socket.socket) -> None:
    """Have the kernel drop what comes to a socket from now on. Raises: OSError where it cannot."""
    program = struct.pack("@HP", 1, ctypes.addressof(_DROP_ALL))  # struct sock_fprog
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _shut_if_silent(fd: int, ends: Ends, *, is_left: bool = False) -> bool:
    """Shut a connection over which nothing was said: what is said later is not read. False where something was.

    ``is_left``: only one that the other end has closed. The descriptor stays open.
    """
    try:
        sock = socket.socket(fileno=os.dup(fd))  # the same connection, whatever becomes of the number
    except OSError as exc:
        return exc.errno == errno.EBADF  # gloo has closed it since
    with sock:
        if ends_of(sock.fileno()) != ends:
            return True  # it is shut by now: what has its number came later
        if (is_left and _tcp_info(sock)[0] != _LEFT) or _received_bytes(sock) > _SILENT_BYTES:
            return False
        with contextlib.suppress(OSError):
            drop_what_comes(sock)  # an end too: old versions of gloo cannot bear one that is closed at both ends
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # what has passed the filter before is not taken either
        return _received_bytes(sock) <= _SILENT_BYTES


def _received_bytes(sock: socket.socket) -> float:
    """How many have come, whether they were read or not; infinitely many where the kernel does not say."""
    info = _tcp_info(sock)
    if len(info) < _RECEIVED_BYTES_AT + _RECEIVED_BYTES.size:
        return math.inf
    received: int = _RECEIVED_BYTES.unpack_from(info, _RECEIVED_BYTES_AT)[0]
    return received


def _tcp_info(sock: socket.socket) -> bytes:
    return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _RECEIVED_BYTES_AT + _RECEIVED_BYTES.size)


def ports_listened_at(fds: Iterable[int]) -> set[int]:
    ports = set()
    for fd in fds:
        with contextlib.suppress(OSError), borrowed(fd) as sock:
            if is_listening(sock):
                ports.add(sock.getsockname()[1])
    return ports


def _is_here(near: Address, far: Address) -> bool:
    """The far end is on this machine, whatever the kernel's tables show."""
    return near[0] == far[0] or any(ipaddress.ip_address(host).is_loopback for host, _ in (near, far))


def _address(name: tuple[str, int]) -> Address:
    host = ipaddress.ip_address(name[0].partition("%")[0])
    return _plain(host.packed), name[1]


def _plain(packed: bytes) -> bytes:
    """An IPv4 address as such, also where a socket of IPv6 has it."""
    mapped = ipaddress.IPv6Address(packed).ipv4_mapped if len(packed) == 16 else None
    return mapped.packed if mapped else packed


def _read_holders(wanted: Collection[Ends]) -> dict[Ends, _Holder]:
    """Who holds the ``wanted`` connections, which are named by their near and far end. Raises: SessionError."""
    ports = {f"{near[1]:04X}" for near, _ in wanted}
    holders: dict[Ends, _Holder] = {}
    for table in _TABLES:
        try:
            with open(table, encoding="ascii") as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError as exc:
            if table == _TABLES[1] and isinstance(exc, FileNotFoundError):
                continue  # a machine without IPv6
            raise SessionError(f"who is connected to the process group cannot be checked: {exc}") from exc
        for _, near, far, state, _, _, _, uid, _, inode, *_ in rows:
            if near.rpartition(":")[2] in ports and (ends := (_parse(near), _parse(far))) in wanted:
                holder = _Holder(int(uid), int(inode), state)
                if holder.is_known or ends not in holders:
                    holders[ends] = holder
    return holders


def _parse(text: str) -> Address:
    host, _, port = text.partition(":")
    raw = bytes.fromhex(host)
    if sys.byteorder == "little":
        raw = b"".join(raw[start : start + _WORD_BYTES][::-1] for start in range(0, len(raw), _WORD_BYTES))
    return _plain(raw), int(port, 16)


def _name(uid: int) -> str:
    import pwd

    try:
        return f" ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return ""
