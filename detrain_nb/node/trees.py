"""Trees of files, as they are found and sent by talk.py; arrivals.py writes them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import IO

from .talk import FilesError, Talk, Untrue, check_name, clean, reason_of

MOST_ENTRIES = 1_000_000
MOST_NAMED = 20  # of what was left out, or left alone
BULK_BYTES = 1 << 20  # files of that size and more go over SFTP where there is one
_CHUNK_BYTES = 1 << 18
_STAGING = ".detrain_nb-"  # the folder for what is not whole yet; of one copy each


class Progress:
    """How far a copy is; ``on_change`` is told the files that are done, the bytes, and the bytes in all."""

    def __init__(self, on_change: Callable[[int, int, int], object] | None = None) -> None:
        self.files = self.size = self.total = 0
        self._on_change = on_change

    def begin(self, total: int) -> None:
        self.total = total
        self._tell()

    def be_at(self, size: int) -> None:
        self.size = size
        self._tell()

    def end_file(self) -> None:
        self.files += 1
        self._tell()

    def _tell(self) -> None:
        if self._on_change:
            self._on_change(self.files, self.size, self.total)


@dataclass(frozen=True)
class File:
    """A file to be sent; ``name`` is the one that it will have."""

    name: str
    path: str
    size: int
    is_executable: bool
    is_private: bool = False


@dataclass
class Tree:
    """``skipped`` are links, devices and the like, and names that cannot travel."""

    files: list[File] = field(default_factory=list)
    folders: list[str] = field(default_factory=list)
    private_folders: set[str] = field(default_factory=set)
    skipped: list[str] = field(default_factory=list)
    num_skipped: int = 0

    def skip(self, path: str) -> None:
        self.num_skipped += 1
        if len(self.skipped) < MOST_NAMED:
            self.skipped.append(path)

    def note_private(self, folder: str, status: os.stat_result) -> None:
        if is_owners_alone(status.st_mode):
            self.private_folders.add(folder)


def is_owners_alone(mode: int) -> bool:
    """Nobody but its owner can do anything with it."""
    return not mode & 0o077


def _file(name: str, path: str, status: os.stat_result) -> File:
    return File(name, path, status.st_size, bool(status.st_mode & 0o100), is_owners_alone(status.st_mode))


def list_tree(
    sources: Iterable[tuple[str, str]], *, follow_links: bool = False, tick: Callable[[], object] = lambda: None
) -> Tree:
    """List files and folders, given as (name, path), with all that is in them.

    A link that was given itself is followed, one further down is not; to files it is with ``follow_links``.
    """
    tree = Tree()
    waiting: list[tuple[str, str]] = []
    for name, path in sources:
        path = os.path.realpath(path)
        try:
            status = os.stat(path)
        except OSError as exc:
            raise FilesError(f"{path}: {reason_of(exc)}") from exc
        if stat.S_ISDIR(status.st_mode):
            waiting.append((name, path))
            tree.note_private(name, status)
        elif stat.S_ISREG(status.st_mode):
            tree.files.append(_file(name, path, status))
        else:
            raise FilesError(f"{path} is neither a file nor a folder")
    while waiting:
        name, path = waiting.pop()
        tree.folders.append(name)
        tick()
        for entry in _scan(path):
            inner = f"{name}/{entry.name}"
            try:
                is_followed = follow_links and entry.is_symlink() and entry.is_file()
                status = entry.stat(follow_symlinks=is_followed)
                path_of_entry = os.path.realpath(entry.path) if is_followed else entry.path
                check_name(inner)
            except FileNotFoundError:
                continue  # deleted meanwhile
            except Untrue:
                tree.skip(clean(entry.path))
                continue
            if stat.S_ISDIR(status.st_mode):
                waiting.append((inner, entry.path))
                tree.note_private(inner, status)
            elif stat.S_ISREG(status.st_mode):
                tree.files.append(_file(inner, path_of_entry, status))
            else:
                tree.skip(clean(entry.path))
        if len(tree.files) + len(tree.folders) + len(waiting) > MOST_ENTRIES:
            raise FilesError(f"{path}: more than {MOST_ENTRIES} files: pack them into one, or name less")
    tree.folders.sort()
    tree.files.sort(key=lambda file: file.name)
    return tree


def _scan(path: str) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as entries:
            return [entry for entry in entries if not entry.name.startswith(_STAGING)]
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise FilesError(f"{path} cannot be read: {reason_of(exc)}") from exc


def send_tree(
    talk: Talk, tree: Tree, progress: Progress, *, bulk: Callable[[File], int | None] = lambda file: None
) -> None:
    """Send all of a tree. ``bulk`` brings a large file into the receiver's staging folder in another way, and returns
    its number there; None where there is none."""
    total = sum(file.size for file in tree.files)
    talk.say("tree", files=len(tree.files), folders=len(tree.folders), size=total)
    progress.begin(total)
    for name in tree.folders:
        talk.say("folder", name=name, private=name in tree.private_folders)
    for file in tree.files:
        with contextlib.ExitStack() as stack:
            try:
                opened = stack.enter_context(open_regular(file.path))
            except FileNotFoundError:
                talk.say("gone")
                continue
            except OSError as exc:
                raise FilesError(f"{file.path} cannot be read: {reason_of(exc)}") from exc
            before = progress.size
            staged = bulk(file) if file.size >= BULK_BYTES else None
            modes = {"executable": file.is_executable, "private": file.is_private}
            talk.say("file", name=file.name, size=file.size, **modes, staged=staged)
            if staged is None:
                progress.be_at(before)  # what went another way in vain
                _send_exactly(talk, opened, file, progress)
            progress.be_at(before + file.size)
            progress.end_file()
    talk.say("end", skipped=tree.skipped, num_skipped=tree.num_skipped)
    talk.flush()


def _send_exactly(talk: Talk, opened: IO[bytes], file: File, progress: Progress) -> None:
    """So many bytes as were announced, also where the file has grown since."""
    left = file.size
    while left:
        try:
            data = opened.read(min(left, _CHUNK_BYTES))
        except OSError as exc:
            raise FilesError(f"{file.path} cannot be read: {reason_of(exc)}") from exc
        if not data:
            raise FilesError(f"{file.path} became shorter while it was copied: copy it again")
        talk.send(data)
        left -= len(data)
        progress.be_at(progress.size + len(data))


def open_regular(path: str) -> IO[bytes]:
    """Open what was a file when it was listed: no link or device in its place, nor what waits for a writer."""
    flags = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY"))
    handle = os.open(path, os.O_RDONLY | flags)
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError(errno.EINVAL, "no longer a file")
    return os.fdopen(handle, "rb")
