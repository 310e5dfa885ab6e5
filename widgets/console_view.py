"""My Pipelines in a page: the list of spec files and the form of the open one; all logic is in the core."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path
from typing import Any

from ..errors import Conflict, JobError
from ..jobs import Job
from ..pipelines import EXAMPLES, Deleted, MyPipelines, SpecFile, SpecForm, review_spec
from ..pipelines.draft import make_document, make_draft
from ..pipelines.form_fields import FIELDS
from ..session.output.safe_output import one_line
from ..spec import PipelineSpec
from .actions import Refused, action, flag, one_of, optional, text
from .console_files import FilesEditor
from .console_form import describe_form
from .console_job import ShownJob
from .console_jobs import AskedJobs
from .console_list import describe_entry, describe_examples, settle_form, settle_list
from .displays import Settled
from .draft_facts import describe_fields

__all__ = ["ConsoleView"]

_ID = text(most=20)


class _Opened:
    """A form and the file that it was opened from."""

    def __init__(self, form: SpecForm, file: SpecFile) -> None:
        self.form, self.file = form, file
        self._before, _ = make_document(make_draft(_document_of(file)))

    @property
    def is_changed(self) -> bool:
        return self.form.document != self._before

    @property
    def digest(self) -> str:
        """Digest of what would be started: a page returns the one that it has shown."""
        return hashlib.sha256(json.dumps([str(self.file.path), self.form.document]).encode()).hexdigest()


class ConsoleView(FilesEditor):
    """The list, and the form of one pipeline at a time. A form with unsaved changes is kept while others are open."""

    name = "console_view"
    more = ("fields", "node_list", "console_files", "console_form")

    def __init__(self, pipelines: MyPipelines) -> None:
        self.pipelines = pipelines
        self._ids: dict[Path, str] = {}  # pages refer to files by these ids alone
        self._deleted: Deleted | None = None
        self._forms: dict[Path, _Opened] = {}  # forms with changes, and the open one
        self._open: Path | None = None
        self._conflict: Conflict | None = None  # of the file of the open form
        self._shown_job = ShownJob(self._tell_all)
        self._jobs = AskedJobs(pipelines, self._tell_all)
        super().__init__()

    @property
    def form(self) -> SpecForm | None:
        """The open form."""
        with self._guard:
            return self._forms[self._open].form if self._open else None

    def state(self) -> dict[str, Any]:
        with self._guard:
            return {
                "list": self._describe_list(),
                "undo": self._describe_undo(),
                "form": self.describe_form(),
                **self.describe_tests(),
                "work": self.work_told,
                "job": self._shown_job.describe(),
                "fields": describe_fields(FIELDS.values()),
                "examples": describe_examples(),
                **self.describe_formats(),
            }

    def settled(self) -> Settled:
        """Return the open form, else the list."""
        with self._guard:
            told = self.describe_form()
            if told is None:
                return settle_list(self.pipelines.entries())
            form = self._the_form()
            with form.lock:
                return settle_form(told, form.document if form.is_right else None)

    def on_pages(self, *, are_there: bool) -> None:
        self._jobs.follow(is_shown=are_there)

    def close(self) -> None:
        super().close()
        if hasattr(self, "_shown_job"):  # ipywidgets also closes a view whose construction has failed
            self._shown_job.close()

    # ---- the list

    @action()
    def refresh(self) -> None:
        self._tell_all()
        self._jobs.ask_now()

    @action(id=_ID)
    def duplicate(self, id: str) -> dict[str, Any]:
        made = self.pipelines.duplicate(self._path(id))
        self._tell_all()
        return {"id": self._id(made.path), "name": made.name}

    @action(id=_ID)
    def delete(self, id: str) -> None:
        with self._guard:
            path = self._path(id)
            self._deleted = self.pipelines.delete(path)
            self._forms.pop(path, None)
            self.forget_file(path)
            if self._open == path:  # another tab has opened it meanwhile
                self._open, self._conflict = None, None
        self._tell_all()

    @action()
    def undo(self) -> str:
        with self._guard:
            if self._deleted is None:
                raise Refused("there is nothing to restore")
            path = self.pipelines.restore(self._deleted)
            self._deleted = None
        self._tell_all()
        return self._id(path)

    @action()
    def drop_undo(self) -> None:
        with self._guard:
            self._deleted = None
        self._tell_all()

    @action(id=_ID)
    def run(self, id: str) -> None:
        path = self._path(id)
        self.work(f"starting {one_line(path.stem)}", lambda: self._run(path))

    @action(id=_ID)
    def code(self, id: str) -> str:
        opened = self.pipelines.open(self._path(id))
        return SpecForm(_document_of(opened)).to_code()

    @action(name=text(most=100))
    def create(self, name: str) -> None:
        made = self.pipelines.create({}, name=name)
        self.show_file(made)

    @action(name=one_of(*(each.name for each in EXAMPLES)))
    def create_example(self, name: str) -> None:
        made = self.pipelines.create_example(next(each for each in EXAMPLES if each.name == name))
        self.show_file(made)

    # ---- the form

    @action(id=_ID)
    def open_pipeline(self, id: str) -> None:
        self.show_file(self.pipelines.open(self._path(id)))

    @action(path=text(most=4096))
    def open_file(self, path: str) -> None:
        self.show_file(self.pipelines.open(path))

    @action()
    def close_form(self) -> None:
        with self._guard:
            if self._open and not self._is_changed(self._open):
                self._forms.pop(self._open)
            self._open, self._conflict = None, None
        self._tell_all()
        self._displays.renew(self.settled)

    @action(anyway=flag, name=optional(text(most=100)))
    def save(self, anyway: bool, name: str | None) -> None:
        with self._guard:
            form, opened = self._the_form(), self._forms[self.opened_path()].file
            try:
                made = self._save(form, opened, anyway=anyway, name=name)
            except Conflict as exc:
                if name is not None:
                    raise Refused(f"a pipeline named {one_line(name)} already exists: give another name") from exc
                self._conflict = exc
                self._tell_form()
                raise
            self._conflict = None
            self._forms.pop(opened.path, None)
            self._forms[made.path] = _Opened(form, made)
            self._open = made.path
        self._tell_all()
        self._displays.renew(self.settled)

    @action()
    def load_theirs(self) -> None:
        with self._guard:
            form, path = self._the_form(), self.opened_path()
            found = self.pipelines.open(path)
            form.load(_document_of(found))
            self._forms[path] = _Opened(form, found)
            self._conflict = None
        self._tell_all()

    @action()
    def review(self) -> dict[str, Any]:
        """Return what would run; a page passes ``digest`` on to `start` and finds its cell by ``widget``."""
        with self._guard:
            opened = self._forms[self.opened_path()]
        with (form := opened.form).lock:
            if form.spec is None or form.errors:
                return {"error": "correct the errors in the form first"}
            spec, told = form.spec, {"code": form.to_code(), "digest": opened.digest, "widget": self.model_id}
        return {**review_spec(spec), **told}

    def seen_spec(self, digest: str | None) -> tuple[PipelineSpec, str]:
        with self._guard:
            opened = self._forms[self.opened_path()]
        with opened.form.lock:
            if opened.form.spec is None or not opened.form.is_right:
                raise Refused("correct the errors in the form first")
            self._require_seen(opened, digest, "written")
            return opened.form.spec, opened.digest

    def _require_seen(self, opened: _Opened, digest: str | None, done: str) -> None:
        """Check that a page has shown this form. Raises: Refused when the form has changed since."""
        if digest is not None and opened.digest != digest:
            fault = f"{one_line(opened.file.path.name)} has changed since this page showed it, and was not {done}"
            raise Refused(f"{fault}: check it and try again")

    @action(digest=text(most=100))
    def start(self, digest: str) -> None:
        """Save and submit the pipeline that the page shows, not later changes of the form or its file."""
        with self._guard:  # no other tab may close it meanwhile
            form, path = self._the_form(), self.opened_path()
            if not form.is_right:
                raise Refused(f"fields to correct first: {len(form.errors)}")
            self._require_seen(self._forms[path], digest, "started")
            if self._is_changed(path):
                self.save(anyway=False, name=None)
            seen = self._forms[path].file
        self.work(f"starting {one_line(path.stem)}", lambda: self._run(path, as_read=seen))

    @action()
    def drop_work(self) -> None:
        """Remove the result of the last work from pages; running work stays."""
        if self.work_told is None or self.work_told["is"] != "running":
            self.tell_work(None)

    # ---- a job

    @action(id=text(most=200))
    def show_job(self, id: str) -> None:
        self._shown_job.show(self.pipelines.find_job(id))
        self.publish("job", self._shown_job.describe())

    @action(id=text(most=200))
    def stop_job(self, id: str) -> None:
        job = self.pipelines.find_job(id)
        self.work(f"stopping {one_line(job.id)}", lambda: self._stop(job))

    @action()
    def hide_job(self) -> None:
        self._shown_job.close()
        self.publish("job", None)

    # ---- how

    def _run(self, path: Path, *, as_read: SpecFile | None = None) -> dict[str, str]:
        try:
            return {"job": self.pipelines.run(path, as_read=as_read).id}
        finally:
            self._tell_all()
            self._jobs.ask_now()

    def _stop(self, job: Job) -> None:
        try:
            job.stop()
        finally:
            self._tell_all()
            self._jobs.ask_now()

    def describe_error(self, exc: Exception) -> dict[str, Any]:
        if not isinstance(exc, JobError) or not exc.typed.startswith("stop "):
            return super().describe_error(exc)
        words = f"{exc.fault}: stop it, or duplicate the pipeline and start the copy"
        return {"error": one_line(words), "job": one_line(exc.typed.removeprefix("stop "))}

    def _save(self, form: SpecForm, opened: SpecFile, *, anyway: bool, name: str | None) -> SpecFile:
        content = form.spec if form.is_right and form.spec is not None else form.document
        if name is None:
            return self.pipelines.save(opened, content, anyway=anyway)
        made = self.pipelines.save_as(name, content)
        form.edit("name", made.name)
        return made

    def show_file(self, opened: SpecFile) -> None:
        """Open the form of a file. Raises: Refused when the file cannot be read as a document."""
        if opened.data is None:
            raise Refused(f"{one_line(opened.path.name)} cannot be opened: {one_line(opened.errors[0])}")
        with self._guard:
            if not self._is_changed(opened.path):
                form = SpecForm(_document_of(opened))
                form.on_change(self._tell_form)  # a cell can edit it, too
                self._forms[opened.path] = _Opened(form, opened)
            if self._open and self._open != opened.path and not self._is_changed(self._open):
                self._forms.pop(self._open)
            self._open, self._conflict = opened.path, None
        self._tell_all()
        self._displays.renew(self.settled)

    def _is_changed(self, path: Path) -> bool:
        return path in self._forms and self._forms[path].is_changed

    def _the_form(self) -> SpecForm:
        with self._guard:
            return self._forms[self.opened_path()].form

    def opened_path(self) -> Path:
        if self._open is None:
            raise Refused("no pipeline is open: it was closed in another tab")
        return self._open

    def _path(self, id: str) -> Path:
        with self._guard:
            for path, known in self._ids.items():
                if known == id:
                    return path
        raise Refused("this pipeline is no longer in the list: refresh the list")

    def _id(self, path: Path) -> str:
        return self._ids.setdefault(path, f"p{len(self._ids) + 1}")

    def _tell_all(self) -> None:
        with self._guard:
            parts = {"list": self._describe_list(), "undo": self._describe_undo(), "form": self.describe_form()}
            parts |= {"tests": self._told_tests(), "job": self._shown_job.describe()}
            for part, value in parts.items():
                self.publish(part, value)

    def _describe_list(self) -> dict[str, Any]:
        found = self.pipelines.entries()
        return {
            "entries": [
                describe_entry(each, id=self._id(each.path), is_changed=self._is_changed(each.path)) for each in found
            ],
            "folder": f"{one_line(self.pipelines.folder.name)}/",
            "more": found.more,
            "notices": [*map(one_line, found.notices)],
        }

    def _describe_undo(self) -> dict[str, Any] | None:
        deleted = self._deleted
        return None if deleted is None else {"name": one_line(deleted.name), "told": one_line(str(deleted))}

    def describe_form(self) -> dict[str, Any] | None:
        with self._guard:
            if self._open is None:
                return None
            form, opened = self._forms[self._open].form, self._forms[self._open].file
            is_beside = opened.path.parent == self.pipelines.folder
            return {
                **describe_form(form),
                "file": one_line(f"{opened.path.parent.name}/{opened.path.name}" if is_beside else str(opened.path)),
                "is_changed": self._is_changed(opened.path),
                **self.describe_file(opened.path),
                "saved": time.strftime("%H:%M", time.localtime(opened.changed_at)),
                "conflict": self._conflict
                and {
                    "text": one_line(self._conflict.fault),
                    "changes": [[one_line(each.path), each.theirs, each.mine] for each in self._conflict.changes],
                },
            }


def _document_of(opened: SpecFile) -> dict[str, Any]:
    return {name: value for name, value in (opened.data or {}).items() if name != "$schema"}
