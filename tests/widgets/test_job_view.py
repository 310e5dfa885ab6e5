"""A job's view without a page: what it sends of real jobs and of hostile nodes, and which requests it accepts."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import math
import queue
import shutil
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from detrain_nb.widgets import job as view_of
from detrain_nb.widgets import job_picture as picture
from detrain_nb.widgets import job_view
from detrain_nb.widgets.actions import Refused
from detrain_nb.widgets.downloads import MOST_DOWNLOAD_BYTES, Download
from detrain_nb.widgets.job_log import ERROR, INFO, WARNING, Levels, LogWindow, make_begun
from detrain_nb.widgets.job_log_file import write_log
from detrain_nb.widgets.job_model import Model, choose_models, fetch_for_browser, fetch_models, tell_others
from detrain_nb.widgets.job_settled import settle_job
from detrain_nb.widgets.job_view import JobView

from detrain_nb.copying.json_lines import Talk
from detrain_nb.errors import JobError
from detrain_nb.jobs import Job, LogPart, MadeFile, submit
from detrain_nb.jobs.job_status import JobStatus
from detrain_nb.jobs.live_curves import LiveCurves
from detrain_nb.jobs.record import Record
from detrain_nb.jobs.report_checks import NodeReport
from detrain_nb.jobs.watching import Unreached
from detrain_nb.spec import PipelineSpec

from ..jobs.lying_node import LyingNode
from .page import WithPage

LIMIT_S = 300.0  # for two jobs; the machine may be busy
SCRIPT = """
import os, pathlib, time
from detrain_nb import log_metrics
rank = int(os.environ["RANK"])
for step in range(40):
    log_metrics(step, loss=1 / (step + 1), total_steps=40)
    print(f"step {step}")
while not pathlib.Path(r"GO").exists():
    time.sleep(0.02)
pathlib.Path("artifacts/dcp").mkdir(parents=True, exist_ok=True)
for name in ("config.json", "artifacts/dcp/.metadata", "artifacts/dcp/__0_0.distcp"):
    pathlib.Path(name).write_text("{}")
pathlib.Path("model.safetensors").write_bytes(bytes(range(256)) * 4000)
"""


class Pressing(WithPage, JobView):
    """A job's view and its page, for tests that send requests while another one is in progress."""


class Collecting(Pressing):
    """A job's view and its page, for tests that wait for each request."""

    def asks(self, action: str, page: str = "p", **arguments: object) -> Any:
        """Wait for the previous request first: the page is informed shortly before its thread finishes."""
        self.wait_until_idle()
        if self._reading is not None:
            self._reading.join(LIMIT_S)
        return super().asks(action, page, **arguments)

    @property
    def shown_log(self) -> list[dict[str, Any]]:
        """The log without repetitions: lines that arrive with the initial state may come twice; a page skips them."""
        return list({item["number"]: item for item in self.seen["log"]}.values())


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    base = tmp_path_factory.mktemp("jobs")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "DETRAIN_NB_RUNTIME_DIR"):
            (base / name).mkdir(mode=0o700)
            patch.setenv(name, str(base / name))
        yield base


@pytest.fixture
def run_script(home: Path) -> Iterator[Callable[..., Job]]:
    """Return a function that submits a script; the job is stopped after the test, even if the test fails."""
    submitted: list[Job] = []

    def run(name: str, text: str, **spec: Any) -> Job:
        submitted.append(submit(PipelineSpec.from_dict({"name": name, "source": {"script_text": text}, **spec})))
        return submitted[-1]

    yield run
    for job in submitted:
        assert job.stop(grace_s=0.5).is_over


