"""Lines of a job: assembled from the pieces in which its files arrive, kept in memory, and sorted."""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..errors import JobError
from ..metrics import MOST_LINE_BYTES
from ..text import ShownAsText
from .report_checks import clean_line

__all__ = ["FollowedFile", "JobLog", "Kept", "LogLine", "in_order", "place_of"]

_MOST_LINE_BYTES = 1 << 16  # a longer one is shown in parts
_LINE_TAKES_BYTES = 200  # in addition to its texts
# The end of a tqdm bar, such as [00:02<00:04, 9.94it/s], before text that a print wrote after it on the same line. The
# pattern never backtracks: matching holds the GIL, and a node may send megabytes of text that nearly is a bar.
_BAR = re.compile(rb"\[[0-9:]{4,12}(?:<[^]\r\n,]{1,20})?, ([^]\r\n]{1,300}+)\]{1,3} {0,300}+(?=[^\r\n\x1b ])")
_MOST_DRAWN_BYTES = 1000
_TAKE_BACK = b"\r\x1b[K"


@dataclass(frozen=True)
class LogLine:
    """A line of a job, without control sequences. ``source``: a rank, "setup", "torchrun", or "" for our own.

    ``node`` is empty if the job has only one node.
    """

    node: str
    source: str
    text: str

    def __str__(self) -> str:
        where = ":".join(filter(None, (self.node, self.source)))
        return f"[{where}] {self.text}" if where else self.text


@dataclass(frozen=True)
class JobLog(ShownAsText):
    """Lines of a job, by node and rank."""

    lines: tuple[LogLine, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.lines))


class Kept:
    """Lines of logs or metrics, kept in memory up to ``most_bytes``; more raises JobError."""

    def __init__(self, job: str, most_bytes: int) -> None:
        self.lines: list[LogLine] = []
        self.metrics: list[dict[str, Any]] = []
        self._job, self._most_bytes, self._num_bytes = job, most_bytes, 0

    def add_line(self, line: LogLine) -> None:
        self._count([line.text])
        self.lines.append(line)

    def add_metrics(self, values: dict[str, Any]) -> None:
        self._count([*values, *values.values()])
        self.metrics.append(values)

    def by_step(self) -> list[dict[str, Any]]:
        """Return the metrics, sorted by step and rank."""
        return sorted(self.metrics, key=lambda line: (line["step"], line["rank"]))

    def _count(self, parts: Sequence[object]) -> None:
        self._num_bytes += _LINE_TAKES_BYTES + sum(map(sys.getsizeof, parts))
        if self._num_bytes > self._most_bytes:
            raise JobError(f"job {self._job}: its output takes more than {self._most_bytes:,} bytes: ask for one rank")


@dataclass
class FollowedFile:
    """A file that arrives in pieces, some of them twice, and is turned into lines."""

    offset: int = 0
    rest: bytearray = field(default_factory=bytearray)  # of an unfinished line
    most_line_bytes: int = _MOST_LINE_BYTES
    _is_in_line: bool = False
    _drawn: bytes = b""  # what was drawn last on that line

    @classmethod
    def of(cls, name: str, offset: int = 0) -> FollowedFile:
        """Return an instance for a file of a job; a line of metrics is useless in parts, so it may be longer."""
        return cls(offset, most_line_bytes=MOST_LINE_BYTES if name.startswith("metrics/") else _MOST_LINE_BYTES)

    def take(self, offset: int, data: bytes) -> list[str]:
        """Return the lines that ``data``, found at ``offset`` of the file, completes."""
        return self.to_lines(self.take_piece(offset, data))

    def to_lines(self, piece: bytes) -> list[str]:
        """Return the lines that a piece from `take_piece` completes."""
        *whole, rest = (bytes(self.rest) + piece).split(b"\n")
        if len(rest) > self.most_line_bytes:  # keep only what a bar has drawn last
            rest = rest[max(0, rest.rfind(b"\r", 0, -1)) :]
        while len(rest) > self.most_line_bytes:
            whole.append(rest[: self.most_line_bytes])
            rest = rest[self.most_line_bytes :]
        self.rest = bytearray(rest)
        return [_as_line(line) for line in whole]

    def take_piece(self, offset: int, data: bytes) -> bytes:
        """Return the part of ``data``, found at ``offset`` of the file, that is new; a line reports missing bytes.

        It is unchanged, except that text printed after a progress bar replaces the bar: stdout and stderr share a log.
        """
        gap = b""
        if offset > self.offset:
            said = f"... {offset - self.offset:,} bytes were cut out here ...\n".encode()
            gap = b"\n" + said if self._is_in_line else said
            self.offset = offset
        data = data[self.offset - offset :]
        self.offset += len(data)
        if gap or data:
            self._is_in_line = not (data or gap).endswith(b"\n")
        return gap + self._part_from_bars(data)

    def _part_from_bars(self, data: bytes) -> bytes:
        before, text = len(self._drawn), self._drawn + data
        self._drawn = text[max(text.rfind(b"\r"), len(text) - _MOST_DRAWN_BYTES, 0) :]
        if b"\r" not in text:
            return data
        ends = [found.end() - before for found in _BAR.finditer(text) if _is_of_bar(text, found)]
        parts = itertools.pairwise([0, *(end for end in ends if end >= 0), len(data)])
        return _TAKE_BACK.join(data[begin:end] for begin, end in parts)

    def begun(self) -> str:
        """Return the unfinished line as it was drawn last, for example a progress bar."""
        return _as_line(bytes(self.rest[max(0, self.rest.rfind(b"\r", 0, -1)) :]))

    def end(self) -> list[str]:
        """Return the rest as a line, at the end of the file."""
        rest, self.rest = bytes(self.rest), bytearray()
        return [_as_line(rest)] if rest else []


def _is_of_bar(text: bytes, found: re.Match[bytes]) -> bool:
    """Return whether a match is a progress bar: it has a rate, and its line was redrawn."""
    begin = max(0, found.start() - _MOST_DRAWN_BYTES)
    is_redrawn = text.rfind(b"\r", begin, found.start()) > text.rfind(b"\n", begin, found.start())
    return is_redrawn and (b"/s" in found[1] or b"s/" in found[1])


def _as_line(data: bytes) -> str:
    text = data.decode(errors="replace")
    return text if text.isprintable() else clean_line(text)


def in_order(lines: Iterable[LogLine]) -> tuple[LogLine, ...]:
    """Sort lines by node, then setup, torchrun, and the ranks in order."""
    return tuple(sorted(lines, key=lambda line: place_of(line.node, line.source)))


def place_of(node: str, source: str) -> tuple[str, int, int]:
    """Return the sort key of a log among those of a job."""
    is_rank = source.isdecimal()
    return node, 2 if is_rank else 1 if source == "torchrun" else 0, int(source) if is_rank else 0
