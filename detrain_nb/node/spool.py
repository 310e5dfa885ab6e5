"""What the ranks say to the notebook, numbered, on disk until it is read: a slow notebook holds up nobody.

Frames lie in segments, the oldest of which go when the spool is over its limit. With the disk full, a segment in memory
takes over: what ends a cell is always kept there, output only within bounds; what is lost is counted and announced.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from ..wire import Frame, Notice, to_frame

_SEGMENT_BYTES = 8 << 20
_MEMORY_BYTES = 16 << 20


class _FileSegment:
    in_memory = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        self.size_bytes = 0

    def append(self, data: bytes) -> None:
        """Raises: OSError when the disk takes no more; nothing of ``data`` is left then."""
        written = 0
        try:
            while written < len(data):
                written += os.write(self._fd, data[written:])
        except OSError:
            os.ftruncate(self._fd, self.size_bytes)
            raise
        self.size_bytes += len(data)

    def read(self, offset: int, limit_bytes: int) -> bytes:
        return os.pread(self._fd, limit_bytes, offset)

    def drop(self) -> None:
        os.close(self._fd)
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()


class _MemorySegment:
    in_memory = True

    def __init__(self) -> None:
        self._data = bytearray()

    @property
    def size_bytes(self) -> int:
        return len(self._data)

    def append(self, data: bytes) -> None:
        self._data += data

    def read(self, offset: int, limit_bytes: int) -> bytes:
        return bytes(self._data[offset : offset + limit_bytes])

    def drop(self) -> None:
        self._data.clear()


_Segment = _FileSegment | _MemorySegment


class Spool:
    """One writer and one reader. Segments hold whole frames, so what is dropped never cuts one."""

    def __init__(self, folder: Path, *, limit_bytes: int = 1 << 30) -> None:
        self._folder = folder
        self._limit_bytes = limit_bytes
        self.last_number = 0
        self._segments: list[_Segment] = [_MemorySegment()]
        self._files_made = 0
        self._reading = 0  # index of the segment that the reader is in
        self._offset = 0
        self._fresh = b""  # what was appended while the reader had everything else: it need not come from the disk
        self._lost_bytes = 0
        self._loss_reason = ""

    def append(self, frame: Frame) -> None:
        """Number a frame and keep it."""
        if self._lost_bytes and self._has_room_again() and self._put(to_frame(self._loss()), can_be_lost=True):
            self._lost_bytes = 0
        # looking costs less than decoding: to_frame writes the type last
        can_be_lost = frame.header.endswith((b'"type":"Output"}', b'"type":"Display"}'))
        if not self._put(frame, can_be_lost=can_be_lost):
            self._lost_bytes += len(frame.body)
            self._loss_reason = "the disk is full"

    @property
    def has_more(self) -> bool:
        """There is something that the reader has not had."""
        return self._offset < self._segments[self._reading].size_bytes or self._reading + 1 < len(self._segments)

    def read(self, limit_bytes: int = 1 << 18) -> bytes:
        """The next bytes that the reader has not had; empty when there are none."""
        while self._offset >= self._segments[self._reading].size_bytes and self._reading + 1 < len(self._segments):
            self._reading, self._offset = self._reading + 1, 0
            if self._segments[self._reading - 1].in_memory:
                self._drop(self._reading - 1)
        data, self._fresh = self._fresh or self._segments[self._reading].read(self._offset, limit_bytes), b""
        self._offset += len(data)
        return data

    def close(self) -> None:
        """Remove the spool from the disk."""
        for segment in self._segments:
            segment.drop()

    def _put(self, frame: Frame, *, can_be_lost: bool) -> bool:
        """False when there was no room for a frame that can be lost."""
        data = frame.to_bytes(number=self.last_number + 1)
        is_reader_waiting = not self.has_more
        segment = self._segment_for_writing()
        if segment.in_memory and can_be_lost and segment.size_bytes + len(data) > _MEMORY_BYTES:
            return False
        try:
            segment.append(data)
        except OSError:
            segment = _MemorySegment()
            segment.append(data)
            self._segments.append(segment)
        self.last_number += 1
        self._fresh = data if is_reader_waiting else b""
        return True

    def _segment_for_writing(self) -> _Segment:
        """The last one, or a new one when it is full, or when the disk may be tried again: all in memory was read."""
        last = self._segments[-1]
        if last.in_memory and self.has_more or not last.in_memory and last.size_bytes < _SEGMENT_BYTES:
            return last
        try:
            segment = _FileSegment(self._folder / f"spool.{self._files_made:06d}")
        except OSError:
            return last if last.in_memory else self._add(_MemorySegment())
        self._files_made += 1
        return self._add(segment)

    def _add(self, segment: _Segment) -> _Segment:
        self._segments.append(segment)
        while len(self._segments) > 3 and sum(s.size_bytes for s in self._segments) > self._limit_bytes:
            oldest = 0 if self._reading > 0 else 1  # the one that is being read may end in the middle of a frame
            if oldest > self._reading:
                self._lost_bytes += self._segments[oldest].size_bytes
                self._loss_reason = f"the spool is over its limit of {self._limit_bytes:,} bytes"
            self._drop(oldest)
        return segment

    def _drop(self, index: int) -> None:
        self._segments.pop(index).drop()
        if index < self._reading:
            self._reading -= 1

    def _has_room_again(self) -> bool:
        last = self._segments[-1]
        return not last.in_memory or not self.has_more

    def _loss(self) -> Notice:
        return Notice(
            f"about {self._lost_bytes:,} bytes of output were lost under {self._folder}: {self._loss_reason}; "
            "the ranks went on"
        )
