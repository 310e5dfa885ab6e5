"""Lines of JSON with raw bytes between them: both ends of the protocol for files (remote_program.py) and for jobs.

Everything received is validated.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import reprlib
import time
import unicodedata
from collections.abc import Callable, Iterator
from io import BufferedReader
from typing import Any, Protocol

from ..text import printable

_CHUNK_BYTES = 1 << 18
LINE_BYTES = 1 << 18  # any line is parsed within 70 ms, during which no other thread can run
_STILL_AT_IT = b'{"type": "wait"}\n'
_MOST_WAITS = 10_000  # 14 hours
MOST_DEPTH = 100  # of nested folders
SLOWEST_BYTES_PER_S = 20_000  # slower connections are given up
_TICK_S = 5.0
_LAST_LINES = 100
_CUT_OFF = "the other side hung up in the middle of a file"
_UNFIT = ("Cc", "Cf", "Cs", "Zl", "Zp")  # invisible and direction-changing characters make names look alike
_JOINERS = "\u200c\u200d"  # also invisible, but some languages and emoji need them
_NOT_ON_WINDOWS = re.compile(r'[\\:*?"<>|]|[ .](/|$)|(^|/)(con|prn|aux|nul|com\d|lpt\d)(\.|/|$)', re.IGNORECASE)


class FilesError(Exception):
    """An error on this side, with a text for the user."""


class Failed(FilesError):
    """The other side has reported an error or hung up."""


class Refused(Failed):
    """The other side has reported why it cannot continue."""


class Overdue(Failed):
    """The other side does not finish: it is silent, too slow, or keeps reporting that it is busy."""


class Untrue(FilesError):
    """Received data is not a valid message."""


class Sink(Protocol):
    """A destination for bytes."""

    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> object: ...


class Talk:
    """An exchange of JSON lines and raw bytes with the other side, with limits on sizes.

    ``deadline`` (of time.monotonic()) ends all waiting; the caller may set it.
    """

    def __init__(
        self,
        reader: BufferedReader,
        writer: Sink,
        *,
        has_come: Callable[[], bool] = lambda: False,
        patience_s: float = math.inf,
    ) -> None:
        """Talk through ``reader`` and ``writer``.

        ``has_come``: whether data has arrived while this side only sends; it can only be an error report.
        ``patience_s``: the limit for one answer, however often the other side reports that it is busy.
        """
        self.deadline = math.inf
        self._reader = reader
        self._writer = writer
        self._has_come = has_come
        self._patience_s = patience_s
        self._num_waits = 0
        self._said_at = time.monotonic()
        self._arrived = bytearray()  # received bytes that are not read yet

    def say(self, kind: str, **fields: object) -> None:
        self.send(json.dumps({"type": kind, **fields}).encode() + b"\n")

    def send(self, data: bytes) -> None:
        if self._has_come():
            self._take(self._read_line(self._until()))
        _check_time(self.deadline)
        with self._explained():
            self._writer.write(data)

    def flush(self) -> None:
        with self._explained():
            self._writer.flush()
        self._said_at = time.monotonic()

    def tick(self) -> None:
        """Send a line that this side is still busy, if it has sent nothing for 5 s."""
        if time.monotonic() - self._said_at > _TICK_S:
            self.send(_STILL_AT_IT)
            self.flush()

    def hear(self, *kinds: str, most_bytes: int = LINE_BYTES) -> dict[str, Any]:
        """Return the next line, which must be of one of the kinds. Raises: Failed, Untrue."""
        self.flush()
        deadline = self._until()
        while not self._take(said := self._read_line(deadline, most_bytes), *kinds):
            pass
        return said

    def _until(self) -> float:
        return min(self.deadline, time.monotonic() + self._patience_s)

    def _take(self, said: dict[str, Any], *kinds: str) -> bool:
        """Check the kind of a line; returns False if it only reports that the other side is busy. Raises: Untrue."""
        if not said:
            self._num_waits += 1
            if self._num_waits > _MOST_WAITS:
                raise Overdue("the other side keeps reporting that it is busy")
            return False
        kind = said.get("type")
        if kind not in kinds:
            expected = " or ".join(kinds) or "nothing"
            raise Untrue(f"received {clean(kind)[:40]!r} instead of {expected}")
        return True

    def _read_line(self, deadline: float, most_bytes: int = LINE_BYTES) -> dict[str, Any]:
        """Return the next line; empty if it only reports that the other side is busy."""
        looked_at = 0
        while (end := self._arrived.find(b"\n", looked_at, most_bytes)) < 0 and len(self._arrived) < most_bytes:
            looked_at = len(self._arrived)
            self._arrived += self._receive(deadline, _CHUNK_BYTES, "the other side hung up before it was done")
        line = bytes(self._arrived[: end + 1])
        del self._arrived[: end + 1]
        if line == _STILL_AT_IT:
            return {}
        try:
            said = json.loads(line)  # fails for an empty line, that is, one without an end
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            raise Untrue("received data that is not a valid message")
        if said.get("type") == "failed":
            raise Refused(clean(said.get("text")))
        return said

    def _receive(self, deadline: float, most: int, complaint: str) -> bytes:
        _check_time(deadline)
        with _connection_errors():
            data = self._reader.read1(most)
        if not data:
            raise Failed(complaint)
        return data

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Look for an error report when sending fails: the other side may have sent one before it hung up."""
        try:
            with _connection_errors():
                yield
        except Failed as exc:
            if not isinstance(exc, Overdue):
                deadline = self._until()
                with contextlib.suppress(Untrue):
                    for _ in range(_LAST_LINES):
                        self._read_line(deadline)
            raise

    def read(self, size: int) -> Iterator[bytes]:
        """Yield exactly ``size`` raw bytes, in pieces."""
        deadline = self._until() + size / SLOWEST_BYTES_PER_S
        while size:
            most = min(size, _CHUNK_BYTES)
            data = bytes(self._arrived[:most]) or self._receive(deadline, most, _CUT_OFF)
            del self._arrived[:most]
            size -= len(data)
            yield data


