"""The record of files that a notebook has sent to a work folder, kept outside it; other files there are not ours."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path

from .json_lines import Untrue, check_name


@dataclass
class Sent:
    """A file of the notebook as it was when it arrived here; ``is_ours`` is False if the file was here already."""

    sha256: str
    is_executable: bool
    size: int
    mtime_ns: int
    is_ours: bool
    is_private: bool | None = None  # None: not known, sent by an earlier version

    def is_as(self, kind: tuple[str, bool, bool]) -> bool:
        """Return whether the file arrived as the notebook now wants it."""
        return self.sha256 == kind[0] and self.has_mode_of(kind)

    def has_mode_of(self, kind: tuple[str, bool, bool]) -> bool:
        """Compare the mode with ``kind`` (digest, executable, private); privacy counts only for files we have sent."""
        return self.is_executable == kind[1] and (not self.is_ours or self.is_private in (None, kind[2]))

    def is_untouched(self, status: os.stat_result | None) -> bool:
        """Return whether the file has not changed since it arrived; ``status``: its present one (lstat)."""
        return (
            status is not None
            and stat.S_ISREG(status.st_mode)
            and (status.st_size, status.st_mtime_ns) == (self.size, self.mtime_ns)
            and bool(status.st_mode & 0o100) == self.is_executable
        )

    def stands(self, path: str) -> bool:
        """Return whether the file exists, even if a rank has changed it; False if a power failure has truncated it."""
        status = lstat(path)
        return status is not None and (status.st_mtime_ns != self.mtime_ns or status.st_size == self.size)


def note_path(cache: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Path:
    """Return the path of the record for ``folder``."""
    return Path(cache, "sync", hashlib.sha256(os.fsencode(folder)).hexdigest()[:32] + ".json")


def read_note(path: str | os.PathLike[str]) -> tuple[str, dict[str, Sent]]:
    """Read where the files came from, and their records; empty if unreadable: all files are compared then."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, Untrue):
        with open(path, encoding="utf-8") as file:
            noted = json.load(file)
        return str(noted["root"]), {check_name(name): Sent(*fields) for name, fields in noted["files"].items()}
    return "", {}


def read_state(cache: str | os.PathLike[str], folder: str) -> tuple[str, str]:
    """Read where the files in ``folder`` came from, and the digest of their list; empty if any file is missing."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        with open(note_path(cache, folder), encoding="utf-8") as file:
            noted = json.load(file)
        if all(Sent(*fields).stands(os.path.join(folder, name)) for name, fields in noted["files"].items()):
            return str(noted["root"]), str(noted["digest"])
    return "", ""


def write_note(path: str, root: str, folder: str, sent: dict[str, Sent], *, digest: str = "") -> None:
    """Write the record of a folder.

    ``digest``: that of the list of all files, if the folder equals the notebook's.
    """
    fields = {name: list(vars(file).values()) for name, file in sent.items()}
    handle, draft = tempfile.mkstemp(dir=os.path.dirname(path))
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"root": root, "folder": folder, "digest": digest, "files": fields}, file)
            file.flush()
            os.fsync(file.fileno())  # without a record, a file truncated by a power failure would not count as ours
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None
