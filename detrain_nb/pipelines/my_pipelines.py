"""My Pipelines: the spec files next to a notebook, and those opened recently: list, open, save, run, delete."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..documents import SUFFIXES
from ..errors import Conflict, DetrainError, SpecError
from ..formats.importing import explain_no_spec
from ..jobs.noting import ask_after
from ..jobs.record import Record
from ..spec import PipelineSpec
from ..storage import named_errors
from ..text import name_some, printable, show
from .draft import document_of
from .entries import Entries, Entry, describe_job, make_entry
from .examples import Example
from .names import SUFFIX, check_name, free_name
from .recent import RecentFiles
from .spec_file import SpecFile, read_spec_file, write_spec_file
from .trash import Deleted, Trash

if TYPE_CHECKING:
    from ..jobs import Job

__all__ = ["MyPipelines"]

_T = TypeVar("_T")
_MOST_LISTED = 1_000  # files of the folder
_MOST_ASKED = 100  # jobs at once: their states fit into one line of the protocol
_ASK_LIMIT_S = 15.0
_READING_S = 5.0  # to read the files of one list: a repository may have files that are slow on purpose
_SCHEMA = "$schema"  # read by editors, and not part of a spec


class MyPipelines:
    """The pipelines in ``folder``, by default ``pipelines/`` next to the notebook, and recent ones from elsewhere.

    A pipeline is named by its file in the folder without the suffix, or by a path. A name without a slash that ends in
    ``.toml`` is the file in the folder, or, if there is none, the file next to the notebook. Nothing is created or
    written before something is saved. Only `run` and `ask_after_jobs` contact nodes.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] = "pipelines",
        *,
        record: Record | None = None,
        recent: RecentFiles | None = None,
    ) -> None:
        given = Path(os.path.abspath(os.path.expanduser(folder)))
        self.folder = Path(os.path.realpath(given.parent), given.name)
        self._record = record or Record()
        self._recent = recent or RecentFiles()
        self._trash = Trash(self.folder)
        self._reading = threading.Lock()  # a view lists files, and queries jobs, in its own threads
        self._unsaid: list[str] = []  # notices for the next list
        self._known: dict[
            Path, tuple[tuple[int, ...], SpecFile, Entry]
        ] = {}  # files that were read, with their state then

    def entries(self, search: str = "") -> Entries:
        """List pipelines that match ``search``, by name; those that cannot be read are listed with their error.

        Files that take too long are read for the next list. States of jobs are the last known ones.
        Raises: SpecError when the folder cannot be read.
        """
        with self._reading:
            notices, self._unsaid = self._unsaid, []
            entries, more = self._read_all(notices)
        chosen = sorted((each for each in entries if each.matches(search)), key=lambda each: each.name.casefold())
        return Entries(chosen, folder=_home_as_tilde(self.folder), more=more, notices=[*dict.fromkeys(notices)])

    def _read_all(self, notices: list[str]) -> tuple[list[Entry], int]:
        """Return all entries, and how many more files there are; `_reading` must be held. Raises: SpecError."""
        paths, more = self._paths()
        others = _tried(self._recent.paths, notices) or []
        read_until = time.monotonic() + _READING_S
        found = {path: self._entry(path, read_until) for path in dict.fromkeys([*paths, *others])}
        self._known = {path: known for path, known in self._known.items() if path in found}
        return self._with_jobs(list(found.values()), notices), more

    def open(self, pipeline: str | os.PathLike[str]) -> SpecFile:
        """Read a pipeline, and record that it was opened; one with faults has ``spec`` None and ``errors``.

        Raises: SpecError when the file cannot be read, or is one of another tool.
        """
        path = self.find(pipeline)
        try:
            found = read_spec_file(path)
        except SpecError:
            _refuse_foreign(path)
            raise
        if found.spec is None:
            _refuse_foreign(path)
        if not self._is_beside(path):
            self._unsaid = []
            _tried(lambda: self._recent.add(path), self._unsaid)
        return found

    def find(self, pipeline: str | os.PathLike[str]) -> Path:
        """Return the full path of a pipeline's file, which need not exist. Raises: SpecError."""
        text = os.fspath(pipeline)
        if "\0" in text or not text.strip():
            raise SpecError(f"{show(text)} is not a pipeline: give a name or a path")
        if "/" in text or os.sep in text or not _is_name(text):
            return Path(os.path.realpath(os.path.expanduser(text)))
        place, beside_notebook = self._place(check_name(text)), Path(os.path.realpath(text))
        is_there = text.endswith(SUFFIX) and not os.path.lexists(place) and beside_notebook.is_file()
        return beside_notebook if is_there else place

    def create(self, content: PipelineSpec | Mapping[str, Any], *, name: str | None = None) -> SpecFile:
        """Write a new pipeline under ``name`` or its own; it may be a draft, not yet a valid spec.

        Raises: Conflict when that name is taken, SpecError.
        """
        data = document_of(content)
        stem = check_name(str(data.get("name", "")) if name is None else name)
        return self._write(self._place(stem), {**data, "name": stem}, before=None)

    def create_example(self, example: Example) -> SpecFile:
        """Write an example under its name, or the next free one. Raises: SpecError."""
        return self.create(example.data, name=self._free_name(example.name))

    def add(self, content: PipelineSpec | Mapping[str, Any], *, name: str = "") -> SpecFile:
        """Write a pipeline from elsewhere under its name, else ``name``, or the next free one. Raises: SpecError."""
        data = document_of(content)
        return self.create(data, name=self._free_name(_stem(str(data.get("name") or name))))

    def save(self, opened: SpecFile, content: PipelineSpec | Mapping[str, Any], *, anyway: bool = False) -> SpecFile:
        """Write an opened pipeline again; a text with comments or another layout is kept in ``.trash``.

        Raises: Conflict when the file has changed since, unless ``anyway``; SpecError.
        """
        data = document_of(content)
        schema = {_SCHEMA: opened.data[_SCHEMA]} if opened.data and _SCHEMA in opened.data else {}
        saved = self._write(opened.path, {**schema, **data}, before=opened, anyway=anyway)
        if opened.text and not opened.is_formatted and self._is_beside(opened.path):
            self._trash.keep(opened.path, opened.text)
        return saved

    def save_as(self, name: str, content: PipelineSpec | Mapping[str, Any]) -> SpecFile:
        """Write a new pipeline under another name; the opened one is left as it is. Raises: Conflict, SpecError."""
        return self.create(content, name=name)

    def duplicate(self, pipeline: str | os.PathLike[str]) -> SpecFile:
        """Write a copy under the next free name, such as ``train-2``. Raises: SpecError."""
        found = read_spec_file(self.find(pipeline))
        if found.data is None:
            raise SpecError(f"{printable(found.path.name)} cannot be duplicated: {found.errors[0]}")
        data = {name: value for name, value in found.data.items() if name != _SCHEMA}
        return self.create(data, name=self._free_name(_stem(found.path.stem)))

    def delete(self, pipeline: str | os.PathLike[str]) -> Deleted:
        """Move a pipeline to ``.trash`` in the folder; one outside the folder is only removed from the list.

        Give the result to `restore` to undo it. Raises: SpecError.
        """
        path = self.find(pipeline)
        if self._is_beside(path):
            self._require_own_folder()
            return self._trash.take(path.stem, path)
        self._recent.remove(path)
        return Deleted(path.stem, path, None)

    def restore(self, deleted: Deleted) -> Path:
        """Bring a pipeline back; if its name is taken by now, under the next free one. Raises: SpecError."""
        if deleted.place is None:
            self._recent.add(deleted.path)
        return self._trash.give_back(deleted)

    def run(self, pipeline: str | os.PathLike[str], *, as_read: SpecFile | None = None, **options: Any) -> Job:
        """Submit a pipeline as a job, with the ``options`` of `detrain_nb.jobs.submit`.

        ``as_read``: the file as the user has seen it. Raises: Conflict when it has changed since; the errors of
        ``submit``.
        """
        from ..jobs import submit

        found = self.open(pipeline)
        if as_read is not None and found.revision != as_read.revision:
            raise Conflict(
                f"{printable(found.path.name)} was changed after it was read here, and was not started",
                advice="open it again, check it, then start it",
            )
        if found.spec is None:
            faults = name_some(found.errors, separator="; ")
            raise SpecError(f"{printable(found.path.name)} cannot be run: {faults}")
        job: Job = submit(found.spec, file=found.path, record=self._record, **options)
        return job

    def ask_after_jobs(self) -> bool:
        """Query unfinished jobs of the list, for 15 s in all; returns whether any is left. Raises: SpecError."""
        going = self._going()
        if not going:
            return False
        with contextlib.suppress(DetrainError):  # the list reports errors of the record
            ask_after(going[:_MOST_ASKED], self._record, limit_s=_ASK_LIMIT_S, ask_passphrase=None)
        return bool(self._going())

    def _going(self) -> list[str]:
        """Return the ids of listed jobs that are not over; notices are left for the next list."""
        with self._reading:
            entries, _ = self._read_all([])
        return [each.job.id for each in entries if each.job and not each.job.is_over]

    def find_job(self, wanted: str) -> Job:
        """Return a job of these pipelines, as `detrain_nb.jobs.find_job` does. Raises: JobError."""
        from ..jobs import find_job

        job: Job = find_job(wanted, record=self._record)
        return job

    def _write(self, path: Path, data: Mapping[str, Any], *, before: SpecFile | None, anyway: bool = False) -> SpecFile:
        if self._is_beside(path):
            self._require_own_folder()
        return write_spec_file(path, data, before=before, anyway=anyway)

    def _entry(self, path: Path, read_until: float) -> Entry:
        """Return the entry of a file, which is read only if it has changed."""
        is_beside = self._is_beside(path)
        file = path.name if is_beside else _home_as_tilde(path)
        try:
            state = path.lstat()
            was = (state.st_mtime_ns, state.st_size, state.st_ino, state.st_ctime_ns)
            if (known := self._known.get(path)) and known[0] == was:
                return known[2]
            if time.monotonic() > read_until:
                return _unread(
                    path, file, "was not read yet, as other files took long: list again", is_beside=is_beside
                )
            found = read_spec_file(path)
        except FileNotFoundError:
            return _unread(path, file, "the file no longer exists", is_beside=is_beside)
        except (OSError, SpecError) as exc:
            return _unread(path, file, printable(str(exc))[:300], is_beside=is_beside)
        entry = make_entry(found, file=printable(file), is_beside=is_beside)
        self._known[path] = was, found, entry
        return entry

    def _with_jobs(self, entries: list[Entry], notices: list[str]) -> list[Entry]:
        names = list({each.name for each in entries})
        newest = _tried(lambda: self._record.newest_of(names), notices) or {}
        told = []
        for entry in entries:
            known = self._known.get(entry.path)
            found = newest.get((entry.name, os.fsencode(entry.path)))
            if found is None and known and (older := newest.get((entry.name, None))):
                # earlier releases recorded no file: the job is of this one if it has not changed since
                found = older if known[0][-1] <= older[0].submitted_at * 1e9 else None
            if found is None:
                told.append(entry)
                continue
            spec = known[1].spec if known else None
            told.append(replace(entry, job=describe_job(found[0], count=found[1], spec=spec)))
        return told

    def _paths(self) -> tuple[list[Path], int]:
        """Return the files of the folder by name, and how many more there are. Raises: SpecError."""
        if not os.path.lexists(self.folder):
            return [], 0
        self._require_own_folder()
        with named_errors(printable(str(self.folder)), "listed", kind_of=lambda exc: SpecError):
            names = sorted(filter(_is_listed, os.listdir(self.folder)))
        return [self.folder / name for name in names[:_MOST_LISTED]], max(0, len(names) - _MOST_LISTED)

    def _require_own_folder(self) -> None:
        """Refuse a link: a folder that came with a notebook must not lead elsewhere. Raises: SpecError."""
        if os.path.lexists(self.folder) and not stat.S_ISDIR(self.folder.lstat().st_mode):
            raise SpecError(
                f"{printable(str(self.folder))} is a link or not a folder: give the folder that it leads to"
            )

    def _free_name(self, wanted: str) -> str:
        return free_name(wanted, lambda name: os.path.lexists(self._place(name)))

    def _place(self, stem: str) -> Path:
        """Return the file of a name in the folder: of several the TOML file, as new ones are."""
        places = [self.folder / f"{stem}{suffix}" for suffix in (SUFFIX, *SUFFIXES)]
        return next((place for place in places if os.path.lexists(place)), places[0])

    def _is_beside(self, path: Path) -> bool:
        return path.parent == self.folder


