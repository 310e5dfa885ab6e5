"""What the ranks say to the notebook, numbered, kept until it was shown there: a slow notebook holds up nobody.

Frames lie in segments on disk. A segment goes when all of it is acknowledged and, the oldest first, when the spool is
over its limit. With the disk full, segments in memory take over: what ends a cell is always kept there, output only
within bounds. What is lost is counted and announced where it is missing.
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
    """Whole frames, numbered without a gap, in the file at ``path``; without one, in memory.

    ``begins_at`` and ``ends_at`` are positions in the stream of all frames.
    """

    def __init__(self, first: int, begins_at: int, path: Path | None = None) -> None:
        """Raises: OSError."""
        self._path = path
        self._file = io.FileIO(path, "w+", opener=open_private) if path else io.BytesIO()
        self.in_memory = path is None
        self.first, self.last = first, first - 1
        self.begins_at = self.ends_at = begins_at
        self.size_bytes = 0
        self.is_all_output = True
        self.gap_from = (first, begins_at)  # number and position where what is missing before this segment begins
        self.gap_reason = ""
        self._marks = [(0, first)]  # offset and number of a frame, every now and then

    def append(self, data: bytes, count: int) -> None:
        """Keep ``count`` frames. Raises: OSError when the disk takes no more; nothing of ``data`` is left then."""
        self._write(data)
        if self.size_bytes - self._marks[-1][0] >= _MARK_BYTES:
            self._marks.append((self.size_bytes, self.last + 1))
        self.size_bytes += len(data)
        self.ends_at += len(data)
        self.last += count

    def offset_after(self, number: int) -> int:
        """Where the frame after ``number`` begins."""
        index = bisect_right(self._marks, number, key=itemgetter(1)) - 1
        if index < 0:
            return 0
        start = self._marks[index][0]
        end = self._marks[index + 1][0] if index + 1 < len(self._marks) else self.size_bytes
        frames = FrameReader().feed(self.read(start, end - start))
        return start + sum(frame.size_bytes for frame in frames if frame.number <= number)

    def size_of_frames(self, offset: int, about_bytes: int) -> int:
        """How much to read from ``offset``, where a frame begins, to end where one ends."""
        if self.size_bytes - offset <= about_bytes:
            return self.size_bytes - offset
        index = bisect_right(self._marks, offset + about_bytes, key=itemgetter(0)) - 1
        if self._marks[index][0] <= offset:  # a frame that is larger
            index += 1
        return (self._marks[index][0] if index < len(self._marks) else self.size_bytes) - offset

    def number_before(self, offset: int) -> int:
        """The number of the frame that the byte before ``offset`` belongs to."""
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
    """One writer, and one reader at a time. What the reader has had is kept for the next one until acknowledged."""

    def __init__(self, folder: Path, *, known_as: Path | None = None, limit_bytes: int = 1 << 30) -> None:
        self._folder = folder
        self._known_as = known_as or folder  # in words
        self.limit_bytes = limit_bytes
        self.last_number = 0
        self.acknowledged = 0
        self._segments: list[_Segment] = []
        self._files_made = 0
        self._ends_at = 0  # position in the stream of all frames that were ever kept
        self._read_at = 0  # position of the reader; less than where the next segment begins: there is a gap before that
        self._sent = 0  # at least this was given out
        self._fresh = b""  # what was appended while the reader had everything else: it need not come from the disk
        self._notice = b""  # what the reader has not had of a notice about a gap
        self._refused_bytes = 0  # of output that found no room, and was not announced yet

    def append(self, frame: Frame) -> None:
        """Number a frame and keep it."""
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
        """There is something that the reader has not had."""
        return self._read_at < self._ends_at

    @property
    def read_bytes(self) -> int:
        """How much of all that was ever kept the reader has had, or missed."""
        return self._read_at

    @property
    def unread_bytes(self) -> int:
        """How much the reader has not had."""
        return self._ends_at - self._read_at

    @property
    def sent(self) -> int:
        """The highest number that was given out, be it in part."""
        segment = self._segment_to_read()
        if segment and segment.begins_at < self._read_at:
            self._sent = max(self._sent, segment.number_before(self._read_at - segment.begins_at))
        return self._sent

    def read(self, limit_bytes: int = 1 << 18) -> bytes:
        """The next frames that the reader has not had, whole: something else may be said between two reads; empty when
        there are none. More than ``limit_bytes`` only where a frame is."""
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
        """Everything up to ``number`` was shown: it need not be kept. A number that was not sent yet is ignored."""
        if number <= self.acknowledged or (number > self._sent and number > self.sent):
            return
        self.acknowledged = number
        while len(self._segments) > 1:
            oldest = self._segments[0]
            if oldest.last > number or oldest.ends_at > self._read_at:
                return
            self._segments.pop(0).drop()

    def rewind(self) -> None:
        """Another reader: it gets what comes after the number that was acknowledged."""
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
        """False when the disk is full. That costs: it is tried again when there is no room in memory either."""
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
        """False when there is no room for a frame that can be lost; after one, all are until the reader caught up."""
        last = self._segments[-1] if self._segments else None
        has_room = last and last.in_memory and last.size_bytes + len(data) <= _MEMORY_SEGMENT_BYTES
        segment = last if last and has_room else _Segment(self.last_number + 1, self._ends_at)
        excess = self._memory_bytes_with(data) - _MEMORY_BYTES
        # what the reader has had is lost only if there will be another reader
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
        """Begin a segment; what then is over the limit goes, but for where the reader may be inside a frame."""
        excess = sum(s.size_bytes for s in self._segments) + max(segment.size_bytes, _SEGMENT_BYTES) - self.limit_bytes
        self._segments.append(segment)
        for oldest in self._segments[:-1]:
            if excess > 0 and not oldest.begins_at < self._read_at < oldest.ends_at:
                excess -= oldest.size_bytes
                self._lose(oldest, f"the spool is over its limit of {self.limit_bytes:,} bytes")

    # ---- what goes, and what is read next

    def _lose(self, segment: _Segment, reason: str) -> None:
        """Drop a segment that some reader may still want; it is not the last one."""
        index = self._segments.index(segment)
        following = self._segments[index + 1]
        wanted_from = (self.acknowledged + 1, self._position_after(self.acknowledged))
        following.gap_from, following.gap_reason = max(segment.gap_from, wanted_from), reason
        self._segments.pop(index).drop()

    def _loss(self, size_bytes: int, reason: str) -> Frame:
        lost = f"about {size_bytes:,} bytes of output were lost under {self._known_as}: {reason}"
        return to_frame(Notice(f"{lost}; the ranks went on"))

    def _segment_to_read(self) -> _Segment | None:
        """The first one that ends after the reader's position."""
        index = bisect_right(self._segments, self._read_at, key=attrgetter("ends_at"))
        return self._segments[index] if index < len(self._segments) else None

    def _position_after(self, number: int) -> int:
        """Where the frame after ``number`` begins; began, about, when it was lost."""
        index = bisect_right(self._segments, number, key=attrgetter("last"))
        if index == len(self._segments):
            return self._ends_at
        segment = self._segments[index]
        lost = segment.first - 1 - number
        if lost <= 0:
            return segment.begins_at + segment.offset_after(number)
        first_lost, gap_at = segment.gap_from
        return segment.begins_at - (segment.begins_at - gap_at) * lost // (segment.first - first_lost)
