"""Names that differ in case alone: where a file system ignores case they are one file, and one would be lost."""

from __future__ import annotations

import os

from .json_lines import FilesError

__all__ = ["Names", "ignores_case"]


class Names:
    """The names of a copy into a folder where case is ignored."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._taken: dict[str, str] = {}

    def take(self, name: str) -> None:
        """Raises: FilesError where another name, or that of a folder on the way, differs from it in case alone."""
        parts = name.split("/")
        for depth in range(1, len(parts) + 1):
            path = "/".join(parts[:depth])
            if (other := self._taken.setdefault(path.casefold(), path)) != path:
                raise FilesError(
                    f"{other} and {path} would be one file in {self._folder}, as its file system ignores case: bring "
                    "them one by one, into folders of their own"
                )


def ignores_case(made: str) -> bool:
    """Tell whether a file or folder that was ``made`` just now, of a name with letters, is found in other case too."""
    folder, name = os.path.split(made)
    return os.path.lexists(os.path.join(folder, name.swapcase()))
