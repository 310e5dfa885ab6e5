"""My Pipelines: the spec files beside a notebook, and those opened lately; listed, opened, saved, run, thrown away."""

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
_MOST_ASKED = 100  # jobs at once: their states fit into a line of the talk
_ASK_LIMIT_S = 15.0
_READING_S = 5.0  # in which files are read for one list: those of a repository may be made to take their time
_SCHEMA = "$schema"  # which an editor reads, and no spec has


class MyPipelines:
    """The pipelines in ``folder``, by default ``pipelines/`` where the notebook is, and those opened lately elsewhere.

    A pipeline is named by its file in the folder without the suffix, or by a path; what has no slash and ends in
    ``.toml`` is the one in the folder where there is one, else a file where the notebook is. Nothing is made or written
    before something is saved. Nodes are asked by `run` and `ask_after_jobs` alone.
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
        self._reading = threading.Lock()  # a view lists them, and asks after their jobs, in threads of its own
        self._unsaid: list[str] = []  # what the next list has to say
        self._known: dict[Path, tuple[tuple[int, ...], SpecFile, Entry]] = {}  # what was read, by what the file was

    def entries(self, search: str = "") -> Entries:
        """List them by name, those that ``search`` matches; what cannot be read is listed with its error.

        What takes too long is read for the next list. How their last jobs are is what was last heard of them.
        Raises: SpecError where the folder cannot be read.
        """
        with self._reading:
            notices, self._unsaid = self._unsaid, []
            entries, more = self._read_all(notices)
        chosen = sorted((each for each in entries if each.matches(search)), key=lambda each: each.name.casefold())
        return Entries(chosen, folder=_home_as_tilde(self.folder), more=more, notices=[*dict.fromkeys(notices)])

    def _read_all(self, notices: list[str]) -> tuple[list[Entry], int]:
        """All entries, and how many more files there are. `_reading` is held. Raises: SpecError."""
        paths, more = self._paths()
        others = _tried(self._recent.paths, notices) or []
        read_until = time.monotonic() + _READING_S
        found = {path: self._entry(path, read_until) for path in dict.fromkeys([*paths, *others])}
        self._known = {path: known for path, known in self._known.items() if path in found}
        return self._with_jobs(list(found.values()), notices), more

    def open(self, pipeline: str | os.PathLike[str]) -> SpecFile:
        """Read one, and note down that it was opened. Raises: SpecError for another tool's file, too."""
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
        """Return the full path of the file that is meant; it may not be there. Raises: SpecError."""
        text = os.fspath(pipeline)
        if "\0" in text or not text.strip():
            raise SpecError(f"{show(text)} is no pipeline: give the name of one, or a path")
        if "/" in text or os.sep in text or not _is_name(text):
            return Path(os.path.realpath(os.path.expanduser(text)))
        place, beside_notebook = self._place(check_name(text)), Path(os.path.realpath(text))
        is_there = text.endswith(SUFFIX) and not os.path.lexists(place) and beside_notebook.is_file()
        return beside_notebook if is_there else place

    def create(self, content: PipelineSpec | Mapping[str, Any], *, name: str | None = None) -> SpecFile:
        """Write a new one, under ``name`` or its own; what is no spec yet is a draft. Raises: Conflict, SpecError."""
        data = document_of(content)
        stem = check_name(str(data.get("name", "")) if name is None else name)
        return self._write(self._place(stem), {**data, "name": stem}, before=None)

    def create_example(self, example: Example) -> SpecFile:
        """Write an example, under its name or the next that is free. Raises: SpecError."""
        return self.create(example.data, name=self._free_name(example.name))

    def add(self, content: PipelineSpec | Mapping[str, Any], *, name: str = "") -> SpecFile:
        """Write what is from elsewhere, under its name, else ``name``, or the next that is free. Raises: SpecError."""
        data = document_of(content)
        return self.create(data, name=self._free_name(_stem(str(data.get("name") or name))))

    def save(self, opened: SpecFile, content: PipelineSpec | Mapping[str, Any], *, anyway: bool = False) -> SpecFile:
        """Write what was opened anew; a text with comments or of another layout is kept in ``.trash``.

        Raises: Conflict where the file has changed since, unless ``anyway``; SpecError.
        """
        data = document_of(content)
        schema = {_SCHEMA: opened.data[_SCHEMA]} if opened.data and _SCHEMA in opened.data else {}
        saved = self._write(opened.path, {**schema, **data}, before=opened, anyway=anyway)
        if opened.text and not opened.is_formatted and self._is_beside(opened.path):
            self._trash.keep(opened.path, opened.text)
        return saved

    def save_as(self, name: str, content: PipelineSpec | Mapping[str, Any]) -> SpecFile:
        """Write it as a new one of another name; the one that it was opened from stays. Raises: Conflict, SpecError."""
        return self.create(content, name=name)

    def duplicate(self, pipeline: str | os.PathLike[str]) -> SpecFile:
        """Write the same under the next free name, as ``train-2``. Raises: SpecError."""
        found = read_spec_file(self.find(pipeline))
        if found.data is None:
            raise SpecError(f"{printable(found.path.name)} cannot be duplicated: {found.errors[0]}")
        data = {name: value for name, value in found.data.items() if name != _SCHEMA}
        return self.create(data, name=self._free_name(_stem(found.path.stem)))

    def delete(self, pipeline: str | os.PathLike[str]) -> Deleted:
        """Move it to ``.trash`` in the folder; one that is elsewhere is only taken off the list. Raises: SpecError."""
        path = self.find(pipeline)
        if self._is_beside(path):
            self._require_own_folder()
            return self._trash.take(path.stem, path)
        self._recent.remove(path)
        return Deleted(path.stem, path, None)

    def restore(self, deleted: Deleted) -> Path:
        """Bring it back; where another one has its name by now, under the next free one. Raises: SpecError."""
        if deleted.place is None:
            self._recent.add(deleted.path)
        return self._trash.give_back(deleted)

    def run(self, pipeline: str | os.PathLike[str], *, as_read: SpecFile | None = None, **options: Any) -> Job:
        """Submit it as a job, with the ``options`` of `detrain_nb.jobs.submit`.

        ``as_read``: what somebody has seen of it. Raises: Conflict where the file is another one by now; what
        ``submit`` raises.
        """
        from ..jobs import submit

        found = self.open(pipeline)
        if as_read is not None and found.revision != as_read.revision:
            raise Conflict(
                f"{printable(found.path.name)} was changed after it was read here, and was not started",
                advice="open it again, look at it, and start it then",
            )
        if found.spec is None:
            faults = name_some(found.errors, separator="; ")
            raise SpecError(f"{printable(found.path.name)} cannot be run: {faults}")
        job: Job = submit(found.spec, file=found.path, record=self._record, **options)
        return job

    def ask_after_jobs(self) -> bool:
        """Ask how the listed jobs are that are not over, for 15 s in all; does one of them go on? Raises: SpecError."""
        going = self._going()
        if not going:
            return False
        with contextlib.suppress(DetrainError):  # the list says what is wrong with the record
            ask_after(going[:_MOST_ASKED], self._record, limit_s=_ASK_LIMIT_S, ask_passphrase=None)
        return bool(self._going())

    def _going(self) -> list[str]:
        """The ids of listed jobs that are not over. What a list has to say is left to the next one."""
        with self._reading:
            entries, _ = self._read_all([])
        return [each.job.id for each in entries if each.job and not each.job.is_over]

    def find_job(self, wanted: str) -> Job:
        """Return one of their jobs, as `detrain_nb.jobs.find_job` finds it. Raises: JobError."""
        from ..jobs import find_job

        job: Job = find_job(wanted, record=self._record)
        return job

    def _write(self, path: Path, data: Mapping[str, Any], *, before: SpecFile | None, anyway: bool = False) -> SpecFile:
        if self._is_beside(path):
            self._require_own_folder()
        return write_spec_file(path, data, before=before, anyway=anyway)

    def _entry(self, path: Path, read_until: float) -> Entry:
        """What is known of a file that has not changed since is not read again."""
        is_beside = self._is_beside(path)
        file = path.name if is_beside else _home_as_tilde(path)
        try:
            state = path.lstat()
            was = (state.st_mtime_ns, state.st_size, state.st_ino, state.st_ctime_ns)
            if (known := self._known.get(path)) and known[0] == was:
                return known[2]
            if time.monotonic() > read_until:
                return _unread(
                    path, file, "was not read yet, as others took long: list them again", is_beside=is_beside
                )
            found = read_spec_file(path)
        except FileNotFoundError:
            return _unread(path, file, "it is not there any more", is_beside=is_beside)
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
                # an earlier release has noted no file: the job is of this one if that has not changed since
                found = older if known[0][-1] <= older[0].submitted_at * 1e9 else None
            if found is None:
                told.append(entry)
                continue
            spec = known[1].spec if known else None
            told.append(replace(entry, job=describe_job(found[0], count=found[1], spec=spec)))
        return told

    def _paths(self) -> tuple[list[Path], int]:
        """The files of the folder by name, and how many more there are. Raises: SpecError."""
        if not os.path.lexists(self.folder):
            return [], 0
        self._require_own_folder()
        with named_errors(printable(str(self.folder)), "listed", kind_of=lambda exc: SpecError):
            names = sorted(filter(_is_listed, os.listdir(self.folder)))
        return [self.folder / name for name in names[:_MOST_LISTED]], max(0, len(names) - _MOST_LISTED)

    def _require_own_folder(self) -> None:
        """Raises: SpecError for a link: a folder that came with a notebook leads to no other one."""
        if os.path.lexists(self.folder) and not stat.S_ISDIR(self.folder.lstat().st_mode):
            raise SpecError(f"{printable(str(self.folder))} is no folder, or a link: name the folder that it leads to")

    def _free_name(self, wanted: str) -> str:
        return free_name(wanted, lambda name: os.path.lexists(self._place(name)))

    def _place(self, stem: str) -> Path:
        """The file of a name in the folder: of several that of TOML, as a new one is."""
        places = [self.folder / f"{stem}{suffix}" for suffix in (SUFFIX, *SUFFIXES)]
        return next((place for place in places if os.path.lexists(place)), places[0])

    def _is_beside(self, path: Path) -> bool:
        return path.parent == self.folder


