"""What has come to a work folder from a notebook, noted beside the work folders: no other file in it is ours."""

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
    """A file of the notebook as it stands here since it came; not ``is_ours``: it was here before."""

    sha256: str
    is_executable: bool
    size: int
    mtime_ns: int
    is_ours: bool
    is_private: bool | None = None  # not known: it came from an earlier version

    def is_as(self, kind: tuple[str, bool, bool]) -> bool:
        """The notebook says that a file is to be so, and it came so."""
        return self.sha256 == kind[0] and self.has_mode_of(kind)

    def has_mode_of(self, kind: tuple[str, bool, bool]) -> bool:
        """``kind``: digest, executable, private. Whether a file of this host's is private is its owner's to say."""
        return self.is_executable == kind[1] and (not self.is_ours or self.is_private in (None, kind[2]))

    def is_untouched(self, status: os.stat_result | None) -> bool:
        """``status``: of what stands there, or of the link, now."""
        return (
            status is not None
            and stat.S_ISREG(status.st_mode)
            and (status.st_size, status.st_mtime_ns) == (self.size, self.mtime_ns)
            and bool(status.st_mode & 0o100) == self.is_executable
        )

    def stands(self, path: str) -> bool:
        """It is there, whatever a rank made of it; not one that lost its end with the power, of the time it came at."""
        status = lstat(path)
        return status is not None and (status.st_mtime_ns != self.mtime_ns or status.st_size == self.size)


def note_path(cache: str | os.PathLike[str], folder: str | os.PathLike[str]) -> Path:
    """Where what came to ``folder`` is noted."""
    return Path(cache, "sync", hashlib.sha256(os.fsencode(folder)).hexdigest()[:32] + ".json")


def read_note(path: str | os.PathLike[str]) -> tuple[str, dict[str, Sent]]:
    """Where the files came from, and what they were. Nothing where no note can be read: all is compared then."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, Untrue):
        with open(path, encoding="utf-8") as file:
            noted = json.load(file)
        return str(noted["root"]), {check_name(name): Sent(*fields) for name, fields in noted["files"].items()}
    return "", {}


def read_state(cache: str | os.PathLike[str], folder: str) -> tuple[str, str]:
    """Where the files in ``folder`` came from, and the digest of what there was; empty when they are not all here."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        with open(note_path(cache, folder), encoding="utf-8") as file:
            noted = json.load(file)
        if all(Sent(*fields).stands(os.path.join(folder, name)) for name, fields in noted["files"].items()):
            return str(noted["root"]), str(noted["digest"])
    return "", ""


def write_note(path: str, root: str, folder: str, sent: dict[str, Sent], *, digest: str = "") -> None:
    """``digest``: of the list of all files, when they are here as they were in the notebook's folder."""
    fields = {name: list(vars(file).values()) for name, file in sent.items()}
    handle, draft = tempfile.mkstemp(dir=os.path.dirname(path))
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"root": root, "folder": folder, "digest": digest, "files": fields}, file)
            file.flush()
            os.fsync(file.fileno())  # without a note, a file that lost its end with the power would be somebody else's
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise


def lstat(path: str) -> os.stat_result | None:
    try:
        return os.lstat(path)
    except OSError:
        return None
