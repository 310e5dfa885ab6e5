"""Code, data, logs and checkpoints at a path or a URL, which becomes a `Location` on a file system of fsspec.

URLs of hosts over SSH are refused: fsspec's own ``sftp://`` accepts any host key, even a changed one. A caller with a
connection whose host key was checked passes its file system instead (transport/ssh.py). No message and no repr
contains a password.
"""

from __future__ import annotations

import contextlib
import difflib
import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

from fsspec.callbacks import Callback
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem
from fsspec.registry import known_implementations
from fsspec.spec import AbstractFileSystem

from .errors import DetrainError, SpecError
from .guarded import SEARCH, open_file
from .text import printable

__all__ = [
    "Location",
    "OnProgress",
    "has_password",
    "has_password_of_user",
    "locate",
    "named_errors",
    "needed_library",
    "replace_file",
    "shown",
    "whole_file",
]

OnProgress = Callable[[int, int], object]  # bytes done, bytes in all (0: unknown); may be called in a thread of fsspec

# Writes there are atomic by themselves, and a move would be a copy.
_WHOLE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "hf", "oci", "oss", "http", "https"}
# The protocols that a URL may name. For others the caller must pass a file system, and knows what that does: sftp and
# ssh check no host key, whoever implements them; ftp encrypts nothing; simplecache, dir, generic, zip, reference and
# dvc open further places, named by a chain, the user's configuration or a file; dask has other hosts open them.
_TAKEN = {"file", "local", "memory"} | _WHOLE

_PART = ".detrain-part"  # the suffix of incomplete files
_HIDDEN, _NOT_FOUND = "***", 404  # replaces secrets; HTTP status
_URL = re.compile(r"\s*([^/\\~.:][^/\\]+?):(?=[/:])")  # one letter and a colon begin a Windows path
_PIECES = re.compile(r"(?:(.*?:)(/+))?(.*)", re.DOTALL)
_USER = re.compile(r"[^/@]*:(?!\d+(?:[/?#]|$)).*@|[^/?#]*@", re.DOTALL)  # also of a password with / or @ in it
_CHUNK_BYTES = 1 << 20
_HAS_DIR_FD = os.open in os.supports_dir_fd  # not on Windows


