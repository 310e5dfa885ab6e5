"""Files of a host over an open SSH connection, as an fsspec filesystem."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ..errors import TransportError
from .ssh_socket import clean

if TYPE_CHECKING:
    import paramiko

__all__ = ["MOST_NAMES", "client_class", "filesystem_class"]

_SFTP_READ_BYTES = 32 << 10  # every server returns this much per read
_SFTP_AHEAD_BYTES = 4 << 20  # requested before the first data has arrived
_REPLY_BYTES = 256 << 10  # the largest packet, as in OpenSSH
MOST_NAMES = 100_000  # in a folder
_MOST_EMPTY = 1000  # replies without a name in them, per connection
_INIT_NUMBER = (3).to_bytes(4, "big")  # the first request has the version in the place of a request number
_SIZES_OF_ATTRIBUTES = {1: 8, 2: 8, 4: 4, 8: 8}  # in bytes, by flag: size, owner, mode, times
_HAS_MORE = 1 << 31  # flag of extended attributes, pairs of strings


@functools.cache
def client_class() -> Callable[[paramiko.Channel, str], paramiko.SFTPClient]:
    """Return a subclass of paramiko's SFTP client that trusts no number from the server."""
    import paramiko
    from paramiko.sftp import CMD_NAME, CMD_READ, CMD_VERSION

    class Client(paramiko.SFTPClient):
        """SFTP client that closes the connection to a server that sends more than requested, or unrequested replies."""

        def __init__(self, channel: paramiko.Channel, where: str) -> None:
            self._channel, self._where, self._is_sftp = channel, where, False
            self._num_empty = 0
            self._asked: dict[bytes, int] = {}  # open requests by number, with the bytes of data that each allows
            super().__init__(channel)

        def _send_packet(self, kind: int, packet: Any) -> None:
            said = packet.asbytes()
            self._asked[said[:4]] = int.from_bytes(said[-4:], "big") if kind == CMD_READ else 0
            super()._send_packet(kind, packet)  # type: ignore[misc]  # missing in the stubs

        def _read_packet(self) -> tuple[int, bytes]:
            size = int.from_bytes(self._read_all(4), "big")  # type: ignore[attr-defined]
            if not 5 <= size <= _REPLY_BYTES:
                self._leave(f"a reply of {size} bytes")
            data = self._read_all(size)  # type: ignore[attr-defined]
            kind, said = data[0], data[1:]
            allowed = self._asked.pop(_INIT_NUMBER if kind == CMD_VERSION else said[:4], None)
            self._num_empty += kind == CMD_NAME and _number_at(said, 4) == 0
            if allowed is None:
                self._leave("a reply to no request")
            elif self._num_empty > _MOST_EMPTY:
                self._leave(f"more than {_MOST_EMPTY} empty lists of names")
            elif not _is_within(kind, said, allowed):
                self._leave(f"more than was requested, in {len(data)} bytes")
            self._is_sftp = True
            return kind, said

        def _leave(self, what: str) -> None:
            """Raise TransportError after closing the connection; SFTPError for what may be a shell's output."""
            if not self._is_sftp:
                raise paramiko.SFTPError(f"not SFTP, but {what}")
            self._channel.get_transport().close()
            raise TransportError(f"{self._where}: its SFTP server sent {what}: the connection was closed")

    return Client


def _is_within(kind: int, said: bytes, allowed: int) -> bool:
    """Return True when a reply has at most ``allowed`` bytes of data, and all names and attributes it announces."""
    from paramiko.sftp import CMD_ATTRS, CMD_DATA, CMD_NAME

    if kind == CMD_DATA:
        return len(said) - 8 <= allowed
    if kind == CMD_ATTRS:
        return _skip_attributes(said, 4) <= len(said)
    at = 8
    for _ in range(_number_at(said, 4) if kind == CMD_NAME else 0):
        at = _skip_attributes(said, _skip_text(said, _skip_text(said, at)))
        if at > len(said):
            return False
    return True


def _skip_attributes(said: bytes, at: int) -> int:
    flags = _number_at(said, at)
    at += 4 + sum(size for flag, size in _SIZES_OF_ATTRIBUTES.items() if flags & flag)
    if flags & _HAS_MORE:
        pairs, at = _number_at(said, at), at + 4
        for _ in range(pairs):
            at = _skip_text(said, _skip_text(said, at))
            if at > len(said):
                break
    return at


