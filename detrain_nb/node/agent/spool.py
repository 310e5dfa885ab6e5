"""The ranks' messages to the notebook, numbered and kept until the notebook has shown them.

Frames are kept in segments on disk. A segment is dropped when all of it is acknowledged; when the spool is over its
limit, the oldest segments are dropped. If the disk is full, segments in memory are used instead: messages that end a
cell are always kept there, output only up to a limit. Lost bytes are counted and announced where they are missing.
"""

from __future__ import annotations

import io
from bisect import bisect_left, bisect_right
from operator import attrgetter, itemgetter
from pathlib import Path

from ...agents import open_private
from ...wire import Display, Frame, FrameReader, Notice, Output, to_frame

_SEGMENT_BYTES = 8 << 20
_MEMORY_SEGMENT_BYTES = 1 << 20
_MEMORY_BYTES = 16 << 20
_MARK_BYTES = 1 << 16


class _Segment:
    """Whole frames with consecutive numbers, in the file at ``path``; without a path, in memory.

    ``begins_at`` and ``ends_at`` are positions in the stream of all frames.
    """

    def __init__(self, first: int, begins_at: int, path: Path | None = None) -> None:
        """Open the file. Raises: OSError."""
        self._path = path
        self._file = io.FileIO(path, "w+", opener=open_private) if path else io.BytesIO()
        self.in_memory = path is None
        self.first, self.last = first, first - 1
        self.begins_at = self.ends_at = begins_at
        self.size_bytes = 0
        self.is_all_output = True
        self.gap_from = (first, begins_at)  # number and position where the gap before this segment begins
        self.gap_reason = ""
        self._marks = [(0, first)]  # offset and number of a frame, one about every 64 KiB

    def append(self, data: bytes, count: int) -> None:
        """Keep ``count`` frames. Raises: OSError when the disk is full; none of ``data`` is kept then."""
        self._write(data)
        if self.size_bytes - self._marks[-1][0] >= _MARK_BYTES:
            self._marks.append((self.size_bytes, self.last + 1))
        self.size_bytes += len(data)
        self.ends_at += len(data)
        self.last += count

    def offset_after(self, number: int) -> int:
        """Return the offset at which the frame after ``number`` begins."""
        index = bisect_right(self._marks, number, key=itemgetter(1)) - 1
        if index < 0:
            return 0
        start = self._marks[index][0]
        end = self._marks[index + 1][0] if index + 1 < len(self._marks) else self.size_bytes
        frames = FrameReader().feed(self.read(start, end - start))
        return start + sum(frame.size_bytes for frame in frames if frame.number <= number)

    def size_of_frames(self, offset: int, about_bytes: int) -> int:
        """Return how many bytes to read from ``offset``, the start of a frame, to end at the end of a frame."""
        if self.size_bytes - offset <= about_bytes:
            return self.size_bytes - offset
        index = bisect_right(self._marks, offset + about_bytes, key=itemgetter(0)) - 1
        if self._marks[index][0] <= offset:  # the frame is larger than ``about_bytes``
            index += 1
        return (self._marks[index][0] if index < len(self._marks) else self.size_bytes) - offset

    def number_before(self, offset: int) -> int:
        """Return the number of the frame that contains the byte before ``offset``."""
        start, number = self._marks[bisect_left(self._marks, (offset, 0)) - 1]
        reader = FrameReader()
        number += len(reader.feed(self.read(start, offset - start)))
        return number - 1 if reader.is_empty else number

    def read(self, offset: int, limit_bytes: int) -> bytes:
        self._file.seek(offset)
        return self._file.read(limit_bytes)

    def drop(self) -> None:
        self._file.close()
        if self._path:
            self._path.unlink(missing_ok=True)

    def _write(self, data: bytes) -> None:
        written = 0
        try:
            self._file.seek(self.size_bytes)
            while written < len(data):
                written += self._file.write(data[written:])
        except OSError:
            self._file.truncate(self.size_bytes)
            raise


