"""The removal of files that earlier sessions left in our folder on a node, a month after their last use.

These are versions of our code; our work folders with nothing but files sent by a notebook; notes on what was sent to
folders that no longer exist; agents' folders of machines that shared the home. A process that starts to use the folder
shares its lock, from its first look until its agent has recorded what it uses; renames need the lock exclusively.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from ...agents import ENDED_PREFIX, USES_NAME, is_served, remove_dead_agent
from ...copying.sync_manifest import Sent, lstat, note_path, read_note
from ...locks import take_lock

LOCK_NAME = ".lock"
_UNUSED_S = 30 * 86400.0
_GAP_S = 86400.0
_OLD = ".old-"
_CODE = re.compile(r"[0-9a-f]{32}")
_BROKEN_OFF = re.compile(r"\.(incoming|upload|unpacking|old)-.+")
_NOTE = re.compile(r"[0-9a-f]{32}\.json(\.lock)?")


def touch(cache: Path, used: Iterable[str]) -> None:
    """Mark those of ``used`` that are ours, directly under ``cache``, as in use now."""
    for path in map(Path, used):
        if path.parent in (cache, cache / "work"):
            with contextlib.suppress(OSError):
                os.utime(path)


def clean_up(cache: Path) -> None:
    """Remove what was unused for a month, at most once a day; not now if a session is about to start."""
    with contextlib.suppress(OSError, ValueError, TypeError):  # an agent without a record of what it uses, a full disk
        if time.time() - (cache / LOCK_NAME).stat().st_mtime < _GAP_S:
            return
        found = [folder for folder in _entries(cache / "work", _is_work) if _may_go(cache, folder)]
        with _alone(cache) as is_alone:
            if not is_alone:
                return
            os.utime(cache / LOCK_NAME)
            used = _in_use(cache)
            _remove_dead_agents_of_others(cache)
            code = [folder for folder in _entries(cache, _CODE.fullmatch) if _is_unused(folder, used)]
            condemned = [*_entries(cache, _BROKEN_OFF.fullmatch, can_be_file=True), *map(_put_aside, code)]
            work = [(folder, _put_work_aside(cache, folder)) for folder in found if _is_unused(folder, used)]
            _remove_notes(cache, used)
        for path in condemned:
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        for folder, aside in work:
            _remove_sent(cache, aside)
            if aside.exists():  # a file was added at the last moment
                aside.rename(folder)


# ---- use


@contextlib.contextmanager
def _alone(cache: Path) -> Iterator[bool]:
    """Lock the folder exclusively, so that nothing reads or changes it; False if it is in use."""
    lock = take_lock(cache / LOCK_NAME)
    try:
        yield lock is not None
    finally:
        if lock is not None:
            os.close(lock)


def _in_use(cache: Path) -> set[str]:
    """Return what live agents use, by their records, on this machine and on others that share the home.

    Raises: OSError, ValueError, TypeError when one has no valid record.
    """
    used: set[str] = set()
    for folder in (cache / "run").glob("*/*"):
        if is_served(folder):
            used.update(map(os.path.realpath, json.loads((folder / USES_NAME).read_text(encoding="utf-8"))))
    return used


def _is_unused(path: Path, used: set[str]) -> bool:
    return os.path.realpath(path) not in used and _is_old(path)


def _is_old(path: Path) -> bool:
    """Return whether it was unused for a month, or is missing."""
    try:
        return time.time() - path.lstat().st_mtime > _UNUSED_S
    except FileNotFoundError:
        return True


def _entries(folder: Path, is_name: Callable[[str], object], *, can_be_file: bool = False) -> list[Path]:
    """Return the folders in ``folder`` that are ours by owner and name; links never are."""
    found = []
    with contextlib.suppress(FileNotFoundError), os.scandir(folder) as entries:
        for entry in entries:
            state = entry.stat(follow_symlinks=False)
            is_kind = stat.S_ISDIR(state.st_mode) or (can_be_file and stat.S_ISREG(state.st_mode))
            if is_name(entry.name) and is_kind and state.st_uid == os.getuid():
                found.append(Path(entry.path))
    return found


def _is_work(name: str) -> bool:
    return not name.startswith(".") or name.startswith(_OLD)


def _remove_dead_agents_of_others(cache: Path) -> None:
    """Remove old folders of other machines' dead agents: their locks may be invisible here. Ours go at each start."""
    for host in _entries(cache / "run", lambda name: name != platform.node()):
        for folder in _entries(host, lambda name: not name.startswith(".") or name.startswith(ENDED_PREFIX)):
            if _is_old(folder) and all(_is_old(path) for path in folder.iterdir()):
                remove_dead_agent(folder)
        if _is_old(host):
            with contextlib.suppress(OSError):  # not empty
                host.rmdir()


