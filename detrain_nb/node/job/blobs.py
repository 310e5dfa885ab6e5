"""Content-addressed files in the cache of a node: a file that was received once is not sent again.

Every file is hashed when it is received and again when it is read for a job, so no corrupted file runs.
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
PART = ".part-"  # prefix of the names of incomplete files


def sources_folder() -> Path:
    """Return the folder for job sources in the user's cache; no other user can write to it. Raises: FilesError."""
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
    raise FilesError(f"no usable folder for job sources: {refused[0]}: set XDG_CACHE_HOME to a folder of your own")


def _possible_folders() -> Iterator[str]:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    yield os.path.join(base, "detrain_nb")
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    yield os.path.join(tempfile.gettempdir(), f"detrain_nb-{user}")


class Blobs:
    """Files in the folder ``root``, which is created when needed."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def path(self, sha256: str) -> Path:
        """Return the path of a file, whether it exists or not. Raises: Untrue for an invalid digest."""
        if not _DIGEST.fullmatch(sha256):
            raise Untrue("the digest is not a SHA-256")
        return self._root / sha256[:2] / sha256

    def has(self, sha256: str, size: int) -> bool:
        """Return whether the file exists with this size; if so, it is kept for another month."""
        path = self.path(sha256)
        try:
            is_here = path.lstat().st_size == size
        except (FileNotFoundError, NotADirectoryError):
            return False
        if is_here:
            touch(path)
        return is_here

    def add(self, sha256: str, size: int, pieces: Iterable[bytes]) -> None:
        """Store a file. Raises: Untrue when size or digest do not match; FilesError when the disk is full or fails."""
        path, digest, length = self.path(sha256), hashlib.sha256(), 0
        part = path.parent / f"{PART}{secrets.token_hex(8)}"
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            free = shutil.disk_usage(path.parent).free
            if size > free:
                raise FilesError(f"{self._root} has {free} bytes free but {size} are needed: free disk space")
            with open(part, "xb") as file:
                for data in pieces:
                    digest.update(data)
                    length += len(data)
                    if length > size:
                        break
                    file.write(data)
            if length != size or digest.hexdigest() != sha256:
                raise Untrue(
                    f"a file of {size} bytes does not match its announced size or digest: was it changed meanwhile?"
                )
            os.replace(part, path)
        except OSError as exc:
            raise FilesError(f"{self._root} cannot be written to: {exc.strerror or exc}") from exc
        finally:
            with contextlib.suppress(OSError):
                part.unlink()

    def read(self, sha256: str, size: int) -> Iterator[bytes]:
        """Yield the bytes of a file. Raises: FilesError when it is missing, or does not match its digest any more."""
        path, digest, length = self.path(sha256), hashlib.sha256(), 0
        again = "submit the job again, which sends it again"
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
            raise FilesError(f"{path} has changed since it was received: {again}")


def touch(path: Path) -> None:
    """Mark a file as used now, to the precision of a day."""
    with contextlib.suppress(OSError):
        if time.time() - path.lstat().st_mtime > _GAP_S:
            os.utime(path)


def remove_unused(root: Path, *, tick: Callable[[], object] = lambda: None) -> int:
    """Remove files unused for a month, and incomplete files, at most once a day; return their number.

    ``root`` is `sources_folder`. Every user of a file touches it first, so no file in use is removed.
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
