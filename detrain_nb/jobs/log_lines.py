"""Lines of a job: made of the pieces in which its files come, kept in memory, and put in order."""

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
_LINE_TAKES_BYTES = 200  # beside its texts
# The end of a bar of tqdm, as [00:02<00:04, 9.94it/s], with what a print has written behind it on its line. It takes
# nothing back that it has matched: no other thread has its turn meanwhile, and a node sends megabytes of almost bars.
_BAR = re.compile(rb"\[[0-9:]{4,12}(?:<[^]\r\n,]{1,20})?, ([^]\r\n]{1,300}+)\]{1,3} {0,300}+(?=[^\r\n\x1b ])")
_MOST_DRAWN_BYTES = 1000
_TAKE_BACK = b"\r\x1b[K"


@dataclass(frozen=True)
class LogLine:
    """A line of a job, clean of what controls a terminal. ``source``: a rank, "setup", "torchrun", or "" for ours.

    ``node`` is empty where the job has one node.
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
    """Lines that are kept in memory, of logs or of metrics, as far as they take ``most_bytes``; then JobError."""

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
        """The metrics by step and rank."""
        return sorted(self.metrics, key=lambda line: (line["step"], line["rank"]))

    def _count(self, parts: Sequence[object]) -> None:
        self._num_bytes += _LINE_TAKES_BYTES + sum(map(sys.getsizeof, parts))
        if self._num_bytes > self._most_bytes:
            raise JobError(f"job {self._job}: what came takes more than {self._most_bytes:,} bytes: ask for one rank")


@dataclass
class FollowedFile:
    """A file as far as it has come: its bytes come in pieces, some of them again, and leave it as lines."""

    offset: int = 0
    rest: bytearray = field(default_factory=bytearray)  # of a line that has not ended
    most_line_bytes: int = _MOST_LINE_BYTES
    _is_in_line: bool = False
    _drawn: bytes = b""  # what was drawn on it last

    @classmethod
    def of(cls, name: str, offset: int = 0) -> FollowedFile:
        """One of a job: what was logged is of no use in parts."""
        return cls(offset, most_line_bytes=MOST_LINE_BYTES if name.startswith("metrics/") else _MOST_LINE_BYTES)

    def take(self, offset: int, data: bytes) -> list[str]:
        """The lines that ``data``, which stands at ``offset``, completes."""
        return self.to_lines(self.take_piece(offset, data))

    def to_lines(self, piece: bytes) -> list[str]:
        """The lines that a piece of `take_piece` completes."""
        *whole, rest = (bytes(self.rest) + piece).split(b"\n")
        if len(rest) > self.most_line_bytes:  # of a bar only what is drawn last stands there
            rest = rest[max(0, rest.rfind(b"\r", 0, -1)) :]
        while len(rest) > self.most_line_bytes:
            whole.append(rest[: self.most_line_bytes])
            rest = rest[self.most_line_bytes :]
        self.rest = bytearray(rest)
        return [_as_line(line) for line in whole]

    def take_piece(self, offset: int, data: bytes) -> bytes:
        """What of ``data``, which stands at ``offset``, has not come yet; a line says what is missing.

        It is as it is, but for a print behind a bar, which takes its place: stdout and stderr share a log.
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
        """The line that has not ended, as what is drawn last on it, of a bar say."""
        return _as_line(bytes(self.rest[max(0, self.rest.rfind(b"\r", 0, -1)) :]))

    def end(self) -> list[str]:
        """What is left when no more comes."""
        rest, self.rest = bytes(self.rest), bytearray()
        return [_as_line(rest)] if rest else []


def _is_of_bar(text: bytes, found: re.Match[bytes]) -> bool:
    """It has a rate, and its line was drawn anew."""
    begin = max(0, found.start() - _MOST_DRAWN_BYTES)
    is_redrawn = text.rfind(b"\r", begin, found.start()) > text.rfind(b"\n", begin, found.start())
    return is_redrawn and (b"/s" in found[1] or b"s/" in found[1])


def _as_line(data: bytes) -> str:
    text = data.decode(errors="replace")
    return text if text.isprintable() else clean_line(text)


def in_order(lines: Iterable[LogLine]) -> tuple[LogLine, ...]:
    """By node: what setup printed, what torchrun said, then the ranks in their order."""
    return tuple(sorted(lines, key=lambda line: place_of(line.node, line.source)))


def place_of(node: str, source: str) -> tuple[str, int, int]:
    """Where a log stands among those of a job."""
    is_rank = source.isdecimal()
    return node, 2 if is_rank else 1 if source == "torchrun" else 0, int(source) if is_rank else 0
