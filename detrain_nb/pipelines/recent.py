"""The spec files that this user opened recently: paths in a small file that outlives kernels."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

from ..errors import SpecError
from ..guarded import can_others_write, describe, state_folder
from ..storage import locate, named_errors, whole_file

__all__ = ["RecentFiles"]

_FILE_NAME = "recent_pipelines.json"
_MOST_FILES = 30
_MOST_BYTES = 1 << 17
_MOST_PATH_CHARS = 4096


class RecentFiles:
    """The recent files, newest first, in ``file``: by default under ``XDG_STATE_HOME``, else in ~/.local/state.

    A file that others can write is not trusted; a damaged one counts as empty.
    """

    def __init__(self, file: Path | None = None) -> None:
        self._file = file

    def paths(self) -> list[Path]:
        """List the paths, whose files may be gone. Raises: SpecError if others can write the list."""
        with named_errors("the list of recent pipelines", "read", kind_of=lambda exc: SpecError):
            file = self._place()
            try:
                state = file.lstat()
            except FileNotFoundError:
                return []
            if not stat.S_ISREG(state.st_mode) or can_others_write(state, file):
                raise PermissionError(f"{describe(file, state)} is not a file that only this user can write: remove it")
            if state.st_size > _MOST_BYTES:
                return []
            return _parse(locate(file).read(limit_bytes=_MOST_BYTES, may_be_link=False))

    def add(self, path: Path) -> None:
        """Put a path first in the list. Raises: SpecError."""
        self._write([path, *(each for each in self.paths() if each != path)])

    def remove(self, path: Path) -> None:
        """Remove a path from the list; an unknown path is no error. Raises: SpecError."""
        paths = self.paths()
        if path in paths:
            self._write([each for each in paths if each != path])

    def _write(self, paths: list[Path]) -> None:
        kept = [str(path) for path in paths if _is_path(str(path))][:_MOST_FILES]
        told = named_errors("the list of recent pipelines", "written", kind_of=lambda exc: SpecError)
        with told, whole_file(self._place(), may_be_link=False, mode=0o600) as file:
            file.write(json.dumps({"recent": kept}).encode("utf-8"))

    def _place(self) -> Path:
        return self._file or state_folder() / _FILE_NAME


def _parse(data: bytes) -> list[Path]:
    try:
        content = json.loads(data)
    except (ValueError, RecursionError):
        return []
    found = content.get("recent") if isinstance(content, dict) else None
    texts = [text for text in found if _is_path(text)] if isinstance(found, list) else []
    return [Path(text) for text in dict.fromkeys(texts)][:_MOST_FILES]


def _is_path(text: object) -> bool:
    if not isinstance(text, str) or not os.path.isabs(text) or len(text) > _MOST_PATH_CHARS or "\0" in text:
        return False
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
