"""Trees of files, as they come by json_lines.py and are written.

A file is written beside its place and renamed when it is whole; when the other side hangs up, what is not whole is
removed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import platform
import re
import secrets
import stat
from collections.abc import Iterable, Iterator
from typing import IO, Any

from ..guarded import SEARCH
from .json_lines import FilesError, Talk, Untrue, as_size, check_name, clean, reason_of
from .letter_case import Names, ignores_case
from .sender import MOST_ENTRIES, MOST_NAMED, STAGING, STAGING_NAME, Progress, is_guarded

_STAGED = re.compile(r"archive|[0-9]+\.part")
_MOST_NAME_CHARS = 1 << 27  # of the folders that are made, which are remembered


class TreeWriter:
    """Writes files and folders below ``folder``, which is made; through no link, and over no folder.

    What is not whole yet stands in the folder ``staging``.
    On the way out nothing that is not whole is left, nor a folder that was made for it in vain; on the way in, what a
    process that was killed has left is removed.
    """

    def __init__(self, folder: str) -> None:
        self.folder = os.path.abspath(folder)
        self.staging = ""
        self.opened = self._opened_staging = -1  # descriptors
        self._made: list[str] = []
        self._checked: set[str] = set()
        self._count = 0
        self.ignores_case = False
        self._names = Names(self.folder)

    def __enter__(self) -> TreeWriter:
        try:
            self._make_folders(self.folder)
            self.opened = os.open(self.folder, SEARCH)
            self._make_staging()
            self.ignores_case = ignores_case(self.staging)
            self._remove_leftovers()
        except OSError as exc:
            self._remove_staging()
            self._close()
            self._remove_in_vain()
            raise FilesError(f"{self.folder} cannot be written to: {reason_of(exc)}") from exc
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._remove_staging()
        self._close()
        if kind is not None:
            self._remove_in_vain()

    def _make_staging(self) -> None:
        """Raises: OSError, also when others have put something in its place before it was opened."""
        name = f"{STAGING}{_this_machine()}{secrets.token_hex(4)}"
        os.mkdir(name, 0o700, dir_fd=self.opened)
        self.staging = os.path.join(self.folder, name)
        try:
            self._opened_staging = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self.opened)
        except OSError:
            with contextlib.suppress(OSError):  # another one has the name
                os.rmdir(name, dir_fd=self.opened)
            raise
        if not self._is_ours(self._opened_staging):
            os.close(self._opened_staging)
            self._opened_staging = -1
            raise PermissionError(errno.EPERM, "somebody else has put a folder in the place of ours")
        with contextlib.suppress(OSError):  # a file system without locks: it is not removed there either
            _lock(self._opened_staging)

    def _remove_leftovers(self) -> None:
        """Of processes of this machine, in a folder where nobody else can have put them."""
        found: list[str] = []
        with contextlib.suppress(OSError):  # it need not be one that can be listed
            found = os.listdir(self.folder)
        for name in found:
            is_one = name.startswith(STAGING + _this_machine()) and STAGING_NAME.fullmatch(name)
            if is_one and is_guarded(os.path.join(self.folder, name)):
                with contextlib.suppress(OSError), _opened_folder(name, self.opened) as left:
                    staged = os.listdir(left)  # something, or it may be one that is not locked yet
                    if staged and all(map(_STAGED.fullmatch, staged)):
                        _lock(left)
                        self._remove_opened(name, left)

    def _is_ours(self, opened: int) -> bool:
        """The folder is as it was made, not another one, perhaps of this user's too."""
        state = os.fstat(opened)
        if state.st_uid != os.geteuid() or os.listdir(opened):
            return False
        if not state.st_mode & 0o077:
            return True
        probe = os.open("probe", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=opened)
        try:
            return bool(os.fstat(probe).st_mode & 0o077)  # a file system that knows no modes
        finally:
            os.close(probe)
            os.unlink("probe", dir_fd=opened)

    def _close(self) -> None:
        for opened in (self.opened, self._opened_staging):
            if opened >= 0:
                os.close(opened)

    def _remove_staging(self) -> None:
        """Empty the folder that was made, whatever has its name now: in a folder of a group others can rename it."""
        if self._opened_staging < 0:
            return
        self._remove_opened(os.path.basename(self.staging), self._opened_staging)

    def _remove_opened(self, name: str, opened: int) -> None:
        for staged in os.listdir(opened):
            with contextlib.suppress(OSError):  # a folder that somebody has put there
                os.unlink(staged, dir_fd=opened)
        with contextlib.suppress(OSError):
            named = os.stat(name, dir_fd=self.opened, follow_symlinks=False)
            if os.path.samestat(named, os.fstat(opened)):
                os.rmdir(name, dir_fd=self.opened)

    def open_staged(self, name: str, *, mode: int = 0o600) -> IO[bytes]:
        """Make a file in the staging folder: in ours, whatever has its name now."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        handle = os.open(name, flags, 0o600 | mode & 0o666, dir_fd=self._opened_staging)
        return os.fdopen(handle, "w+b")

    def add_folder(self, name: str, mode: int) -> None:
        with self._opened_parent(f"{name}/_", mode=0o700 | mode):
            pass

    def has_folder(self, name: str) -> bool:
        """Whether one was made, or needed, for what has come."""
        return os.path.join(self.folder, *name.split("/")) in self._checked

    def add_file(self, name: str, size: int, mode: int, pieces: Iterable[bytes]) -> None:
        """``pieces`` have ``size`` bytes together. ``mode``: its own before; nobody else may do more."""
        place = os.path.join(self.folder, name)
        self.check_room(name, size)
        self._count += 1
        part = f"{self._count}.part"
        try:
            with self._explained(place), self.open_staged(part, mode=mode) as file:
                file.writelines(pieces)
                file.flush()
                status = os.fstat(file.fileno())
                if (wanted := _mode(status, mode)) != stat.S_IMODE(status.st_mode):
                    with contextlib.suppress(*[PermissionError] * bool(mode & 0o077)):  # a file system without modes
                        os.fchmod(file.fileno(), wanted)
            self._place(part, name)
        finally:
            with contextlib.suppress(OSError):
                os.unlink(part, dir_fd=self._opened_staging)

    def check_room(self, name: str, size: int) -> None:
        """Raises: FilesError when so much does not fit: it need not be tried."""
        disk = os.fstatvfs(self._opened_staging)
        free = disk.f_bavail * disk.f_frsize
        if size > free:
            place = os.path.join(self.folder, name)
            raise FilesError(f"{place} cannot be written: it has {size} bytes and {free} are free: the disk is full")

    def _place(self, staged: str, name: str) -> None:
        with self._opened_parent(name) as (parent, last), self._explained(os.path.join(self.folder, name)):
            os.replace(staged, last, src_dir_fd=self._opened_staging, dst_dir_fd=parent)

    @contextlib.contextmanager
    def _opened_parent(self, name: str, *, mode: int = 0o755) -> Iterator[tuple[int, str]]:
        """The folder that a name is in, opened, and the last part of the name; the folders on the way are made.

        None of them is a link: each is opened in the one before, as others may put a link in the place of one that has
        been looked at, where a group can write it.
        """
        if self.ignores_case:
            self._names.take(name)
        *parents, last = name.split("/")
        opened, place = os.dup(self.opened), self.folder
        try:
            for parent in parents:
                place = os.path.join(place, parent)
                with self._explained(place):
                    if place not in self._checked:
                        self._make_folder(parent, opened, place, mode)
                    inner = os.open(parent, SEARCH | os.O_NOFOLLOW, dir_fd=opened)
                    os.close(opened)
                    opened = inner
                self._checked.add(place)
            yield opened, last
        finally:
            os.close(opened)

    def _make_folder(self, name: str, parent: int, place: str, mode: int) -> None:
        """Raises: FilesError when something else stands there."""
        try:
            os.mkdir(name, mode, dir_fd=parent)
            self._made.append(place)
        except FileExistsError:
            found = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
            if stat.S_ISLNK(found):
                raise FilesError(
                    f"{place} is a link, and nothing is written through it: name the folder that it leads to"
                ) from None
            if not stat.S_ISDIR(found):
                raise FilesError(f"{place} is there and is no folder") from None

    def _make_folders(self, path: str) -> None:
        """Other writers may make the same ones at the same time."""
        if os.path.isdir(path):
            return
        self._make_folders(os.path.dirname(path))
        try:
            os.mkdir(path)
        except FileExistsError:
            if not os.path.isdir(path):
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)) from None
        else:
            self._made.append(path)

    def _remove_in_vain(self) -> None:
        for folder in reversed(self._made):
            with contextlib.suppress(OSError):  # there is something in it
                os.rmdir(folder)

    @contextlib.contextmanager
    def _explained(self, place: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise FilesError(f"{place} cannot be written: {reason_of(exc)}") from exc


def _this_machine() -> str:
    """And since when it runs: another one that has the same disk may not see what is locked here."""
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read()
    return hashlib.sha256(f"{platform.node()} {boot}".encode()).hexdigest()[:8]


def _lock(folder: int) -> None:
    """As long as it is open. Raises: OSError where another process has."""
    import fcntl

    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def _opened_folder(name: str, parent: int) -> Iterator[int]:
    """Raises: OSError, as for a link."""
    opened = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        yield opened
    finally:
        os.close(opened)


def _mode(status: os.stat_result, before: int) -> int:
    """Of a file that came to be with ``status``, and has had the mode ``before``."""
    mode = stat.S_IMODE(status.st_mode)
    if before & 0o100:
        mode |= (mode & 0o444) >> 2
    return mode & (0o700 | before)


@contextlib.contextmanager
def opened_parent(folder: int, name: str) -> Iterator[tuple[int, str]]:
    """The folder that ``name`` below an opened one is in, opened through no link, and the last part of the name.

    Raises: OSError, as where a link stands on the way.
    """
    *parents, last = name.split("/")
    opened = os.dup(folder)
    try:
        for parent in parents:
            inner = os.open(parent, SEARCH | os.O_NOFOLLOW, dir_fd=opened)
            os.close(opened)
            opened = inner
        yield opened, last
    finally:
        os.close(opened)


def receive_tree(
    talk: Talk, writer: TreeWriter, progress: Progress, *, roots: Iterable[str] | None = None
) -> tuple[int, tuple[str, ...]]:
    """Write what the other side sends, of which it has announced how much it is.

    Returns how many links and devices stayed where they are, and the names of some.
    Every name is one of ``roots``, or below it, in a folder that has come before: no more are made than were announced,
    and one for each of ``roots``. Raises: FilesError, Failed, Untrue.
    """
    allowed = None if roots is None else frozenset(roots)
    announced = talk.hear("tree")
    files, folders, size = (as_size(announced.get(key)) for key in ("files", "folders", "size"))
    if files + folders > MOST_ENTRIES:
        raise Untrue(f"{files + folders} files were announced, more than {MOST_ENTRIES}")
    progress.begin(size)
    name_chars = 0
    while True:
        said = talk.hear("folder", "file", "gone", "end")
        kind = said["type"]
        if kind == "end":
            names = said.get("skipped")
            names = names[:MOST_NAMED] if isinstance(names, list) else []
            return as_size(said.get("num_skipped")), tuple(map(clean, names))
        folders, files = folders - (kind == "folder"), files - (kind != "folder")
        if folders < 0 or files < 0:
            raise Untrue("more files came than were announced")
        if kind == "gone":
            continue
        name = _check_place(said.get("name"), writer, allowed)
        if kind == "folder":
            name_chars += len(name)
            if name_chars > _MOST_NAME_CHARS:
                raise Untrue(f"the names of its folders have more than {_MOST_NAME_CHARS} characters")
            writer.add_folder(name, _read_mode(said))
        else:
            _receive_file(talk, writer, progress, name, said)


def _check_place(said: object, writer: TreeWriter, allowed: frozenset[str] | None) -> str:
    name = check_name(said)
    if allowed is not None and name.partition("/")[0] not in allowed:
        raise Untrue(f"{name[:200]!r} was not asked for")
    parent = name.rpartition("/")[0]
    if "/" in parent and not writer.has_folder(parent):
        raise Untrue(f"{name[:200]!r} came before the folder that it is in")
    return name


def _read_mode(said: dict[str, Any]) -> int:
    mode = said.get("mode")
    return mode & 0o777 if isinstance(mode, int) else 0o600


def _receive_file(talk: Talk, writer: TreeWriter, progress: Progress, name: str, said: dict[str, Any]) -> None:
    size, left = as_size(said.get("size")), progress.total - progress.size
    if size > left:
        raise Untrue(f"{name!r} has {size} bytes, and {left} of those announced are left")

    def counted() -> Iterator[bytes]:
        for data in talk.read(size):
            yield data
            progress.advance(len(data))

    writer.add_file(name, size, _read_mode(said), counted())
    progress.end_file()
