"""Code, data, logs and checkpoints wherever they are: a path or a URL becomes a `Location`, on a file system of fsspec.

No URL leads to a host over SSH: fsspec's own ``sftp://`` takes any host key, a changed one too. Who has a connection
that has checked it hands over its file system (transport/ssh.py). No message and no repr has a password in it.
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

OnProgress = Callable[[int, int], object]  # bytes done, bytes in all (0: not known); it may run in a thread of fsspec's

# What is written there is whole or nothing, by itself, and a move would be a copy.
_WHOLE = {"s3", "s3a", "gs", "gcs", "az", "abfs", "hf", "oci", "oss", "http", "https"}
# What a URL may name. Of the others somebody has to hand over a file system, who knows what it does: sftp and ssh,
# whoever brings them, check no host key; ftp hides nothing; simplecache, dir, generic, zip, reference and dvc open
# further places, which a chain, the user's configuration or the content of a file names; dask lets others open them.
_TAKEN = {"file", "local", "memory"} | _WHOLE

_PART = ".detrain-part"  # ends the name of what is not whole yet
_HIDDEN = "***"
_URL = re.compile(r"\s*([^/\\~.:][^/\\]+?):(?=[/:])")  # one letter and a colon begin a path of Windows
_PIECES = re.compile(r"(?:(.*?:)(/+))?(.*)", re.DOTALL)
_USER = re.compile(r"[^/@]*:(?!\d+(?:[/?#]|$)).*@|[^/?#]*@", re.DOTALL)  # also of a password with / or @ in it
_CHUNK_BYTES = 1 << 20
_HAS_DIR_FD = os.open in os.supports_dir_fd  # not on Windows


@dataclass(frozen=True)
class Location:
    """A path on a file system of fsspec, made by `locate`; ``name`` is for people.

    What goes wrong there is a DetrainError with the name and the reason.
    """

    name: str
    path: str = field(repr=False)
    files: Any = field(repr=False)

    def __truediv__(self, name: str) -> Location:
        """What is called ``name`` in this folder, whoever says so. Raises: SpecError when that may be elsewhere."""
        if name in ("", ".", "..") or any(char in name for char in "/\\\0"):
            raise SpecError(f"'{printable(name)}' is not the name of a file in {self.name}")
        return Location(f"{self.name.rstrip('/')}/{printable(name)}", f"{self.path.rstrip('/')}/{name}", self.files)

    def exists(self) -> bool:
        """Whether a file or folder is there. A store that does not answer is an error, not a no."""
        with named_errors(self.name, "looked for"):
            try:
                self._fresh().info(self.path)
            except (FileNotFoundError, NotADirectoryError):
                return False
            return True

    def names(self) -> list[str]:
        """List what is in this folder, sorted, without what is not whole yet."""
        own = self.path.rstrip("/")
        with named_errors(self.name, "listed"):
            found = {each["name"].rstrip("/"): each["type"] for each in self._fresh().ls(self.path, detail=True)}
            if found.pop(own, "directory") != "directory":
                raise NotADirectoryError("it is a file")
        return sorted(path.rpartition("/")[2] for path in found if not path.endswith(_PART))

    def open(self, *, may_be_link: bool = True) -> Any:
        """Open the file to read.

        On this machine it has to be one: of a pipe nobody knows when it ends. Without ``may_be_link`` no link to one is
        taken: where others can write, they may have put it there, to what only the user can read. On another file
        system nobody looks. Raises: what that raises.
        """
        if not is_local(self.files):
            return self._fresh().open(self.path, "rb")
        return open_file(self.path, may_be_link=may_be_link)

    def read(self, *, limit_bytes: int, may_be_link: bool = True) -> bytes:
        """Read the whole file; ``may_be_link``: see `open`.

        Raises: DetrainError when it has more than ``limit_bytes``, of which no more is read.
        """
        data = bytearray()
        with named_errors(self.name, "read"), self.open(may_be_link=may_be_link) as file:
            while chunk := file.read(min(_CHUNK_BYTES, limit_bytes + 1 - len(data))):
                data += chunk
                if len(data) > limit_bytes:
                    raise DetrainError(f"{self.name} has more than {limit_bytes} bytes")
        return bytes(data)

    def write(self, data: bytes, *, may_be_link: bool = True) -> None:
        """Put a file there, whole or not at all, with the folders that it needs; one that is there is replaced.

        ``may_be_link``: see `whole_file`; on another file system nobody looks.
        """
        with named_errors(self.name, "written"):
            if is_local(self.files):
                with self._made_here(may_be_link=may_be_link) as file:
                    file.write(data)
            else:
                with self._staged() as part:
                    self.files.pipe_file(part, data)

    def put(self, source: str | os.PathLike[str], *, on_progress: OnProgress | None = None) -> None:
        """Copy a file of this machine there, as `write` does. Raises: SpecError when ``source`` is no file."""
        if not os.path.isfile(source):
            raise SpecError(f"{printable(os.fspath(source))} is no file")
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
        """Copy the file to ``target`` on this machine, whole or not at all, with the folders that it needs."""
        here = _here(os.fspath(target))
        with named_errors(here.name, "written"), here._staged() as part, named_errors(self.name, "read"):
            # that of the local file system tells no callback
            copy = partial(AbstractFileSystem.get_file, self.files) if is_local(self.files) else self._fresh().get_file
            copy(self.path, part, callback=_callback(on_progress))
            if os.path.isdir(part):  # what fsspec makes of a folder
                os.rmdir(part)
                raise IsADirectoryError("it is a folder")

    def _fresh(self) -> Any:
        """The file system, without what it remembers: others write there too."""
        self.files.invalidate_cache()
        return self.files

    def _made_here(self, *, may_be_link: bool = True) -> contextlib.AbstractContextManager[BinaryIO]:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        return whole_file(self.path, may_be_link=may_be_link)

    @contextlib.contextmanager
    def _staged(self) -> Iterator[str]:
        """Give the path to write to, beside the target: it becomes the target at the end of the block, or goes."""
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
            with contextlib.suppress(Exception):  # whatever a library raises: the first error is the one to tell
                self.files.rm_file(part)
            raise


def locate(where: str | os.PathLike[str], *, files: Any = None) -> Location:
    """Turn a path of this machine (``~`` is the home) or a URL into a location; no store is asked anything yet.

    With ``files``, a file system of fsspec, it is a path on that. What begins like a URL is one: ``./a::b`` is a file.
    Raises: SpecError for a URL that is refused or unknown, or needs a library that is not installed.
    """
    text = os.fsdecode(where)
    name = _name(text)
    if not text:
        raise SpecError("no path and no URL was given")
    if files is not None:
        path = files._strip_protocol(text)
        if "://" in text and path != text:  # nobody would look at the host in it
            raise SpecError(f"{name}: with a file system goes a path on it, not a URL")
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
    """Whether a path or a URL has a user, a password or a query in it: what no message shows, and no file keeps."""
    return _HIDDEN in _name(where)


def has_password_of_user(where: str) -> bool:
    """Whether a URL has a password before its host, or, over http, a user: that may be a token."""
    start, slashes, rest = _PIECES.fullmatch(where).groups(default="")  # type: ignore[union-attr]  # it matches all
    scheme, user = start.strip().lower(), _find_user(rest) if slashes else None
    if user is None or scheme in ("file:", "local:"):
        return False
    return ":" in user[0] or scheme in ("http:", "https:")


def needed_library(where: str) -> str:
    """What a machine has to have installed beside fsspec to open a URL, as ``s3fs``; empty where that is nothing."""
    begins = _URL.match(where)
    if begins is None:
        return ""
    protocol = begins[1].lower()
    module = str(known_implementations.get(protocol, {}).get("class", "")).partition(".")[0]
    return ("aiohttp" if protocol in ("http", "https") else "") if module == "fsspec" else module


def _check(protocol: str, rest: str, name: str) -> None:
    """Raises: SpecError for a URL that is not to be opened."""
    instead = "hand over the file system that is meant (files=)"
    if protocol in ("sftp", "ssh"):
        wrong = f"{protocol}:// would take any host key: {instead}, SshConnection.open_sftp_filesystem() gives it"
    elif "::" in f":{rest}":
        wrong = f"a chain of URLs is refused: {instead}"
    elif protocol not in _TAKEN and protocol in known_implementations:
        wrong = f"{protocol}:// is refused: {instead}"
    elif protocol not in _TAKEN:
        near = difflib.get_close_matches(protocol, sorted(_TAKEN)) or sorted(_TAKEN)
        wrong = f"its protocol is unknown: there is {', '.join(near)}"
    elif not rest.startswith(start := "///" if protocol in ("file", "local") else "//"):
        wrong = f"write {protocol}:{start}..."
    else:
        return
    raise SpecError(f"{name}: {wrong}")


def _here(path: str) -> Location:
    full = os.path.abspath(os.path.expanduser(path)).replace(os.sep, "/")
    return Location(printable(full), full, LocalFileSystem())


def _move(files: Any, part: str, target: str) -> None:
    """Put ``part`` in the place of a file ``target``, never into a folder of that name."""
    if isinstance(files, LocalFileSystem):
        with open(part, "rb+") as file:
            os.fsync(file.fileno())  # else a machine that goes down may leave an empty file there
        os.replace(part, target)
    elif files.isdir(target):
        raise IsADirectoryError("it is a folder")
    elif type(files).mv is AbstractFileSystem.mv:  # which takes [ or * in the name of a folder for a pattern
        files.cp_file(part, target)
        files.rm_file(part)
    else:
        files.mv(part, target)


def _find_user(rest: str) -> re.Match[str] | None:
    """What stands before a host; without an @ there is none, and to look at each colon of a long text takes minutes."""
    return _USER.match(rest) if "@" in rest else None


def _callback(on_progress: OnProgress | None) -> Callback:
    return Callback(hooks={"told": lambda size, done, **_: on_progress(done, size or 0)} if on_progress else None)


def _name(text: str) -> str:
    """A path or a URL for people: without user and password, and without what stands behind a ``?``."""
    start, slashes, rest = _PIECES.fullmatch(text).groups(default="")  # type: ignore[union-attr]  # it matches all
    if not slashes:
        return printable(text)
    user = _find_user(rest)
    if ":/" in rest or (user and "?" in user[0]):
        rest = _HIDDEN  # nobody can say where a password ends
    elif user:
        rest = f"{_HIDDEN}@{rest[user.end() :]}"
    head, query, _ = rest.partition("?")
    start = re.sub(".*@", f"{_HIDDEN}@", start, flags=re.DOTALL)
    return printable(f"{start}{slashes}{head}{query and '?' + _HIDDEN}")


@contextlib.contextmanager
def named_errors(
    name: str, done: str, *, kind_of: Callable[[Exception], type[DetrainError]] = lambda exc: DetrainError
) -> Iterator[None]:
    """What the libraries raise is a DetrainError; their text is left out where it may have what the name hides."""
    try:
        yield
    except DetrainError:
        raise
    except Exception as exc:  # they have no common one
        kind = kind_of(exc)
        if _HIDDEN in name:
            raise kind(f"{name} cannot be {done}: {type(exc).__name__}") from None
        absent = "it is not there" if isinstance(exc, FileNotFoundError) else ""
        reason = absent or getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
        raise kind(f"{name} cannot be {done}: {shown(reason)}") from exc


def shown(text: str, *, most: int = 200) -> str:
    """What a file or a store says, for a line of a message: without control characters, and no longer than that."""
    return printable(text[: most + 1])[:most]


def is_local(files: Any) -> bool:
    """Whether that file system is this machine's own, and nothing that somebody has built on it."""
    return type(files) is LocalFileSystem


