"""Files by their digest, in our cache on a node: what has come once does not come again.

Every file is hashed when it comes, and once more when it is laid out: nothing that a disk has changed is run.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ...copying.json_lines import FilesError, Untrue
from ...guarded import can_others_write, describe, find_guest_parent, make_parents

__all__ = ["PART", "Blobs", "remove_unused", "sources_folder", "touch"]

_DIGEST = re.compile(r"[0-9a-f]{64}")
_CHUNK_BYTES = 1 << 20
_UNUSED_S = 30 * 86400.0
_GAP_S = 86400.0
PART = ".part-"  # begins the name of what is not whole yet


def sources_folder() -> Path:
    """The folder of what jobs are made of, in the user's cache; nobody else can write to it. Raises: FilesError."""
    refused = []
    for above in _possible_folders():
        folder = Path(os.path.realpath(above), "sources")
        try:
            make_parents(folder)
            folder.mkdir(mode=0o700, exist_ok=True)
            if (guest := find_guest_parent(folder)) or can_others_write(folder.lstat(), folder):
                raise PermissionError(f"others can write to {describe(guest or folder)}")
            if os.access(folder, os.W_OK | os.X_OK):
                return folder
            raise PermissionError(f"{folder} cannot be written to")
        except OSError as exc:
            refused.append(str(exc))
    raise FilesError(f"there is no folder for the source of a job: {refused[0]}: set XDG_CACHE_HOME to one of your own")


def _possible_folders() -> Iterator[str]:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    yield os.path.join(base, "detrain_nb")
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    yield os.path.join(tempfile.gettempdir(), f"detrain_nb-{user}")


class Blobs:
    """The files in the folder ``root``, which is made."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, sha256: str) -> Path:
        """Where it is, or would be. Raises: Untrue for what is no digest."""
        if not _DIGEST.fullmatch(sha256):
            raise Untrue("what came is no SHA-256")
        return self._root / sha256[:2] / sha256

    def has(self, sha256: str, size: int) -> bool:
        """Whether it is here in its length; then it is kept for another month."""
        path = self.path(sha256)
        try:
            is_here = path.lstat().st_size == size
        except (FileNotFoundError, NotADirectoryError):
            return False
        if is_here:
            touch(path)
        return is_here

    def add(self, sha256: str, size: int, pieces: Iterable[bytes]) -> None:
        """Keep a file. Raises: Untrue where it is not what it was said to be; FilesError where there is no room."""
        path, digest, length = self.path(sha256), hashlib.sha256(), 0
        part = path.parent / f"{PART}{secrets.token_hex(8)}"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            free = shutil.disk_usage(path.parent).free
            if size > free:
                raise FilesError(f"{self._root} has {free} bytes free, and {size} come: make room on that disk")
            with open(part, "xb") as file:
                for data in pieces:
                    digest.update(data)
                    length += len(data)
                    if length > size:
                        break
                    file.write(data)
            if length != size or digest.hexdigest() != sha256:
                raise Untrue(
                    f"a file of {size} bytes came as another than it was said to be: was it changed meanwhile?"
                )
            os.replace(part, path)
        except OSError as exc:
            raise FilesError(f"{self._root} cannot be written to: {exc.strerror or exc}") from exc
        finally:
            with contextlib.suppress(OSError):
                part.unlink()

    def read(self, sha256: str, size: int) -> Iterator[bytes]:
        """The bytes of a file, as they came. Raises: FilesError where it is gone, or is not what came any more."""
        path, digest, length = self.path(sha256), hashlib.sha256(), 0
        again = "submit the job again, its files are sent anew then"
        try:
            with open(path, "rb") as file:
                while data := file.read(_CHUNK_BYTES):
                    digest.update(data)
                    length += len(data)
                    yield data
        except OSError as exc:
            raise FilesError(f"{path} cannot be read: {exc.strerror or exc}: {again}") from exc
        if length != size or digest.hexdigest() != sha256:
            with contextlib.suppress(OSError):
                path.unlink()
            raise FilesError(f"{path} was changed since it came: {again}")


def touch(path: Path) -> None:
    """It is used now; a day counts, not the second."""
    with contextlib.suppress(OSError):
        if time.time() - path.lstat().st_mtime > _GAP_S:
            os.utime(path)


def remove_unused(root: Path, *, tick: Callable[[], object] = lambda: None) -> int:
    """Remove what nobody has used for a month, and what was never whole; once a day is enough. Returns how much it was.

    ``root`` is `sources_folder`. Whatever is used is touched first, so that nobody's goes from under their hands.
    """
    mark, removed = root / ".cleaned", 0
    with contextlib.suppress(OSError):
        if time.time() - mark.stat().st_mtime < _GAP_S:
            return 0
    with contextlib.suppress(OSError):
        mark.touch()
        for folder in (*root.glob("blobs/??"), root / "git", root / "listed", root / "bundles"):
            tick()
            for path in folder.iterdir() if folder.is_dir() else ():
                with contextlib.suppress(OSError):
                    age = time.time() - path.lstat().st_mtime
                    if age > (_GAP_S if path.name.startswith(PART) else _UNUSED_S):
                        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
                        removed += 1
    return removed