@pytest.mark.timeout(LIMIT_S)
def test_real_job_is_watched_fetched_from_and_submitted_again(
    run_script: Callable[..., Job], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_view, "_LOOK_LIMIT_S", LIMIT_S)  # the machine may be busy
    text, began_at = SCRIPT.replace("GO", str(tmp_path / "go")), time.time()
    job = run_script("train", text, checkpoint=None)
    view, unseen = Collecting(job), JobView(job)
    assert unseen.settled().text.startswith((f"▶ job {job.id}: running", f"▶ job {job.id}: preparing"))
    assert view.sent.empty()
    wait_for_no_watcher()  # including watchers of earlier jobs that have just finished
    view.hears("hello")
    seen = view.wait_for(lambda it: bool(it) and (it["progress"] or {}).get("step") == 39)
    assert seen["head"]["phase"] == "running" and seen["progress"]["total"] == 40
    early = JobView(job)
    early.settle()
    assert early.settled().text.startswith(f"▶ job {job.id}: running, step 39 of 40, loss 0.025\n")
    assert view.refusal("save", folder=str(tmp_path)) == "The model is written after the last step"
    assert view.refusal("download", index=0) == "The model is written after the last step"
    (tmp_path / "go").write_text("")
    seen = view.wait_for(lambda it: bool(it["model"]["files"]))
    assert seen["head"]["word"] == "succeeded"
    assert seen["model"]["files"] == [{"node": "", "name": "model.safetensors", "size": 1_024_002, "count": 2}]
    told = f"artifacts/dcp/ (2 files, 4 B): %job fetch {job.id} copies them"
    assert seen["model"]["others"] == told
    assert seen["curves"]["loss"]["points"][0] == [0, 1.0]
    lines = [text for item in view.shown_log for _, text in item["lines"] if item["source"] == "1"]
    assert lines == [f"step {step}" for step in range(40)]
    times = [at for item in view.shown_log for at in item["times"] if item["source"] == "1"]
    assert len(times) == 40 and times == sorted(times)
    printed_at = time.mktime(time.strptime(times[0], "%Y-%m-%d %H:%M:%S"))
    assert began_at - 1 <= printed_at <= time.time(), "when it was printed, not when it came"

    assert view.refusal("piece", id="x", offset=0) == "that download has ended: start it again"
    assert view.refusal("download", index=1) == "no such model: reload the page"
    assert view.asks("download", index=0) is None
    file = view.wait_for(lambda it: it["doing"]["is"] == "ready")["doing"]["file"]
    pieces = [base64.b64decode(view.asks("piece", id=file["id"], offset=at)) for at in (0, file["chunk"])]
    with zipfile.ZipFile(io.BytesIO(b"".join(pieces))) as archive:
        assert archive.read("model.safetensors") == bytes(range(256)) * 4000
        assert archive.read("config.json") == b"{}"
    assert view.refusal("piece", id=file["id"], offset=file["size"]).startswith("that download has ended")
    folder = view._download._folder
    assert folder and Path(folder.name).exists()
    view.asks("downloaded")
    assert not Path(folder.name).exists()
    assert view.asks("save", folder=str(tmp_path / "models")) is None
    view.wait_for(lambda it: it["doing"]["is"] == "done" and it["doing"]["what"] == "save")
    assert (tmp_path / "models/model.safetensors").read_bytes() == bytes(range(256)) * 4000
    assert (tmp_path / "models/config.json").read_text() == "{}"

    check_the_whole_log(view, job, tmp_path)

    settled = view.settled()
    assert settled.text.startswith(f"✓ job {job.id}: succeeded, after ")
    assert "step 39 of 40, loss 0.025, model model.safetensors" in settled.text
    assert "<svg" in settled.html and "class=" not in settled.html
    assert unseen.settled() == settled, "no page has shown it"
    wait_for_no_watcher()
    unseen.close()

    assert view.asks("restart") is None
    seen = view.wait_for(lambda it: it["head"]["id"] != job.id)
    view.hears("hello")
    again = view.wait_for(lambda it: it["head"]["word"] == "succeeded" and bool(it["model"]["files"]))
    assert again["head"]["id"].startswith("train-") and again["head"]["id"] != job.id
    view.hears("bye")
    view.close()
    wait_for_no_watcher()
    assert view_of("train").state()["head"]["id"] == again["head"]["id"]
    with pytest.raises(JobError, match="no job 'other'"):
        view_of("other")


