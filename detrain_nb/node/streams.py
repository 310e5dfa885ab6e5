"""What a rank prints through: descriptors 0 to 2 and the streams of ``sys``; what a cell has broken is put back.

A replacement that works stays, as IPython's kernel keeps it: a Tee, a StringIO, a file. So does ``builtins.print``:
training scripts replace it, so that rank 0 alone prints. A descriptor is put back in any case: in a kernel print does
not go through descriptor 1, so that there too it survives an ``os.dup2``.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import os
import sys
from typing import Any, TextIO

_NAMES = ("stdin", "stdout", "stderr")
_libc = ctypes.CDLL(None)


class Streams:
    """Those of this process, opened anew on descriptors 1 and 2: they give each line at once, C's too."""

    def __init__(self) -> None:
        self._kept = {fd: (os.dup(fd), _identity(fd)) for fd in range(3)}
        self._given = {name: _open(fd) for fd, name in enumerate(_NAMES)}
        self._print = builtins.print
        for name, stream in self._given.items():
            self._set(name, stream)
        with contextlib.suppress(ValueError, AttributeError):  # a pipe would hold back whole blocks
            _libc.setvbuf(ctypes.c_void_p.in_dll(_libc, "stdout"), None, 1, 0)  # 1 is _IOLBF

    def put_back(self) -> list[str]:
        """Put back what is broken; a line for each."""
        descriptors = [fd for fd in self._kept if _identity(fd) != self._kept[fd][1]]
        for fd in descriptors:
            os.dup2(self._kept[fd][0], fd, inheritable=True)
        broken = [name for name in _NAMES if not _works(getattr(sys, name, None))]
        for fd, name in enumerate(_NAMES):
            if name in broken:
                if not _works(self._given[name]):
                    self._given[name] = _open(fd)
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


def _open(fd: int) -> TextIO:
    if fd == 0:
        return open(0, encoding="utf-8", closefd=False)
    return open(fd, "w", buffering=1, encoding="utf-8", errors="backslashreplace", closefd=False)


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
