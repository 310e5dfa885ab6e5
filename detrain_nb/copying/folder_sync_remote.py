"""The node's copy of the notebook's folder: only files that the notebook has sent are ever replaced or removed."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import stat
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

from ..guarded import SEARCH
from ..locks import take_lock
from .json_lines import SLOWEST_BYTES_PER_S, FilesError, Talk, Untrue, as_size, check_name
from .receiver import TreeWriter, opened_parent
from .sender import MOST_NAMED, is_owners_alone
from .sync_manifest import Sent, lstat, note_path, read_note, write_note

_CHUNK_BYTES = 1 << 18
_Wanted = dict[str, tuple[str, bool, bool]]  # by name: digest, executable, private
_COMPILED = "__pycache__"
_LOCK_LIMIT_S = 60.0
_DONE_LIMIT_S = 600.0  # by then the notebook has given up, or has disappeared without disconnecting


def sync(talk: Talk, order: dict[str, Any], folder: str) -> None:
    """Make ``folder`` equal to the notebook's folder.

    SIGALRM arrives if that takes too long, as other notebooks may be waiting for the lock.
    """
    _be_done_in_time(order["size"])
    text = b"".join(talk.read(order["size"]))
    listed: list[list[Any]] = json.loads(text)
    wanted = {check_name(name): (sha256, executable, private) for name, sha256, executable, private in listed}
    note = str(note_path(order["cache"], folder))
    os.makedirs(os.path.dirname(note), mode=0o700, exist_ok=True)
    with _locked(f"{note}.lock", talk):
        root, sent = read_note(note)
        if root != order["root"] and not order["takes_over"]:
            talk.say("other", root=root)
            return
        want, left_alone = _compare(folder, wanted, sent)
        talk.say("want", indices=[index for index, entry in enumerate(listed) if entry[0] in want])
        try:
            if want:
                with TreeWriter(folder) as writer, _receive_archive(talk, writer) as archive:
                    _remove_unwanted(folder, wanted, sent)
                    left_alone += _unpack(archive, writer, want, sent)
            else:
                _remove_unwanted(folder, wanted, sent)
        except BaseException:
            with contextlib.suppress(OSError):  # record what was done, unless the disk is full
                write_note(note, order["root"], folder, sent)
            raise
        digest = "" if left_alone else hashlib.sha256(text).hexdigest()
        write_note(note, order["root"], folder, sent, digest=digest)
    talk.say("done", left_alone=sorted(left_alone)[:MOST_NAMED], num_left_alone=len(left_alone))


def _be_done_in_time(size: int) -> None:
    """Set SIGALRM for a transfer of ``size`` bytes."""
    signal.setitimer(signal.ITIMER_REAL, _DONE_LIMIT_S + size / SLOWEST_BYTES_PER_S)


def _compare(folder: str, wanted: _Wanted, sent: dict[str, Sent]) -> tuple[set[str], list[str]]:
    """Return the names that the notebook has to send, and those left alone because others have changed the path."""
    want, left_alone = set(), []
    for name, kind in wanted.items():
        path = os.path.join(folder, name)
        before = sent.get(name)
        if before and before.is_as(kind) and before.stands(path):
            continue  # a rank's changes to it are kept
        if before and before.is_untouched(lstat(path)):
            want.add(name)
        elif (status := lstat(path)) is None or stat.S_ISDIR(status.st_mode):
            want.add(name)  # a folder there may be removed by the time the file is written
        elif stat.S_ISREG(status.st_mode) and _digest_file(path) == kind[0]:
            if before is None or before.has_mode_of(kind):
                sent[name] = Sent(*kind[:2], status.st_size, status.st_mtime_ns, is_ours=False, is_private=kind[2])
            else:
                want.add(name)
        elif before and before.is_ours and stat.S_ISREG(status.st_mode):
            want.add(name)  # changed on both sides: the notebook's version wins
        else:
            left_alone.append(name)
    return want, left_alone


def _receive_archive(talk: Talk, writer: TreeWriter) -> IO[bytes]:
    size = as_size(talk.hear("archive")["size"])
    _be_done_in_time(size)
    writer.check_room("", size)
    archive = writer.open_staged("archive")
    archive.writelines(talk.read(size))
    return archive


def _remove_unwanted(folder: str, wanted: _Wanted, sent: dict[str, Sent]) -> None:
    """Remove sent files that are unchanged and no longer wanted, and folders left empty. Raises: OSError."""
    try:
        opened = os.open(folder, SEARCH)
    except FileNotFoundError:
        opened = -1
    try:
        for name in sorted(set(sent) - set(wanted)):
            before = sent.pop(name)
            if opened >= 0 and before.is_ours:
                _remove_file(opened, name, before)
    finally:
        if opened >= 0:
            os.close(opened)


def _remove_file(folder: int, name: str, before: Sent) -> None:
    """Remove a file, opening each folder in turn: in group-writable folders, others may insert a link at any moment."""
    with contextlib.ExitStack() as stack:
        try:
            parent, last = stack.enter_context(opened_parent(folder, name))
            status = os.stat(last, dir_fd=parent, follow_symlinks=False)
        except OSError:  # it is missing, or a folder on its path is a link
            return
        if not before.is_untouched(status):
            return
        os.unlink(last, dir_fd=parent)
        _remove_compiled(parent, last)
    while above := name.rpartition("/")[0]:
        try:
            with opened_parent(folder, above) as (parent, last):
                os.rmdir(last, dir_fd=parent)
        except OSError:  # not empty
            return
        name = above


def _unpack(archive: IO[bytes], writer: TreeWriter, want: set[str], sent: dict[str, Sent]) -> list[str]:
    """Write the archive's files; returns the names left alone because others have put something at their path."""
    left_alone = []
    with zipfile.ZipFile(archive) as packed:
        for info in packed.infolist():
            if info.filename not in want:
                raise Untrue(f"{info.filename!r} was not requested")
            name, mode = info.filename, info.external_attr >> 16
            path = os.path.join(writer.folder, name)
            if os.path.isdir(path) or _is_behind_link(writer.folder, name):
                left_alone.append(name)
                continue
            digest = hashlib.sha256()
            with packed.open(info) as file:
                pieces = _digested(file, digest.update)
                writer.add_file(name, info.file_size, mode & 0o777, pieces)
            with opened_parent(writer.opened, name) as (parent, last):
                _remove_compiled(parent, last)
                status = os.stat(last, dir_fd=parent, follow_symlinks=False)
            kind = digest.hexdigest(), bool(mode & 0o100)
            at = status.st_size, status.st_mtime_ns
            sent[name] = Sent(*kind, *at, is_ours=True, is_private=is_owners_alone(mode))
    return left_alone