def _check_time(deadline: float) -> None:
    if time.monotonic() > deadline:
        raise Overdue("the other side takes too long")


@contextlib.contextmanager
def _connection_errors() -> Iterator[None]:
    try:
        yield
    except TimeoutError as exc:
        raise Overdue("the other side does not answer") from exc
    except (OSError, ValueError) as exc:  # ValueError: closed in the meantime
        raise Failed("the connection broke") from exc


# ---- received values


def as_size(said: object) -> int:
    """Check a received number of bytes or files. Raises: Untrue."""
    if type(said) is not int or not 0 <= said < 1 << 62:  # a bool is an int
        raise Untrue(f"{clean(said)[:40]!r} is not a number of bytes or files")
    return said


def check_name(name: object) -> str:
    """Check the relative name of a file or folder. Raises: Untrue when it leads elsewhere or is not plainly visible."""
    if not isinstance(name, str) or not 0 < len(name) <= 4096:
        raise Untrue("expected a name of 1 to 4096 characters")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise Untrue(f"{clean(name)[:200]!r} leads out of the folder")
    if name.count("/") > MOST_DEPTH:
        raise Untrue(f"{clean(name)[:200]!r}... is nested in more than {MOST_DEPTH} folders")
    if any(unicodedata.category(char) in _UNFIT and char not in _JOINERS for char in name):
        raise Untrue(f"{clean(name)[:200]!r} has control or invisible characters")
    if os.name == "nt" and _NOT_ON_WINDOWS.search(name):
        raise Untrue(f"{clean(name)[:200]!r} is not a valid name on Windows")
    return name


def clean(said: object) -> str:
    """Make received data printable on one line."""
    text = said if isinstance(said, str) else reprlib.repr(said)  # nested data can be too deep for repr
    return printable(text[:4096], "?")


def reason_of(exc: OSError) -> str:
    return exc.strerror or str(exc) or type(exc).__name__
