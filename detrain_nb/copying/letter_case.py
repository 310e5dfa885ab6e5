"""Names that differ only in case: on a file system that ignores case they are one file, and one would be lost."""

from __future__ import annotations

import os

from .json_lines import FilesError

__all__ = ["Names", "ignores_case"]


class Names:
    """The names in a copy whose target folder ignores case."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._taken: dict[str, str] = {}

    def take(self, name: str) -> None:
        """Add a name and its parent folders. Raises: FilesError when one differs from an earlier name only in case."""
        parts = name.split("/")
        for depth in range(1, len(parts) + 1):
            path = "/".join(parts[:depth])
            if (other := self._taken.setdefault(path.casefold(), path)) != path:
                raise FilesError(
                    f"{other} and {path} would be one file in {self._folder}, as its file system ignores case: copy "
                    "them one at a time, into separate folders"
                )


def ignores_case(made: str) -> bool:
    """Return whether ``made``, a new file or folder with letters in its name, is also found in the other case."""
    folder, name = os.path.split(made)
    return os.path.lexists(os.path.join(folder, name.swapcase()))