def check_the_whole_log(view: Collecting, job: Job, folder: Path) -> None:
    """Check the log of all ranks in order, and of one rank; on disk, and for a browser up to its size limit."""
    steps = [f"step {step}" for step in range(40)]
    assert view.refusal("whole_log", node="", source="0; rm", folder=None) == "the job has no such log: reload the page"
    assert view.asks("whole_log", node="", source="", folder=str(folder / "logs")) is None
    doing = view.wait_for(lambda it: it["doing"]["is"] == "done" and it["doing"]["what"] == "log")["doing"]
    saved = folder / "logs" / f"{job.id}.log"
    assert doing["line"] == f"saved: {saved}"
    assert saved.read_text().splitlines() == [f"[{rank}] {step}" for rank in (0, 1) for step in steps]
    assert view.asks("whole_log", node="", source="1", folder=None) is None
    file = view.wait_for(lambda it: it["doing"]["is"] == "ready")["doing"]["file"]
    assert file["name"] == f"{job.id}-rank-1.log"
    assert base64.b64decode(view.asks("piece", id=file["id"], offset=0)).decode().splitlines() == steps
    view.asks("downloaded")
    with pytest.raises(Refused, match="the output exceeds 100 B"):
        write_log(job, folder / "logs", lambda done: None, most_bytes=100)
    size = sum(len(f"{step}\n") for step in steps)
    usage = shutil.disk_usage(folder)._replace(free=2 * size)  # too little: the file exists twice for a while
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Refused, match="the most that fits here"):
        patch.setattr(shutil, "disk_usage", lambda folder: usage)
        write_log(job, folder / "logs", lambda done: None, source="1")
    assert [*(folder / "logs").iterdir()] == [saved], "no part is left"


def wait_for_no_watcher() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("detrain_nb watch"):
            thread.join(20)
            assert not thread.is_alive()


@pytest.mark.timeout(LIMIT_S)
def test_watching_ends_with_the_last_page_and_a_stop_is_told(run_script: Callable[..., Job], tmp_path: Path) -> None:
    job = run_script("stopped", SCRIPT.replace("GO", str(tmp_path / "never")))
    view = Collecting(job)
    view.hears("hello")
    view.wait_for(lambda it: bool(it) and (it["progress"] or {}).get("step") == 39)
    view.hears("bye")
    wait_for_no_watcher()
    view.hears("hello")
    assert view.asks("stop") is None
    seen = view.wait_for(lambda it: it["head"]["word"] == "stopped")
    assert seen["model"]["why"] in ("Looking for the model", "No model was written")
    numbers = [item["number"] for item in view.shown_log]
    assert numbers == sorted(numbers)
    assert view.refusal("earlier", node="", source="0; rm", begin=5) == "the job has no such log: reload the page"
    assert view.refusal("earlier", node="", source="0", begin=0).startswith("earlier: begin must be a whole number")
    view.asks("earlier", node="", source="0", begin=14)
    item = view.wait_for(lambda it: "earlier" in it)["earlier"]["item"]
    assert [text for _, text in item["lines"]] == ["step 0", "step 1"] and all(item["times"])
    view.asks("earlier", node="elsewhere", source="0", begin=14)
    assert "has no node" in view.wait_for(lambda it: "error" in it["earlier"])["earlier"]["error"]
    view.close()
    wait_for_no_watcher()


# ---- hostile nodes


def status(state: str = "running", **more: Any) -> JobStatus:
    return JobStatus("lies-1", "lies", state, **more)


def test_nodes_are_told_with_their_ranks_and_since_when_they_do_not_answer() -> None:
    reports = {
        "gpu1": NodeReport("a", 0, "ended", exit_code=3, failed_rank=1, ranks=(0, 1)),
        "gpu2": NodeReport("a", 1, "ended", exit_code=143, ranks=(2, 3), reason="<b>\x1b[2J"),
        "gpu3": NodeReport("a", 2, "running", ranks=tuple(range(100))),
    }
    gone = {"gpu3": Unreached(time.time(), "no route")}
    said = status("ended", exit_code=3, failed_node="gpu1", failed_rank=1, reports=reports, silent={"gpu4": "no"})
    first, second, third, fourth = picture.nodes_of(said, gone)
    assert (first["word"], first["ranks"]) == ("rank 1 failed", [[0, "stopped"], [1, "bad"]])
    assert (second["word"], second["more"].isprintable()) == ("stopped", True)
    assert third["sign"] == "lost" and third["more"].startswith("not reached since ")
    assert (len(third["ranks"]), third["hidden"]) == (64, 36)
    assert (fourth["word"], fourth["more"]) == ("unknown", "no")


