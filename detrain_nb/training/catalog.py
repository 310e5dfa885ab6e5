"""The checkpoints at a URL: a folder for each, which is complete as soon as its last file is in it.

`step-00000200/` has a file of tensors from each rank, the index of all tensors and, written last, `checkpoint.json`: a
small file that names the others with their sizes. It holds its own digest and the index's, and the index holds those of
all tensors; format 1 has no digests. Files are never overwritten: a second save of a step writes new files next to the
old ones, and then replaces `checkpoint.json`.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..errors import DetrainError, SpecError
from ..plan.names import CHECKPOINT_FOLDER, CHECKPOINT_NOTE
from ..storage import Location, is_local, shown
from ..text import format_size, table_lines
from .digests import Damaged, is_digests, is_sealed
from .plain import parse_json
from .tensor_files import foreign_errors, read_whole

NOTE = CHECKPOINT_NOTE
_FORMAT = 2
_KEYS = (  # of all that a note may have
    *("step", "serial", "saved_at", "world_size", "index", "index_crc32", "files"),
    *("optimizer", "scheduler_kind", "scheduler", "data_position", "extra"),
)
_INDEX = re.compile(r"index-[0-9a-f]+\.json")
_OURS = re.compile(
    r"(rank-[0-9]+-[0-9a-f]+\.safetensors|index-[0-9a-f]+\.json|\.[0-9a-f]+\.detrain-part|checkpoint\.json)"
)
MOST_NOTE_BYTES = 64 << 20
MOST_NOTE_VALUES = 1 << 23  # parsing that many takes a second, in which no other thread runs
MOST_SAVES = 1 << 40
MOST_STEPS = 10**18  # the name of a folder can hold any number below this
_UNFINISHED = "its save has not finished"
_LINK = "is a link, and links are not followed because others may have created them: copy the files here"
_LAST_SECOND = 253402300799.0  # of the year 9999


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint at a URL. ``serial`` counts the saves there: the last one has the highest, whatever its step.

    ``saved_at`` is in seconds of Unix time. ``wrong`` is the reason why it cannot be loaded, empty if it can.
    ``is_unfinished``: it has no index, which a save writes once all tensors are written, so removing it loses nothing.
    ``is_unknown``: its storage does not answer, and it may be intact. ``leftovers``: files of unfinished saves in it.
    """

    step: int
    serial: int
    saved_at: float
    size_bytes: int
    wrong: str
    name: str
    is_unfinished: bool = False
    is_unknown: bool = False
    leftovers: tuple[str, ...] = field(default=(), repr=False)

    @property
    def is_complete(self) -> bool:
        """True when its files exist with their full sizes; only a load compares them with their digests."""
        return not self.wrong


class Checkpoints(tuple[Checkpoint, ...]):
    """Checkpoints in the order in which they were saved; they print as a table."""

    __slots__ = ()

    @property
    def last(self) -> Checkpoint | None:
        """The complete checkpoint that was saved last, which `load` takes unless it is damaged, or None."""
        return next((each for each in reversed(self) if each.is_complete), None)

    def __repr__(self) -> str:
        rows = [("step", "saved", "size", "complete")]
        for each in self:
            when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(each.saved_at)) if each.saved_at else "-"
            state = f"no: {each.wrong}" if each.wrong else "yes"
            rows.append((str(each.step), when, format_size(each.size_bytes, smallest="B"), state))
        return "\n".join(table_lines(rows, num_right=3)) if self else "no checkpoints"

    __str__ = __repr__


def step_folder(place: Location, step: int) -> Location:
    return place / _folder_name(step)


def _folder_name(step: int) -> str:
    return f"step-{step:08d}"


def list_checkpoints(place: Location) -> Checkpoints:
    """List the checkpoints in a folder; a folder that does not exist has none.

    Raises: DetrainError when the store cannot list the folder; a checkpoint whose files it cannot read is unknown.
    """
    if not place.exists():
        return Checkpoints()
    entries = _read_entries(place)
    steps = {int(match[1]) for name in entries if (match := CHECKPOINT_FOLDER.fullmatch(name))}
    kinds = {step: entries.get(_folder_name(step), ("directory", 0))[0] for step in steps}
    found = [each for step in steps if (each := _read(step, step_folder(place, step), kinds[step])) is not None]
    return Checkpoints(sorted(found, key=lambda each: (each.serial, each.step)))


def require_no_link(folder: Location) -> None:
    """Check that a step's folder is not a link: where a group can write, others can make one. Raises: SpecError."""
    with foreign_errors(folder.name, "inspected"), contextlib.suppress(FileNotFoundError):
        if folder.files.info(folder.path).get("islink"):
            raise SpecError(f"{folder.name} is a link, and links are not followed: remove it, or save elsewhere")


def read_files(folder: Location) -> dict[str, int]:
    """Return the sizes in bytes of the files in a folder, incomplete ones included."""
    return {name: size for name, (kind, size) in _read_entries(folder).items() if kind == "file"}


def _read_entries(folder: Location) -> dict[str, tuple[str, int]]:
    """Return by name the kind of each entry (file, directory, link or another) and its size in bytes."""
    with foreign_errors(folder.name, "listed"):
        folder.files.invalidate_cache()
        found = {
            each["name"].rstrip("/"): ("link" if each.get("islink") else str(each["type"]), int(each["size"] or 0))
            for each in folder.files.ls(folder.path, detail=True)
        }
        if found.pop(folder.path.rstrip("/"), ("directory", 0))[0] != "directory":
            raise NotADirectoryError("it is a file")
    return {path.rpartition("/")[2]: entry for path, entry in found.items()}


