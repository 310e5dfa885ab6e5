"""Files of the notebook's folder that are sent to the nodes: all but those that .gitignore and .detrainignore exclude.

Both have git's syntax and can be in any folder. The lines of .detrainignore apply after all lines of .gitignore, so
``!data/*.csv`` there sends files that git ignores. Ignore files above the folder apply too, up to the top of its
repository, unless they exclude the folder itself.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import stat
import time
from collections.abc import Collection, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import IO, NamedTuple

from ..copying.json_lines import Untrue, check_name
from ..copying.sender import is_guarded, is_owners_alone, open_regular
from ..errors import SpecError
from ..text import format_size
from .code import pack_files
from .ignoring import GIT_FILE, OWN_FILE, Rules, cannot_read, extend, is_left_out, read_rules_above
from .private import is_private

__all__ = ["NEVER_TRAVELS", "FileState", "Manifest", "list_folder", "name_hidden", "pack"]

NEVER_TRAVELS = frozenset({".git", "__pycache__", ".venv", ".ipynb_checkpoints", "node_modules"})
_MOST_TRIED, _TRIES_TO_COMPILE = 50_000_000, 500  # matches of a pattern with a name: 15 s; compiling one costs 500
_MOST_TOLD = 20  # invalid names in one error
_MOST_ENTRIES = 100_000  # a home directory has more, and listing them all would delay the first cell
_SETTLED_NS = 2_000_000_000  # a file can change twice within one tick of its file system's clock, 2 s on FAT
_WAYS_OUT = f"list what the ranks do not need in {OWN_FILE}, which has the syntax of {GIT_FILE}"


class FileState(NamedTuple):
    """State of a file at the moment when its folder was listed."""

    size: int
    mtime_ns: int
    sha256: str
    is_executable: bool
    is_private: bool = False  # for its owner alone, by its own mode or that of a folder below the listed one

    @property
    def kind(self) -> tuple[str, bool, bool]:
        """Content and modes, by which two states are equal regardless of modification time."""
        return self.sha256, self.is_executable, self.is_private


Manifest = dict[str, FileState]
"""Files of a folder by their relative path, with slashes, in ascending order."""


def list_folder(
    root: str | os.PathLike[str],
    *,
    top: str = "",
    limit_bytes: int = 50_000_000,
    most_entries: int = _MOST_ENTRIES,
    settled_ns: int = _SETTLED_NS,
    kept: list[str] | None = None,
    skipped: list[str] | None = None,
    way_out: str = ", or give --no-sync",
) -> Manifest:
    """List the files below ``root`` that are sent. A file that has not changed since the last call is not read again.

    ``top`` is the real path that ``root`` had at first: others could replace a folder above it with a link. A symbolic
    link is sent as its target if the target is below ``root``; other links are not sent. ``kept`` collects the files
    and folders that stay here because of their names (deploy/private.py), ``skipped`` the links that lead outside or
    nowhere, and entries that are neither file nor folder. ``way_out`` is appended to the errors about size.
    Raises: SpecError when the folder is too large, its real path is no longer ``top``, a name is invalid, or a file
    cannot be read.
    """
    if not os.path.isdir(root):
        raise SpecError(f"{root}: no such folder")
    there = os.path.realpath(root)
    if (top := top or there) != there:
        raise SpecError(f"{root} now points to {there}, no longer to {top}: none of its files are sent to the nodes")
    found = sorted(_walk(top, most_entries, [] if kept is None else kept, [] if skipped is None else skipped, way_out))
    if faults := [fault for name, *_ in found if (fault := _find_fault(name))]:
        more = f"\nand {len(faults) - _MOST_TOLD} more" if len(faults) > _MOST_TOLD else ""
        raise SpecError("\n".join(faults[:_MOST_TOLD]) + more)
    total_bytes = sum(status.st_size for _, _, status in found)
    if total_bytes > limit_bytes:
        largest = sorted(found, key=lambda item: -item[2].st_size)[:5]
        names = ", ".join(f"{name} {_format_size(status.st_size)}" for name, _, status in largest)
        raise SpecError(
            f"the folder {root} has {_format_size(total_bytes)} to send, more than {_format_size(limit_bytes)}; "
            f"the largest files are {names}: {_WAYS_OUT}{way_out}"
        )
    now_ns = time.time_ns()
    manifest: Manifest = {}
    for name, path, status in found:
        read = _read_digest if now_ns - max(status.st_mtime_ns, status.st_ctime_ns) > settled_ns else _digest
        try:
            digest = read(path, status.st_size, status.st_mtime_ns, status.st_ctime_ns, status.st_ino)
        except FileNotFoundError:
            continue  # deleted or replaced meanwhile: the next manifest has the new state
        except OSError as exc:
            raise cannot_read(name, exc) from exc
        is_private = _is_owners_alone(path, status.st_mode, os.path.join(top, ""))
        is_executable = bool(status.st_mode & 0o100)
        manifest[name] = FileState(status.st_size, status.st_mtime_ns, digest, is_executable, is_private)
    return manifest


def name_hidden(manifest: Manifest) -> list[str]:
    """Return the hidden files and folders of ``manifest``, except ignore files."""
    found: dict[str, None] = {}
    for name in manifest:
        parts = name.split("/")
        depth = next((depth for depth, part in enumerate(parts) if part.startswith(".")), None)
        if depth is not None and parts[depth] not in (GIT_FILE, OWN_FILE):
            found["/".join(parts[: depth + 1]) + ("/" if parts[depth + 1 :] else "")] = None
    return list(found)


def pack(root: str | os.PathLike[str], manifest: Manifest, names: Iterable[str]) -> bytes:
    """Pack files of a manifest of ``root``, a path without links, into a reproducible zip with their modes.

    A file that was deleted meanwhile is left out. So is a file that is reached through a link and differs from the
    listed one: others may have put a link there to a file that they cannot read. The next manifest has the new state.
    Raises: SpecError when a file cannot be read.
    """
    top = os.path.join(root, "")
    files: dict[str, bytes] = {}
    executable: set[str] = set()
    private: set[str] = set()
    for name in names:
        try:
            with open_regular(os.path.realpath(os.path.join(root, name))) as file:
                data = file.read()
                if _path_of(file) != top + name and hashlib.sha256(data).hexdigest() != manifest[name].sha256:
                    continue
                files[name] = data
                mode = os.fstat(file.fileno()).st_mode
                if mode & 0o100:
                    executable.add(name)
                if manifest[name].is_private or _is_owners_alone(_path_of(file), mode, top):
                    private.add(name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as exc:
            raise cannot_read(name, exc) from exc
    return pack_files(files, executable=executable, private=private)


def _path_of(file: IO[bytes]) -> str:
    """Return the real path of an open file, even if its name was replaced; without /proc, the real path of its name."""
    link = f"/proc/self/fd/{file.fileno()}"
    return os.readlink(link) if os.path.exists("/proc/self/fd") else os.path.realpath(file.name)


def _is_owners_alone(path: str, mode: int, top: str) -> bool:
    """Return True when only the owner has access, by its mode or that of a folder below ``top`` (with a slash)."""
    while not is_owners_alone(mode):
        path = os.path.dirname(path)
        if not path.startswith(top):
            return False
        with contextlib.suppress(OSError):
            mode = os.stat(path).st_mode
    return True


def _digest(path: str, _size: int, _mtime_ns: int, _ctime_ns: int, _inode: int) -> str:
    with open_regular(path) as file:
        if _path_of(file).casefold() != path.casefold() and not is_guarded(path):  # others put a link into the path
            raise FileNotFoundError(errno.ENOENT, "it was replaced", path)
        return hashlib.file_digest(file, "sha256").hexdigest()  # type: ignore[arg-type]


_read_digest = lru_cache(maxsize=_MOST_ENTRIES)(_digest)  # digests of unchanged files


class _Folder(NamedTuple):
    path: str
    prefix: str  # of the names in it: empty, or with a trailing slash
    rules: Rules
    real: str  # its path without links
    within: frozenset[str]  # real paths of the folder and its parents: a link to one of them would be a loop
    is_theirs: bool = False  # reached through a link that another user made


def _walk(
    top: str, most_entries: int, kept: list[str], skipped: list[str], way_out: str
) -> Iterator[tuple[str, str, os.stat_result]]:
    """Yield name, path and status of the files that are sent."""
    above, outer = read_rules_above(Path(top))
    trusted = {0, os.stat(top).st_uid, *([os.geteuid()] if hasattr(os, "geteuid") else [])}
    folders = [_Folder(top, "", outer, top, frozenset({top}))]
    entries_seen = tried = 0
    while folders:
        folder = folders.pop()
        entries = _scan(folder)
        entries_seen += len(entries)
        if entries_seen > most_entries:
            raise SpecError(
                f"the folder {top} has more than {most_entries} files: work in a smaller folder, {_WAYS_OUT}{way_out}"
            )
        rules = extend(folder.rules, folder.path, above + folder.prefix, {entry.name for entry in entries})
        fresh = rules.num_patterns - folder.rules.num_patterns
        tried += fresh * _TRIES_TO_COMPILE + (rules.num_patterns - outer.num_patterns) * len(entries)
        if tried > _MOST_TRIED:
            raise SpecError(
                f"{top}: {GIT_FILE} and {OWN_FILE} have too many patterns for the number of files: list folders, not "
                "files"
            )
        for entry in entries:
            name = folder.prefix + entry.name
            real, status = _look_at(entry, name, folder.real, top)
            is_folder = os.path.isdir(real) if status is None else stat.S_ISDIR(status.st_mode)
            if not real or real in folder.within or is_left_out(rules, above + name, is_folder=is_folder):
                continue
            if status is None or not is_folder and not stat.S_ISREG(status.st_mode):
                skipped.append(name)
                continue
            if is_folder and os.path.exists(os.path.join(real, "pyvenv.cfg")):  # a virtual environment
                continue
            real_name = os.path.relpath(real, top) if real != entry.path else name
            is_theirs = folder.is_theirs or _is_link_of_others(entry, trusted)
            if is_theirs and _is_left_out_there(outer, above, top, real_name, is_folder=is_folder):
                continue
            if _is_private(rules, above, name, real_name):
                kept.append(f"{name}/" if is_folder else name)
            elif is_folder:
                folders.append(_Folder(entry.path, f"{name}/", rules, real, folder.within | {real}, is_theirs))
            else:
                yield name, real, status


def _scan(folder: _Folder) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder.path) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):  # deleted meanwhile
        return []
    except OSError as exc:
        raise cannot_read(folder.prefix or folder.path, exc) from exc


def _look_at(entry: os.DirEntry[str], name: str, parent: str, top: str) -> tuple[str, os.stat_result | None]:
    """Return the real path and status of an entry; an empty path for one that is never sent, or is missing.

    The status is None for a link that leads out of ``top``, or nowhere.
    """
    if entry.name.lower() in NEVER_TRAVELS:  # .GIT is .git on a file system that ignores case
        return "", None
    real = os.path.join(parent, entry.name)
    if entry.is_symlink():
        real = os.path.realpath(entry.path)
        if not os.path.exists(entry.path) or not os.path.join(real, "").startswith(os.path.join(top, "")):
            return real, None
        if not NEVER_TRAVELS.isdisjoint(Path(real.lower()).relative_to(top.lower()).parts):
            return "", None
    try:
        return real, entry.stat()
    except FileNotFoundError:
        return "", None
    except OSError as exc:
        raise cannot_read(name, exc) from exc


def _is_left_out_there(rules: Rules, above: str, top: str, name: str, *, is_folder: bool) -> bool:
    """Return True when the rules along the path from ``top`` exclude ``name``, the real path of a link's target."""
    prefix, parts = "", name.split(os.sep)
    for number, part in enumerate(parts, 1):
        folder = os.path.join(top, prefix)
        there = {file for file in (GIT_FILE, OWN_FILE) if os.path.lexists(os.path.join(folder, file))}
        rules = extend(rules, folder, above + prefix, there)
        if is_left_out(rules, f"{above}{prefix}{part}", is_folder=is_folder or number < len(parts)):
            return True
        prefix += f"{part}/"
    return False


