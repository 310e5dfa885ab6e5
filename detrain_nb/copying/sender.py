"""Trees of files, listed and sent through json_lines.py; receiver.py writes them."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from ..guarded import find_guest_parent
from .json_lines import FilesError, Talk, Untrue, check_name, clean, reason_of

MOST_ENTRIES = 1_000_000
MOST_NAMED = 20  # of the files that were skipped or left alone
_CHUNK_BYTES = 1 << 18
STAGING = ".detrain_nb-"  # prefix of the folder for incomplete files; each copy has its own
STAGING_NAME = re.compile(re.escape(STAGING) + "[0-9a-f]{16}")


class Progress:
    """The progress of a copy; ``on_change`` is called with the files done, the bytes done, and the total bytes."""

    def __init__(self, on_change: Callable[[int, int, int], object] | None = None) -> None:
        self.files = self.size = self.total = 0
        self._on_change = on_change

    def begin(self, total: int) -> None:
        self.total = total
        self._tell()

    def advance(self, size: int) -> None:
        self.size += size
        self._tell()

    def end_file(self) -> None:
        self.files += 1
        self._tell()

    def _tell(self) -> None:
        if self._on_change:
            self._on_change(self.files, self.size, self.total)


@dataclass(frozen=True)
class File:
    """A file to be sent; ``name`` is its name on the other side."""

    name: str
    path: str
    size: int
    mode: int  # its permissions
    identity: tuple[int, int]  # its device and inode when it was listed
    mtime_ns: int


@dataclass
class Tree:
    """A tree to be sent; ``skipped`` are links, devices and the like, and files whose names cannot be sent."""

    files: list[File] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    folder_modes: dict[str, int] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    num_skipped: int = 0

    def skip(self, path: str) -> None:
        self.num_skipped += 1
        if len(self.skipped) < MOST_NAMED:
            self.skipped.append(path)

    def mode_of(self, file: File) -> int:
        """Return a file's permissions, less those that its folders deny: the target folder may be open to others."""
        mode, above = file.mode, file.name
        while above := above.rpartition("/")[0]:
            folder = self.folder_modes[above]
            mode &= 0o700 | (folder & 0o010) * 7 | (folder & 0o001) * 7
        return mode


def is_owners_alone(mode: int) -> bool:
    """Return whether a mode grants permissions to the owner only."""
    return not mode & 0o077


def _file(name: str, path: str, status: os.stat_result) -> File:
    return File(name, path, status.st_size, status.st_mode & 0o777, _identity(status), status.st_mtime_ns)


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


def list_tree(
    sources: Iterable[tuple[str, str]], *, as_read: bool = False, tick: Callable[[], object] = lambda: None
) -> Tree:
    """List files and folders, given as (name, path), with everything in them.

    A link is followed only if it is itself one of ``sources``. Each folder is checked when it is opened, so that a link
    that replaces a folder after it was listed is not followed either. ``as_read``: list them as a local reader sees
    them, including links to files as files, and names that cannot be sent. ``tick`` is called for each folder.
    Raises: FilesError.
    """
    tree = Tree()
    waiting: list[tuple[str, str, tuple[int, int]]] = []
    for name, path in sources:
        path = os.path.realpath(path)
        try:
            status = os.stat(path)
        except OSError as exc:
            raise FilesError(f"{path}: {reason_of(exc)}") from exc
        if stat.S_ISDIR(status.st_mode):
            waiting.append((name, path, _identity(status)))
            tree.folder_modes[name] = status.st_mode & 0o777
        elif stat.S_ISREG(status.st_mode):
            tree.files.append(_file(name, path, status))
        else:
            raise FilesError(f"{path} is neither a file nor a folder")
    while waiting:
        name, path, identity = waiting.pop()
        tree.folders.append(name)
        tick()
        with _opened_folder(path, identity) as opened:
            for entry in _scan(path, opened):
                _list_entry(entry, name, path, tree, waiting, as_read=as_read)
        if len(tree.files) + len(tree.folders) + len(waiting) > MOST_ENTRIES:
            raise FilesError(f"{path}: more than {MOST_ENTRIES} files: pack them into an archive, or name fewer")
    tree.folders.sort()
    tree.files.sort(key=lambda file: file.name)
    return tree