def test_job_whose_nodes_are_all_out_of_reach_is_unknown() -> None:
    since = time.time() - 3600
    gone = {"gpu1": Unreached(since, "no route")}
    head = picture.head_of(status(started_at=since), gone, ["gpu1"])
    assert (head["sign"], head["word"], head["seconds"]) == ("lost", "unknown", None)
    assert head["facts"] == f"not reached since {picture.clock(since)}"


def test_log_without_lines_says_why() -> None:
    reports = {"gpu1": NodeReport("a", 0, "ended", exit_code=0)}
    assert picture.no_lines_of(status(reports=reports), {}) == "No output yet"
    ended = status("ended", exit_code=0, reports=reports)
    assert picture.no_lines_of(ended, {}) == "The job printed nothing"
    assert picture.no_lines_of(ended, {"gpu1": Unreached(0.0, "no route")}).startswith("No output received")
    assert picture.no_lines_of(status("ended", exit_code=0), {}) == "Looking for its logs", "no node was asked yet"


def test_progress_says_how_long_it_takes() -> None:
    curves = LiveCurves()
    assert picture.progress_of(status(), curves, [], 100) is None
    for step in range(51):
        curves.add({"step": step, "rank": 0, "time": 1000.0 + step, "loss": 1.0})
    found = picture.progress_of(status(), curves, [(10, time.time())], 5050)
    assert found and (found["left"], found["pace"], found["checkpoints"]) == ("about 1 h 23 min left", 1.0, [10])
    unknown = picture.progress_of(status(), curves, [], None)
    assert unknown and (unknown["left"], unknown["total"]) == ("", None)


def test_hostile_curves_are_plain_json() -> None:
    curves = LiveCurves()
    for step in range(5000):
        curves.add({"step": step, "rank": 0, "time": 1.0, "loss": [1.0, math.inf, math.nan, 1e308][step % 4]})
    curves.add({"step": 1 << 62, "rank": 0, "<img>\x1b_loss": 10**400})
    shown = picture.curves_of(curves)
    assert len(json.dumps(shown, allow_nan=False)) < 20_000
    assert len(shown["loss"]["points"]) <= 400


@pytest.mark.parametrize(
    ("is_bad", "warning", "fact"),
    [
        (lambda step: False, "", {"title": "Loss", "value": "0.5"}),
        (lambda step: step % 7 == 3, "nan or inf at 14 steps, first at step 3", {"title": "Loss", "value": "0.5"}),
        (lambda step: step > 40, "nan since step 41", {"title": "Loss", "value": "nan since step 41", "sign": "warn"}),
    ],
)
def test_loss_that_is_no_number_is_told(is_bad: Callable[[int], bool], warning: str, fact: dict[str, str]) -> None:
    curves = LiveCurves()
    for step in range(100):
        curves.add({"step": step, "rank": 0, "loss": math.nan if is_bad(step) else 0.5})
    assert picture.curves_of(curves)["loss"]["warning"] == warning
    assert picture.facts_of(status("ended", exit_code=0), curves)[0] == fact


@pytest.mark.parametrize("largest", [sys.float_info.max, -sys.float_info.max])
def test_largest_numbers_that_a_node_can_log_are_plain_json(largest: float) -> None:
    """Rounded, they would be infinite, which no message to a page can contain: the view would get no more updates."""
    curves = LiveCurves()
    for step in range(3):
        curves.add({"step": step, "rank": 0, "time": 1.0 + step, "loss": largest, "memory_bytes": largest})
    shown = [picture.curves_of(curves), picture.facts_of(status("ended", exit_code=0), curves)]
    assert json.loads(json.dumps(shown, allow_nan=False))[0]["loss"]["points"][-1] == [2, largest]


