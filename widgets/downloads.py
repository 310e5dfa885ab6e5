"""A file for the browser: written to a folder of its own on this machine, and read from there in pieces, once."""

from __future__ import annotations

import base64
import tempfile
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..text import format_size
from .actions import Refused

MOST_DOWNLOAD_BYTES = 50_000_000  # the file passes through messages and the browser's memory
CHUNK_BYTES = 1 << 19


@dataclass(frozen=True)
class _Ready:
    id: str
    file: Path
    size_bytes: int


class Download:
    """The download of a view, one at a time: a new one replaces it."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None  # removed with the kernel at the latest
        self._ready: _Ready | None = None
        self._changing = threading.Lock()

    def prepare(self, make: Callable[[Path], Path]) -> dict[str, Any]:
        """Call ``make`` with a folder to write the file to; returns the file's id, name and size for the page.

        Raises: Refused when the file is too large; whatever ``make`` raises.
        """
        folder = tempfile.TemporaryDirectory(prefix="detrain_nb-download-", ignore_cleanup_errors=True)
        self._replace(folder, None)
        try:
            path = make(Path(folder.name))
            ready = _Ready(uuid.uuid4().hex, path, path.stat().st_size)
            require_small(ready.size_bytes)
        except BaseException:
            self.clear()
            raise
        self._replace(folder, ready)
        return {"id": ready.id, "name": path.name, "size": ready.size_bytes, "chunk": CHUNK_BYTES}

    def read(self, id: str, offset: int) -> str:
        """Return a piece of the file in base64. Raises: Refused when the download is over, or past the end."""
        ready = self._ready
        if ready is None or ready.id != id or not 0 <= offset < max(1, ready.size_bytes):
            raise Refused("that download has ended: start it again")
        with open(ready.file, "rb") as opened:
            opened.seek(offset)
            return base64.b64encode(opened.read(CHUNK_BYTES)).decode()

    def clear(self) -> None:
        """Remove the file and its folder."""
        self._replace(None, None)

    def _replace(self, folder: tempfile.TemporaryDirectory[str] | None, ready: _Ready | None) -> None:
        with self._changing:
            before, self._folder, self._ready = self._folder, folder, ready
        if before is not None and before is not folder:
            before.cleanup()


def require_small(size_bytes: int, most_bytes: int = MOST_DOWNLOAD_BYTES) -> None:
    """Check that a file may pass through the notebook. Raises: Refused when it is larger than ``most_bytes``."""
    if size_bytes > most_bytes:
        most = format_size(most_bytes)
        raise Refused(f"{format_size(size_bytes)} is more than the {most} that can be downloaded through the notebook")
