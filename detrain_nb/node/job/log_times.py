"""Times of the output in a log: marks with its size at a time, at most one per second; the last 65536 are kept.

They are in ``rank-0.log.times``, next to the log. A log without marks was written by an earlier release.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import overload

MOST_MARKS = 1 << 16  # kept: 18 hours of a rank that prints all the time
_GAP_S = 1.0
_MARK = struct.Struct("<Qd")  # an offset, and seconds since the epoch
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_APPEND = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW

Mark = tuple[int, float]


class LogTimes:
    """Writer of the marks of a log. On a disk error only marks are lost."""

    def __init__(self, log: Path, *, most: int = MOST_MARKS, now: Callable[[], float] = time.time) -> None:
        self._path, self._most, self._now = _path_of(log), most, now
        self._count, self._noted_at = 0, 0.0

    def note(self, size: int) -> None:
        """Note that output after the first ``size`` bytes is printed now."""
        now = self._now()
        if 0 <= now - self._noted_at < _GAP_S:  # a clock that was set back gets a mark at once
            return
        self._noted_at = now
        with contextlib.suppress(OSError):
            self._append(_MARK.pack(size, now))
            if self._count >= 2 * self._most:
                self._drop_old()

    def _append(self, mark: bytes) -> None:
        file = os.open(self._path, _APPEND, 0o600)
        try:
            if os.write(file, mark) < len(mark):  # the disk is full: part of a mark would misalign all later ones
                size = os.fstat(file).st_size
                os.ftruncate(file, size - size % _MARK.size)
                return
        finally:
            os.close(file)
        self._count += 1

    def _drop_old(self) -> None:
        fresh = self._path.with_name(f"{self._path.name}.new")
        fresh.write_bytes(self._path.read_bytes()[-self._most * _MARK.size :])
        fresh.replace(self._path)
        self._count = self._most


def read_times(log: Path, begin: int, end: int, *, most: int) -> list[Mark]:
    """Return the marks of the bytes from ``begin`` to ``end``; the last ``most`` if there are more."""
    try:
        file = os.open(_path_of(log), _READ)
    except OSError:
        return []
    try:
        marks = _Marks(file)
        first = max(0, bisect.bisect_right(marks, begin, key=lambda mark: mark[0]) - 1)
        last = bisect.bisect_left(marks, end, lo=first, key=lambda mark: mark[0])
        return list(marks[max(first, last - most) : last])
    except (OSError, struct.error):  # not a file that we wrote
        return []
    finally:
        os.close(file)


class _Marks(Sequence[Mark]):
    """Marks of a file, read on access."""

    def __init__(self, file: int) -> None:
        self._file, self._count = file, os.fstat(file).st_size // _MARK.size

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, place: int) -> Mark: ...
    @overload
    def __getitem__(self, place: slice) -> list[Mark]: ...
    def __getitem__(self, place: int | slice) -> Mark | list[Mark]:
        if isinstance(place, int):
            if not 0 <= place < self._count:
                raise IndexError(place)
            return _MARK.unpack(os.pread(self._file, _MARK.size, place * _MARK.size))
        begin, end, _ = place.indices(self._count)
        data = os.pread(self._file, max(0, end - begin) * _MARK.size, begin * _MARK.size)
        return list(_MARK.iter_unpack(data))


def _path_of(log: Path) -> Path:
    return log.with_name(f"{log.name}.times")