def _is_listed(name: str) -> bool:
    """What of the folder may be a pipeline; a schema, which an editor reads, is none."""
    return name.endswith(SUFFIXES) and not name.startswith(".") and not name.endswith(".schema.json")


def _is_name(text: str) -> bool:
    """It can be the name of one in the folder; ``train.yaml`` is a file where the notebook is."""
    return Path(text).suffix.lower() not in (".json", ".yaml", ".yml")


def _stem(text: str) -> str:
    """What of the name of a file is the name of a pipeline."""
    try:
        return check_name(text)
    except SpecError:
        return "pipeline"


def _unread(path: Path, file: str, error: str, *, is_beside: bool) -> Entry:
    name = printable(path.stem)[:80]
    return Entry(name, path, printable(file), "", (), "", (error,), False, False, is_beside)


def _refuse_foreign(path: Path) -> None:
    """Raises: SpecError for a file of another tool."""
    if said := explain_no_spec(path):
        raise SpecError(f"{said}, or by Import… in My Pipelines")


def _home_as_tilde(path: Path) -> str:
    home = Path.home()
    return printable(f"~/{path.relative_to(home)}" if path != home and path.is_relative_to(home) else str(path))


def _tried(ask: Callable[[], _T], notices: list[str]) -> _T | None:
    """A record that cannot be used leaves the list without what it has, and says so in a notice."""
    try:
        return ask()
    except DetrainError as exc:
        notices.append(str(exc))
        return None
