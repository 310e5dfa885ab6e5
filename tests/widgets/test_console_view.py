"""The console of pipelines without a page: what it sends to pages, which requests it accepts, and what it leaves."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from detrain_nb.widgets import job as job_view
from detrain_nb.widgets.console_view import ConsoleView
from ipywidgets import Widget

from detrain_nb.jobs import find_job
from detrain_nb.jobs.record import Record
from detrain_nb.pipelines import MyPipelines
from detrain_nb.plan.targets import KINDS, TARGETS

from .page import WithPage

pytestmark = pytest.mark.timeout(240)  # the machine may be busy

DATA: dict[str, Any] = {
    "source": {"script_text": "print('ran')"},
    "nodes": [{"host": "localhost", "devices": "cpu", "ranks": 1}],
}


class Page(WithPage, ConsoleView):
    def names(self) -> dict[str, str]:
        """Return the ids of the listed pipelines, by name."""
        return {each["name"]: each["id"] for each in self.state()["list"]["entries"]}


@pytest.fixture
def page(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Page]:
    base = tmp_path_factory.mktemp("u")
    for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "DETRAIN_NB_RUNTIME_DIR"):
        (base / name.lower()[:4]).mkdir(mode=0o700, exist_ok=True)
        monkeypatch.setenv(name, str(base / name.lower()[:4]))
    monkeypatch.chdir(tmp_path)
    page = Page(MyPipelines())
    page.open_page()
    yield page
    page.close()


def test_page_without_pipelines_gets_examples_and_fields(page: Page) -> None:
    state = page.open_page()
    assert state["list"]["entries"] == [] and state["form"] is None and len(state["examples"]) == 3
    assert state["fields"]["fields"]["training.steps"]["kind"] == "number"
    page.asks("create_example", name="two-copies")
    form = page.wait_for_part("form", bool)
    assert form["file"] == "pipelines/two-copies.toml" and form["is_right"] and not form["is_changed"]
    assert form["mesh"]["ranks"] == 2 and [each["told"] for each in form["steps"]] == [
        "1 axis",
        "1 node",
        "script text",
    ]


def test_pipeline_is_duplicated_deleted_and_brought_back(page: Page) -> None:
    page.pipelines.create({**DATA, "name": "train"})
    made = page.asks("duplicate", id=page.names()["train"])
    assert made["name"] == "train-2" and page.names()["train-2"] == made["id"]
    page.asks("delete", id=made["id"])
    assert page.wait_for_part("undo", bool) == {"name": "train-2", "told": "train-2 was moved to pipelines/.trash"}
    assert [*page.names()] == ["train"]
    trash = page.pipelines.folder / ".trash"
    trash.rename(elsewhere := trash.with_name("elsewhere"))
    with pytest.raises(RuntimeError, match="cannot be brought back"):
        page.asks("undo")
    elsewhere.rename(trash)  # a failed restore can be repeated
    back = page.asks("undo")
    assert page.wait_for_part("undo", lambda undo: undo is None) is None
    assert [*page.names()] == ["train", "train-2"] and page.names()["train-2"] == back
    with pytest.raises(RuntimeError, match="nothing to restore"):
        page.asks("undo")


def test_pipeline_that_another_tab_has_open_is_deleted_and_its_form_closed(page: Page) -> None:
    page.pipelines.create({**DATA, "name": "train"})
    key = page.names()["train"]
    page.asks("open_pipeline", id=key)
    page.asks("delete", id=key)
    assert page.wait_for_part("undo", bool)["name"] == "train"
    assert page.form is None and page.state()["form"] is None
    with pytest.raises(RuntimeError, match="no pipeline is open"):
        page.asks("edit", path="name", typed="other", revision=0, editor="e")


@pytest.mark.parametrize(
    ("action", "arguments", "said"),
    [
        ("delete", {"id": "p99"}, "no longer in the list"),
        ("delete", {"id": "../../etc/passwd"}, "no longer in the list"),
        ("create", {"name": "../up"}, "a-z, A-Z, 0-9"),
        ("create_example", {"name": "other"}, "one of two-copies"),
        ("edit", {"path": "name", "typed": "x", "revision": 1, "editor": "p"}, "no pipeline is open"),
        ("open_file", {"path": "gone.yaml"}, "it does not exist"),
        ("open_file", {"path": "a\0b"}, "is not a pipeline"),
        ("change_nodes", {"do": "format", "key": ""}, "one of add"),
    ],
)
def test_what_a_page_may_not_ask_is_refused(page: Page, action: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(RuntimeError, match=said):
        page.asks(action, **arguments)


def test_edits_are_told_and_saved(page: Page) -> None:
    page.pipelines.create({**DATA, "name": "train"})
    page.asks("open_pipeline", id=page.names()["train"])
    form = page.wait_for_part("form", bool)
    edit = {"revision": form["revision"], "editor": "p"}
    page.asks("edit", path="env", typed="RANK=1", **edit)
    page.asks("edit", path=f"nodes[{form['rows'][0]}].ranks", typed="x", **edit)
    form = page.wait_for_part("form", lambda form: len(form["errors"]) == 2)
    assert [*form["errors"]] == [f"nodes[{form['rows'][0]}].ranks", "env"] or set(form["errors"]) == {
        f"nodes[{form['rows'][0]}].ranks",
        "env",
    }
    assert form["is_changed"] and not form["is_right"]
    assert [(each["id"], each["faults"]) for each in form["steps"]] == [("general", 0), ("nodes", 1), ("source", 1)]
    page.asks("close_form")
    assert page.open_page()["list"]["entries"][0]["is_changed"], "a form with changes is kept"
    page.asks("open_pipeline", id=page.names()["train"])
    assert page.wait_for_part("form", bool)["draft"]["env"] == "RANK=1"
    page.asks("edit", path="env", typed="A=1", revision=1 << 40, editor="p")
    page.asks("edit", path=f"nodes[{form['rows'][0]}].ranks", typed="2", revision=1 << 40, editor="p")
    page.asks("save", anyway=False, name=None)
    saved = page.pipelines.open("train").spec
    assert saved is not None and saved.env == {"A": "1"} and saved.nodes[0].ranks == 2
    assert not page.state()["form"]["is_changed"]


def test_no_older_form_is_told_behind_a_newer_one(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    """This happens when the jobs are queried while the user types."""
    page.pipelines.create({**DATA, "name": "train"})
    page.asks("open_pipeline", id=page.names()["train"])
    form, publish, told = page.form, page.publish, list[Any]()
    assert form is not None
    telling = threading.Thread(target=page._tell_all)
    editing = threading.Thread(target=form.edit, args=("env", "A=1"))

    def publish_slowly(part: str, value: Any) -> None:
        if part == "list" and threading.current_thread() is telling:
            editing.start()
            editing.join(0.3)  # time for the edit to interfere
        if part == "form":
            told.append(value)
        publish(part, value)

    monkeypatch.setattr(page, "publish", publish_slowly)
    telling.start()
    for thread in (telling, editing):
        thread.join(30)
    assert told[-1]["draft"]["env"] == "A=1"
    page.wait_for_part("form", lambda form: form and form["draft"].get("env") == "A=1")


def test_file_that_changed_is_told_of_and_either_side_is_kept(page: Page) -> None:
    page.pipelines.create({**DATA, "name": "train"})
    page.asks("open_pipeline", id=page.names()["train"])
    page.asks("edit", path="training.steps", typed="5", revision=1 << 40, editor="p")
    other = MyPipelines().open("train")
    MyPipelines().save(other, {**DATA, "name": "train", "training": {"steps": 7}})
    with pytest.raises(RuntimeError, match="was changed after it was read here"):
        page.asks("save", anyway=False, name=None)
    form = page.wait_for_part("form", lambda form: form and form["conflict"])
    assert form["conflict"]["changes"] == [["training.steps", "7", "5"]] and form["draft"]["training"]["steps"] == "5"
    page.pipelines.create({**DATA, "name": "taken"})
    with pytest.raises(RuntimeError, match="a pipeline named taken already exists: give another name"):
        page.asks("save", anyway=False, name="taken")
    assert page.state()["form"]["conflict"] == form["conflict"], "it is still about the open file"
    page.asks("save", anyway=False, name="train-mine")
    assert page.wait_for_part("form", lambda form: not form["conflict"])["file"] == "pipelines/train-mine.toml"
    page.asks("open_pipeline", id=page.names()["train"])
    page.asks("edit", path="training.steps", typed="9", revision=1 << 40, editor="p")
    MyPipelines().save(MyPipelines().open("train"), {**DATA, "name": "train", "training": {"steps": 8}})
    with pytest.raises(RuntimeError, match="was changed after"):
        page.asks("save", anyway=False, name=None)
    page.asks("load_theirs")
    assert page.state()["form"]["draft"]["training"]["steps"] == "8"
    page.asks("edit", path="training.steps", typed="9", revision=1 << 40, editor="p")
    page.asks("save", anyway=True, name=None)
    saved = page.pipelines.open("train").spec
    assert saved is not None and saved.training.steps == 9


def widget_ids() -> set[str]:
    """Return the ids of the open widgets."""
    return {*Widget.get_manager_state()["state"]}


def test_run_is_told_as_work_and_then_in_the_list(page: Page) -> None:
    page.pipelines.create({**DATA, "name": "train"})
    page.asks("run", id=page.names()["train"])
    done = page.wait_for_part("work", lambda work: work and work["is"] != "running")
    job = find_job("train")
    assert done == {"what": "starting train", "is": "done", "job": job.id}
    [entry] = page.wait_for_part("list", lambda found: found["entries"] and found["entries"][0]["job"])["entries"]
    assert entry["job"]["word"] in ("running", "preparing", "succeeded")
    with pytest.raises(RuntimeError, match="no job 'other'"):
        page.asks("show_job", id="other")
    page.asks("show_job", id=job.id)
    first = page.wait_for_part("job", lambda shown: shown)
    assert first["command"] == f"%job view {job.id}" and first["widget"] in widget_ids()
    page.asks("show_job", id=job.id)
    second = page.wait_for_part("job", lambda shown: shown["widget"] != first["widget"])
    assert first["widget"] not in widget_ids(), "one is shown at a time"
    assert page.open_page()["job"] == second
    shown = page._shown_job._view
    assert shown is not None
    shown.restart()
    page.wait_for_part("job", lambda told: told["command"] != second["command"])
    again = find_job("train")
    assert page.seen["job"] == {**second, "id": again.id, "command": f"%job view {again.id}"} and again.id != job.id
    page.asks("hide_job")
    assert page.open_page()["job"] is None and second["widget"] not in widget_ids()
    ended = {"id": again.id, "word": "succeeded"}
    page.wait_for_part("list", lambda found: found["entries"][0]["job"].items() >= ended.items())  # the list queries it
    page.asks("refresh")
    assert page.open_page()["list"]["entries"][0]["job"]["word"] == "succeeded"
    Record().update(again.id, state="running", exit_code=None, ended_at=None)  # its end is not recorded
    view = job_view(again.id)
    assert view.settled().text.startswith(f"✓ job {again.id}: succeeded"), "its plain form is true from the first"
    view.close()
    for each in (job, again):
        each.remove()


def test_pipeline_that_runs_already_is_told_with_its_job_which_can_be_stopped(page: Page) -> None:
    page.pipelines.create({**DATA, "name": "train", "source": {"script_text": "import time; time.sleep(200)"}})
    page.asks("run", id=page.names()["train"])
    job = page.wait_for_part("work", lambda work: work and work["is"] == "done")["job"]
    page.wait_until_idle()  # the page is informed shortly before the thread finishes
    page.asks("run", id=page.names()["train"])
    failed = page.wait_for_part("work", lambda work: work and work["is"] == "failed")
    page.wait_until_idle()
    assert failed["error"] == f"job {job} is already running: stop it, or duplicate the pipeline and start the copy"
    page.asks("stop_job", id=failed["job"])
    page.wait_for_part("work", lambda work: work == {"what": f"stopping {job}", "is": "done"})
    page.wait_for_part("list", lambda found: found["entries"][0]["job"]["word"] == "stopped")
    find_job(job).remove()


def test_what_is_started_is_what_the_form_shows(page: Page) -> None:
    page.pipelines.create({**DATA, "name": "train"})
    page.asks("open_pipeline", id=page.names()["train"])
    seen = page.asks("review")["digest"]
    page.asks("edit", path="env", typed="A=1", revision=1 << 40, editor="another tab")
    assert "train.toml has changed since this page showed it, and was not" in page.refusal("start", digest=seen)
    page.pipelines.create({**DATA, "name": "other"})
    page.asks("open_pipeline", id=page.names()["other"])  # as another tab does
    assert "other.toml has changed since this page showed it" in page.refusal("start", digest=seen)
    page.asks("open_pipeline", id=page.names()["train"])
    page.asks("edit", path="env", typed="", revision=1 << 40, editor="another tab")  # as the page showed it
    harm = {**DATA, "name": "train", "source": {"script_text": "print('harm')"}}
    MyPipelines().save(MyPipelines().open("train"), harm)
    page.asks("start", digest=seen)
    failed = page.wait_for_part("work", lambda work: work and work["is"] != "running")
    assert failed["is"] == "failed" and "was changed after it was read here, and was not started" in failed["error"]
    assert Record().summaries(limit=10) == []


def test_form_that_another_tab_closes_meanwhile_is_started_as_it_was(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    page.pipelines.create({**DATA, "name": "train", "secrets": ["NOT_SET_ANYWHERE"]})  # so that no job starts
    page.asks("open_pipeline", id=page.names()["train"])
    starting, is_changed = threading.current_thread(), page._is_changed
    closing = threading.Thread(target=page.close_form)

    def close_first(path: Path) -> bool:
        if threading.current_thread() is starting and closing.ident is None:
            closing.start()
            closing.join(0.3)  # time for closing to interfere
        return is_changed(path)

    seen = page.asks("review")["digest"]
    monkeypatch.setattr(page, "_is_changed", close_first)
    page.asks("start", digest=seen)
    failed = page.wait_for_part("work", lambda work: work and work["is"] == "failed")
    assert "NOT_SET_ANYWHERE: not set here" in failed["error"]
    closing.join(30)
    assert page.refusal("start", digest=seen) == "no pipeline is open: it was closed in another tab"


def test_draft_that_cannot_be_run_says_why(page: Page) -> None:
    page.pipelines.create({"name": "draft"})
    page.asks("run", id=page.names()["draft"])
    failed = page.wait_for_part("work", lambda work: work and work["is"] == "failed")
    assert "cannot be run: source" in failed["error"]
    assert page.open_page()["work"] == failed, "a page that opens, or draws itself anew, is told of it"
    page.asks("drop_work")
    assert page.wait_for_part("work", lambda work: work is None) is None and page.open_page()["work"] is None
    page.asks("open_pipeline", id=page.names()["draft"])
    assert page.asks("review") == {"error": "correct the errors in the form first"}
    with pytest.raises(RuntimeError, match="to correct first"):
        page.asks("start", digest="")


def test_review_and_code_of_a_right_one(page: Page) -> None:
    page.pipelines.create({**DATA, "name": "train"})
    page.asks("open_pipeline", id=page.names()["train"])
    found = page.asks("review")
    assert found["commands"]["nodes"][0]["name"] == "this machine" and "submit(spec)" in found["code"]
    assert page.asks("code", id=page.names()["train"]) == found["code"]


def test_export_is_shown_and_saved_over_no_other_file_unasked(page: Page, tmp_path: Path) -> None:
    assert [each["name"] for each in page.open_page()["targets"]] == [*TARGETS]
    page.pipelines.create({**DATA, "name": "train"})
    assert page.refusal("export", to="slurm", options={}) == "no pipeline is open: it was closed in another tab"
    page.asks("open_pipeline", id=page.names()["train"])
    given = {"to": "slurm", "options": {"time": "02:00:00"}}
    shown = page.asks("export", **given)
    assert "#SBATCH --time=02:00:00" in shown["text"]
    assert page.asks("export", to="slurm", options={"time": "2 h"})["option"] == "time"
    page.asks("export", to="torchrun", options={"gpus": "2"})
    typed = {"slurm": {"time": "2 h"}, "torchrun": {"gpus": "2"}}
    assert page.open_page()["form"]["exported"] == {"to": "torchrun", "options": typed}, "for a page that is reloaded"
    assert "to must be one of torchrun, slurm" in page.refusal("export", to="other", options={})
    assert "options must be a mapping" in page.refusal("export", to="slurm", options=["time"])
    save = {**given, "path": "jobs/train.sbatch", "digest": shown["digest"]}
    assert page.asks("save_export", **save, anyway=False)["said"].endswith("jobs/train.sbatch was written.")
    file = tmp_path / "jobs/train.sbatch"
    assert file.read_text() == shown["text"]
    file.write_text("theirs")
    assert page.asks("save_export", **save, anyway=False)["ask"].endswith("jobs/train.sbatch already exists.")
    assert file.read_text() == "theirs"
    page.asks("edit", path="env", typed="A=1", revision=1 << 40, editor="another tab")
    assert "has changed since this page showed it, and was not written" in page.refusal(
        "save_export", **save, anyway=True
    )
    save["digest"] = page.asks("export", **given)["digest"]
    page.asks("save_export", **save, anyway=True)
    assert "A=1" in file.read_text()
    assert page.refusal("save_export", **{**save, "path": " "}, anyway=True) == "give a file name"
    assert "jobs is a folder: give a file name in it" in page.refusal(
        "save_export", **{**save, "path": "jobs"}, anyway=False
    )
    page.asks("edit", path="env", typed="RANK=1", revision=1 << 41, editor="p")
    assert page.refusal("export", **given) == "correct the errors in the form first"


def test_file_of_another_tool_becomes_a_draft_that_lists_what_was_left_out(page: Page, tmp_path: Path) -> None:
    assert [each["name"] for each in page.open_page()["kinds"]] == [*KINDS]
    (tmp_path / "cluster.txt").write_text("gpu1 rack=7 row=2\ngpu2\n")
    ask = {"path": "cluster.txt", "text": "", "kind": ""}
    page.asks("import_pipeline", **ask)
    form = page.wait_for_part("form", bool)
    assert form["file"] == "pipelines/cluster.toml" and form["draft"]["nodes"] == [{"host": "gpu1"}, {"host": "gpu2"}]
    left_out = [f"{name} (line 1): a spec has no field for it" for name in ("rack", "row")]
    assert form["left_out"] == left_out
    page.asks("close_form")
    page.asks("open_pipeline", id=page.names()["cluster"])
    assert page.open_page()["form"]["left_out"] == left_out, "until it was read"
    page.asks("dismiss", line=left_out[0])
    assert page.wait_for_part("form", lambda form: len(form["left_out"]) == 1)["left_out"] == left_out[1:]
    page.asks("dismiss", line=None)
    page.wait_for_part("form", lambda form: form["left_out"] == [])
    page.asks("import_pipeline", **{**ask, "text": "gpu3\n", "path": ""})
    form = page.wait_for_part("form", lambda form: form["draft"]["nodes"] == [{"host": "gpu3"}])
    assert form["file"] == "pipelines/pipeline.toml" and form["left_out"] == []
    page.asks("import_pipeline", **ask)
    assert page.wait_for_part("form", lambda form: len(form["rows"]) == 2)["file"] == "pipelines/cluster-2.toml"
    (tmp_path / "cluster.txt").write_text("gpu1\ngpu[1-\n")
    before = page.names()
    assert "cluster.txt: line 2: " in page.refusal("import_pipeline", **{**ask, "kind": "hostfile"})
    assert "is not a kind of file to import" in page.refusal("import_pipeline", **{**ask, "kind": "other"})
    assert "it does not exist" in page.refusal("import_pipeline", **{**ask, "path": "gone.json"})
    assert page.refusal("import_pipeline", **{**ask, "path": ""}) == "give a file name"
    assert page.names() == before


def test_settled_form_is_a_table_of_plain_html(page: Page) -> None:
    file = os.fsencode(page.pipelines.create({**DATA, "name": "train", "description": "<b>bold</b>"}).path)
    (page.pipelines.folder / "<i>odd.toml").write_text("name = 1\x07")
    Record().add("train-1", name="train", nodes="[]", spec="{}", state="running", file=file)
    settled = page.settled()
    assert "train" in settled.text and "running" in settled.text and "<i>" not in settled.html
    assert settled.html.count("<tr>") == 3 and "\x07" not in settled.text + settled.html


def test_settled_form_has_its_spec_in_a_fold_and_nothing_of_what_is_none(page: Page) -> None:
    script = "# </pre><b>\u202e\n" + "x = 1\n" * 10_000
    page.pipelines.create({**DATA, "name": "train", "source": {"script_text": script}})
    page.asks("open_pipeline", id=page.names()["train"])
    settled = page.settled()
    assert settled.text.startswith("name: train\nfile: pipelines/train.toml\nmesh: -\nnodes: localhost\n")
    assert "<details><summary>The spec as TOML</summary>" in settled.html and "&lt;/pre&gt;&lt;b&gt;" in settled.html
    assert "\u202e" not in settled.html and 'host = "localhost"' in settled.text
    assert settled.bundle()["text/html"] == settled.html, "short enough to stay in columns"
    for path, typed in (("source.kind", "git"), ("source.git.url", "https://me:hunter2@example.org/a.git")):
        page.asks("edit", path=path, typed=typed, revision=99, editor="p")
    settled = page.settled()
    assert "1 field to correct" in settled.text and "hunter2" not in settled.text + settled.html
    page.asks("close_form")
    assert "My Pipelines" in page.settled().text