def test_levels_of_lines() -> None:
    lines = [
        "step 1",
        "WARNING: x",
        "UserWarning: y",
        "Traceback (most recent call last):",
        "  at",
        "ValueError: x",
        "on",
    ]
    levels = Levels()
    assert [levels.of(line) for line in lines] == [INFO, WARNING, WARNING, ERROR, ERROR, ERROR, INFO]
    assert Levels().of("x" * 400 + " ERROR") == INFO, "a line is not searched to its end"


def test_line_that_has_not_ended_is_clean() -> None:
    begun = make_begun({("", "0"): " 3%|\x1b[31m#\n<b>", ("gpu2", "1"): ""})
    assert begun == [{"node": "", "source": "0", "lines": [[INFO, " 3%|# <b>"]]}]


def test_log_is_a_window_of_bounded_size() -> None:
    window = LogWindow()
    for number in range(12):  # 10 MB, of which less than half is kept
        told = window.add([LogPart("", str(rank), number, ("x" * 5000,) * 20) for rank in range(20)])
        assert sum(len(text) for item in told for _, text in item["lines"]) <= 600_000
        assert told[0].get("is_cut") is True
    kept = sum(len(text) for item in window.items() for _, text in item["lines"])
    assert kept < 4_000_000
    assert all(len(text) < 2100 for item in told for _, text in item["lines"])
    item = window.add([LogPart("", "0", 0, ("\x1b[31mred\x1b[0m\x1b[2J\x07\u202e",))])[0]
    assert item["lines"][0][1].replace("\u202e", "").startswith("red")
    assert "\x1b" not in item["lines"][0][1]


def made(*names: str, size: int = 10, node: str = "n") -> list[MadeFile]:
    return [MadeFile(node, name, size, float(place)) for place, name in enumerate(names)]


def test_model_is_the_likeliest_file_and_no_checkpoint() -> None:
    names = ["a.txt", "opt.pt", "checkpoints/step-00000100/rank-0-ab.safetensors", "out/model.pt", "model.safetensors"]
    found = choose_models([*made(*names), *made("model_7.pt", size=99)])
    assert [model.name for model in found] == ["model.safetensors", "out/model.pt", "model_7.pt", "opt.pt"]
    assert [model.name for model in choose_models([*made("a.pt"), *made("a.pt", node="m")])] == ["a.pt", "a.pt"]
    assert MOST_DOWNLOAD_BYTES == 50_000_000