def _skip_text(said: bytes, at: int) -> int:
    return at + 4 + _number_at(said, at)


def _number_at(said: bytes, at: int) -> int:
    return int.from_bytes(said[at : at + 4], "big")


@functools.cache
def filesystem_class() -> type[Any]:
    from fsspec.implementations.sftp import SFTPFileSystem

    class SshFileSystem(SFTPFileSystem):  # type: ignore[misc]  # fsspec is untyped
        """Files over an open connection; never over one of fsspec's own, which would check no host key."""

        cachable = False

        def __init__(self, sftp: paramiko.SFTPClient, host: str, most_names: int) -> None:
            self._sftp, self._most_names = sftp, most_names
            super().__init__(host)

        def _connect(self) -> None:
            self.ftp = self._sftp

        def ls(self, path: str, detail: bool = False, **kwargs: Any) -> Any:
            """List a folder; unlike fsspec's own, with a limit on names. Raises: OSError."""
            path = self._strip_protocol(path)
            with _sftp_errors():
                found = list(itertools.islice(self.ftp.listdir_iter(path), self._most_names + 1))
            if len(found) > self._most_names:
                raise OSError(f"{path} has more than {self._most_names} names")
            entries = [self._decode_stat(attributes, path) for attributes in found]
            return entries if detail else sorted(entry["name"] for entry in entries)

        def put_file(self, lpath: str, rpath: str, callback: Any = None, **kwargs: Any) -> None:
            """Upload a file; unlike fsspec's own, call the callback and do not stat every parent. Raises: OSError."""
            with _sftp_errors():
                try:
                    self.ftp.put(lpath, rpath, _told(callback))
                except FileNotFoundError:
                    self.makedirs(self._parent(rpath), exist_ok=True)
                    self.ftp.put(lpath, rpath, _told(callback))

        def get_file(self, rpath: str, lpath: str, callback: Any = None, **kwargs: Any) -> None:
            """Download a file; paramiko's own leaves a thread that keeps reading after an abort. Raises: OSError."""
            tell = _told(callback)
            with _sftp_errors(), self.ftp.open(rpath, "rb") as there, open(lpath, "wb") as here:
                _ask_in_this_thread(there)
                size = there.stat().st_size or 0
                for start in range(0, size, _SFTP_AHEAD_BYTES):
                    if tell:
                        tell(start, size)
                    end = min(size, start + _SFTP_AHEAD_BYTES)
                    offsets = range(start, end, _SFTP_READ_BYTES)
                    here.writelines(there.readv([(at, min(_SFTP_READ_BYTES, end - at)) for at in offsets]))
                if here.tell() != size:
                    raise OSError(f"{rpath}: only {here.tell()} of {size} bytes arrived")
                if tell:
                    tell(size, size)

        def info(self, path: str) -> Any:
            with _sftp_errors():
                return super().info(path)

        def rm_file(self, path: str) -> None:
            with _sftp_errors():
                self.ftp.remove(path)

        def close(self) -> None:
            with _sftp_errors():
                self.ftp.close()

    return SshFileSystem


def _ask_in_this_thread(file: Any) -> None:
    """Send read-ahead requests from the calling thread; paramiko's thread would print an error on a broken link."""

    def start_prefetch(chunks: list[tuple[int, int]], most: int | None = None) -> None:
        file._prefetching, file._prefetch_done = True, False
        file._prefetch_thread(chunks, most)

    file._start_prefetch = start_prefetch


def _told(callback: Any) -> Callable[[int, int], object] | None:
    """Return a progress function for paramiko (bytes done, bytes in total) that updates a callback of fsspec."""

    def tell(done: int, size: int) -> None:
        if callback.size != size:
            callback.set_size(size)
        callback.absolute_update(done)

    return tell if callback is not None else None


@contextlib.contextmanager
def _sftp_errors() -> Iterator[None]:
    """Raise OSError for all SFTP failures, as for other files."""
    import paramiko

    try:
        yield
    except (paramiko.SSHException, paramiko.SFTPError, EOFError, UnicodeDecodeError) as exc:  # the last for bad names
        raise OSError(clean(exc)) from exc
