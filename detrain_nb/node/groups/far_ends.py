"""The owner of the other end of a TCP connection on this machine, read from /proc/net.

Any user of a machine can connect to a port on its loopback. gloo takes the first process that connects for the rank it
expects, and torch unpickles data from ranks. A connection that sends nothing, such as a port scanner's, is shut, and
the group is still used.
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
_LEFT = 8  # the kernel's CLOSE_WAIT: closed by the other end only
_OPEN_HERE = (1, _LEFT)
_RECEIVED_BYTES, _RECEIVED_BYTES_AT = struct.Struct("@Q"), 128  # in struct tcp_info
_SILENT_BYTES = 1  # closing a connection may count as one byte; a gloo peer's first message has eight
_SO_ATTACH_FILTER = 26
_DROP_ALL = ctypes.create_string_buffer(struct.pack("@HBBI", 0x06, 0, 0, 0), 8)  # classic BPF: return 0 bytes
_WORD_BYTES = 4  # the tables show an address as words in this machine's byte order
_LIMIT_S = 20.0  # for the other end to be accepted by its process
_GAP_S = 0.002

Address = tuple[bytes, int]
Ends = tuple[Address, Address]  # the near end and the far end


@dataclass(frozen=True)
class _Holder:
    """The owner of one end. ``inode`` is 0 if no process holds it: it is not accepted yet, or is already closed."""

    uid: int
    inode: int
    state: str

    @property
    def is_known(self) -> bool:
        return self.inode != 0 and self.state == _ESTABLISHED


def require_own(find: Callable[[], Iterable[int]], *, earlier_ports: Collection[int] = ()) -> None:
    """Check that a process of this user holds the far end of each connection among the sockets that ``find`` returns.

    Connections to other machines are not checked. A connection that was accepted by a listening socket among them, or
    at one of ``earlier_ports``, and over which no data has arrived, is shut.
    Raises: ForeignConnection; SessionError when an owner cannot be read, or is not found within 20 s.
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
                    f"(its port {far[1]}, ours {near[1]}): the group was ended, no data of that user was read"
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
    """Compare the uid; if other users may share it, also require a process that this one may inspect."""
    return holder.uid == os.geteuid() and (not shares_its_number() or _is_in_own_process(holder.inode))


def _is_in_own_process(inode: int) -> bool:
    for folder in glob.iglob("/proc/[0-9]*/fd"):
        with contextlib.suppress(OSError):  # another user's process, or it has exited
            for name in os.listdir(folder):
                with contextlib.suppress(OSError):
                    if os.readlink(os.path.join(folder, name)) == f"socket:[{inode}]":
                        return True
    return False


@contextlib.contextmanager
def borrowed(fd: int) -> Iterator[socket.socket]:
    """Yield a socket object for a descriptor, which stays open and in the hands of its owner.

    Needs no second descriptor. Raises: OSError when ``fd`` is closed or not a socket.
    """
    sock = socket.socket(fileno=fd)
    try:
        yield sock
    finally:
        sock.detach()


def is_listening(sock: socket.socket) -> bool:
    """Return whether a socket accepts TCP connections. Raises: OSError."""
    return sock.family in TCP and bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def ends_of(fd: int) -> Ends | None:
    """Return the two ends of a TCP connection; None if ``fd`` is not one, not connected, or shut at this end.

    Needs no second descriptor: another user may have used them up. Raises: OSError when the ends cannot be read.
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
    """Have the kernel drop everything that arrives at a socket from now on. Raises: OSError where it cannot."""
    program = struct.pack("@HP", 1, ctypes.addressof(_DROP_ALL))  # struct sock_fprog
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)


def _shut_if_silent(fd: int, ends: Ends, *, is_left: bool = False) -> bool:
    """Shut a connection over which no data has arrived, so that later data is not read; returns False if data has.

    ``is_left``: shut it only if the other end has closed it. The descriptor stays open.
    """
    try:
        sock = socket.socket(fileno=os.dup(fd))  # the same connection, even if the descriptor is reused
    except OSError as exc:
        return exc.errno == errno.EBADF  # gloo has closed it since
    with sock:
        if ends_of(sock.fileno()) != ends:
            return True  # it was shut already, and its descriptor reused
        if (is_left and _tcp_info(sock)[0] != _LEFT) or _received_bytes(sock) > _SILENT_BYTES:
            return False
        with contextlib.suppress(OSError):
            drop_what_comes(sock)  # drops a FIN too: old versions of gloo fail if both ends are closed
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)  # data that arrived before the filter is not read either
        return _received_bytes(sock) <= _SILENT_BYTES


def _received_bytes(sock: socket.socket) -> float:
    """Return how many bytes have arrived, read or not; infinity if the kernel does not report it."""
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
    """Check by its address whether the far end is on this machine."""
    return near[0] == far[0] or any(ipaddress.ip_address(host).is_loopback for host, _ in (near, far))


def _address(name: tuple[str, int]) -> Address:
    host = ipaddress.ip_address(name[0].partition("%")[0])
    return _plain(host.packed), name[1]


def _plain(packed: bytes) -> bytes:
    """Convert an IPv4-mapped IPv6 address to IPv4; returns other addresses unchanged."""
    mapped = ipaddress.IPv6Address(packed).ipv4_mapped if len(packed) == 16 else None
    return mapped.packed if mapped else packed


def _read_holders(wanted: Collection[Ends]) -> dict[Ends, _Holder]:
    """Find the holders of the ``wanted`` connections, given by near and far end. Raises: SessionError."""
    ports = {f"{near[1]:04X}" for near, _ in wanted}
    holders: dict[Ends, _Holder] = {}
    for table in _TABLES:
        try:
            with open(table, encoding="ascii") as file:
                rows = [line.split() for line in file.readlines()[1:]]
        except OSError as exc:
            if table == _TABLES[1] and isinstance(exc, FileNotFoundError):
                continue  # a machine without IPv6
            raise SessionError(f"the owners of the process group's connections cannot be checked: {exc}") from exc
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
