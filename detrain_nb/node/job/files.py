"""Artifacts of a job for the notebook to fetch: files in the folder of its ranks and in its artifacts folder.

Nothing outside these two is listed or read, and no link is followed.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ...copying.json_lines import MOST_DEPTH, Failed, Talk, Untrue, as_size, check_name
from ...plan.choices import ARTIFACTS
from .folders import ARTIFACTS_NAME, find_job_folder, read_order, work_folder
from .order import JobOrder, JobRefused, check_id, check_number, check_texts
from .terms import FILES_OF_A_LINE, fits

_MOST_FILES = 100_000
_PIECE_BYTES = 1 << 20
_OPEN = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK


def list_artifacts(talk: Talk, said: dict[str, Any]) -> None:
    """Send name, size and SHA-256 of each artifact, in messages of up to 500; all but the last have ``more``.

    The last message has ``left_out``, how many more match but are not sent: links, special files, unreadable files and
    names that are not text. With ``digests`` false, the first 500 are sent in one message, each with its size and
    modification time; files that match a pattern of ``first`` come before all others, in the order of ``first``.
    """
    folder, order = _find_job(said)
    patterns = check_texts(said.get("patterns") or []) or order.artifacts or ARTIFACTS
    if said.get("digests") is False:
        names = _sort(_match(folder, order, patterns), check_texts(said.get("first") or []))
        talk.say("made", files=[*itertools.islice(_measure(folder, order, names), FILES_OF_A_LINE)])
        return
    listed: list[tuple[str, int, str]] = []
    num_left_out = 0
    for name in _match(folder, order, patterns):
        try:
            size, digest = _digest(_open_artifact(folder, order, check_name(name)), talk)
        except (JobRefused, FileNotFoundError, Untrue):
            num_left_out += 1
            continue
        listed.append((name, size, digest))
        if len(listed) == FILES_OF_A_LINE:
            talk.say("files", files=listed, more=True)
            listed = []
    talk.say("files", files=listed, more=False, left_out=num_left_out)


def _sort(names: Iterable[str], first: Sequence[str]) -> Iterable[str]:
    """Sort the names by the patterns of ``first``; without these, keep the lazy iterable."""

    def place(name: str) -> int:
        return next((number for number, pattern in enumerate(first) if fits(name, pattern)), len(first))

    return sorted(names, key=place) if first else names


def _measure(folder: Path, order: JobOrder, names: Iterable[str]) -> Iterator[tuple[str, int, float]]:
    """Yield name, size and modification time of files, without reading them."""
    for name in names:
        with contextlib.suppress(JobRefused, FileNotFoundError, Untrue):
            opened = _open_artifact(folder, order, check_name(name))
            try:
                state = os.fstat(opened)
            finally:
                os.close(opened)
            yield name, state.st_size, state.st_mtime


def send_artifact(talk: Talk, said: dict[str, Any]) -> None:
    """Send the bytes of a file from ``offset`` to its end. Raises: JobRefused, OSError."""
    folder, order = _find_job(said)
    offset = as_size(said.get("offset", 0))
    with open(_open_artifact(folder, order, check_name(said.get("name"))), "rb") as file:
        state = os.fstat(file.fileno())
        left = max(0, state.st_size - offset)
        file.seek(offset)
        talk.say("file", size=left, private=not state.st_mode & 0o077)
        while left:
            data = file.read(min(left, _PIECE_BYTES))
            if not data:  # it was truncated meanwhile: fewer bytes than announced
                raise Failed("the file shrank while it was being sent")
            talk.send(data)
            left -= len(data)


def _find_job(said: dict[str, Any]) -> tuple[Path, JobOrder]:
    folder = find_job_folder(check_id(said.get("id")), check_number(said.get("node_rank", 0)))
    return folder, read_order(folder)


def _match(folder: Path, order: JobOrder, patterns: Sequence[str]) -> Iterator[str]:
    """Yield matching files in the folder of the ranks, and in the artifacts folder, prefixed by its name."""
    seen: set[str] = set()
    for root, prefix in ((work_folder(order, folder), ""), (folder / ARTIFACTS_NAME, f"{ARTIFACTS_NAME}/")):
        for name in _walk(root):
            full = prefix + name
            if full not in seen and any(fits(full, pattern) for pattern in patterns):
                seen.add(full)
                yield full


def _walk(root: Path) -> Iterator[str]:
    """Yield the relative path of everything but folders; a link to a folder ends with a slash. Raises: JobRefused."""
    num_files = 0
    for path, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        inner = os.path.relpath(path, root)
        if inner.count("/") >= MOST_DEPTH:
            folders.clear()
        links = [f"{name}/" for name in folders if os.path.islink(os.path.join(path, name))]
        for name in sorted([*names, *links]):
            num_files += 1
            if num_files > _MOST_FILES:
                raise JobRefused(f"{root} has more than {_MOST_FILES} files: set workdir to a folder for the job alone")
            yield name if inner == "." else f"{inner}/{name}"


def _open_artifact(folder: Path, order: JobOrder, name: str) -> int:
    """Open a file in either folder. Raises: JobRefused when it is missing, a link, or below a link."""
    for root in (work_folder(order, folder), *([folder] if name.startswith(f"{ARTIFACTS_NAME}/") else [])):
        with contextlib.suppress(OSError):
            return _open_below(root, name)
    raise JobRefused(f"{name} is not a file of this job")


def _open_below(root: Path, name: str) -> int:
    """Open a file below ``root``. Raises: OSError, also when a folder of its path is a link."""
    *parents, last = name.split("/")
    at = os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for part in parents:
            inner = os.open(part, _OPEN | os.O_DIRECTORY, dir_fd=at)
            os.close(at)
            at = inner
        opened = os.open(last, _OPEN, dir_fd=at)
    finally:
        os.close(at)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise FileNotFoundError(name)
    return opened


def _digest(opened: int, talk: Talk) -> tuple[int, str]:
    """Hash the current bytes of a file only: a job may append faster than they are read."""
    digest, size = hashlib.sha256(), 0
    with open(opened, "rb", buffering=0) as file:
        most = os.fstat(opened).st_size
        while data := file.read(min(_PIECE_BYTES, most - size)):
            digest.update(data)
            size += len(data)
            talk.tick()
    return size, digest.hexdigest()