def _read(step: int, folder: Location, kind: str) -> Checkpoint | None:
    """Read a checkpoint; None for a folder of other files, which only has the name of one."""
    found = Checkpoint(step, -1, 0.0, 0, "", folder.name)
    if kind != "directory":
        return replace(found, wrong=f"it {_LINK}" if kind == "link" else "it is not a folder")
    try:
        entries = _read_entries(folder)
        ours = [name for name in entries if _OURS.fullmatch(name)]
        if entries and not ours:
            return None
        found = replace(found, size_bytes=sum(size for kind, size in entries.values() if kind == "file"))
        if NOTE not in entries and not any(_INDEX.fullmatch(name) for name in ours):
            return replace(found, wrong=_UNFINISHED, is_unfinished=True)
        _require_file(entries, NOTE)
        note = read_note(folder)
        leftovers = tuple(name for name in ours if name != NOTE and name not in note["files"])
        found = replace(found, serial=note["serial"], saved_at=note["saved_at"], leftovers=leftovers)
        for name, size_bytes in note["files"].items():
            _require_file(entries, name, size_bytes)
        if note["step"] != step:
            raise Damaged(f"{NOTE} is of step {note['step']}, its folder of step {step}")
    except Damaged as exc:
        return replace(found, wrong=str(exc))
    except DetrainError as exc:
        return replace(found, wrong=str(exc), is_unknown=True)
    return found


def _require_file(entries: Mapping[str, tuple[str, int]], name: str, size_bytes: int | None = None) -> None:
    """Check that a folder's entries have this file. Raises: Damaged."""
    kind, size = entries.get(name, ("", 0))
    if not kind:
        raise Damaged(f"{shown(name)} is missing" + (f" ({size_bytes} bytes)" if size_bytes is not None else ""))
    if kind == "link":
        raise Damaged(f"{name} {_LINK}")
    if kind != "file":
        raise Damaged(f"{name} is not a file")
    if size_bytes is not None and size != size_bytes:
        raise Damaged(f"{name} has {size} bytes instead of {size_bytes}")


def read_note(folder: Location) -> dict[str, Any]:
    """Return the content of `checkpoint.json`. Raises: Damaged when it is invalid or of a later format."""
    text = read_whole(folder / NOTE, limit_bytes=MOST_NOTE_BYTES)
    try:
        has_digests = is_sealed(text, (folder / NOTE).name)
        note = parse_json(text, most_values=MOST_NOTE_VALUES)
        if type(note["format"]) is int and note["format"] > _FORMAT:
            raise ValueError(f"its format {shown(str(note['format']), most=20)} is of a newer version")
        is_right = note["format"] == (_FORMAT if has_digests else 1) and has_digests == ("index_crc32" in note)
        is_right = is_right and (not has_digests or is_digests(note["index_crc32"], 1))
        is_right = is_right and all(type(size) is int and name.isprintable() for name, size in note["files"].items())
        is_right = is_right and all(type(note[key]) is int for key in ("step", "serial", "world_size"))
        is_right = is_right and 0 <= note["serial"] <= MOST_SAVES and note["world_size"] > 0
        is_right = is_right and isinstance(note["saved_at"], float) and 0 <= note["saved_at"] <= _LAST_SECOND
        if not is_right or note["index"] not in note["files"]:
            raise ValueError("its content is not of this format")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        raise Damaged(f"{NOTE} cannot be read: {shown(str(exc))}") from exc
    return {key: note[key] for key in _KEYS if key in note}


# ---- removal


def clear_leftovers(place: Location) -> None:
    """Remove what unfinished saves have left. No other save may be running there."""
    for each in list_checkpoints(place):
        folder = step_folder(place, each.step)
        remove_files(folder, list(read_files(folder) if each.is_unfinished else each.leftovers))


def prune(place: Location, keep: int | None) -> None:
    """Keep the last ``keep`` complete checkpoints, and remove older ones, complete or damaged.

    The age of a checkpoint is in its `checkpoint.json`: it is kept when that cannot be read.
    """
    if keep is None:
        return
    found = list_checkpoints(place)
    kept = [each for each in found if each.is_complete][-keep:]
    for each in found:
        if kept and 0 <= each.serial < kept[0].serial:
            folder = step_folder(place, each.step)
            # the note last: a half-removed checkpoint can still be recognized as old, and the next save removes it
            remove_files(folder, [*(name for name in read_files(folder) if name != NOTE), NOTE])


def remove_files(folder: Location, names: list[str]) -> None:
    """Remove our files among ``names``, in this order, then the folder if it is empty; links are not followed."""
    ours = [name for name in names if _OURS.fullmatch(name)]
    with foreign_errors(folder.name, "cleared"):
        if is_local(folder.files) and os.unlink in os.supports_dir_fd:
            _remove_here(folder.path, ours)
            folder.files.invalidate_cache()
            return
        for name in ours:
            folder.files.rm_file((folder / name).path)
        folder.files.invalidate_cache()
        if folder.files.isdir(folder.path) and not folder.files.ls(folder.path, detail=False):
            folder.files.rmdir(folder.path)


def _remove_here(folder: str, names: list[str]) -> None:
    """Remove by file descriptor: where a group can write, others may replace the folder by a link at any moment."""
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENOTDIR):  # a link
            return
        raise
    try:
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name, dir_fd=opened)
        is_empty = not os.listdir(opened)
    finally:
        os.close(opened)
    if is_empty:
        with contextlib.suppress(OSError):  # meanwhile replaced by another folder or a link
            os.rmdir(folder)
