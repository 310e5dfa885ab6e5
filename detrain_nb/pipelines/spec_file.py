"""The file of a spec, which is written only if it has not changed since it was read, unless the user insists."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ..agents import runtime_folder
from ..documents import format_document, parse_document, suffix_of
from ..documents.content import MOST_BYTES, TOO_LARGE
from ..errors import Conflict, FieldChange, FieldError, SpecError
from ..locks import take_lock
from ..spec import PipelineSpec
from ..spec.model import may_show
from ..storage import Location, locate, named_errors, whole_file
from ..text import name_some, printable, show

__all__ = ["SpecFile", "find_changes", "leaves", "read_spec_file", "write_spec_file"]

_MOST_CHANGES = 20  # listed one by one
_KEEP_OR_MOVE = "keep yours (anyway=True), or save under another name"
_CHOICES = "keep yours (anyway=True), take theirs (open it again), or save under another name"
_ANOTHER_NAME = "choose another name, or open that file"


@dataclass(frozen=True)
class SpecFile:
    """A file and its content: ``spec`` if that is a pipeline, else ``errors`` say why it is not.

    ``data`` is the document, also of a spec with faults; None if the file is not a document. ``revision`` is the
    SHA-256 of its bytes, ``changed_at`` is in seconds since the epoch, ``owner`` is the user who owns the file.
    """

    path: Path
    revision: str
    changed_at: float
    owner: str
    text: str = field(repr=False)
    data: Mapping[str, Any] | None = field(repr=False)
    spec: PipelineSpec | None = field(repr=False)
    errors: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The name of the spec, else of the file."""
        said = (self.data or {}).get("name")
        return printable(said if isinstance(said, str) and said else self.path.stem)[:80]

    @property
    def is_formatted(self) -> bool:
        """True if a rewrite would keep the text as it is. It would lose comments, for example."""
        return self.data is not None and self.text == format_document(self.data, suffix_of(self.path))


def read_spec_file(path: Path) -> SpecFile:
    """Read a file with any content; no link is followed.

    Raises: SpecError when it cannot be read, or its name is not one of a JSON, TOML or YAML file.
    """
    suffix = suffix_of(path)
    location = locate(path)
    data, changed_at, owner = _read_bytes(location)
    revision = hashlib.sha256(data).hexdigest()
    found = SpecFile(path, revision, changed_at, owner, data.decode("utf-8-sig", "replace"), None, None)
    if len(data) > MOST_BYTES:
        return replace(found, text="", errors=(TOO_LARGE,))
    try:
        document = parse_document(data.decode("utf-8-sig"), suffix)
    except UnicodeDecodeError:
        return replace(found, errors=("is not UTF-8: save the file as UTF-8",))
    except SpecError as exc:
        return replace(found, errors=(str(exc),))
    try:
        return replace(found, data=document, spec=PipelineSpec.from_dict(document))
    except FieldError as exc:
        return replace(found, data=document, errors=tuple(map(str, exc.faults)))


def write_spec_file(path: Path, data: Mapping[str, Any], *, before: SpecFile | None, anyway: bool = False) -> SpecFile:
    """Write a file, completely or not at all, if it is as it was ``before``; with None, if there is no file.

    ``anyway`` overwrites changes by others. No link is written through.
    Raises: Conflict, SpecError.
    """
    text = format_document(data, suffix_of(path), where=printable(str(path)))
    with _saving(path), named_errors(printable(str(path)), "written", kind_of=lambda exc: SpecError):
        if not anyway:
            _require_unchanged(path, data, before)
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(path, may_be_link=False) as file:
            file.write(text.encode("utf-8"))
        return read_spec_file(path)


def find_changes(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> tuple[FieldChange, ...]:
    """Return the fields in which two documents differ, by path; possible secrets are not shown."""
    there, here = dict(leaves(theirs)), dict(leaves(mine))
    paths = [path for path in {**there, **here} if path and there.get(path) != here.get(path)]
    return tuple(
        FieldChange(
            printable("".join(path).removeprefix("."))[:120], _told(path, there.get(path)), _told(path, here.get(path))
        )
        for path in paths
    )


def leaves(value: object, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield the values of a document that contain no others, each with the steps to it."""
    if isinstance(value, Mapping) and value:
        for name, inner in value.items():
            yield from leaves(inner, (*path, f".{name}"))
    elif isinstance(value, list | tuple) and any(isinstance(each, Mapping) for each in value):
        for number, inner in enumerate(value):
            yield from leaves(inner, (*path, f"[{number}]"))
    else:
        yield path, json.loads(json.dumps(value))  # a tuple becomes a list, as in a file


def _require_unchanged(path: Path, data: Mapping[str, Any], before: SpecFile | None) -> None:
    """Check that the file is as it was ``before``. Raises: Conflict."""
    named = _short(path)
    if not os.path.lexists(path):
        if before is not None:
            raise Conflict(f"{named} was removed after it was read here", advice=_KEEP_OR_MOVE)
        return
    found = read_spec_file(path)
    if before is not None and found.revision == before.revision:
        return
    changes = () if found.data is None else find_changes(found.data, data)
    at = time.strftime("%H:%M:%S on %Y-%m-%d", time.localtime(found.changed_at))
    told = name_some([str(each) for each in changes], separator="; ") or "the content is the same"
    if found.data is None:
        told = f"it is not a valid document now: {found.errors[0]}"
    what = "already exists" if before is None else "was changed after it was read here"
    whose = f", by its owner {found.owner}" if found.owner else ""
    raise Conflict(
        f"{named} {what}: it was written at {at}{whose} ({told})",
        advice=_CHOICES if before is not None else _ANOTHER_NAME,
        changed_at=found.changed_at,
        owner=found.owner,
        changes=changes[:_MOST_CHANGES],
    )


def _read_bytes(location: Location) -> tuple[bytes, float, str]:
    with (
        named_errors(location.name, "read", kind_of=lambda exc: SpecError),
        location.open(may_be_link=False) as file,
    ):
        state = os.fstat(file.fileno())
        data: bytes = file.read(MOST_BYTES + 1)
    return data, state.st_mtime, _owner(state)


def _owner(state: os.stat_result) -> str:
    """Return the name of the owner, or the number; empty on a system without owners."""
    if os.name != "posix":
        return ""
    import pwd

    try:
        return printable(pwd.getpwuid(state.st_uid).pw_name)
    except KeyError:
        return str(state.st_uid)


@contextmanager
def _saving(path: Path) -> Iterator[None]:
    """Lock the file against other processes of this user that write it this way. Raises: Conflict."""
    if os.name != "posix":
        yield
        return
    place = runtime_folder() / f".saving-{hashlib.sha256(os.fsencode(path)).hexdigest()[:24]}"
    lock = take_lock(place, is_new=True)
    if lock is None:
        raise Conflict(f"{_short(path)} is being written by another process right now", advice="save it again")
    try:
        yield
    finally:
        place.unlink(missing_ok=True)
        os.close(lock)


def _short(path: Path) -> str:
    return printable(f"{path.parent.name}/{path.name}")


def _told(path: tuple[str, ...], value: object) -> str:
    if value is None:
        return ""
    steps = [step.removeprefix(".") for step in path if step != ".nodes" or len(path) == 1]
    return show(value) if all(may_show(step, value) for step in steps) else "a value that is not shown"