@contextlib.contextmanager
def whole_file(path: str | os.PathLike[str], *, may_be_link: bool = True, mode: int = 0o777) -> Iterator[BinaryIO]:
    """Give a new file, which stands at ``path`` on this machine at the end of the block, whole, or not at all.

    It has the mode of the user's file that is there, else that of any new one, from its first byte on, since who opens
    it meanwhile reads on; and no more than ``mode`` allows.

    Its folder is opened once, through a link where that ``may_be_link``, and the file is a new one in there: where
    others can write, nothing is written through what they put in the place of either. A link at ``path`` is replaced.
    Raises: OSError, also for a device, or a link to one or to a stream, as /dev/stdout is: nothing takes its place.
    """
    folder, name = os.path.split(os.path.abspath(path))
    staged = f".{secrets.token_hex(8)}{_PART}"
    opened = os.open(folder, SEARCH | (0 if may_be_link else os.O_NOFOLLOW)) if _HAS_DIR_FD else None
    if opened is None:
        staged, name = os.path.join(folder, staged), os.path.join(folder, name)
    try:
        if may_be_link and _is_device(name, opened):
            raise OSError(errno.EINVAL, "it is no file")
        earlier = _mode_of_own(name, opened)
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)
        made = os.open(staged, flags, 0o666 & mode & (0o666 if earlier is None else earlier), dir_fd=opened)
        try:
            with open(made, "w+b") as file:
                if earlier is not None:
                    with contextlib.suppress(OSError):  # of a file system that has no modes
                        os.fchmod(made, earlier & mode)
                yield file
                file.flush()
                os.fsync(made)  # else a machine that goes down may leave an empty file there
            os.replace(staged, name, src_dir_fd=opened, dst_dir_fd=opened)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(staged, dir_fd=opened)
            raise
    finally:
        if opened is not None:
            os.close(opened)


def _is_device(name: str, opened: int | None) -> bool:
    """Whether a device is there, or a link to one, or to a stream of a process as /dev/stdout is."""
    try:
        kind = os.stat(name, dir_fd=opened).st_mode
        is_link = stat.S_ISLNK(os.stat(name, dir_fd=opened, follow_symlinks=False).st_mode)
        is_stream = is_link and os.readlink(name, dir_fd=opened).startswith("/proc/")
    except OSError:
        return False
    return is_stream or stat.S_ISCHR(kind) or stat.S_ISBLK(kind)


def _mode_of_own(name: str, opened: int | None) -> int | None:
    """That of the user's own file of that name, which a new one is to keep; None where there is none."""
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