def _digested(file: IO[bytes], update: Callable[[bytes], object]) -> Iterator[bytes]:
    while data := file.read(_CHUNK_BYTES):
        update(data)
        yield data


def _is_behind_link(folder: str, name: str) -> bool:
    """Return whether any parent of ``name`` is a link or not a folder."""
    path = folder
    for part in name.split("/")[:-1]:
        path = os.path.join(path, part)
        status = lstat(path)
        if status is not None and not stat.S_ISDIR(status.st_mode):
            return True
    return False


def _remove_compiled(folder: int, name: str) -> None:
    """Remove a module's compiled files: Python compares size and time in seconds, and misses two quick edits."""
    if not name.endswith(".py"):
        return
    try:
        opened = os.open(_COMPILED, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
    except OSError:  # there is none
        return
    try:
        for found in os.listdir(opened):
            if found.startswith(f"{name[:-3]}.") and found.endswith(".pyc"):
                with contextlib.suppress(OSError):
                    os.unlink(found, dir_fd=opened)
    finally:
        os.close(opened)
    with contextlib.suppress(OSError):  # not empty: files of other modules
        os.rmdir(_COMPILED, dir_fd=folder)


def _digest_file(path: str) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while data := file.read(_CHUNK_BYTES):
            digest.update(data)
    return digest.hexdigest()


@contextlib.contextmanager
def _locked(path: str, talk: Talk) -> Iterator[None]:
    """Hold the lock: nodes may share their home, and only one at a time may write there."""
    deadline = time.monotonic() + _LOCK_LIMIT_S
    while (lock := take_lock(Path(path), is_new=True)) is None:
        if time.monotonic() >= deadline:
            raise FilesError(f"{path} is locked by another notebook or node")
        talk.tick()
        time.sleep(0.02)
    try:
        yield
    finally:
        os.close(lock)
