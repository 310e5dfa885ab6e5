"""What of the notebook's folder travels to the nodes: its files but for what .gitignore and .detrainignore leave out.

Both are written as git reads them, and may stand in any folder; the lines of .detrainignore count as if they stood
below all those of .gitignore, so ``!data/*.csv`` there sends what git leaves alone. Files above the folder count as
well, up to the top of its repository, unless they leave out the folder itself.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from pathspec import GitIgnoreSpec

from ..errors import SpecError
from .code import pack_files

__all__ = ["Changes", "FileState", "Manifest", "changes", "list_folder", "pack"]

_NEVER = frozenset({".git", "__pycache__", ".venv", ".ipynb_checkpoints", "node_modules"})
_GIT_FILE, _OWN_FILE = ".gitignore", ".detrainignore"
_MOST_ENTRIES = 100_000  # a home folder has more: looking at them all would hold up the first cell
_SETTLED_NS = 2_000_000_000  # a file may change twice within the steps of its file system's clock; FAT's are of 2 s
_WAYS_OUT = f"list what the ranks do not need in {_OWN_FILE}, which is written as {_GIT_FILE}, or give --no-sync"


class FileState(NamedTuple):
    """A file at the moment when its folder was listed."""

    size: int
    mtime_ns: int
    sha256: str
    is_executable: bool


Manifest = dict[str, FileState]
"""The files of a folder by their path in it, with slashes, in ascending order."""


@dataclass(frozen=True)
class Changes:
    """What a node has to do, in this order: remove files and the folders that are empty then, write files."""

    remove: list[str]
    write: list[str]


def list_folder(root: str | os.PathLike[str], *, limit_bytes: int = 50_000_000) -> Manifest:
    """List the files below ``root`` that travel. A file that has not changed since the last call is not read again.

    A symbolic link counts as what it points to, if that is below ``root``; other links do not travel.
    Raises: SpecError when it is too much, or a file cannot be read.
    """
    if not os.path.isdir(root):
        raise SpecError(f"{root}: no such folder")
    found = sorted(_walk(Path(root)))
    total_bytes = sum(status.st_size for _, _, status in found)
    if total_bytes > limit_bytes:
        largest = sorted(found, key=lambda item: -item[2].st_size)[:5]
        names = ", ".join(f"{name} {_format_size(status.st_size)}" for name, _, status in largest)
        raise SpecError(
            f"the folder {root} has {_format_size(total_bytes)} for each node, more than {_format_size(limit_bytes)}; "
            f"the largest files are {names}: {_WAYS_OUT}"
        )
    now_ns = time.time_ns()
    manifest: Manifest = {}
    for name, path, status in found:
        read = _read_digest if now_ns - max(status.st_mtime_ns, status.st_ctime_ns) > _SETTLED_NS else _digest
        try:
            digest = read(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        except FileNotFoundError:
            continue  # deleted meanwhile
        except OSError as exc:
            raise _cannot_read(name, exc) from exc
        manifest[name] = FileState(status.st_size, status.st_mtime_ns, digest, bool(status.st_mode & 0o100))
    return manifest


def changes(before: Manifest | None, now: Manifest) -> Changes:
    """Say what makes a folder that is as ``before``, None for an empty one, as ``now``."""
    before = before or {}
    old = {name: (state.sha256, state.is_executable) for name, state in before.items()}
    new = {name: (state.sha256, state.is_executable) for name, state in now.items()}
    return Changes(
        remove=sorted(name for name in old if name not in new),
        write=sorted(name for name, state in new.items() if old.get(name) != state),
    )


def pack(root: str | os.PathLike[str], names: Iterable[str]) -> bytes:
    """Pack files of a manifest of ``root`` into a zip with their modes; the same files give the same zip.

    One that was deleted meanwhile is left out: the next manifest does not have it either. Raises: SpecError.
    """
    files: dict[str, bytes] = {}
    executable: set[str] = set()
    for name in names:
        try:
            with open(os.path.join(root, name), "rb") as file:
                files[name] = file.read()
                if os.fstat(file.fileno()).st_mode & 0o100:
                    executable.add(name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as exc:
            raise _cannot_read(name, exc) from exc
    return pack_files(files, executable=executable)


def _digest(path: str, _size: int, _mtime_ns: int, _ctime_ns: int, _inode: int) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


_read_digest = lru_cache(maxsize=_MOST_ENTRIES)(_digest)  # what has not changed is in there


@dataclass(frozen=True, eq=False)  # equal when it is the same: a quick key
class _Rules:
    """The lines that count in a folder, from the outermost to its own, and what they compile to."""

    git: tuple[str, ...]
    own: tuple[str, ...]
    of_files: GitIgnoreSpec
    of_folders: GitIgnoreSpec


class _Folder(NamedTuple):
    path: str
    prefix: str  # of the names in it: empty, or ends with a slash
    rules: _Rules
    real: str  # its path without links
    within: frozenset[str]  # the real paths of the folders that it is in, and its own: a link to one would be a loop


def _walk(root: Path) -> Iterator[tuple[str, str, os.stat_result]]:
    """Yield name, path and status of the files that travel."""
    top = os.path.realpath(root)
    above, rules = _read_rules_above(Path(top))
    folders = [_Folder(top, "", rules, top, frozenset({top}))]
    entries_seen = 0
    while folders:
        folder = folders.pop()
        entries = _scan(folder)
        entries_seen += len(entries)
        if entries_seen > _MOST_ENTRIES:
            raise SpecError(
                f"the folder {root} has more than {_MOST_ENTRIES} files: work in a smaller one, {_WAYS_OUT}"
            )
        rules = _extend(folder.rules, folder.path, above + folder.prefix, {entry.name for entry in entries})
        for entry in entries:
            name = folder.prefix + entry.name
            real, status = _look_at(entry, name, folder.real, top)
            if not status:
                continue
            if stat.S_ISDIR(status.st_mode):
                is_loop = real in folder.within
                if not is_loop and not _is_left_out(rules, above + name, is_folder=True) and not _is_environment(real):
                    folders.append(_Folder(entry.path, f"{name}/", rules, real, folder.within | {real}))
            elif stat.S_ISREG(status.st_mode) and not _is_left_out(rules, above + name, is_folder=False):
                yield _check_name(name), entry.path, status


def _scan(folder: _Folder) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder.path) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):  # deleted meanwhile
        return []
    except OSError as exc:
        raise _cannot_read(folder.prefix or folder.path, exc) from exc


def _look_at(entry: os.DirEntry[str], name: str, parent: str, top: str) -> tuple[str, os.stat_result | None]:
    """Return the real path of an entry and what it is; None for what never travels, or is gone."""
    if entry.name in _NEVER:
        return "", None
    real = os.path.join(parent, entry.name)
    if entry.is_symlink():
        real = os.path.realpath(entry.path)
        if not os.path.exists(entry.path) or not real.startswith(os.path.join(top, "")):
            return "", None
        if not _NEVER.isdisjoint(Path(real).relative_to(top).parts):
            return "", None
    try:
        return real, entry.stat()
    except FileNotFoundError:
        return "", None
    except OSError as exc:
        raise _cannot_read(name, exc) from exc


def _is_environment(folder: str) -> bool:
    return os.path.exists(os.path.join(folder, "pyvenv.cfg"))


def _check_name(name: str) -> str:
    if not name.isascii():
        try:
            name.encode()
        except UnicodeEncodeError:
            raise SpecError(f"{name!r}: its name is not UTF-8: rename it, or list it in {_OWN_FILE}") from None
    return name


def _read_rules_above(top: Path) -> tuple[str, _Rules]:
    """Return what leads from the top of the repository to ``top``, and the rules that it brings."""
    nothing = "", _compile((), ())
    repository = next((folder for folder in (top, *top.parents) if (folder / ".git").exists()), top)
    parts = top.relative_to(repository).parts
    prefix, rules = nothing
    for part in parts:
        rules = _extend(rules, str(repository / prefix), prefix, {_GIT_FILE, _OWN_FILE})
        if _is_left_out(rules, prefix + part, is_folder=True):
            return nothing
        prefix += f"{part}/"
    return prefix, rules


def _extend(rules: _Rules, folder: str, prefix: str, names: set[str]) -> _Rules:
    """Add the rules that stand in ``folder``, of which ``names`` are there."""
    git = _read_lines(os.path.join(folder, _GIT_FILE), prefix) if _GIT_FILE in names else ()
    own = _read_lines(os.path.join(folder, _OWN_FILE), prefix) if _OWN_FILE in names else ()
    return _compile(rules.git + git, rules.own + own) if git or own else rules


def _read_lines(path: str, prefix: str) -> tuple[str, ...]:
    try:
        with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="\n") as file:
            return tuple(_anchor(line, prefix) for line in file.read().split("\n") if line.strip() and line[0] != "#")
    except (FileNotFoundError, IsADirectoryError):
        return ()
    except OSError as exc:
        raise _cannot_read(path, exc) from exc


def _anchor(line: str, prefix: str) -> str:
    """Write a pattern that stands in the folder ``prefix`` as one of the outermost folder."""
    if not prefix:
        return line
    sign, pattern = ("!", line[1:]) if line.startswith("!") else ("", line)
    core = pattern.rstrip().rstrip("/")
    if not core:
        return ""
    anywhere = "" if "/" in core else "**/"
    return sign + re.sub(r"([\\*?\[\]!# ])", r"\\\1", prefix) + anywhere + pattern.lstrip("/")


@lru_cache(maxsize=1000)
def _compile(git: tuple[str, ...], own: tuple[str, ...]) -> _Rules:
    """Compile the lines once for files and once for folders, where ``a/`` and ``a`` are the same.

    pathspec knows a folder by the slash at its end, and weighs ``a`` as less than ``!*`` above it then.
    """
    lines = [re.sub(r"\*\*/\s*$", "**/*/", line) for line in git + own if _is_pattern(line)]
    of_folders = GitIgnoreSpec.from_lines(re.sub(r"/\s*$", "", line) for line in lines)
    return _Rules(git, own, GitIgnoreSpec.from_lines(lines), of_folders)


def _is_pattern(line: str) -> bool:
    try:
        GitIgnoreSpec.from_lines([line])
    except ValueError:  # a lone `!`, for which git does nothing either
        return False
    return True


@lru_cache(maxsize=_MOST_ENTRIES)
def _is_left_out(rules: _Rules, path: str, *, is_folder: bool) -> bool:
    return (rules.of_folders if is_folder else rules.of_files).match_file(path)


def _cannot_read(name: str, error: OSError) -> SpecError:
    return SpecError(f"{name}: cannot be read: {error.strerror}: make it readable, or list it in {_OWN_FILE}")


def _format_size(size_bytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= scale:
            return f"{size_bytes / scale:.1f}".removesuffix(".0") + f" {unit}"
    return f"{size_bytes} bytes"
