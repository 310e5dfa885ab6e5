"""What a rank prints through: descriptors 0 to 2 and the streams of ``sys``; what a cell has broken is put back.

A replacement that works stays, as IPython's kernel keeps it: a Tee, a StringIO, a file. So does ``builtins.print``:
training scripts replace it, so that rank 0 alone prints. A descriptor is put back in any case: in a kernel print does
not go through descriptor 1, so that there too it survives an ``os.dup2``.

What a rank says goes to its worker through three channels: a pipe for each stream, and a socket for what is displayed.
Before one is used after another, the worker has read that other, so that all of it arrives in the order in which it
was said.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import fcntl
import io
import os
import sys
import termios
import time
from typing import Any, TextIO

_NAMES = ("stdin", "stdout", "stderr")
_DISPLAYS = 0  # the channel of what is displayed; those of the streams have their descriptors' numbers
_READ_LIMIT_S = 3.0  # a busy machine lets the worker wait; the order is not worth more where it does not come to read
_LOOK_S = 0.00005
_NOTHING = bytes(4)
_libc = ctypes.CDLL(None)
_write = io.TextIOWrapper.write  # called twice for each print


class Streams:
    """Those of this process, opened anew on descriptors 1 and 2: they give each line at once, C's too.

    ``link``: the descriptor of the socket to the worker.
    """

    def __init__(self, link: int) -> None:
        self._kept = {fd: (os.dup(fd), _identity(fd)) for fd in range(3)}
        self._channels = {1: (self._kept[1][0], termios.FIONREAD), 2: (self._kept[2][0], termios.FIONREAD)}
        self._channels[_DISPLAYS] = (link, termios.TIOCOUTQ)
        self.used_last = _DISPLAYS
        self._is_waited_for = True
        self._given = {name: self._open(fd) for fd, name in enumerate(_NAMES)}
        self._print = builtins.print
        for name, stream in self._given.items():
            self._set(name, stream)
        with contextlib.suppress(ValueError, AttributeError):  # a pipe would hold back whole blocks
            _libc.setvbuf(ctypes.c_void_p.in_dll(_libc, "stdout"), None, 1, 0)  # 1 is _IOLBF

    def before_display(self) -> None:
        """What was printed so far is read before what is displayed next."""
        flush_streams()
        self.used_last = _DISPLAYS
        for fd in (1, 2):
            self._wait_until_read(*self._channels[fd])

    def use(self, channel: int) -> None:
        """Write to ``channel`` next."""
        before = self.used_last
        if before != _DISPLAYS:
            with contextlib.suppress(Exception):
                self._given[_NAMES[before]].flush()
        self.used_last = channel
        self._wait_until_read(*self._channels[before])

    def _wait_until_read(self, fd: int, request: int) -> None:
        """Wait until the worker has read it; one that did not come in time is not waited for until it has."""
        deadline = time.monotonic() + _READ_LIMIT_S
        with contextlib.suppress(OSError):
            while fcntl.ioctl(fd, request, _NOTHING) != _NOTHING:
                if not self._is_waited_for or time.monotonic() > deadline:
                    self._is_waited_for = False
                    return
                time.sleep(_LOOK_S)
            self._is_waited_for = True

    def _open(self, fd: int) -> TextIO:
        if fd == 0:
            return open(0, encoding="utf-8", closefd=False)
        return _Stream(self, fd)

    def put_back(self) -> list[str]:
        """Put back what is broken; a line for each."""
        descriptors = [fd for fd in self._kept if _identity(fd) != self._kept[fd][1]]
        for fd in descriptors:
            os.dup2(self._kept[fd][0], fd, inheritable=True)
        broken = [name for name in _NAMES if not _works(getattr(sys, name, None))]
        for fd, name in enumerate(_NAMES):
            if name in broken:
                if not _works(self._given[name]):
                    self._given[name] = self._open(fd)
                self._set(name, self._given[name])
        found = [f"descriptor {fd} ({_NAMES[fd]})" for fd in descriptors] + [f"sys.{name}" for name in broken]
        if not callable(getattr(builtins, "print", None)):
            builtins.print = self._print
            found.append("builtins.print")
        return [
            f"this cell has closed or replaced {what}, without which later cells cannot print or read: it is put back; "
            "to redirect what a cell prints use contextlib.redirect_stdout() in it"
            for what in found
        ]

    def _set(self, name: str, stream: TextIO) -> None:
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class _Stream(io.TextIOWrapper):
    """A text stream on a descriptor, as ``open`` makes it, that keeps the order of what is said."""

    def __init__(self, streams: Streams, fd: int) -> None:
        buffer = io.BufferedWriter(io.FileIO(fd, "w", closefd=False))
        super().__init__(buffer, encoding="utf-8", errors="backslashreplace", line_buffering=True)
        self.mode = "w"  # type: ignore[misc]  # as open() sets it
        self._streams, self._fd = streams, fd

    def write(self, text: str) -> int:
        if self._streams.used_last != self._fd:
            self._streams.use(self._fd)
        return _write(self, text)


def flush_streams() -> None:
    """What was printed goes to the worker, what C libraries print too."""
    for name in _NAMES[1:]:
        with contextlib.suppress(Exception):  # a cell may have put anything there, or nothing
            getattr(sys, name).flush()
    _libc.fflush(None)


def _works(stream: Any) -> bool:
    """It can be read, or takes a text of no length, as ``print(end="")`` writes it."""
    try:
        if stream is None or getattr(stream, "closed", False):
            return False
        if hasattr(stream, "write") and not (hasattr(stream, "readable") and stream.readable()):
            stream.write("")
            if hasattr(stream, "flush"):
                stream.flush()
        return hasattr(stream, "write") or hasattr(stream, "read")
    except Exception:  # noqa: BLE001  a cell may have put anything there
        return False


def _identity(fd: int) -> tuple[int, int] | None:
    try:
        found = os.fstat(fd)
    except OSError:
        return None
    return found.st_dev, found.st_ino
