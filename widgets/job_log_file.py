"""The whole output of a job as one file: log by log, sorted by node and rank."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from ..deploy.files import Stop
from ..jobs import Job, LogLine
from ..jobs.log_lines import place_of
from ..session.output.safe_output import one_line
from ..text import format_size
from .actions import Refused

_WAITING_BYTES = 1 << 18  # of a log, in memory
_MOST_NOTES = 3  # about missing lines; a node could send any number
_SHARE = 0.45  # of the free disk space: a log exists twice while the logs are joined
OnBytes = Callable[[int], object]


def write_log(
    job: Job,
    folder: Path,
    on_bytes: OnBytes,
    *,
    node: str = "",
    source: str = "",
    most_bytes: int | None = None,
    cancel: Stop | None = None,
) -> tuple[Path, list[str]]:
    """Write the output, or that of ``source`` alone, to a file in ``folder``; replaces an earlier one.

    Returns the file, and up to three notes about missing lines. Another thread can end it with ``cancel``.
    Raises: Refused when the output exceeds ``most_bytes``, by default 45 % of the free disk space; DetrainError.
    """
    most = int(_SHARE * shutil.disk_usage(folder).free) if most_bytes is None else most_bytes
    of_node = node if source == "setup" else ""
    named = "-".join(filter(None, (job.id, of_node, _word_for(source))))
    path = folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', named)}.log"
    with tempfile.TemporaryDirectory(prefix=".detrain_nb-log-", dir=folder) as parts:
        written = _Parts(Path(parts), source, most, on_bytes)
        rank = int(source) if source.isdecimal() else None
        job.logs(node=node or None, rank=rank, on_line=written.add, cancel=cancel)
        written.join().replace(path)
    return path, written.notes


def _word_for(source: str) -> str:
    return f"rank-{source}" if source.isdecimal() else source


class _Parts:
    """The logs, each in a file of its own, as nodes send their lines interleaved."""

    def __init__(self, folder: Path, source: str, most_bytes: int, on_bytes: OnBytes) -> None:
        self.notes: list[str] = []
        self._folder, self._source, self._most_bytes, self._on_bytes = folder, source, most_bytes, on_bytes
        self._waiting: dict[tuple[str, str], bytearray] = {}
        self._files: dict[tuple[str, str], Path] = {}
        self._num_bytes = 0

    def add(self, line: LogLine) -> None:
        """Add a line. Raises: Refused when the output is too large."""
        if not line.source:
            if len(self.notes) < _MOST_NOTES:
                self.notes.append(one_line(str(line)))
        elif self._source in ("", line.source):
            data = f"{line.text if self._source else line}\n".encode()
            whose = line.node, line.source
            self._files.setdefault(whose, self._folder / f"{len(self._files)}")
            waiting = self._waiting.setdefault(whose, bytearray())
            waiting += data
            self._num_bytes += len(data)
            if len(waiting) >= _WAITING_BYTES:
                self._flush(whose)
                self._on_bytes(self._num_bytes)
            if self._num_bytes > self._most_bytes:
                raise Refused(f"the output exceeds {format_size(self._most_bytes)}, the most that fits here")

    def join(self) -> Path:
        whole = self._folder / "whole"
        with whole.open("wb") as file:
            for whose in sorted(self._waiting, key=lambda each: place_of(*each)):
                self._flush(whose)
                with self._files[whose].open("rb") as part:
                    shutil.copyfileobj(part, file)
                self._files[whose].unlink()
        return whole

    def _flush(self, whose: tuple[str, str]) -> None:
        with self._files[whose].open("ab") as part:
            part.write(self._waiting[whose])
        self._waiting[whose].clear()
