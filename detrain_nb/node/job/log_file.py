"""A log of bounded size: its beginning and its end are kept, in several files.

``rank-0.log`` has the beginning. Later output is in ``rank-0.log.OFFSET``, where OFFSET is the number of bytes before
it; the oldest of these files are removed. Offsets count everything written, so a reader notices what was cut.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from .log_times import LogTimes

FIRST_BYTES = 10_000_000
LAST_BYTES = 1_000_000_000
_PARTS = 16  # files for the end of the log
_DIGITS = 18
MOST_TAIL_BYTES = 4_000_000
_TAIL_BYTES = 1 << 16
_LINE_CHARS = 1000
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


class BoundedLog:
    """A log open for writing. On a disk error bytes are lost, but the job continues; the log reports the loss later."""

    def __init__(self, path: Path, *, first_bytes: int = FIRST_BYTES, last_bytes: int = LAST_BYTES) -> None:
        self._path = path
        self._first_bytes, self._last_bytes = first_bytes, last_bytes
        self._part_bytes = max(1, last_bytes // _PARTS)
        self._size = 0  # of everything written
        self._room = first_bytes  # in the open file
        self._parts: list[tuple[Path, int]] = []  # after the first file, each with its offset
        self._file = -1
        self._num_lost, self._why_lost = 0, ""
        self._times = LogTimes(path)

    def write(self, data: bytes) -> None:
        """Append bytes; a disk error is noted, not raised."""
        self._times.note(self._size)
        if self._says_losses():
            self._write(data)
        else:
            self._num_lost += len(data)

    def close(self) -> None:
        """Report losses, if possible, and close the file."""
        self._says_losses()
        self._close()

    def _says_losses(self) -> bool:
        """Write a pending loss into the log; return whether none is pending any more."""
        if lost := self._num_lost:
            self._num_lost = 0
            self._write(
                f"\n[detrain_nb: {lost} bytes of output could not be written here: {self._why_lost}]\n".encode()
            )
            if self._num_lost:
                self._num_lost = lost
                return False
        return True

    def _write(self, data: bytes) -> None:
        waiting = memoryview(data)
        try:
            while waiting:
                if not self._room:
                    self._begin_part()
                if self._file < 0:
                    self._file = os.open(self._parts[-1][0] if self._parts else self._path, _FLAGS, 0o600)
                written = os.write(self._file, waiting[: self._room])
                self._size += written
                self._room -= written
                waiting = waiting[written:]
        except OSError as exc:
            self._num_lost += len(waiting)
            self._why_lost = exc.strerror or str(exc)
            self._close()

    def _begin_part(self) -> None:
        self._close()
        is_first = not self._parts
        path = self._path.with_name(f"{self._path.name}.{self._size:0{_DIGITS}d}")
        self._file = os.open(path, _FLAGS, 0o600)
        self._parts.append((path, self._size))
        self._room = self._part_bytes
        while len(self._parts) > 1 and self._size - self._parts[1][1] >= self._last_bytes:
            with contextlib.suppress(OSError):
                self._parts[0][0].unlink(missing_ok=True)
            del self._parts[0]
        if is_first:
            kept = f"its first {self._first_bytes} bytes and its last {self._last_bytes} are kept"
            self._write(f"\n[detrain_nb: a long log: {kept}]\n".encode())

    def _close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


def read_log(path: Path, offset: int, most: int) -> tuple[int, bytes]:
    """Read from ``offset``; return the offset of the bytes, larger after a cut, and the bytes, empty at the end.

    A file that is removed during the read counts as cut.
    """
    for begin, part in _list_parts(path):
        try:
            opened = os.open(part, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            continue
        try:
            at = max(offset, begin)
            if data := os.pread(opened, most, at - begin):
                return at, data
        finally:
            os.close(opened)
    return offset, b""


def find_end(path: Path) -> int:
    """Return the offset of the end of the log."""
    ends = [0]
    for begin, part in _list_parts(path):
        with contextlib.suppress(OSError):  # the file was removed meanwhile
            ends.append(begin + part.lstat().st_size)
    return max(ends)


def find_tail(path: Path, lines: int, *, most_bytes: int = MOST_TAIL_BYTES) -> int:
    """Return the offset of the last ``lines``, within the last ``most_bytes`` and after any cut."""
    at = end = find_end(path)
    least = max(0, end - most_bytes)
    while lines > 0 and at > least:
        begin, data = read_up_to(path, max(least, at - _TAIL_BYTES), at)
        if begin > at - _TAIL_BYTES:
            least = begin
        before = len(data)
        while (before := data.rfind(b"\n", 0, before)) >= 0:
            if begin + before + 1 < end:  # else it is the end of the last line
                lines -= 1
                if not lines:
                    return begin + before + 1
        at = begin
    return at


def read_up_to(path: Path, begin: int, end: int) -> tuple[int, bytes]:
    """Read the bytes from ``begin``, or after a cut there, up to ``end``; return their offset and the bytes."""
    data = b""
    while begin + len(data) < end:
        at, more = read_log(path, begin + len(data), end - begin - len(data))
        if not more:
            return end, b""
        begin, data = (begin, data + more) if at == begin + len(data) else (at, more)
    return min(begin, end), data[: max(0, end - begin)]


def last_lines(path: Path, number: int) -> tuple[str, ...]:
    """Return the last lines of a log, at most the last 64 KiB and 1000 characters of each."""
    parts = list(_list_parts(path))
    data = b""
    for _, part in reversed(parts):
        with contextlib.suppress(OSError), open(part, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES + len(data)))
            data = file.read(_TAIL_BYTES) + data
        if len(data) >= _TAIL_BYTES:
            break
    lines = data.decode("utf-8", errors="replace").rstrip().split("\n")  # a redrawn progress bar is one line
    return tuple(line[-_LINE_CHARS:] for line in lines[-number:]) if data.strip() else ()


def _list_parts(path: Path) -> list[tuple[int, Path]]:
    """Return the files of a log, each with its offset."""
    name = re.compile(rf"{re.escape(path.name)}(?:\.(\d{{{_DIGITS}}}))?")
    try:
        found = [(match, entry) for entry in os.listdir(path.parent) if (match := name.fullmatch(entry))]
    except OSError:
        return []
    return sorted((int(match[1] or 0), path.with_name(entry)) for match, entry in found)
