"""Where a fetched file goes here: in one opened folder, whatever others put in the place of names meanwhile."""

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
    """Where a file goes: ``name`` in a folder that is ``opened``, so that others cannot put another in its place.

    Where folders cannot be opened, on Windows, ``name`` is the whole path.
    """

    opened: int | None
    name: str

    def beside(self, name: str) -> str:
        return name if self.opened is not None else os.path.join(os.path.dirname(self.name), name)

    def digest(self) -> str | None:
        """The SHA-256 of the file that is there; None where nothing is, and empty for a link or what is no file.

        Raises: IsADirectoryError where a folder is.
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
        """What an earlier fetch has left of a file, to go on with, or a new one; its name, and whether it stays.

        Where another process is at that one, or it is not this user's alone, a new one of another name is begun.
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
        """It was not whole meanwhile, and renamed."""
        return os.path.samestat(os.fstat(opened), os.stat(name, dir_fd=self.opened, follow_symlinks=False))

    def put(self, part: str) -> None:
        os.replace(part, self.name, src_dir_fd=self.opened, dst_dir_fd=self.opened)

    def remove(self, part: str) -> None:
        with contextlib.suppress(OSError):
            os.unlink(part, dir_fd=self.opened)


def _is_own(opened: int) -> bool:
    """A file of this user that has no other name, and that no other process writes: it is locked then."""
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
    """Make the folders of a file below ``root``; each is opened in the one before, and none is a link.

    Raises: OSError, also for a folder of another user where everybody can make one, as in /tmp.
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
