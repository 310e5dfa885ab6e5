"""Files of a job from a store such as ``s3://``, read by a separate program, as it needs more libraries.

Only the environment of that program has the credentials. It first reports whether it can open the store.
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
_SILENCE_LIMIT_S = 45.0  # the notebook gives up after 60 s without a message
_END_LIMIT_S = 5.0


class _StoreReader:
    """The running program, and a socket to it with a timeout; created by `read_stored`."""

    def __init__(self, process: subprocess.Popen[bytes], sock: socket.socket, where: str) -> None:
        self._process, self._sock, self._where = process, sock, where
        self._name = ""  # of the store, without credentials
        self._reader, self._writer = sock.makefile("rb"), sock.makefile("wb")
        self._talk = Talk(self._reader, self._writer)

    def __enter__(self) -> _StoreReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill the program."""
        self._process.kill()
        self._process.wait(_END_LIMIT_S)
        for each in (self._reader, self._writer, self._sock):
            with contextlib.suppress(OSError):
                each.close()

    def open(self) -> None:
        """Open the store. Raises: FilesError when that fails: a library is missing, or the URL is invalid."""
        with self._explained():
            self._talk.say("open", where=self._where)
            self._name = str(self._talk.hear("opened").get("name"))

    def fetch(self, wanted: Sequence[tuple[str, int]], blobs: Blobs, *, tick: Callable[[], object]) -> None:
        """Fetch all files into ``blobs``. Raises: FilesError, also for a file that does not match its SHA-256."""
        for sha256, size in wanted:
            with self._explained():
                self._talk.say("read", name=sha256, size=size)
                self._talk.hear("file")
                try:
                    blobs.add(sha256, size, self._ticking(size, tick))
                except Untrue as exc:
                    there = f"{clean(self._name)}/{sha256}"
                    raise FilesError(f"{there} does not match its SHA-256: remove it and submit the job again") from exc

    def _ticking(self, size: int, tick: Callable[[], object]) -> Iterator[bytes]:
        for data in self._talk.read(size):
            tick()
            yield data

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Turn a failure of the program into a FilesError: it is not a failure of the notebook."""
        try:
            yield
        except Failed as exc:
            raise FilesError(f"the store cannot be read from this node: {exc}") from exc


def read_stored(where: str, environment: Mapping[str, str], *, tick: Callable[[], object]) -> _StoreReader:
    """Start the program that reads the store ``where``; the end of a ``with`` block kills it. Raises: FilesError."""
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
        raise FilesError(f"cannot start a process to read the store: {exc.strerror}") from exc
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
    """Open one store, and send the requested files until EOF."""
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
                is_sending = True  # a message now would be read as part of the file
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
