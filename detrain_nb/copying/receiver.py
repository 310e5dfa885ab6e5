"""Trees of files, received through json_lines.py and written to disk.

A file is written to a staging folder and moved into place when it is complete. If the other side hangs up, incomplete
files are removed.
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
_MOST_NAME_CHARS = 1 << 27  # of all folders made, whose names are kept in memory


class TreeWriter:
    """A writer of files and folders below ``folder``, which it makes; follows no links and replaces no folders.

    Incomplete files are kept in the folder ``staging``. On entry, leftovers of killed processes are removed; on exit,
    incomplete files are, and after an error also the empty folders that were made.
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
        """Make and open the staging folder. Raises: OSError, also when others replaced it before it was opened."""
        name = f"{STAGING}{_this_machine()}{secrets.token_hex(4)}"
        os.mkdir(name, 0o700, dir_fd=self.opened)
        self.staging = os.path.join(self.folder, name)
        try:
            self._opened_staging = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=self.opened)
        except OSError:
            with contextlib.suppress(OSError):  # another folder has the name
                os.rmdir(name, dir_fd=self.opened)
            raise
        if not self._is_ours(self._opened_staging):
            os.close(self._opened_staging)
            self._opened_staging = -1
            raise PermissionError(errno.EPERM, "another process has replaced our staging folder")
        with contextlib.suppress(OSError):  # a file system without locks, on which no leftovers are removed
            _lock(self._opened_staging)

    def _remove_leftovers(self) -> None:
        """Remove leftovers of processes of this machine, if no other user can have put them there."""
        found: list[str] = []
        with contextlib.suppress(OSError):  # the folder may not be readable
            found = os.listdir(self.folder)
        for name in found:
            is_one = name.startswith(STAGING + _this_machine()) and STAGING_NAME.fullmatch(name)
            if is_one and is_guarded(os.path.join(self.folder, name)):
                with contextlib.suppress(OSError), _opened_folder(name, self.opened) as left:
                    staged = os.listdir(left)  # an empty one may be new and not locked yet
                    if staged and all(map(_STAGED.fullmatch, staged)):
                        _lock(left)
                        self._remove_opened(name, left)

    def _is_ours(self, opened: int) -> bool:
        """Return whether the folder is the one just made, and not another one, which may belong to this user too."""
        state = os.fstat(opened)
        if state.st_uid != os.geteuid() or os.listdir(opened):
            return False
        if not state.st_mode & 0o077:
            return True
        probe = os.open("probe", os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=opened)
        try:
            return bool(os.fstat(probe).st_mode & 0o077)  # a file system without modes
        finally:
            os.close(probe)
            os.unlink("probe", dir_fd=opened)

    def _close(self) -> None:
        for opened in (self.opened, self._opened_staging):
            if opened >= 0:
                os.close(opened)

    def _remove_staging(self) -> None:
        """Empty the staging folder by its descriptor: in a group-writable folder others can rename it."""
        if self._opened_staging < 0:
            return
        self._remove_opened(os.path.basename(self.staging), self._opened_staging)

    def _remove_opened(self, name: str, opened: int) -> None:
        for staged in os.listdir(opened):
            with contextlib.suppress(OSError):  # a folder that someone else has put there
                os.unlink(staged, dir_fd=opened)
        with contextlib.suppress(OSError):
            named = os.stat(name, dir_fd=self.opened, follow_symlinks=False)
            if os.path.samestat(named, os.fstat(opened)):
                os.rmdir(name, dir_fd=self.opened)

    def open_staged(self, name: str, *, mode: int = 0o600) -> IO[bytes]:
        """Make a file in the staging folder, by its descriptor: its name may be another folder's by now."""
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        handle = os.open(name, flags, 0o600 | mode & 0o666, dir_fd=self._opened_staging)
        return os.fdopen(handle, "w+b")

    def add_folder(self, name: str, mode: int) -> None:
        with self._opened_parent(f"{name}/_", mode=0o700 | mode):
            pass

    def has_folder(self, name: str) -> bool:
        """Return whether a folder was made or used for what has been received."""
        return os.path.join(self.folder, *name.split("/")) in self._checked

    def add_file(self, name: str, size: int, mode: int, pieces: Iterable[bytes]) -> None:
        """Write a file from ``pieces`` of ``size`` bytes in all.

        ``mode``: the original's permissions; the copy grants others no more than those.
        """
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
        """Check that ``size`` bytes are free on the disk. Raises: FilesError when they are not."""
        disk = os.fstatvfs(self._opened_staging)
        free = disk.f_bavail * disk.f_frsize
        if size > free:
            place = os.path.join(self.folder, name)
            raise FilesError(f"{place} cannot be written: it needs {size} bytes, {free} are free: the disk is full")

    def _place(self, staged: str, name: str) -> None:
        with self._opened_parent(name) as (parent, last), self._explained(os.path.join(self.folder, name)):
            os.replace(staged, last, src_dir_fd=self._opened_staging, dst_dir_fd=parent)

    @contextlib.contextmanager
    def _opened_parent(self, name: str, *, mode: int = 0o755) -> Iterator[tuple[int, str]]:
        """Yield the opened parent folder of ``name``, making it if needed, and the last part of the name.

        No parent may be a link. Each is opened relative to the one above: in group-writable folders, others may replace
        a folder with a link after it was checked.
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
        """Make a folder, unless it exists. Raises: FilesError when the name is taken by something else."""
        try:
            os.mkdir(name, mode, dir_fd=parent)
            self._made.append(place)
        except FileExistsError:
            found = os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode
            if stat.S_ISLNK(found):
                raise FilesError(
                    f"{place} is a link, and nothing is written through it: name the folder that it points to"
                ) from None
            if not stat.S_ISDIR(found):
                raise FilesError(f"{place} exists and is not a folder") from None

    def _make_folders(self, path: str) -> None:
        """Make a folder and its parents; other writers may be making the same ones."""
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
            with contextlib.suppress(OSError):  # not empty
                os.rmdir(folder)

    @contextlib.contextmanager
    def _explained(self, place: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise FilesError(f"{place} cannot be written: {reason_of(exc)}") from exc


def _this_machine() -> str:
    """Return a digest of host name and boot id: another machine with the same disk may not see the locks set here."""
    boot = ""
    with contextlib.suppress(OSError), open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        boot = file.read()
    return hashlib.sha256(f"{platform.node()} {boot}".encode()).hexdigest()[:8]


def _lock(folder: int) -> None:
    """Lock a folder for as long as it is open. Raises: OSError when another process holds the lock."""
    import fcntl

    fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextlib.contextmanager
def _opened_folder(name: str, parent: int) -> Iterator[int]:
    """Open a folder. Raises: OSError, also for a link."""
    opened = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=parent)
    try:
        yield opened
    finally:
        os.close(opened)


def _mode(status: os.stat_result, before: int) -> int:
    """Return the mode for a new file with ``status`` whose original has the mode ``before``."""
    mode = stat.S_IMODE(status.st_mode)
    if before & 0o100:
        mode |= (mode & 0o444) >> 2
    return mode & (0o700 | before)


@contextlib.contextmanager
def opened_parent(folder: int, name: str) -> Iterator[tuple[int, str]]:
    """Yield the opened parent folder of ``name`` (relative to ``folder``), and the last part of the name.

    Raises: OSError, also when a parent is a link.
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
    """Write the tree that the other side sends, within the numbers that it has announced.

    Returns how many links, devices and the like were skipped, and the names of some.
    Every name must be one of ``roots`` or below one, in a folder received earlier. No more folders are made than were
    announced, plus one for each of ``roots``.
    Raises: FilesError, Failed, Untrue.
    """
    allowed = None if roots is None else frozenset(roots)
    announced = talk.hear("tree")
    files, folders, size = (as_size(announced.get(key)) for key in ("files", "folders", "size"))
    if files + folders > MOST_ENTRIES:
        raise Untrue(f"{files + folders} files were announced, at most {MOST_ENTRIES} are allowed")
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
            raise Untrue("more files arrived than were announced")
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
        raise Untrue(f"{name[:200]!r} was not requested")
    parent = name.rpartition("/")[0]
    if "/" in parent and not writer.has_folder(parent):
        raise Untrue(f"{name[:200]!r} arrived before its folder")
    return name


def _read_mode(said: dict[str, Any]) -> int:
    mode = said.get("mode")
    return mode & 0o777 if isinstance(mode, int) else 0o600


def _receive_file(talk: Talk, writer: TreeWriter, progress: Progress, name: str, said: dict[str, Any]) -> None:
    size, left = as_size(said.get("size")), progress.total - progress.size
    if size > left:
        raise Untrue(f"{name!r} has {size} bytes, but only {left} of the announced bytes are left")

    def counted() -> Iterator[bytes]:
        for data in talk.read(size):
            yield data
            progress.advance(len(data))

    writer.add_file(name, size, _read_mode(said), counted())
    progress.end_file()