class Spool:
    """A queue of frames with one writer and one reader at a time; frames are kept until they are acknowledged."""

    def __init__(self, folder: Path, *, known_as: Path | None = None, limit_bytes: int = 1 << 30) -> None:
        self._folder = folder
        self._known_as = known_as or folder  # the path shown in notices
        self.limit_bytes = limit_bytes
        self.last_number = 0
        self.acknowledged = 0
        self._segments: list[_Segment] = []
        self._files_made = 0
        self._ends_at = 0  # position in the stream of all frames that were ever kept
        self._read_at = 0  # position of the reader; a gap follows if it is before the next segment
        self._sent = 0  # a lower bound of the highest number that was read
        self._fresh = b""  # the last frames, if the reader had read all others: they need not be read from disk
        self._notice = b""  # the unread notice about a gap
        self._refused_bytes = 0  # of output that did not fit and has not been announced yet

    def append(self, frame: Frame) -> None:
        """Keep a frame under the next number."""
        can_be_lost = frame.kind in (Output, Display)
        is_reader_waiting = self._read_at == self._ends_at
        data, count = frame.to_bytes(number=self.last_number + 1), 1
        if self._refused_bytes and (can_be_lost or is_reader_waiting):
            loss = self._loss(self._refused_bytes, "the disk is full")
            data, count = loss.to_bytes(number=self.last_number + 1) + frame.to_bytes(number=self.last_number + 2), 2
        if not self._to_disk(data, count) and not self._to_memory(data, count, can_be_lost=can_be_lost):
            self._refused_bytes += len(frame.body)
            return
        if count > 1:
            self._refused_bytes = 0
        self.last_number += count
        self._ends_at += len(data)
        self._fresh = data if is_reader_waiting else b""

    @property
    def has_more(self) -> bool:
        """Whether there are frames that the reader has not read."""
        return self._read_at < self._ends_at

    @property
    def read_bytes(self) -> int:
        """The bytes of all frames ever kept that the reader has read or missed."""
        return self._read_at

    @property
    def unread_bytes(self) -> int:
        """The bytes that the reader has not read."""
        return self._ends_at - self._read_at

    @property
    def sent(self) -> int:
        """The highest frame number that was read, even if only in part."""
        segment = self._segment_to_read()
        if segment and segment.begins_at < self._read_at:
            self._sent = max(self._sent, segment.number_before(self._read_at - segment.begins_at))
        return self._sent

    def read(self, limit_bytes: int = 1 << 18) -> bytes:
        """Return the next unread frames; empty if there are none.

        Frames are never split, as other messages may be sent between two reads. The result exceeds ``limit_bytes``
        only if a single frame does.
        """
        if self._fresh:
            data, self._fresh = self._fresh, b""
            self._read_at, self._sent = self._ends_at, self.last_number
            return data
        segment = None if self._notice else self._segment_to_read()
        if segment and segment.begins_at <= self._read_at:
            offset = self._read_at - segment.begins_at
            data = segment.read(offset, segment.size_of_frames(offset, limit_bytes))
            self._read_at += len(data)
            if self._read_at == segment.ends_at:
                self._sent = max(self._sent, segment.last)
            return data
        if segment:
            loss = self._loss(segment.begins_at - self._read_at, segment.gap_reason)
            self._notice = loss.to_bytes(number=segment.first - 1)
            self._read_at = segment.begins_at
            self._sent = max(self._sent, segment.first - 1)
        data, self._notice = self._notice, b""
        return data

    def acknowledge(self, number: int) -> None:
        """Drop what need not be kept: everything up to ``number`` was shown. Numbers not sent yet are ignored."""
        if number <= self.acknowledged or (number > self._sent and number > self.sent):
            return
        self.acknowledged = number
        while len(self._segments) > 1:
            oldest = self._segments[0]
            if oldest.last > number or oldest.ends_at > self._read_at:
                return
            self._segments.pop(0).drop()

    def rewind(self) -> None:
        """Start over for another reader, after the last acknowledged number."""
        self._sent = self.sent
        self._fresh = self._notice = b""
        self._read_at = self._position_after(self.acknowledged)

    def close(self) -> None:
        """Remove the spool from the disk."""
        for segment in self._segments:
            segment.drop()
        self._segments.clear()
        self._fresh = self._notice = b""
        self._read_at = self._ends_at

    # ---- where frames go

    def _to_disk(self, data: bytes, count: int) -> bool:
        """Append to disk; returns False if the disk is full.

        A failed attempt is slow: the next one is made only when the segments in memory are full too.
        """
        last = self._segments[-1] if self._segments else None
        try:
            if last and not last.in_memory and last.size_bytes + len(data) <= _SEGMENT_BYTES:
                last.append(data, count)
                return True
            if last and last.in_memory and not self._refused_bytes and self._memory_bytes_with(data) <= _MEMORY_BYTES:
                return False
            path = self._folder / f"spool.{self._files_made:06d}"
            segment = _Segment(self.last_number + 1, self._ends_at, path)
        except OSError:
            return False
        try:
            segment.append(data, count)
        except OSError:
            segment.drop()
            return False
        self._files_made += 1
        self._add(segment)
        return True

    def _to_memory(self, data: bytes, count: int, *, can_be_lost: bool) -> bool:
        """Append to memory; returns False if a frame that can be lost does not fit.

        Once one such frame is lost, all further ones are lost until the reader has caught up.
        """
        last = self._segments[-1] if self._segments else None
        has_room = last and last.in_memory and last.size_bytes + len(data) <= _MEMORY_SEGMENT_BYTES
        segment = last if last and has_room else _Segment(self.last_number + 1, self._ends_at)
        excess = self._memory_bytes_with(data) - _MEMORY_BYTES
        # dropping what this reader has read loses something only if another reader follows
        can_go = [
            s
            for s in self._segments
            if s is not segment and s.is_all_output and s.in_memory and s.ends_at <= self._read_at
        ]
        if can_be_lost and (excess > sum(s.size_bytes for s in can_go) or (self._refused_bytes and self.has_more)):
            return False
        segment.append(data, count)
        segment.is_all_output &= can_be_lost
        if segment is not last:
            self._add(segment)
        for read in can_go:
            if excess > 0 and read in self._segments:
                excess -= read.size_bytes
                self._lose(read, "the disk is full")
        return True

    def _memory_bytes_with(self, data: bytes) -> int:
        return sum(segment.size_bytes for segment in self._segments if segment.in_memory) + len(data)

    def _add(self, segment: _Segment) -> None:
        """Add a segment, and drop the oldest ones above the limit except one that the reader is in the middle of."""
        excess = sum(s.size_bytes for s in self._segments) + max(segment.size_bytes, _SEGMENT_BYTES) - self.limit_bytes
        self._segments.append(segment)
        for oldest in self._segments[:-1]:
            if excess > 0 and not oldest.begins_at < self._read_at < oldest.ends_at:
                excess -= oldest.size_bytes
                self._lose(oldest, f"the spool is over its limit of {self.limit_bytes:,} bytes")

    # ---- what is dropped, and what is read next

    def _lose(self, segment: _Segment, reason: str) -> None:
        """Drop a segment that a reader may still need; it must not be the last one."""
        index = self._segments.index(segment)
        following = self._segments[index + 1]
        wanted_from = (self.acknowledged + 1, self._position_after(self.acknowledged))
        following.gap_from, following.gap_reason = max(segment.gap_from, wanted_from), reason
        self._segments.pop(index).drop()

    def _loss(self, size_bytes: int, reason: str) -> Frame:
        lost = f"about {size_bytes:,} bytes of output were lost under {self._known_as}: {reason}"
        return to_frame(Notice(f"{lost}; the ranks kept running"))

    def _segment_to_read(self) -> _Segment | None:
        """Return the first segment that ends after the reader's position."""
        index = bisect_right(self._segments, self._read_at, key=attrgetter("ends_at"))
        return self._segments[index] if index < len(self._segments) else None

    def _position_after(self, number: int) -> int:
        """Return the position at which the frame after ``number`` begins; an estimate if that frame was lost."""
        index = bisect_right(self._segments, number, key=attrgetter("last"))
        if index == len(self._segments):
            return self._ends_at
        segment = self._segments[index]
        lost = segment.first - 1 - number
        if lost <= 0:
            return segment.begins_at + segment.offset_after(number)
        first_lost, gap_at = segment.gap_from
        return segment.begins_at - (segment.begins_at - gap_at) * lost // (segment.first - first_lost)
