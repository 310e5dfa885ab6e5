"""The output of a rank: descriptors 0 to 2 and the streams of ``sys``; what a cell has broken is restored.

A replacement that works stays, as in IPython's kernel: a Tee, a StringIO, a file. So does ``builtins.print``:
training scripts replace it so that only rank 0 prints. A descriptor is always restored: in a kernel, print does not
use descriptor 1, so there too it survives an ``os.dup2``.

Output reaches the worker through three channels: a pipe per stream, and a socket for rich output. Before the channel
changes, the worker must have read the previous one, so that all output arrives in order.
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
_DISPLAYS = 0  # the channel of rich output; those of the streams are their descriptors
_READ_LIMIT_S = 3.0  # on a busy machine the worker may be late; order is not worth a longer wait
_LOOK_S = 0.00005
_NOTHING = bytes(4)
_libc = ctypes.CDLL(None)
_write = io.TextIOWrapper.write  # bound once: called twice for each print


class Streams:
    """The streams of this process, reopened on descriptors 1 and 2 with line buffering, also in C.

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
        with contextlib.suppress(ValueError, AttributeError):  # with a pipe, C would buffer whole blocks
            _libc.setvbuf(ctypes.c_void_p.in_dll(_libc, "stdout"), None, 1, 0)  # 1 is _IOLBF

    def before_display(self) -> None:
        """Have everything printed so far read before the next rich output."""
        flush_streams()
        self.used_last = _DISPLAYS
        for fd in (1, 2):
            self._wait_until_read(*self._channels[fd])

    def use(self, channel: int) -> None:
        """Switch to ``channel``."""
        before = self.used_last
        if before != _DISPLAYS:
            with contextlib.suppress(Exception):
                self._given[_NAMES[before]].flush()
        self.used_last = channel
        self._wait_until_read(*self._channels[before])

    def _wait_until_read(self, fd: int, request: int) -> None:
        """Wait until the worker has read a channel; after a timeout, do not wait again until it has."""
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
        """Restore what is broken; returns a line for each."""
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
            f"this cell closed or replaced {what}, which later cells need to print or read: it was restored; "
            "to redirect the output of a cell, use contextlib.redirect_stdout() in it"
            for what in found
        ]

    def _set(self, name: str, stream: TextIO) -> None:
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


class _Stream(io.TextIOWrapper):
    """A text stream on a descriptor, like one of ``open``, that keeps output in order across streams."""

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
    """Flush the streams to the worker, those of C libraries too."""
    for name in _NAMES[1:]:
        with contextlib.suppress(Exception):  # a cell may have put anything there, or nothing
            getattr(sys, name).flush()
    _libc.fflush(None)


def _works(stream: Any) -> bool:
    """Return whether it can be read, or accepts an empty text, as ``print(end="")`` writes it."""
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
