"""A log that does not fill a disk: what came first and what came last is kept, in files that begin where they say.

``rank-0.log`` has the beginning. What comes after it is in ``rank-0.log.OFFSET``, where OFFSET is how many bytes came
before; the oldest of these are removed. An offset counts all that was written, so that who follows sees what was cut.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from .log_times import LogTimes

FIRST_BYTES = 10_000_000
LAST_BYTES = 1_000_000_000
_PARTS = 16  # of what is kept of the end
_DIGITS = 18
MOST_TAIL_BYTES = 4_000_000
_TAIL_BYTES = 1 << 16
_LINE_CHARS = 1000
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


class BoundedLog:
    """One that is written. A disk that refuses loses the bytes, not the job: what was lost is said when it can be."""

    def __init__(self, path: Path, *, first_bytes: int = FIRST_BYTES, last_bytes: int = LAST_BYTES) -> None:
        self._path = path
        self._first_bytes, self._last_bytes = first_bytes, last_bytes
        self._part_bytes = max(1, last_bytes // _PARTS)
        self._size = 0  # of all that was written
        self._room = first_bytes  # in the file that is open
        self._parts: list[tuple[Path, int]] = []  # behind the first file, each with where it begins
        self._file = -1
        self._num_lost, self._why_lost = 0, ""
        self._times = LogTimes(path)

    def write(self, data: bytes) -> None:
        self._times.note(self._size)
        if self._says_losses():
            self._write(data)
        else:
            self._num_lost += len(data)

    def close(self) -> None:
        self._says_losses()
        self._close()

    def _says_losses(self) -> bool:
        """Nothing was lost, or it stands in the log now."""
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
    """Read from ``offset``; returns where what was read begins, later where something was cut. Empty at the end.

    A file that was removed meanwhile was cut.
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
    """The offset behind all that was written so far."""
    ends = [0]
    for begin, part in _list_parts(path):
        with contextlib.suppress(OSError):  # it was cut meanwhile
            ends.append(begin + part.lstat().st_size)
    return max(ends)


def find_tail(path: Path, lines: int, *, most_bytes: int = MOST_TAIL_BYTES) -> int:
    """The offset at which the last ``lines`` begin; they take at most ``most_bytes``, and begin behind what was cut."""
    at = end = find_end(path)
    least = max(0, end - most_bytes)
    while lines > 0 and at > least:
        begin, data = read_up_to(path, max(least, at - _TAIL_BYTES), at)
        if begin > at - _TAIL_BYTES:
            least = begin
        before = len(data)
        while (before := data.rfind(b"\n", 0, before)) >= 0:
            if begin + before + 1 < end:  # else it ends the last line
                lines -= 1
                if not lines:
                    return begin + before + 1
        at = begin
    return at


def read_up_to(path: Path, begin: int, end: int) -> tuple[int, bytes]:
    """What stands before ``end``, from ``begin`` on, or behind what was cut out there; and where that begins."""
    data = b""
    while begin + len(data) < end:
        at, more = read_log(path, begin + len(data), end - begin - len(data))
        if not more:
            return end, b""
        begin, data = (begin, data + more) if at == begin + len(data) else (at, more)
    return min(begin, end), data[: max(0, end - begin)]


def last_lines(path: Path, number: int) -> tuple[str, ...]:
    """The last lines of a log, not all of those that are very long."""
    parts = list(_list_parts(path))
    data = b""
    for _, part in reversed(parts):
        with contextlib.suppress(OSError), open(part, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _TAIL_BYTES + len(data)))
            data = file.read(_TAIL_BYTES) + data
        if len(data) >= _TAIL_BYTES:
            break
    lines = data.decode("utf-8", errors="replace").rstrip().split("\n")  # a bar that was drawn many times is one
    return tuple(line[-_LINE_CHARS:] for line in lines[-number:]) if data.strip() else ()


def _list_parts(path: Path) -> list[tuple[int, Path]]:
    """The files of a log, with where each begins."""
    name = re.compile(rf"{re.escape(path.name)}(?:\.(\d{{{_DIGITS}}}))?")
    try:
        found = [(match, entry) for entry in os.listdir(path.parent) if (match := name.fullmatch(entry))]
    except OSError:
        return []
    return sorted((int(match[1] or 0), path.with_name(entry)) for match, entry in found)
