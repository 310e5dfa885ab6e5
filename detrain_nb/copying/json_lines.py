"""Lines of JSON with raw bytes between them: how the notebook and remote_program.py speak, the same at both ends.

Whoever listens believes nothing of what comes.
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
LINE_BYTES = 1 << 18  # parsed in 70 ms, whatever is in them, during which no other thread has its turn
_STILL_AT_IT = b'{"type": "wait"}\n'
_MOST_WAITS = 10_000  # 14 hours
MOST_DEPTH = 100  # of the folders in one another
SLOWEST_BYTES_PER_S = 20_000  # a slower connection brings nothing
_TICK_S = 5.0
_LAST_LINES = 100
_CUT_OFF = "the other side hung up in the middle of a file"
_UNFIT = ("Cc", "Cf", "Cs", "Zl", "Zp")  # what is not seen, or turns the writing, makes a name look like another
_JOINERS = "\u200c\u200d"  # not seen either; words of some languages, and emoji, need them
_NOT_ON_WINDOWS = re.compile(r'[\\:*?"<>|]|[ .](/|$)|(^|/)(con|prn|aux|nul|com\d|lpt\d)(\.|/|$)', re.IGNORECASE)


class FilesError(Exception):
    """What cannot be done on this side, in words for the user."""


class Failed(FilesError):
    """The other side has said that it cannot go on, or has hung up."""


class Refused(Failed):
    """The other side has said why it cannot go on."""


class Overdue(Failed):
    """The other side does not come to an end, be it silent, slow, or always still at it."""


class Untrue(FilesError):
    """What came is not what our program says."""


class Sink(Protocol):
    """Where bytes go."""

    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> object: ...


class Talk:
    """Lines of JSON and raw bytes with the other side; sizes have limits.

    After ``deadline``, of time.monotonic(), nothing is waited for; whoever uses it may set it.
    """

    def __init__(
        self,
        reader: BufferedReader,
        writer: Sink,
        *,
        has_come: Callable[[], bool] = lambda: False,
        patience_s: float = math.inf,
    ) -> None:
        """``has_come``: there is something to hear while we only send, which can but be a failure.

        ``patience_s`` is for one answer, however often the other side says that it is still at it.
        """
        self.deadline = math.inf
        self._reader = reader
        self._writer = writer
        self._has_come = has_come
        self._patience_s = patience_s
        self._num_waits = 0
        self._said_at = time.monotonic()
        self._arrived = bytearray()  # and not read yet

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
        """Say that we are still at it, now and then."""
        if time.monotonic() - self._said_at > _TICK_S:
            self.send(_STILL_AT_IT)
            self.flush()

    def hear(self, *kinds: str, most_bytes: int = LINE_BYTES) -> dict[str, Any]:
        """The next line, which is of one of the kinds. Raises: Failed, Untrue."""
        self.flush()
        deadline = self._until()
        while not self._take(said := self._read_line(deadline, most_bytes), *kinds):
            pass
        return said

    def _until(self) -> float:
        return min(self.deadline, time.monotonic() + self._patience_s)

    def _take(self, said: dict[str, Any], *kinds: str) -> bool:
        """Say whether it is of one of the kinds; else the other side is still at it. Raises: Untrue."""
        if not said:
            self._num_waits += 1
            if self._num_waits > _MOST_WAITS:
                raise Overdue("the other side says without end that it is still at it")
            return False
        kind = said.get("type")
        if kind not in kinds:
            expected = " or ".join(kinds) or "nothing"
            raise Untrue(f"{clean(kind)[:40]!r} came where {expected} was expected")
        return True

    def _read_line(self, deadline: float, most_bytes: int = LINE_BYTES) -> dict[str, Any]:
        """The next line; nothing where it says that the other side is still at it."""
        looked_at = 0
        while (end := self._arrived.find(b"\n", looked_at, most_bytes)) < 0 and len(self._arrived) < most_bytes:
            looked_at = len(self._arrived)
            self._arrived += self._receive(deadline, _CHUNK_BYTES, "the other side hung up before it was done")
        line = bytes(self._arrived[: end + 1])
        del self._arrived[: end + 1]
        if line == _STILL_AT_IT:
            return {}
        try:
            said = json.loads(line)  # nothing, where it has no end
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            raise Untrue("what came is not what our program says")
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
        """Where nothing can be sent any more, the other side may have said why before it hung up."""
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
        """Exactly so many raw bytes, in pieces."""
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
    except (OSError, ValueError) as exc:  # ValueError: closed under our hands
        raise Failed("the connection broke") from exc


# ---- what came


def as_size(said: object) -> int:
    """A number that came. Raises: Untrue."""
    if type(said) is not int or not 0 <= said < 1 << 62:  # a bool is an int
        raise Untrue(f"{clean(said)[:40]!r} is no number of bytes or files")
    return said


def check_name(name: object) -> str:
    """Return the name of a file or folder below another. Raises: Untrue when it could lead elsewhere, or hides."""
    if not isinstance(name, str) or not 0 < len(name) <= 4096:
        raise Untrue("a name was expected")
    if any(part in ("", ".", "..") for part in name.split("/")):
        raise Untrue(f"{clean(name)[:200]!r} leads out of the folder")
    if name.count("/") > MOST_DEPTH:
        raise Untrue(f"{clean(name)[:200]!r}... is in more than {MOST_DEPTH} folders")
    if any(unicodedata.category(char) in _UNFIT and char not in _JOINERS for char in name):
        raise Untrue(f"{clean(name)[:200]!r} has characters that no name should have")
    if os.name == "nt" and _NOT_ON_WINDOWS.search(name):
        raise Untrue(f"{clean(name)[:200]!r} can be no name on Windows")
    return name


def clean(said: object) -> str:
    """What the other side said, fit for one line."""
    text = said if isinstance(said, str) else reprlib.repr(said)  # what is nested can be too deep for repr
    return printable(text[:4096], "?")


def reason_of(exc: OSError) -> str:
    return exc.strerror or str(exc) or type(exc).__name__
