"""Everything that the ranks printed and showed, cell by cell, in files on the notebook's disk.

The log outlives its session because results read from it; it is deleted with the last of them, or when the process
exits.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

from ...agents import open_private, runtime_folder
from ...errors import LaunchError
from ...locks import take_lock
from ...wire import MAX_HEADER_BYTES, CellDone, CellFailed, ClearOutput, Display, FrameReader, Output, to_frame
from .safe_output import clean_text

Logged = Output | Display | ClearOutput | CellDone | CellFailed
BEGINNINGS, SHOWN_PERHAPS, NEW = range(3)  # the parts of a cell, in the order in which they are read
_READ_BYTES = 1 << 20
_MOST_LOOKED_AT_BYTES = 64 << 20
_MOST_PIECES = 10_000  # of a cell
_GROWN = 8  # growth factor, at most: a node may omit defaults and zeros that are written out here
_PREFIX = ".log-"
_LOCK = "lock"  # file in the folder, locked for the lifetime of the log
_WHAT_TO_DO = (
    "free space on that disk, or restart this process with DETRAIN_NB_RUNTIME_DIR set to a folder on another one"
)


class OutputLog:
    """One file of frames per cell, in a folder of its own."""

    def __init__(self) -> None:
        base = runtime_folder()
        _remove_orphans(base)
        try:
            self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))
        except OSError as exc:
            raise LaunchError(
                f"the log of the cells cannot be created under {base}: {exc.strerror}; {_WHAT_TO_DO}"
            ) from exc
        lock = None
        with contextlib.suppress(OSError, ImportError):  # without a lock (Windows), it is never removed as an orphan
            lock = take_lock(self._folder / _LOCK, is_new=True)
        weakref.finalize(self, _remove, self._folder, lock)
        self._pieces: dict[int, list[tuple[int, int]]] = {}  # of each cell's file: part and bytes
        self.lacking: dict[int, str] = {}  # cells that are not completely logged, and why
        self.error = ""  # why the last write failed; empty once a write succeeds

    def append(self, message: Logged, *, part: int = NEW) -> None:
        """Append a message of a rank. A failed write sets ``error``, and nothing more of that cell is kept.

        The cell keeps running. Later cells are logged as soon as the disk has space again. Messages that several nodes
        kept for this notebook arrive interleaved: each ``part`` of a cell is read as one.
        """
        if message.cell in self.lacking:
            return
        data = to_frame(message).to_bytes()
        try:
            self._write(message.cell, data)
        except OSError as exc:
            self.lacking[message.cell] = exc.strerror or str(exc)
            self.error = (
                f"the log under {self._folder} cannot be written ({self.lacking[message.cell]}): new output is "
                f"shown, but missing in %distributed log and in the cell's result; {_WHAT_TO_DO}"
            )
            return
        self.error = ""
        pieces = self._pieces.setdefault(message.cell, [])
        part = part if len(pieces) < _MOST_PIECES else NEW  # a node may alternate: the rest is read in order
        if pieces and pieces[-1][0] == part:
            pieces[-1] = (part, pieces[-1][1] + len(data))
        else:
            pieces.append((part, len(data)))

    def cells(self) -> list[int]:
        """Return the cells that have logged output."""
        return sorted(cell for cell, pieces in list(self._pieces.items()) if pieces)

    def read(self, cell: int) -> Iterator[Logged]:
        """Yield the messages of the ranks in ``cell``, part by part, each part in order of arrival."""
        return self.reader(cell).read()

    def reader(self, cell: int) -> LogReader:
        """Return a reader of ``cell`` that can be read again when the cell has printed more."""
        return LogReader(self._path(cell), self._pieces.setdefault(cell, []))

    def text(self, cell: int, rank: int, stream: str = "stdout") -> str:
        """Return all that one rank printed to one stream in ``cell``, without control sequences."""
        pieces = (m.body for m in self.read(cell) if isinstance(m, Output) and (m.rank, m.stream) == (rank, stream))
        return clean_text(b"".join(pieces).decode("utf-8", "replace"))

    def beginning(self, cell: int, rank: int, *, limit_bytes: int) -> tuple[str, bool]:
        """Return the first bytes of ``text``, and whether there is more, without reading a huge log completely."""
        found, looked_at_bytes = bytearray(), 0
        for message in self.read(cell):
            looked_at_bytes += len(getattr(message, "body", b""))
            if isinstance(message, Output) and (message.rank, message.stream) == (rank, "stdout"):
                found += message.body[: limit_bytes + 1]
            if len(found) > limit_bytes or looked_at_bytes > _MOST_LOOKED_AT_BYTES:
                return clean_text(found[:limit_bytes].decode("utf-8", "replace")), True
        return clean_text(found.decode("utf-8", "replace")), False

    def _write(self, cell: int, data: bytes) -> None:
        """Append ``data`` to the file of a cell, or nothing of it. Raises: OSError when the disk is full."""
        with open(self._path(cell), "ab", buffering=0, opener=open_private) as file:
            size_bytes, left = file.tell(), memoryview(data)
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError:
                file.truncate(size_bytes)
                raise

    def _path(self, cell: int) -> Path:
        return self._folder / f"{cell:06d}.frames"


class LogReader:
    """A reader of the log of one cell, which may still grow."""

    def __init__(self, path: Path, pieces: list[tuple[int, int]]) -> None:
        self._path = path
        self._pieces = pieces  # grows at its end
        self._read_bytes: dict[int, int] = {}  # of a piece, by where it begins
        self._frames = FrameReader(max_header_bytes=_GROWN * MAX_HEADER_BYTES)

    def read(self) -> Iterator[Logged]:
        """Yield the messages that were logged since the last call."""
        with contextlib.suppress(FileNotFoundError), open(self._path, "rb") as file:
            for start, size_bytes in self._find_pieces():
                file.seek(start + self._read_bytes.setdefault(start, 0))
                while (left := size_bytes - self._read_bytes[start]) and (data := file.read(min(left, _READ_BYTES))):
                    self._read_bytes[start] += len(data)
                    for frame in self._frames.feed(data):
                        message = frame.message()
                        assert isinstance(message, Logged)
                        yield message

    def _find_pieces(self) -> list[tuple[int, int]]:
        """Return start and length of the pieces, in the order in which they are read."""
        found, start = [], 0
        for part, size_bytes in list(self._pieces):
            found.append((part, start, size_bytes))
            start += size_bytes
        return [(start, size_bytes) for _, start, size_bytes in sorted(found)]


def _remove_orphans(base: Path) -> None:
    """Remove the logs of processes that were killed before they could: no process holds their locks.

    Pids would not do: a running process may be in another PID namespace, as when containers share the folder.
    """
    for folder in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError, ImportError):
            if (lock := take_lock(folder / _LOCK)) is not None:
                _remove(folder, lock)


def _remove(folder: Path, lock: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)
