"""Where the ranks of a session's only node meet to make their groups: a file that no other user can reach.

torch keeps in it where each rank listens. Whoever waits there is freed when the file has become a link to itself: all
that torch then tries with it fails at once, while a file that was removed would be waited for.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from pathlib import Path

from ...agents import GROUPS_FILE


class Meeting:
    """One file of a generation, in a folder that only its user can enter; ``again`` of that generation have ended."""

    def __init__(self, folder: Path, generation: int, again: int = 0) -> None:
        self.generation, self.again = generation, again
        self.path = folder / f"groups.{generation}.{again}"
        self._end = self.path.with_name(f"{self.path.name}.end")

    @classmethod
    def next(cls, folder: Path, generation: int) -> Meeting:
        """The one that has not ended: all ranks find the same, a fresh one too."""
        meetings = (cls(folder, generation, again) for again in itertools.count())
        return next(meeting for meeting in meetings if not meeting.has_ended)

    @property
    def has_ended(self) -> bool:
        return self.path.is_symlink()

    def open(self) -> None:
        """Make the file, and ready for its end, which then needs no room on the disk. Raises: OSError."""
        self._make_end()
        with contextlib.suppress(FileExistsError):  # another rank has made it, or ended it already
            os.close(os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))

    def end(self) -> None:
        """Free all ranks that wait in it, and let nobody begin to. Raises: OSError where there is no room for that."""
        if self.has_ended:
            return
        self._make_end()
        with contextlib.suppress(FileNotFoundError):  # another rank has done it
            self._end.replace(self.path)

    def remove_earlier(self) -> None:
        """Remove the files of earlier generations: nobody waits there once all ranks have begun with this one."""
        for path in self.path.parent.iterdir():
            if (named := GROUPS_FILE.fullmatch(path.name)) and int(named[1]) < self.generation:
                path.unlink(missing_ok=True)

    def _make_end(self) -> None:
        with contextlib.suppress(FileExistsError):
            os.symlink(self.path.name, self._end)
