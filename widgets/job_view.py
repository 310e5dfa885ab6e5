"""A job, running or finished: its progress, nodes, curves, logs and the files that it produced."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ..deploy.files import Stop
from ..errors import DetrainError, JobError
from ..jobs import Job, JobNews, LogPart
from ..jobs.job_status import JobStatus
from ..jobs.live_curves import LiveCurves
from ..session.output.safe_output import one_line
from . import job_picture as picture
from .actions import Refused, action, describe_failure, optional, text, whole
from .displays import Settled
from .downloads import MOST_DOWNLOAD_BYTES, Download
from .job_log import Levels, LogWindow, make_begun, make_item
from .job_log_file import write_log
from .job_model import Model, describe_models, fetch_for_browser, fetch_models, list_models, tell_others
from .job_settled import settle_job
from .live_view import LiveView

_LONG_S = 3600.0  # a job that has run longer is stopped only after a confirmation
_TELL_BYTES = 1 << 20  # of a copy, between two progress messages
_LOOK_LIMIT_S = 3.0  # how long a view that no page showed queries its job's nodes before it settles

_PARTS = ("head", "progress", "nodes", "curves", "failure", "facts", "model", "begun", "no_lines")


class JobView(LiveView):
    """A view of a job, which it watches as long as a page shows it."""

    name = "job_view"
    more = ("job_curves",)

    def __init__(self, job: Job, *, on_state: Callable[[], object] = lambda: None) -> None:
        """``on_state`` is called when the watched job changes its state or is replaced by its restart."""
        self._job, self._on_state = job, on_state
        self._changing = threading.Lock()
        self._stop_watching: Callable[[], None] | None = None
        self._reading: threading.Thread | None = None
        self._download = Download()
        self._when_downloaded = ""
        self._doing: picture.Json = {"what": "", "is": ""}
        self._under_way, self._cancel = "", Stop()  # the work that can be cancelled
        self._begin(job)
        super().__init__()

    def _begin(self, job: Job) -> None:
        self._job = job
        self._log = LogWindow()
        self._models: list[Model] | None = None
        self._others = ""  # artifacts other than models, such as checkpoints
        self._listing: threading.Thread | None = None
        self._looked: set[tuple[bool, bool]] = set()  # (job is over, view settles) that were queried
        self._parts: picture.Json = dict.fromkeys(_PARTS)
        spec = None
        with contextlib.suppress(DetrainError):  # another release may have written it
            spec = job.spec
        self._num_steps = spec.training.steps if spec else None
        self._saves_checkpoints = spec is not None and spec.checkpoint is not None
        self._draw(JobNews(job.last_known(), {}, LiveCurves(), (), ()))

    @property
    def job(self) -> Job:
        """The shown job; after a restart, the new one."""
        return self._job

    # ---- what a page shows

    def state(self) -> dict[str, Any]:
        return {
            **self._parts,
            "log": self._log.items(),
            "doing": self._doing,
            "under_way": self._under_way,
            "long_s": _LONG_S,
            "most_download": MOST_DOWNLOAD_BYTES,
            "saves_checkpoints": self._saves_checkpoints,
        }

    def settled(self) -> Settled:
        self._catch_up()
        parts = self._parts
        return settle_job(
            self._status,
            parts["head"],
            progress=parts["progress"],
            curves=parts["curves"],
            failure=parts["failure"],
            model=(parts["model"] or {}).get("files", []),
            advice=f"%job view {self._job.id} shows the job, %job logs {self._job.id} its whole output",
        )

    def on_pages(self, *, are_there: bool) -> None:
        with self._changing:
            stop, self._stop_watching = self._stop_watching, None
            if are_there:
                self._stop_watching = self._watch(self._job)
        if stop:
            stop()

    def close(self) -> None:
        super().close()
        self._download.clear()

    def _catch_up(self) -> None:
        """Update a job that no page watches: from its record if it has ended, and by a query of its nodes."""
        if self._stop_watching:
            return
        with contextlib.suppress(DetrainError):  # the job was removed
            known = self._job.last_known()
            if known.is_over and not self._status.is_over:
                self._draw(replace(self._news, status=known, unreached={}))
            asked = self._status.is_over, self._is_settled
            if any(asked) and self._models is None and asked not in self._looked:
                self._looked.add(asked)
                self._look(self._job)

    def _look(self, job: Job) -> None:
        """Query the nodes as a page would, for up to 3 seconds: until all have reported, or the job is known to run."""
        has_all, until = threading.Event(), time.monotonic() + _LOOK_LIMIT_S

        def take(news: JobNews) -> None:
            if news.status.reports:  # else the record is newer
                self._take(job, news)
            if news.is_last or not (news.status.is_over or news.unreached):
                has_all.set()

        with self._changing:
            if self._stop_watching:  # a page has opened
                return
            stop = self._stop_watching = self._watch(job, take)
        has_all.wait(_LOOK_LIMIT_S)
        if self._listing is not None:
            self._listing.join(max(0.0, until - time.monotonic()))
        with self._changing:
            if self._stop_watching is stop:
                self._stop_watching = None
        stop()

    # ---- news from its nodes, in a thread of the job

    def _watch(self, job: Job, take: Callable[[JobNews], None] | None = None) -> Callable[[], None]:
        """Start a watch with an empty log window: the watch repeats the lines that are kept."""
        self._log = LogWindow()
        return job.on_change(take or (lambda news: self._take(job, news)))

    def _take(self, job: Job, news: JobNews) -> None:
        if job is not self._job:  # the job was restarted meanwhile
            return
        items, before = self._log.add(news.parts), self._status
        self._draw(news)
        if items:
            self.append("log", items)
        for part in _PARTS:
            self.publish(part, self._parts[part])
        if (before.state, before.exit_code) != (news.status.state, news.status.exit_code):
            self._on_state()
        if news.status.is_over and news.status.reports and self._models is None and self._listing is None:
            self._listing = threading.Thread(target=self._list_made, args=(job, news), name="job model", daemon=True)
            self._listing.start()

    def _draw(self, news: JobNews) -> None:
        status, curves, checkpoints = news.status, news.curves, news.checkpoints
        self._news, self._status = news, status
        nodes = [*status.reports, *status.silent]
        self._parts = {
            "head": picture.head_of(status, news.unreached, nodes),
            "progress": picture.progress_of(status, curves, checkpoints, self._num_steps),
            "nodes": picture.nodes_of(status, news.unreached),
            "curves": picture.curves_of(curves),
            "failure": picture.failure_of(status, curves, checkpoints),
            "facts": picture.facts_of(status, curves),
            "model": self._model_of(status, [step for step, _ in checkpoints]),
            "begun": make_begun(news.begun),
            "no_lines": picture.no_lines_of(status, news.unreached),
        }

    def _model_of(self, status: JobStatus, checkpoints: list[int]) -> picture.Json:
        """Return the models, or why there are none."""
        if self._models:
            files = describe_models(self._models, has_many_nodes=len(status.reports) > 1)
            made = [file for model in self._models for file in model.files]
            total = sum(file.size_bytes for file in made)
            return {"files": files, "count": len(made), "size": total, "why": "", "others": self._others}
        there = f"; checkpoint {checkpoints[-1]:,} is available" if checkpoints else ""
        if not status.is_over:
            why = f"The model is written after the last step{there}"
        else:
            why = "Looking for the model" if self._models is None else f"No model was written{there}"
            why += f"; {self._others}" if self._others else ""
        return {"files": [], "count": 0, "size": 0, "why": why, "others": ""}

    def _list_made(self, job: Job, news: JobNews) -> None:
        try:
            models, others, has_more = list_models(job)
        except DetrainError as exc:
            models, others, has_more = [], [], False
            self._say(what="list", state="failed", error=one_line(str(exc)))
        if job is self._job:
            anyway = "" if picture.phase_of(news.status) == "succeeded" else " --anyway"
            command = f"%job fetch {job.id}{anyway} copies them"
            self._models, self._others = models, tell_others(others, command, has_more=has_more)
            self._draw(news)
            self.publish("model", self._parts["model"])

    # ---- what a page asks for

    @action()
    def stop(self) -> None:
        """Stop the job, also during other work: copying a model for hours must not keep the nodes running."""
        self._do("stop", lambda _: self._job.stop(), is_beside=True)

    @action()
    def restart(self) -> None:
        """Submit the job again; the view then shows the new job."""

        def restart(cancel: Stop) -> None:
            tell = lambda line: self._say(what="restart", state="running", line=line)  # noqa: E731
            again = self._job.restart(on_progress=tell, cancel=cancel)
            with self._changing:
                stop, self._stop_watching = self._stop_watching, None
                self._begin(again)
                if stop:
                    stop()
                    self._stop_watching = self._watch(again)
            self.publish("head", self._parts["head"])  # the id differs: pages request the whole state
            self._on_state()

        self._do("restart", restart)

    @action(folder=text(most=1000))
    def save(self, folder: str) -> None:
        """Copy the model to a folder of this machine."""
        models = self._need_models()
        place, num_nodes = folder.strip() or ".", len(self._status.reports)

        def save(cancel: Stop) -> None:
            tell = self._tell_bytes("save")
            fetched = fetch_models(self._job, models, place, tell, num_nodes=num_nodes, cancel=cancel)
            self._say(what="save", state="done", line=one_line(f"saved: {fetched}", most_chars=1000))

        self._do("save", save)

    @action()
    def cancel(self) -> None:
        """Cancel the running work, except a stop; the view reports when it has ended."""
        self._cancel.ask()
        self._cancel.insist()

    @action(index=whole(0, 19))
    def download(self, index: int) -> None:
        """Prepare a model for download; the browser then reads it in pieces."""
        models = self._need_models()
        if index >= len(models):
            raise Refused("no such model: reload the page")
        model = models[index]
        num_nodes = len({file.node for each in models if each.name == model.name for file in each.files})

        def prepare(cancel: Stop) -> None:
            fetch = partial(fetch_for_browser, self._job, model, num_nodes=num_nodes, cancel=cancel)
            ready = self._download.prepare(lambda to: fetch(to, self._tell_bytes("download")))
            self._offer("download", ready, "the model is in the browser's downloads")

        self._do("download", prepare)

    @action(id=text(most=64), offset=whole(0, MOST_DOWNLOAD_BYTES))
    def piece(self, id: str, offset: int) -> str:
        return self._download.read(id, offset)

    @action()
    def downloaded(self) -> None:
        self._download.clear()
        if self._doing["is"] == "ready":  # else another message is shown
            self._say(what=self._doing["what"], state="done", line=self._when_downloaded)

    @action(node=text(most=300), source=text(most=10), folder=optional(text(most=1000)))
    def whole_log(self, node: str, source: str, folder: str | None) -> None:
        """Write the whole output of the job, or one of its logs, to a folder of this machine or for download."""
        if source and not _is_log(source):
            raise Refused("the job has no such log: reload the page")
        tell, job, notes = self._tell_bytes("log"), self._job, list[str]()

        def write(to: Path, cancel: Stop, most_bytes: int | None = None) -> Path:
            on_bytes = lambda done: tell(done, 0)  # noqa: E731
            path, missing = write_log(job, to, on_bytes, node=node, source=source, most_bytes=most_bytes, cancel=cancel)
            notes.extend(missing)
            return path

        def save(cancel: Stop) -> None:
            if folder is None:
                ready = self._download.prepare(lambda to: write(to, cancel, MOST_DOWNLOAD_BYTES))
                self._offer("log", ready, "; ".join(["the log is in the browser's downloads", *notes]))
                return
            place = Path(os.path.expanduser(folder.strip() or "."))
            place.mkdir(parents=True, exist_ok=True)
            said = f"saved: {write(place, cancel)}"
            self._say(what="log", state="done", line=one_line("; ".join([said, *notes]), most_chars=1000))

        self._do("log", save)

    @action(node=text(most=300), source=text(most=10), begin=whole(1, 1 << 53))
    def earlier(self, node: str, source: str, begin: int) -> None:
        """Read the lines before position ``begin`` of a log; pages get them in the part ``earlier``."""
        if not _is_log(source):
            raise Refused("the job has no such log: reload the page")
        if self._reading is not None and self._reading.is_alive():
            raise Refused("earlier lines are already being read")
        part = LogPart(node, source, begin, ())
        self._reading = threading.Thread(target=self._read, args=(self._job, part), name="job log", daemon=True)
        self._reading.start()

    def _read(self, job: Job, part: LogPart) -> None:
        asked = {"node": part.node, "source": part.source, "before": part.begin}
        try:
            item = make_item(job.log_before(part), Levels())
        except DetrainError as exc:
            self.publish("earlier", {**asked, "error": one_line(str(exc))})
        else:
            self.publish("earlier", {**asked, "item": item})

    def _offer(self, what: str, file: picture.Json, line: str) -> None:
        """Offer a file to the page that requested it; ``line`` is shown once the page has it."""
        self._when_downloaded = line
        self._say(what=what, state="ready", file=file)

    def _need_models(self) -> list[Model]:
        """Return the models. Raises: Refused when the job still runs or has written no model."""
        if not self._status.is_over or not self._models:
            raise Refused(self._parts["model"]["why"] or "the job has no model")
        return self._models

    # ---- long work, one at a time, and a stop beside it

    def _do(self, what: str, act: Callable[[Stop], object], *, is_beside: bool = False) -> None:
        """Run ``act``, which ends when its `Stop` is set; ``is_beside`` is for work that cannot be cancelled."""
        cancel = Stop()

        def run_alone() -> None:
            self._cancel = cancel
            self._tell_under_way(what)
            try:
                run()
            finally:
                self._tell_under_way("")

        def run() -> None:
            self._say(what=what, state="running")
            try:
                act(cancel)
            except Exception as exc:  # noqa: BLE001  nothing else would show it: the page does
                if cancel.is_asked:
                    self._say(what=what, state="cancelled")
                    return
                if isinstance(exc, JobError):
                    exc.prog = "%job"
                self._say(what=what, state="failed", error=one_line(describe_failure(exc), most_chars=1000))
                return
            if (self._doing["what"], self._doing["is"]) == (what, "running"):
                self._say(what=what, state="done")

        self.work(what, run if is_beside else run_alone, is_beside=is_beside)

    def _tell_under_way(self, what: str) -> None:
        self._under_way = what
        self.publish("under_way", what)

    def _say(self, *, what: str, state: str, **more: Any) -> None:
        self._doing = {"what": what, "is": state, **more}
        self.publish("doing", self._doing)

    def _tell_bytes(self, what: str) -> Callable[[int, int], None]:
        def tell(done: int, total: int) -> None:
            if done == total or done - tell_at[0] >= _TELL_BYTES:
                tell_at[0] = done
                self._say(what=what, state="running", done=done, total=total)

        tell_at = [0]
        return tell


def _is_log(source: str) -> bool:
    return source == "setup" or (source.isascii() and source.isdecimal())
