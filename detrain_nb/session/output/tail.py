"""The last lines that a rank has printed in a cell, read as they arrive; a long log is not kept completely."""

from __future__ import annotations

from ...wire import Output
from .log import LogReader
from .safe_output import clean_text, without_colours

_KEPT_BYTES = 1 << 16  # of each stream
_STREAMS = ("stdout", "stderr")


class Tail:
    """The last lines of one rank in one cell, both streams in order of arrival."""

    def __init__(self, reader: LogReader, rank: int, *, most_lines: int, most_chars: int) -> None:
        """Start reading; ``most_chars`` of each line are kept."""
        self._reader = reader
        self._rank = rank
        self._most_lines = most_lines
        self._most_chars = most_chars
        self._end = bytearray()
        self._is_cut = False

    def read(self) -> tuple[list[str], bool]:
        """Return the last lines so far, and whether there are more before them."""
        for message in self._reader.read():
            if isinstance(message, Output) and message.rank == self._rank and message.stream in _STREAMS:
                self._end += message.body[-_KEPT_BYTES:]
                if len(self._end) > 2 * _KEPT_BYTES:
                    del self._end[:-_KEPT_BYTES]
                    self._is_cut = True
        text = without_colours(clean_text(self._end.decode("utf-8", "replace")))
        lines = [_as_drawn_last(line)[: self._most_chars] for line in text.split("\n")]
        lines = lines[1:] if self._is_cut else lines  # the first is incomplete
        lines = lines[:-1] if lines and not lines[-1] else lines
        return lines[-self._most_lines :], self._is_cut or len(lines) > self._most_lines


def _as_drawn_last(line: str) -> str:
    """Return the last state of a line that was redrawn, like a progress bar."""
    return next((drawn for drawn in reversed(line.split("\r")) if drawn.strip()), "")