def _is_listed(name: str) -> bool:
    """Return whether a file can be a pipeline; a schema for editors is not."""
    return name.endswith(SUFFIXES) and not name.startswith(".") and not name.endswith(".schema.json")


def _is_name(text: str) -> bool:
    """Return whether a text can be a name in the folder; ``train.yaml`` is a file next to the notebook."""
    return Path(text).suffix.lower() not in (".json", ".yaml", ".yml")


def _stem(text: str) -> str:
    """Return the name of a pipeline for the name of a file."""
    try:
        return check_name(text)
    except SpecError:
        return "pipeline"


def _unread(path: Path, file: str, error: str, *, is_beside: bool) -> Entry:
    name = printable(path.stem)[:80]
    return Entry(name, path, printable(file), "", (), "", (error,), False, False, is_beside)


def _refuse_foreign(path: Path) -> None:
    """Refuse a file of another tool. Raises: SpecError."""
    if said := explain_no_spec(path):
        raise SpecError(f"{said}, or use Import… in My Pipelines")


def _home_as_tilde(path: Path) -> str:
    home = Path.home()
    return printable(f"~/{path.relative_to(home)}" if path != home and path.is_relative_to(home) else str(path))


def _tried(ask: Callable[[], _T], notices: list[str]) -> _T | None:
    """Return what ``ask`` returns; on an error None, with the error as a notice of the list."""
    try:
        return ask()
    except DetrainError as exc:
        notices.append(str(exc))
        return None
