"""Lines of JSON with raw bytes between them: how the notebook and files.py speak, the same at both ends.

Whoever listens believes nothing of what comes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import unicodedata
from collections.abc import Callable, Iterator
from typing import IO, Any, Protocol

_CHUNK_BYTES = 1 << 18
LINE_BYTES = 1 << 22
_TICK_S = 5.0
_LAST_LINES = 100
_TURNS_TEXT = set("\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")  # makes a name look like another
_NOT_ON_WINDOWS = re.compile(r'[\\:*?"<>|]|[ .](/|$)|(^|/)(con|prn|aux|nul|com\d|lpt\d)(\.|/|$)', re.IGNORECASE)


class FilesError(Exception):
    """What cannot be done on this side, in words for the user."""


class Failed(FilesError):
    """The other side has said that it cannot go on, or has hung up."""


class Untrue(FilesError):
    """What came is not what our program says."""


class Sink(Protocol):
    """Where bytes go."""

    def write(self, data: bytes, /) -> object: ...

    def flush(self) -> object: ...


class Talk:
    """Lines of JSON and raw bytes with the other side; sizes have limits."""

    def __init__(self, reader: IO[bytes], writer: Sink, *, has_come: Callable[[], bool] = lambda: False) -> None:
        """``has_come``: there is something to hear while we only send, which can but be a failure."""
        self._reader = reader
        self._writer = writer
        self._has_come = has_come
        self._said_at = time.monotonic()

    def say(self, kind: str, **fields: object) -> None:
        self.send(json.dumps({"type": kind, **fields}).encode() + b"\n")

    def send(self, data: bytes) -> None:
        if self._has_come():
            self.hear()
        with self._explained():
            self._writer.write(data)

    def flush(self) -> None:
        with self._explained():
            self._writer.flush()
        self._said_at = time.monotonic()

    def tick(self) -> None:
        """Say that we are still at it, now and then."""
        if time.monotonic() - self._said_at > _TICK_S:
            self.say("wait")
            self.flush()

    def hear(self, *kinds: str) -> dict[str, Any]:
        """The next line, which is of one of the kinds. Raises: Failed, Untrue."""
        self.flush()
        while True:
            said = self._read_line()
            if said.get("type") in kinds:
                return said
            if said.get("type") != "wait":
                expected = " or ".join(kinds) or "nothing"
                raise Untrue(f"{clean(said.get('type'))[:40]!r} came where {expected} was expected")

    def _read_line(self) -> dict[str, Any]:
        with _connection_errors():
            line = self._reader.readline(LINE_BYTES)
        if not line:
            raise Failed("the other side hung up before it was done")
        try:
            said = json.loads(line) if line.endswith(b"\n") else None
        except (ValueError, RecursionError):
            said = None
        if not isinstance(said, dict):
            raise Untrue("what came is not what our program says")
        if said.get("type") == "failed":
            raise Failed(clean(said.get("text")))
        return said

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Where nothing can be sent any more, the other side may have said why before it hung up."""
        try:
            with _connection_errors():
                yield
        except Failed as exc:
            if not isinstance(exc.__cause__, TimeoutError):
                with contextlib.suppress(Untrue):
                    for _ in range(_LAST_LINES):
                        self._read_line()
            raise

    def read(self, size: int) -> Iterator[bytes]:
        """Exactly so many raw bytes, in pieces."""
        while size:
            with _connection_errors():
                data = self._reader.read(min(size, _CHUNK_BYTES))
            if not data:
                raise Failed("the other side hung up in the middle of a file")
            size -= len(data)
            yield data


@contextlib.contextmanager
def _connection_errors() -> Iterator[None]:
    try:
        yield
    except TimeoutError as exc:
        raise Failed("the other side does not answer") from exc
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
    if any(char in _TURNS_TEXT or unicodedata.category(char) in ("Cc", "Cs", "Zl", "Zp") for char in name):
        raise Untrue(f"{clean(name)[:200]!r} has characters that no name should have")
    if os.name == "nt" and _NOT_ON_WINDOWS.search(name):
        raise Untrue(f"{clean(name)[:200]!r} can be no name on Windows")
    return name


def clean(said: object) -> str:
    """What the other side said, fit for one line."""
    text = said if isinstance(said, str) else repr(said)
    return "".join(char if char.isprintable() else "?" for char in text[:4096])


def reason_of(exc: OSError) -> str:
    return exc.strerror or str(exc) or type(exc).__name__
