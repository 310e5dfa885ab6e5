"""Files of a host over an SSH connection that is open already, as fsspec knows them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from .ssh_socket import clean

if TYPE_CHECKING:
    import paramiko

__all__ = ["filesystem_class"]

_SFTP_READ_BYTES = 32 << 10  # what every server gives at once
_SFTP_AHEAD_BYTES = 4 << 20  # of what is asked for before the first of it has come


@functools.cache
def filesystem_class() -> type[Any]:
    from fsspec.implementations.sftp import SFTPFileSystem

    class SshFileSystem(SFTPFileSystem):  # type: ignore[misc]  # fsspec is untyped
        """Files over a connection that is open already; never one of fsspec's own, which checks no host key."""

        cachable = False

        def __init__(self, sftp: paramiko.SFTPClient, host: str) -> None:
            self._sftp = sftp
            super().__init__(host)

        def _connect(self) -> None:
            self.ftp = self._sftp

        def put_file(self, lpath: str, rpath: str, callback: Any = None, **kwargs: Any) -> None:
            """fsspec's own tells no callback, and looks at every folder on the way. Raises: OSError."""
            with _sftp_errors():
                try:
                    self.ftp.put(lpath, rpath, _told(callback))
                except FileNotFoundError:
                    self.makedirs(self._parent(rpath), exist_ok=True)
                    self.ftp.put(lpath, rpath, _told(callback))

        def get_file(self, rpath: str, lpath: str, callback: Any = None, **kwargs: Any) -> None:
            """paramiko's own leaves a thread behind that asks for the rest when a copy is given up. Raises: OSError."""
            tell = _told(callback)
            with _sftp_errors(), self.ftp.open(rpath, "rb") as there, open(lpath, "wb") as here:
                size = there.stat().st_size or 0
                for start in range(0, size, _SFTP_AHEAD_BYTES):
                    if tell:
                        tell(start, size)
                    end = min(size, start + _SFTP_AHEAD_BYTES)
                    offsets = range(start, end, _SFTP_READ_BYTES)
                    here.writelines(there.readv([(at, min(_SFTP_READ_BYTES, end - at)) for at in offsets]))
                if here.tell() != size:
                    raise OSError(f"{rpath}: {here.tell()} of {size} bytes came")
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


def _told(callback: Any) -> Callable[[int, int], object] | None:
    """What paramiko calls with the bytes that are done, and those in all, for a callback of fsspec."""

    def tell(done: int, size: int) -> None:
        if callback.size != size:
            callback.set_size(size)
        callback.absolute_update(done)

    return tell if callback is not None else None


@contextlib.contextmanager
def _sftp_errors() -> Iterator[None]:
    """Whatever goes wrong is an OSError, as with other files."""
    import paramiko

    try:
        yield
    except (paramiko.SSHException, paramiko.SFTPError, EOFError) as exc:
        raise OSError(clean(exc)) from exc
