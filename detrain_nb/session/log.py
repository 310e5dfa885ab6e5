"""Everything the ranks printed, cell by cell, on the notebook's disk: any cell's output can be read again, whole."""

from __future__ import annotations

import codecs
import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ..wire import FrameReader, Output, to_frame

_READ_BYTES = 1 << 20


class OutputLog:
    """One file of frames per cell, in a folder of its own."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="detrain_nb-log-"))
        self.error = ""

    def append(self, message: Output) -> None:
        """Keep a piece of output. A disk that takes no more is remembered in ``error``; the cell goes on."""
        if self.error:
            return
        try:
            with open(self._path(message.cell), "ab") as file:
                file.write(to_frame(message).to_bytes())
        except OSError as exc:
            self.error = f"the log under {self._folder} takes no more ({exc}): later output is only shown"

    def cells(self) -> list[int]:
        """The cells that printed something."""
        return sorted(int(path.stem) for path in self._folder.glob("*.frames"))

    def read(self, cell: int) -> Iterator[tuple[int, str, str]]:
        """What ``cell`` printed, in the order in which it arrived: rank, stream, text."""
        decoders: dict[tuple[int, str], codecs.IncrementalDecoder] = {}
        reader = FrameReader()
        with contextlib.suppress(FileNotFoundError), open(self._path(cell), "rb") as file:
            while data := file.read(_READ_BYTES):
                for frame in reader.feed(data):
                    message = frame.message()
                    assert isinstance(message, Output)
                    source = (message.rank, message.stream)
                    decoder = decoders.setdefault(source, codecs.getincrementaldecoder("utf-8")("replace"))
                    yield message.rank, message.stream, decoder.decode(message.body)

    def text(self, cell: int, rank: int, stream: str = "stdout") -> str:
        """All that one rank printed to one stream in ``cell``."""
        return "".join(text for r, s, text in self.read(cell) if (r, s) == (rank, stream))

    def close(self) -> None:
        """Remove the log from the disk."""
        shutil.rmtree(self._folder, ignore_errors=True)

    def _path(self, cell: int) -> Path:
        return self._folder / f"{cell:06d}.frames"