# ---- removal


def _put_aside(folder: Path) -> Path:
    """Rename to a name that nothing looks for: what remains if we are killed is removed another day."""
    return folder.rename(folder.with_name(f"{_OLD}{folder.name}-{uuid.uuid4().hex[:8]}"))


def _put_work_aside(cache: Path, folder: Path) -> Path:
    """Rename a work folder together with its note, which lists what in it is ours."""
    if folder.name.startswith(_OLD):
        return folder
    aside, note = _put_aside(folder), note_path(cache, folder)
    with contextlib.suppress(FileNotFoundError):
        note.rename(note_path(cache, aside))
    _remove_note(note)
    return aside


def _may_go(cache: Path, folder: Path) -> bool:
    """Return whether a work folder is long unused, and holds only files from a notebook.

    One with other files is checked again in a month.
    """
    note = note_path(cache, folder)
    if not (_is_old(folder) and _is_old(note)):
        return False
    _, sent = read_note(note)
    with contextlib.suppress(OSError):
        if all(_is_sent(folder, path, sent) for path in _files_in(folder)):
            return True
    os.utime(folder)
    return False


def _files_in(folder: Path) -> Iterator[str]:
    """Yield everything but folders, including links to folders. Raises: OSError for an unreadable folder."""

    def refuse(error: OSError) -> None:
        raise error

    for parent, folders, files in os.walk(folder, onerror=refuse):
        yield from (os.path.join(parent, name) for name in files)
        yield from (os.path.join(parent, name) for name in folders if os.path.islink(os.path.join(parent, name)))


def _is_sent(folder: Path, path: str, sent: dict[str, Sent]) -> bool:
    """Return whether it came from a notebook and is unchanged, or was compiled by Python from such a file."""
    name = os.path.relpath(path, folder)
    if name in sent:
        return sent[name].is_ours and sent[name].is_untouched(lstat(path))
    parent, compiled = os.path.split(name)
    outer, cache_name = os.path.split(parent)
    source = os.path.join(outer, compiled.partition(".")[0] + ".py")
    is_compiled = cache_name == "__pycache__" and compiled.endswith(".pyc") and not os.path.islink(path)
    return is_compiled and source in sent and sent[source].is_ours


def _remove_sent(cache: Path, folder: Path) -> None:
    """Remove a work folder with the files from a notebook, and its note; files added meanwhile stay."""
    note = note_path(cache, folder)
    _, sent = read_note(note)
    for path in _files_in(folder):
        if _is_sent(folder, path, sent):
            os.unlink(path)
    for parent, _, _ in os.walk(folder, topdown=False):
        with contextlib.suppress(OSError):  # not empty
            os.rmdir(parent)
    _remove_note(note)


def _remove_notes(cache: Path, used: set[str]) -> None:
    """Remove notes of missing folders. Folders of the user keep theirs: they list our files."""
    kept = {note_path(cache, folder) for folder in _entries(cache / "work", _is_work)}
    with contextlib.suppress(FileNotFoundError), os.scandir(cache / "sync") as entries:
        for path in [Path(entry.path) for entry in entries if entry.is_file(follow_symlinks=False)]:
            if path in kept or not _is_old(path):
                continue
            if not _NOTE.fullmatch(path.name):  # an unfinished draft
                path.unlink()
            elif path.suffix == ".json" and _is_of_none(path, used):
                _remove_note(path)
            elif path.suffix == ".lock" and not path.with_suffix("").exists():
                _remove_note(path.with_suffix(""))


def _is_of_none(note: Path, used: set[str]) -> bool:
    """Return whether the folder of a note is missing. If its parent is too, its disk may just be unmounted."""
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        folder = json.loads(note.read_text(encoding="utf-8"))["folder"]
        return (
            os.path.realpath(folder) not in used
            and os.path.isdir(os.path.dirname(folder))
            and not os.path.lexists(folder)
        )
    return False


def _remove_note(note: Path) -> None:
    """Remove a note with its lock, unless the lock is held."""
    path, lock = Path(f"{note}.lock"), None
    with contextlib.suppress(FileNotFoundError):  # no note was ever written
        lock = take_lock(path, is_new=True)
    if lock is not None:
        try:
            note.unlink(missing_ok=True)
            path.unlink()
        finally:
            os.close(lock)
