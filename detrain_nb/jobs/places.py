"""Local place of a fetched file: a name in an opened folder, which stays the same if others swap folders."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..copying.json_lines import FilesError
from ..guarded import open_inside, open_users_folder

__all__ = ["HerePlace", "make_place"]

_HAS_DIR_FD = os.open in os.supports_dir_fd  # not on Windows
_CAREFUL = sum(getattr(os, name, 0) for name in ("O_NOFOLLOW", "O_NONBLOCK", "O_BINARY", "O_CLOEXEC"))


@dataclass(frozen=True)
class HerePlace:
    """Place of a file: ``name`` in the folder with descriptor ``opened``, so that others cannot swap the folder.

    On Windows, which cannot open folders, ``opened`` is None and ``name`` is the whole path.
    """

    opened: int | None
    name: str

    def beside(self, name: str) -> str:
        return name if self.opened is not None else os.path.join(os.path.dirname(self.name), name)

    def digest(self) -> str | None:
        """Return the SHA-256 of the existing file; None if there is none, empty for a link or special file.

        Raises: IsADirectoryError for a folder.
        """
        try:
            state = os.stat(self.name, dir_fd=self.opened, follow_symlinks=False)
            if stat.S_ISDIR(state.st_mode):
                raise IsADirectoryError(errno.EISDIR, "is a folder: a file of this name cannot be written there")
            if not stat.S_ISREG(state.st_mode):
                return ""
            with open(os.open(self.name, os.O_RDONLY | _CAREFUL, dir_fd=self.opened), "rb") as opened:
                return hashlib.file_digest(opened, "sha256").hexdigest()
        except FileNotFoundError:
            return None

    def open_part(self, digest: str) -> tuple[str, int, bool]:
        """Open the part of a file that an earlier fetch left, or a new one; return name, descriptor, keep on failure.

        If another process writes that part, or it is not this user's alone, a new part of another name is created.
        """
        base = f".{os.path.basename(self.name)[:100]}.{digest}"
        left = self.beside(f"{base}.part")
        with contextlib.suppress(OSError):
            opened = os.open(left, os.O_RDWR | os.O_CREAT | _CAREFUL, 0o666, dir_fd=self.opened)
            with contextlib.ExitStack() as on_failure:
                on_failure.callback(os.close, opened)
                if _is_own(opened) and self._is_named(left, opened):
                    on_failure.pop_all()
                    return left, opened, True
        new = self.beside(f"{base}.{secrets.token_hex(4)}.part")
        return new, os.open(new, os.O_RDWR | os.O_CREAT | os.O_EXCL | _CAREFUL, 0o666, dir_fd=self.opened), False

    def _is_named(self, name: str, opened: int) -> bool:
        """Return whether another fetch has not completed and renamed the part meanwhile."""
        return os.path.samestat(os.fstat(opened), os.stat(name, dir_fd=self.opened, follow_symlinks=False))

    def put(self, part: str) -> None:
        os.replace(part, self.name, src_dir_fd=self.opened, dst_dir_fd=self.opened)

    def remove(self, part: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(part, dir_fd=self.opened)


def _is_own(opened: int) -> bool:
    """Return whether a file is this user's, has no other name, and is not written by another process; lock it."""
    state = os.fstat(opened)
    if not stat.S_ISREG(state.st_mode) or state.st_nlink != 1:
        return False
    if os.name != "posix":
        return True
    import fcntl

    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        pass
    return state.st_uid == os.geteuid()


@contextlib.contextmanager
def make_place(root: Path, name: str) -> Iterator[HerePlace]:
    """Create the folders of a file below ``root``; each is opened inside its parent, and none is a link.

    Raises: OSError, also for a folder of another user where every user can create one, as in /tmp.
    """
    *parents, last = name.split("/")
    opened, folder = (open_users_folder(root, is_made=True) if _HAS_DIR_FD else None), root
    if opened is None:
        root.mkdir(parents=True, exist_ok=True)
    try:
        for part in parents:
            folder = folder / part
            here = str(folder) if opened is None else part
            with contextlib.suppress(FileExistsError):
                os.mkdir(here, dir_fd=opened)
            if not stat.S_ISDIR(os.stat(here, dir_fd=opened, follow_symlinks=False).st_mode):
                raise FilesError(f"{folder} is not a folder: {name} cannot be written below it")
            if opened is not None:
                inner = open_inside(part, opened, folder, is_made=True)
                os.close(opened)
                opened = inner
        yield HerePlace(opened, last if opened is not None else str(folder / last))
    finally:
        if opened is not None:
            os.close(opened)