@dataclass(frozen=True)
class Location:
    """A path on a file system of fsspec, made by `locate`; ``name`` is its form for messages.

    Every failure there is raised as a DetrainError with the name and the reason.
    """

    name: str
    path: str = field(repr=False)
    files: Any = field(repr=False)

    def __truediv__(self, name: str) -> Location:
        """Return the entry ``name`` of this folder; ``name`` may be untrusted.

        Raises: SpecError when the name could lead out of the folder.
        """
        if name in ("", ".", "..") or any(char in name for char in "/\\\0"):
            raise SpecError(f"'{printable(name)}' is not the name of a file in {self.name}")
        return Location(f"{self.name.rstrip('/')}/{printable(name)}", f"{self.path.rstrip('/')}/{name}", self.files)

    def exists(self) -> bool:
        """Return whether a file or folder exists. Raises: DetrainError when the store does not answer."""
        with named_errors(self.name, "looked for"):
            try:
                self._fresh().info(self.path)
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

    def names(self) -> list[str]:
        """List the names in this folder, sorted, without incomplete files."""
        own = self.path.rstrip("/")
        with named_errors(self.name, "listed"):
            found = {each["name"].rstrip("/"): each["type"] for each in self._fresh().ls(self.path, detail=True)}
            if found.pop(own, "directory") != "directory":
                raise NotADirectoryError("it is a file")
        return sorted(path.rpartition("/")[2] for path in found if not path.endswith(_PART))

    def open(self, *, may_be_link: bool = True) -> Any:
        """Open the file for reading.

        On this machine it must be a regular file, as a pipe may never end. Without ``may_be_link`` a link is refused:
        in a folder that others can write to, it could point at a file that only this user can read. On other file
        systems neither is checked. Raises: what the file system raises.
        """
        if not is_local(self.files):
            return self._fresh().open(self.path, "rb")
        return open_file(self.path, may_be_link=may_be_link)

    def read(self, *, limit_bytes: int, may_be_link: bool = True) -> bytes:
        """Read the whole file; ``may_be_link``: see `open`.

        Raises: DetrainError when it is larger than ``limit_bytes``; reading stops there.
        """
        data = bytearray()
        with named_errors(self.name, "read"), self.open(may_be_link=may_be_link) as file:
            while chunk := file.read(min(_CHUNK_BYTES, limit_bytes + 1 - len(data))):
                data += chunk
                if len(data) > limit_bytes:
                    raise DetrainError(f"{self.name} is larger than {limit_bytes} bytes")
        return bytes(data)

    def write(self, data: bytes, *, may_be_link: bool = True) -> None:
        """Write a file atomically and create missing parent folders; an existing file is replaced.

        ``may_be_link``: see `whole_file`; not checked on other file systems.
        """
        with named_errors(self.name, "written"):
            if is_local(self.files):
                with self._made_here(may_be_link=may_be_link) as file:
                    file.write(data)
            else:
                with self._staged() as part:
                    self.files.pipe_file(part, data)

    def put(self, source: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> None:
        """Copy a file of this machine there, as `write` does. Raises: SpecError when ``source`` is not a file."""
        if not os.path.isfile(source):
            raise SpecError(f"{printable(os.fspath(source))} is not a file")
        with named_errors(self.name, "written"):
            if is_local(self.files):
                with self._made_here() as file, open(source, "rb") as given:
                    size = os.fstat(given.fileno()).st_size
                    while chunk := given.read(_CHUNK_BYTES):
                        file.write(chunk)
                        if on_progress:
                            on_progress(file.tell(), size)
            else:
                with self._staged() as part:
                    self.files.put_file(os.fspath(source), part, callback=_callback(on_progress))

    def get(self, target: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> None:
        """Copy the file atomically to ``target`` on this machine and create missing parent folders."""
        here = _here(os.fspath(target))
        with named_errors(here.name, "written"), here._staged() as part, named_errors(self.name, "read"):
            # the local file system's own get_file calls no callback
            copy = partial(AbstractFileSystem.get_file, self.files) if is_local(self.files) else self._fresh().get_file
            copy(self.path, part, callback=_callback(on_progress))
            if os.path.isdir(part):  # fsspec has copied a folder as one
                os.rmdir(part)
                raise IsADirectoryError("it is a folder")

    def _fresh(self) -> Any:
        """Return the file system with its cache cleared, as others write there too."""
        self.files.invalidate_cache()
        return self.files

    def _made_here(self, *, may_be_link: bool = True) -> contextlib.AbstractContextManager[BinaryIO]:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        return whole_file(self.path, may_be_link=may_be_link)

    @contextlib.contextmanager
    def _staged(self) -> Iterator[str]:
        """Yield a path next to the target; at the end of the block it replaces the target, or is removed on failure."""
        protocol = self.files.protocol
        if _WHOLE.intersection([protocol] if isinstance(protocol, str) else protocol):
            yield self.path
            return
        folder, slash, _ = self.path.rpartition("/")
        part = f"{folder}{slash}.{secrets.token_hex(8)}{_PART}"
        if folder:
            self.files.makedirs(folder, exist_ok=True)
        try:
            yield part
            _move(self.files, part, self.path)
        except BaseException:
            with contextlib.suppress(Exception):  # whatever a library raises: the first error matters
                self.files.rm_file(part)
            raise


def locate(where: str | os.PathLike[str], *, files: Any = None) -> Location:
    """Turn a path of this machine (``~`` is the home folder) or a URL into a location, without contacting a store.

    With ``files``, a file system of fsspec, ``where`` is a path on that. Anything that begins like a URL is one; write
    ``./a::b`` for a file of that name.
    Raises: SpecError for an empty path, or a URL that is refused or unknown, or needs a library that is not installed.
    """
    text = os.fsdecode(where)
    name = _name(text)
    if not text:
        raise SpecError("the path is empty: give a path or a URL")
    if files is not None:
        path = files._strip_protocol(text)
        if "://" in text and path != text:  # the host in it would be ignored
            raise SpecError(f"{name}: with files= give a path on that file system, not a URL")
        return Location(name, path, files)
    begins = _URL.match(text) if isinstance(where, str) else None
    if begins is None:
        return _here(text)
    protocol, rest = begins[1].lower(), text[begins.end() :]
    _check(protocol, rest, name)
    if protocol in ("file", "local"):
        return _here(rest[2:])
    with named_errors(name, "opened"):
        try:
            opened, path = url_to_fs(f"{protocol}:{rest}")
        except ImportError as exc:
            raise SpecError(f"{name}: {exc}") from exc
    return Location(name, path, opened)


def has_password(where: str) -> bool:
    """Return whether a path or URL contains a user, password or query, which messages hide and files must not keep."""
    return _HIDDEN in _name(where)


def has_password_of_user(where: str) -> bool:
    """Return whether a URL has a password before its host, or over http(s) a user, which may be a token."""
    start, slashes, rest = _PIECES.fullmatch(where).groups(default="")  # type: ignore[union-attr]  # it matches all
    scheme, user = start.strip().lower(), _find_user(rest) if slashes else None
    if user is None or scheme in ("file:", "local:"):
        return False
    return ":" in user[0] or scheme in ("http:", "https:")


def needed_library(where: str) -> str:
    """Return the library that opening a URL needs besides fsspec, such as ``s3fs``; empty when none."""
    begins = _URL.match(where)
    if begins is None:
        return ""
    protocol = begins[1].lower()
    module = str(known_implementations.get(protocol, {}).get("class", "")).partition(".")[0]
    return ("aiohttp" if protocol in ("http", "https") else "") if module == "fsspec" else module


def _check(protocol: str, rest: str, name: str) -> None:
    """Check that a URL may be opened. Raises: SpecError."""
    instead = "pass a file system of fsspec (files=)"
    if protocol in ("sftp", "ssh"):
        wrong = f"{protocol}:// would accept any host key: {instead}, as from SshConnection.open_sftp_filesystem()"
    elif "::" in f":{rest}":
        wrong = f"a chain of URLs is refused: {instead}"
    elif protocol not in _TAKEN and protocol in known_implementations:
        wrong = f"{protocol}:// is refused: {instead}"
    elif protocol not in _TAKEN:
        near = difflib.get_close_matches(protocol, sorted(_TAKEN)) or sorted(_TAKEN)
        wrong = f"unknown protocol: use one of {', '.join(near)}"
    elif not rest.startswith(start := "///" if protocol in ("file", "local") else "//"):
        wrong = f"write {protocol}:{start}..."
    else:
        return
    raise SpecError(f"{name}: {wrong}")


def _here(path: str) -> Location:
    full = os.path.abspath(os.path.expanduser(path)).replace(os.sep, "/")
    return Location(printable(full), full, LocalFileSystem())


def _move(files: Any, part: str, target: str) -> None:
    """Move ``part`` to ``target``, replacing a file but never moving into a folder of that name."""
    if isinstance(files, LocalFileSystem):
        with open(part, "rb+") as file:
            os.fsync(file.fileno())  # else a crash of the machine may leave an empty file
        os.replace(part, target)
    elif files.isdir(target):
        raise IsADirectoryError("it is a folder")
    elif type(files).mv is AbstractFileSystem.mv:  # which reads [ or * in a folder's name as a pattern
        files.cp_file(part, target)
        files.rm_file(part)
    else:
        files.mv(part, target)


def _find_user(rest: str) -> re.Match[str] | None:
    """Match the user part before a host; only with an @, as the regex takes minutes on a long text of colons."""
    return _USER.match(rest) if "@" in rest else None


def _callback(on_progress: OnProgress | None) -> Callback:
    return Callback(hooks={"told": lambda size, done, **_: on_progress(done, size or 0)} if on_progress else None)


def _name(text: str) -> str:
    """Format a path or URL for messages, with user, password and query hidden."""
    start, slashes, rest = _PIECES.fullmatch(text).groups(default="")  # type: ignore[union-attr]  # it matches all
    if not slashes:
        return printable(text)
    user = _find_user(rest)
    if ":/" in rest or (user and "?" in user[0]):
        rest = _HIDDEN  # it is ambiguous where a password ends
    elif user:
        rest = f"{_HIDDEN}@{rest[user.end() :]}"
    head, query, _ = rest.partition("?")
    start = re.sub(".*@", f"{_HIDDEN}@", start, flags=re.DOTALL)
    return printable(f"{start}{slashes}{head}{query and '?' + _HIDDEN}")


@contextlib.contextmanager
def named_errors(
    name: str, done: str, *, kind_of: Callable[[Exception], type[DetrainError]] = lambda exc: DetrainError
) -> Iterator[None]:
    """Turn any exception of a library into a DetrainError; its text is dropped when it may show a hidden secret.

    The message is ``NAME cannot be DONE: REASON``; ``kind_of`` chooses the exception's class.
    """
    try:
        yield
    except DetrainError:
        raise
    except Exception as exc:  # the libraries share no base class
        if _HIDDEN in name:
            raise kind_of(exc)(f"{name} cannot be {done}: {type(exc).__name__}") from None
        why = (isinstance(exc, FileNotFoundError) and exc.__cause__) or exc  # fsspec raises it for any HTTP error, too
        is_absent = isinstance(why, FileNotFoundError) or getattr(why, "status", 0) == _NOT_FOUND
        reason = "it does not exist" if is_absent else getattr(why, "strerror", None) or str(why) or type(why).__name__
        raise kind_of(exc)(f"{name} cannot be {done}: {shown(reason)}") from exc


def shown(text: str, *, most: int = 200) -> str:
    """Clean text of a file or a store for a message: no control characters, at most ``most`` characters."""
    return printable(text[: most + 1])[:most]


def is_local(files: Any) -> bool:
    """Return whether a file system is fsspec's plain local one, not a class derived from it."""
    return type(files) is LocalFileSystem


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], *, may_be_link: bool = True, mode: int = 0o777) -> Iterator[BinaryIO]:
    """Yield a new file that replaces ``path`` on this machine at the end of the block; on failure nothing changes.

    The file has its final mode from the first byte on, as another process may open it early: the mode of the user's
    existing file, else the usual one, limited by ``mode``.

    The folder is opened once, through a link only when ``may_be_link``, and the file is created inside it: if others
    replace the folder or the file, nothing is written through their replacement. A link at ``path`` is replaced.
    Raises: OSError, also for a device, or a link to a device or a stream such as /dev/stdout: these are not replaced.
    """
    folder, name = os.path.split(os.path.abspath(path))
    staged = f".{secrets.token_hex(8)}{_PART}"
    opened = os.open(folder, SEARCH | (0 if may_be_link else os.O_NOFOLLOW)) if _HAS_DIR_FD else None
    if opened is None:
        staged, name = os.path.join(folder, staged), os.path.join(folder, name)
    try:
        if may_be_link and _is_device(name, opened):
            raise OSError(errno.EINVAL, "it is not a regular file")
        earlier = _mode_of_own(name, opened)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        made = os.open(staged, flags, 0o666 & mode & (0o666 if earlier is None else earlier), dir_fd=opened)
        try:
            with open(made, "w+b") as file:
                if earlier is not None:
                    with contextlib.suppress(OSError):  # a file system without modes
                        os.fchmod(made, earlier & mode)
                yield file
                file.flush()
                os.fsync(made)  # else a crash of the machine may leave an empty file
            os.replace(staged, name, src_dir_fd=opened, dst_dir_fd=opened)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(staged, dir_fd=opened)
            raise
    finally:
        if opened is not None:
            os.close(opened)


def _is_device(name: str, opened: int | None) -> bool:
    """Return whether the name is a device, or a link to one or to a stream of a process such as /dev/stdout."""
    try:
        kind = os.stat(name, dir_fd=opened).st_mode
        is_link = stat.S_ISLNK(os.stat(name, dir_fd=opened, follow_symlinks=False).st_mode)
        is_stream = is_link and os.readlink(name, dir_fd=opened).startswith("/proc/")
    except OSError:
        return False
    return is_stream or stat.S_ISCHR(kind) or stat.S_ISBLK(kind)


def _mode_of_own(name: str, opened: int | None) -> int | None:
    """Return the mode of the user's own file of that name, for the new file; None when there is none."""
    if os.name != "posix":
        return None
    try:
        state = os.stat(name, dir_fd=opened, follow_symlinks=False)
    except OSError:
        return None
    return stat.S_IMODE(state.st_mode) if stat.S_ISREG(state.st_mode) and state.st_uid == os.geteuid() else None


def replace_file(path: Path, text: str, *, mode: int = 0o777) -> None:
    """Write text to ``path`` as `whole_file` does. Raises: OSError."""
    with whole_file(path, mode=mode) as file:
        file.write(text.encode("utf-8"))