def test_model_of_hugging_face_is_its_folder() -> None:
    shards = [f"hf/model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    beside = ["hf/config.json", "hf/generation_config.json", "hf/model.safetensors.index.json", "hf/tokenizer.json"]
    other = ["hf/notes.txt", "hf/optimizer.pt", "b/config.json"]
    found = choose_models([*made(*other, *reversed(beside)), *made(*shards, size=99), *made(*shards, node="m")])
    assert [(model.name, model.names) for model in found] == [
        ("hf/", [*shards, *beside]),
        ("hf/optimizer.pt", ["hf/optimizer.pt"]),
    ]
    assert (found[0].size_bytes, found[0].num_nodes) == (3 * 99 + 4 * 10, 2)
    assert [model.name for model in choose_models(made("model.pt", "config.json"))] == ["model.pt"]
    assert choose_models(made("model.bin", "config.json"))[0].names == ["model.bin", "config.json"]
    adapter = ["a/adapter_model.safetensors", "a/adapter_config.json"]
    assert choose_models(made(*adapter))[0].names == adapter


def test_folder_of_torch_is_a_model_where_there_is_no_other() -> None:
    cut = ["a/old/.metadata", "a/old/__0_0.distcp", "a/new/.metadata", "a/new/__0_0.distcp", "a/notes.txt"]
    assert [(model.name, len(model.files)) for model in choose_models(made(*cut))] == [("a/new/", 2), ("a/old/", 2)]
    assert [model.name for model in choose_models(made(*cut, "model.pt"))] == ["model.pt"]
    assert (
        tell_others(made("b.txt", *cut), "x")
        == "a/new/ (2 files, 20 B), a/old/ (2 files, 20 B), a/notes.txt (10 B) and 1 more: x"
    )


@pytest.mark.timeout(60)
def test_job_without_a_model_tells_what_else_it_has_made(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def tell(talk: Talk, order: dict[str, Any]) -> None:
        talk.say("status", jobs=[{"id": "cut-1", "node_rank": 0, "state": "ended", "exit_code": 0}])

    def offer(talk: Talk, order: dict[str, Any]) -> None:
        assert order["first"][0] == "model.*", "of too much the model comes first"
        talk.say("made", files=[[f"artifacts/notes/{number}.txt", 10, 1.0] for number in range(500)])

    spec = '{"name": "cut", "source": {"script_text": "1"}}'
    Record().add("cut-1", name="cut", nodes="[]", spec=spec, state="ended")
    Record().update("cut-1", exit_code=0)
    job = Job("cut-1", "cut", [LyingNode({"status": tell, "artifacts": offer})], record=Record())
    view = JobView(job)
    monkeypatch.setattr(job_view, "_LOOK_LIMIT_S", 0.1)
    assert view.settled().text.startswith("✓ job cut-1: succeeded"), "it does not wait for a node that hangs up"
    wait_for_no_watcher()
    view._list_made(job, view._news)
    told = "artifacts/notes/ (500 files, 5 kB), and more files not listed: %job fetch cut-1 copies them"
    assert view.state()["model"]["why"] == f"No model was written; {told}"
    view.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("fetch", "why"),
    [
        (fetch_for_browser, "200 MB is more than the 50 MB that can be downloaded through the notebook"),
        (lambda job, model, to, tell: fetch_models(job, [model], str(to), tell), "has grown from 10 B to 200 MB"),
    ],
    ids=["for a browser", "to this machine"],
)
def test_file_that_is_larger_than_its_node_said_is_not_fetched(
    fetch: Callable[..., Any], why: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node may announce 10 bytes and then send until the disk of this machine is full."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other tests fetch, too
    is_over = threading.Event()

    def offer(talk: Talk, order: dict[str, Any]) -> None:
        talk.say("files", files=[["model.bin", 4 * MOST_DOWNLOAD_BYTES, "0" * 64]])

    def send(talk: Talk, order: dict[str, Any]) -> None:
        talk.say("file", size=4 * MOST_DOWNLOAD_BYTES)
        talk.send(b"x" * 1000)
        talk.flush()
        is_over.wait(20)
        raise EOFError  # it closes the connection

    def tell(talk: Talk, order: dict[str, Any]) -> None:
        talk.say("status", jobs=[{"id": "lies-1", "node_rank": 0, "state": "ended", "exit_code": 0}])

    with contextlib.suppress(JobError):  # the other parameter of this test has added it
        Record().add("lies-1", name="lies", nodes="[]", spec="{}", state="ended")
    job = Job("lies-1", "lies", [LyingNode({"status": tell, "artifacts": offer, "read": send})], record=Record())
    download = Download()
    try:
        with pytest.raises(Refused, match=why):
            model = Model("model.bin", tuple(made("model.bin", node="")))
            download.prepare(lambda to: fetch(job, model, to, lambda done, total: None))
    finally:
        is_over.set()
    assert list(tmp_path.iterdir()) == [], "what has come is gone"


@pytest.mark.timeout(60)
def test_log_of_a_node_that_begins_anew_without_end_has_few_notes(home: Path, tmp_path: Path) -> None:
    def tell(talk: Talk, order: dict[str, Any], restarts: int = 0) -> None:
        state = {"state": "ended", "exit_code": 0, "restarts": restarts}
        talk.say("status", jobs=[{"id": "anew-1", "node_rank": 0, **state}])

    def follow(talk: Talk, order: dict[str, Any]) -> None:
        for number in range(100):
            tell(talk, order, number)
        talk.say("end")

    Record().add("anew-1", name="anew", nodes="[]", spec="{}", state="ended")
    job = Job("anew-1", "anew", [LyingNode({"status": tell, "follow": follow})], record=Record())
    path, notes = write_log(job, tmp_path, lambda done: None)
    assert path.read_text() == ""
    assert [note.split(": ")[-1] for note in notes] == [f"restart {number}" for number in (1, 2, 3)]


@pytest.mark.timeout(60)
def test_node_that_sends_for_ever_is_not_waited_for_by_a_stop_nor_once_that_is_cancelled(
    home: Path, tmp_path: Path
) -> None:
    is_stopped, is_over, dripping = threading.Event(), threading.Event(), queue.Queue[str]()

    def tell(talk: Talk, order: dict[str, Any]) -> None:
        state = {"state": "stopped", "exit_code": 143} if is_stopped.is_set() else {"state": "running"}
        talk.say("status", jobs=[{"id": "lies-2", "node_rank": 0, **state}])

    def look(talk: Talk, order: dict[str, Any]) -> None:
        tell(talk, order)
        talk.say("end", more=False)

    def drip(talk: Talk, order: dict[str, Any]) -> None:
        dripping.put(order["type"])
        while not is_over.wait(0.05):  # until the other side closes the connection
            talk.say("wait")  # still working
            talk.flush()

    def list_made(talk: Talk, order: dict[str, Any]) -> None:
        if order.get("digests") is not False:
            drip(talk, order)
        talk.say("made", files=[["model.pt", 10, 1.0]])

    def stop(talk: Talk, order: dict[str, Any]) -> None:
        is_stopped.set()
        talk.say("stopped")

    spec = '{"name": "lies", "source": {"script_text": "1"}}'
    Record().add("lies-2", name="lies", nodes="[]", spec=spec, state="running")
    answers = {"status": tell, "look": look, "follow": drip, "stop": stop, "artifacts": list_made, "facts": drip}
    node = LyingNode(answers, name="gpu1")
    view = Pressing(Job("lies-2", "lies", [node], record=Record()))
    view.open_page()
    whole_log = {"node": "", "source": "", "folder": str(tmp_path / "log")}
    view.asks("whole_log", **whole_log)
    view.wait_for_part("under_way", lambda it: it == "log")
    assert view.refusal("save", folder=str(tmp_path)) and view.refusal("restart") == "log is still running"
    view.asks("stop")
    view.wait_for(lambda it: it["head"]["word"] == "stopped" and it["model"]["files"])
    assert view.seen["under_way"] == "log", "a stop does not end it"
    try:
        for what, waits_for, begin in (
            ("log", "follow", lambda: None),
            ("save", "artifacts", lambda: view.asks("save", folder=str(tmp_path / "model"))),
            ("download", "artifacts", lambda: view.asks("download", index=0)),
            ("restart", "facts", lambda: view.asks("restart")),
        ):
            begin()
            assert dripping.get(timeout=LIMIT_S) == waits_for
            view.asks("cancel")
            told = {"what": what, "is": "cancelled"}
            view.wait_for(lambda it, told=told: it["doing"] == told and not it["under_way"])
            view.wait_until_idle()
    finally:
        is_over.set()
    assert [*(tmp_path / "log").iterdir()] == [], "no part is left"
    view.close()


def test_what_is_saved_of_a_failure_is_escaped_and_short() -> None:
    curves = LiveCurves()
    for step in range(3000):
        curves.add({"step": step, "rank": 0, "<img>loss": 1.0 + step})
    last = tuple(f"<script>{number}</script>" * 300 for number in range(50))
    failed = status("ended", exit_code=1, failed_rank=0, last_lines=last)
    settled = settle_job(
        failed,
        picture.head_of(failed, {}, []),
        progress=picture.progress_of(failed, curves, [(10, 0.0)], None),
        curves=picture.curves_of(curves),
        failure=picture.failure_of(failed, curves, [(10, 0.0)]),
        model=[],
        advice="%job view lies-1",
    )
    bundle = settled.bundle()
    assert "<script" not in bundle["text/html"] and "<img" not in bundle["text/html"]
    assert len(bundle["text/html"]) < 50_000
    assert "rank 0 exited with code 1 at step 2,999." in bundle["text/plain"]
    assert "A restart continues from checkpoint 10." in bundle["text/plain"]
