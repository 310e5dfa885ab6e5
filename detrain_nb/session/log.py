"""Everything the ranks printed and showed, cell by cell, on the notebook's disk, to be read again.

The log outlives its session, since results read from it; it goes with the last of them, or with the process.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

from ..transport.local import is_running, runtime_folder
from ..wire import CellDone, CellFailed, ClearOutput, Display, FrameReader, Output, to_frame

Logged = Output | Display | ClearOutput | CellDone | CellFailed
_READ_BYTES = 1 << 20
_PREFIX = ".log-"


class OutputLog:
    """One file of frames per cell, in a folder of its own."""

    def __init__(self) -> None:
        base = runtime_folder()
        _remove_orphans(base)
        self._folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=base))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
        self.error = ""

    def append(self, message: Logged) -> None:
        """Keep what a rank said. A disk that takes no more is remembered in ``error``; the cell goes on."""
        if self.error:
            return
        try:
            with open(self._path(message.cell), "ab") as file:
                file.write(to_frame(message).to_bytes())
        except OSError as exc:
            self.error = f"the log under {self._folder} takes no more ({exc}): later output is only shown"

    def cells(self) -> list[int]:
        """The cells that printed or showed something."""
        return sorted(int(path.stem) for path in self._folder.glob("*.frames"))

    def read(self, cell: int) -> Iterator[Logged]:
        """What the ranks said in ``cell``, in the order in which it arrived."""
        reader = FrameReader()
        with contextlib.suppress(FileNotFoundError), open(self._path(cell), "rb") as file:
            while data := file.read(_READ_BYTES):
                for frame in reader.feed(data):
                    message = frame.message()
                    assert isinstance(message, Logged)
                    yield message

    def text(self, cell: int, rank: int, stream: str = "stdout") -> str:
        """All that one rank printed to one stream in ``cell``."""
        pieces = (m.body for m in self.read(cell) if isinstance(m, Output) and (m.rank, m.stream) == (rank, stream))
        return b"".join(pieces).decode("utf-8", "replace")

    def _path(self, cell: int) -> Path:
        return self._folder / f"{cell:06d}.frames"


def _remove_orphans(base: Path) -> None:
    """Remove the logs of processes that were killed before they could."""
    for folder in base.glob(f"{_PREFIX}*"):
        pid = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdigit() and not is_running(int(pid)):
            shutil.rmtree(folder, ignore_errors=True)
