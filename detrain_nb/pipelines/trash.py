"""The trash of deleted pipelines: the folder ``.trash`` next to them."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from dataclasses import dataclass
from pathlib import Path

from ..errors import SpecError
from ..storage import named_errors, whole_file
from ..text import printable
from .names import free_name

__all__ = ["Deleted", "Trash"]


@dataclass(frozen=True)
class Deleted:
    """A deleted pipeline. ``place``: where its file is now; None if it was only removed from the list."""

    name: str
    path: Path
    place: Path | None

    def __str__(self) -> str:
        if self.place is None:
            return f"{self.name} was removed from the list; its file {printable(str(self.path))} stays"
        return f"{self.name} was moved to {printable(f'{self.path.parent.name}/{self.place.parent.name}')}"


class Trash:
    """The folder ``.trash`` in the folder of the pipelines, created when the first one is deleted."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / ".trash"

    def take(self, name: str, path: Path) -> Deleted:
        """Move a file here, under a free name. Raises: SpecError."""
        with named_errors(printable(str(path)), "deleted", kind_of=lambda exc: SpecError):
            return Deleted(name, path, _move_to_free(path, self._made(), path.stem))

    def give_back(self, deleted: Deleted) -> Path:
        """Move a file back to its place, or under a free name if that is taken. Raises: SpecError."""
        if deleted.place is None:
            return deleted.path
        with named_errors(deleted.name, "brought back", kind_of=lambda exc: SpecError):
            self._made()  # it may have become a link since
            if not os.path.lexists(deleted.place):
                raise SpecError(f"{deleted.name} cannot be brought back: it is no longer in {self._folder}")
            return _move_to_free(deleted.place, deleted.path.parent, deleted.path.stem)

    def keep(self, path: Path, text: str) -> Path:
        """Keep an earlier text of a file here. Raises: SpecError."""
        with named_errors(printable(str(path)), "kept", kind_of=lambda exc: SpecError):
            folder = self._made()
            stem = free_name(f"{path.stem}.before", lambda name: os.path.lexists(folder / f"{name}{path.suffix}"))
            place = folder / f"{stem}{path.suffix}"
            with whole_file(place, may_be_link=False) as file:
                file.write(text.encode("utf-8"))
            return place

    def _made(self) -> Path:
        self._folder.mkdir(exist_ok=True)
        if not stat.S_ISDIR(self._folder.lstat().st_mode):
            raise NotADirectoryError(errno.ENOTDIR, f"{self._folder} is a link or not a folder: move it away")
        return self._folder


def _move_to_free(source: Path, folder: Path, stem: str) -> Path:
    """Move a file into ``folder`` without replacing another. Raises: OSError."""
    suffix = source.suffix
    while True:
        place = folder / f"{free_name(stem, lambda name: os.path.lexists(folder / f'{name}{suffix}'))}{suffix}"
        try:
            os.link(source, place, follow_symlinks=False)  # unlike a rename, fails if the name was taken meanwhile
        except FileExistsError:
            continue
        except (OSError, NotImplementedError):  # a file system without hard links
            os.rename(source, place)
            return place
        with contextlib.suppress(FileNotFoundError):
            os.unlink(source)
        return place