def _list_entry(
    entry: os.DirEntry[str],
    folder: str,
    path: str,
    tree: Tree,
    waiting: list[tuple[str, str, tuple[int, int]]],
    *,
    as_read: bool,
) -> None:
    name, path = f"{folder}/{entry.name}", os.path.join(path, entry.name)
    try:
        is_followed = as_read and entry.is_symlink() and entry.is_file()
        status = entry.stat(follow_symlinks=is_followed)
        if not as_read:
            check_name(name)
    except FileNotFoundError:
        return  # deleted in the meantime
    except Untrue:
        tree.skip(clean(path))
        return
    if stat.S_ISDIR(status.st_mode):
        waiting.append((name, path, _identity(status)))
        tree.folder_modes[name] = status.st_mode & 0o777
    elif stat.S_ISREG(status.st_mode):
        tree.files.append(_file(name, os.path.realpath(path) if is_followed else path, status))
    else:
        tree.skip(clean(path))


@contextlib.contextmanager
def _opened_folder(path: str, identity: tuple[int, int]) -> Iterator[int | None]:
    """Open a listed folder; yields None if it no longer exists. Raises: FilesError, also if it was replaced."""
    replaced = FilesError(f"{path} was replaced while it was copied: copy it again")
    try:
        opened = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except FileNotFoundError:
        yield None
        return
    except OSError as exc:
        is_link = exc.errno in (errno.ENOTDIR, errno.ELOOP)
        raise (replaced if is_link else FilesError(f"{path} cannot be read: {reason_of(exc)}")) from exc
    try:
        if _identity(os.fstat(opened)) != identity and not is_guarded(path):
            raise replaced
        yield opened
    finally:
        os.close(opened)


def _scan(path: str, opened: int | None) -> list[os.DirEntry[str]]:
    if opened is None:
        return []
    try:
        with os.scandir(opened) as entries:
            return [entry for entry in entries if not entry.name.startswith(STAGING)]
    except OSError as exc:
        raise FilesError(f"{path} cannot be read: {reason_of(exc)}") from exc


def send_tree(talk: Talk, tree: Tree, progress: Progress) -> None:
    """Send all of a tree."""
    total = sum(file.size for file in tree.files)
    talk.say("tree", files=len(tree.files), folders=len(tree.folders), size=total)
    progress.begin(total)
    for name in tree.folders:
        talk.say("folder", name=name, mode=tree.folder_modes[name])
    for file in tree.files:
        with contextlib.ExitStack() as stack:
            try:
                opened = stack.enter_context(open_listed(file))
            except FileNotFoundError:
                talk.say("gone")
                continue
            except OSError as exc:
                raise FilesError(f"{file.path} cannot be read: {reason_of(exc)}") from exc
            if not file.size and _read(opened, 1, file) and not os.fstat(opened.fileno()).st_size:  # as in /proc
                raise FilesError(
                    f"{file.path} has contents but size 0, as the system generates it: copy the output of cat"
                )
            talk.say("file", name=file.name, size=file.size, mode=tree.mode_of(file))
            _send_exactly(talk, opened, file, progress)
            progress.end_file()
    talk.say("end", skipped=tree.skipped, num_skipped=tree.num_skipped)
    talk.flush()


def _send_exactly(talk: Talk, opened: IO[bytes], file: File, progress: Progress) -> None:
    """Send exactly as many bytes as were announced, even if the file has grown since."""
    left = file.size
    while left:
        data = _read(opened, min(left, _CHUNK_BYTES), file)
        if not data:
            raise FilesError(f"{file.path} shrank while it was copied: copy it again")
        talk.send(data)
        left -= len(data)
        progress.advance(len(data))


def _read(opened: IO[bytes], most: int, file: File) -> bytes:
    try:
        return opened.read(most)
    except OSError as exc:
        raise FilesError(f"{file.path} cannot be read: {reason_of(exc)}") from exc


def open_listed(file: File) -> IO[bytes]:
    """Open the file that was listed. Raises: OSError; FilesError when another file has replaced it."""
    opened = open_regular(file.path)
    status = os.fstat(opened.fileno())
    is_alike = (status.st_size, status.st_mtime_ns) == (file.size, file.mtime_ns)  # else it was saved again
    if _identity(status) != file.identity and not (is_alike and is_guarded(file.path)):
        opened.close()
        raise FilesError(f"{file.path} was replaced while it was copied: copy it again")
    return opened


def is_guarded(path: str) -> bool:
    """Return whether no other user can replace a file; in a folder like /tmp the file's owner can.

    For such a file a changed inode number does not mean that it was replaced: some network file systems change it.
    """
    with contextlib.suppress(OSError):
        with contextlib.suppress(FileNotFoundError):
            owner = os.lstat(path).st_uid
            if owner != 0 and owner != os.geteuid():  # 0 on Windows
                return False
        return find_guest_parent(Path(path)) is None
    return False


def open_regular(path: str) -> IO[bytes]:
    """Open what was a file when it was listed; fails for a link or device, and does not wait at a pipe."""
    flags = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
    handle = os.open(path, os.O_RDONLY | flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "no longer a file")
    return os.fdopen(handle, "rb")
