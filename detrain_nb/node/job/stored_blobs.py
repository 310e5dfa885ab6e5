"""Files of a job that come through a store, such as ``s3://``: read by a program of its own, since it needs libraries.

Its environment alone has what lets it in. It says first whether it can open the store at all.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from io import BufferedReader
from typing import cast

from ...copying.json_lines import Failed, FilesError, Talk, Untrue, as_size, clean
from ...errors import DetrainError
from ...guarded import RUN_MODULE
from ..system.own_files import PACKAGE
from .blobs import Blobs

__all__ = ["main", "read_stored"]

_CHUNK_BYTES = 1 << 20
_SILENCE_LIMIT_S = 45.0  # the notebook gives up after 60 s in which nothing is said
_END_LIMIT_S = 5.0


class _StoreReader:
    """The program at work, and a socket to it, which no silence holds up; made by `read_stored`."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket, where: str) -> None:
        self._process, self._sock, self._where = process, sock, where
        self._name = ""  # without what lets in
        self._reader, self._writer = sock.makefile("rb"), sock.makefile("wb")
        self._talk = Talk(self._reader, self._writer)

    def __enter__(self) -> _StoreReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the program."""
        self._process.kill()
        self._process.wait(_END_LIMIT_S)
        for each in (self._reader, self._writer, self._sock):
            with contextlib.suppress(OSError):
                each.close()

    def open(self) -> None:
        """Raises: FilesError where the store cannot be opened: a library is missing, or its name is none."""
        with self._explained():
            self._talk.say("open", where=self._where)
            self._name = str(self._talk.hear("opened").get("name"))

    def fetch(self, wanted: Sequence[tuple[str, int]], blobs: Blobs, *, tick: Callable[[], object]) -> None:
        """Have all files. Raises: FilesError, also for one that is another there."""
        for sha256, size in wanted:
            with self._explained():
                self._talk.say("read", name=sha256, size=size)
                self._talk.hear("file")
                try:
                    blobs.add(sha256, size, self._ticking(size, tick))
                except Untrue as exc:
                    there = f"{clean(self._name)}/{sha256}"
                    raise FilesError(f"{there} is not what was put there: remove it, and submit the job again") from exc

    def _ticking(self, size: int, tick: Callable[[], object]) -> Iterator[bytes]:
        for data in self._talk.read(size):
            tick()
            yield data

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """What goes wrong there is no word of the notebook's."""
        try:
            yield
        except Failed as exc:
            raise FilesError(f"the store cannot be read from this node: {exc}") from exc


def read_stored(where: str, environment: Mapping[str, str], *, tick: Callable[[], object]) -> _StoreReader:
    """Start the program that reads the store ``where``; it is ended by the block that uses it."""
    above = os.path.dirname(PACKAGE)
    kept = os.environ.get("PYTHONPATH")
    ours, theirs = socket.socketpair()
    ours.settimeout(_SILENCE_LIMIT_S)
    try:
        process = subprocess.Popen(
            [sys.executable, "-X", "utf8", "-c", RUN_MODULE, __name__],
            cwd="/",
            env={**os.environ, **environment, "PYTHONPATH": f"{above}{os.pathsep}{kept}" if kept else above},
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as exc:
        ours.close()
        raise FilesError(f"no process can be started to read the store: {exc.strerror}") from exc
    finally:
        theirs.close()
    reader = _StoreReader(process, ours, where)
    try:
        tick()
        reader.open()
    except BaseException:
        reader.close()
        raise
    return reader


def main() -> None:
    """Open one store, and read what is asked for until nothing more is."""
    from ...storage import locate, named_errors

    talk, is_sending = Talk(cast(BufferedReader, sys.stdin.buffer), sys.stdout.buffer), False
    try:
        where = talk.hear("open")["where"]
        folder = locate(str(where))
        talk.say("opened", name=folder.name)
        while True:
            said = talk.hear("read")
            left = as_size(said.get("size"))
            file = folder / str(said.get("name"))
            with named_errors(file.name, "read"), file.open() as opened:
                data = opened.read(min(left, _CHUNK_BYTES))
                talk.say("file")
                is_sending = True  # what is said now would be read as a part of the file
                while data:
                    talk.send(data)
                    left -= len(data)
                    data = opened.read(min(left, _CHUNK_BYTES))
            if left:
                return
            is_sending = False
    except (DetrainError, OSError, FilesError) as exc:
        with contextlib.suppress(FilesError):
            if not is_sending:
                talk.say("failed", text=str(exc))
                talk.flush()


if __name__ == "__main__":
    main()
