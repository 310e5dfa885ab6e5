"""The file through which the ranks of a single-node session find each other; no other user can reach it.

torch's FileStore keeps the address of each rank in it. To free ranks that wait for others, the file is replaced with a
symbolic link to itself: everything that torch then tries with it fails at once, while torch would wait for a file that
was removed.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

from ...agents import GROUPS_FILE


class Meeting:
    """One file of a generation, in a folder that only its user can enter.

    ``again``: how many files of the same generation have ended before it.
    """

    def __init__(self, folder: Path, generation: int, again: int = 0) -> None:
        self.generation, self.again = generation, again
        self.path = folder / f"groups.{generation}.{again}"
        self._end = self.path.with_name(f"{self.path.name}.end")

    @classmethod
    def next(cls, folder: Path, generation: int) -> Meeting:
        """Return the first one that has not ended: all ranks find the same, including a restarted rank."""
        meetings = (cls(folder, generation, again) for again in itertools.count())
        return next(meeting for meeting in meetings if not meeting.has_ended)

    @property
    def has_ended(self) -> bool:
        return self.path.is_symlink()

    def open(self) -> None:
        """Make the file, and the link for its end, which then needs no free disk space. Raises: OSError."""
        self._make_end()
        with contextlib.suppress(FileExistsError):  # another rank has already made or ended it
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))

    def end(self) -> None:
        """Free all ranks that wait in it, and keep others from starting to. Raises: OSError when the disk is full."""
        if self.has_ended:
            return
        self._make_end()
        with contextlib.suppress(FileNotFoundError):  # another rank has done it
            self._end.replace(self.path)

    def remove_earlier(self) -> None:
        """Remove the files of earlier generations: no rank waits there once all ranks have started this one."""
        for path in self.path.parent.iterdir():
            if (named := GROUPS_FILE.fullmatch(path.name)) and int(named[1]) < self.generation:
                path.unlink(missing_ok=True)

    def _make_end(self) -> None:
        with contextlib.suppress(FileExistsError):
            os.symlink(self.path.name, self._end)