def _is_link_of_others(entry: os.DirEntry[str], trusted: Collection[int]) -> bool:
    """Return True for a link made by another user: its name may evade the rules that exclude its target."""
    try:
        return entry.is_symlink() and entry.stat(follow_symlinks=False).st_uid not in trusted
    except FileNotFoundError:
        return True


def _is_private(rules: Rules, above: str, name: str, real_name: str) -> bool:
    """Return True when the name is private, or the real path is (for a link, or below a linked folder)."""
    if is_private(above + name, rules.lifted):
        return True
    if real_name == name:
        return False
    parts = real_name.split(os.sep)
    return any(is_private(above + "/".join(parts[:end]), rules.lifted) for end in range(1, len(parts) + 1))


@lru_cache(maxsize=_MOST_ENTRIES)
def _find_fault(name: str) -> str:
    """Return the fault of a file name that nodes would refuse; empty for a valid name."""
    try:
        name.encode()
        check_name(name)
    except UnicodeEncodeError:
        shown = os.fsencode(name).decode(errors="backslashreplace")
        return f"'{shown}': its name is not UTF-8: rename it, or list it in {OWN_FILE}"
    except Untrue as exc:
        return f"{exc}: rename it, or list it in {OWN_FILE}"
    return ""


def _format_size(size_bytes: int) -> str:
    return format_size(size_bytes, smallest="B").replace(".0 ", " ")
