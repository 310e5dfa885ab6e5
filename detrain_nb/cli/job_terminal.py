"""Output of a job followed in a shell: finished lines, and on a terminal also lines still growing, such as bars."""

from __future__ import annotations

from typing import TextIO

from ..jobs.following import OnPiece
from ..jobs.log_lines import FollowedFile, LogLine
from ..jobs.report_checks import clean_line
from .terminal import Foot

__all__ = ["JobTerminal"]


class JobTerminal:
    """Printer for ``Job.attach``. On a terminal the unfinished last line of each rank is redrawn at the bottom."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._foot = Foot(out) if out.isatty() else None
        self._logs: dict[tuple[str, int], FollowedFile] = {}  # by node and rank

    @property
    def on_piece(self) -> OnPiece | None:
        """Callback for pieces of lines; None if only whole lines are shown."""
        return self._take_piece if self._foot else None

    def take(self, line: LogLine) -> None:
        """Print a line."""
        self._show([line])

    def finish(self) -> None:
        """Print the unfinished lines for good."""
        left = [LogLine(node, str(rank), text) for (node, rank), log in self._logs.items() for text in log.end()]
        self._show(left)

    def _take_piece(self, node: str, rank: int, piece: bytes) -> None:
        log = self._logs.setdefault((node, rank), FollowedFile())
        self._show([LogLine(node, str(rank), text) for text in log.take(log.offset, piece)])

    def _show(self, lines: list[LogLine]) -> None:
        if self._foot:
            self._foot.erase()
        self._out.write("".join(f"{line}\n" for line in lines))
        if self._foot:
            growing = [
                LogLine(node, str(rank), clean_line(log.rest.decode(errors="replace")).expandtabs())
                for (node, rank), log in sorted(self._logs.items())
                if log.rest
            ]
            self._foot.draw("\n".join(map(str, growing)))
        self._out.flush()
