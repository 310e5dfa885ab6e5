"""The console of pipelines without a page: what it tells pages, what they may ask, and what stays of it."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from detrain_nb.widgets.console_view import ConsoleView

from detrain_nb.jobs.record import Record
from detrain_nb.pipelines import MyPipelines

LIMIT_S = 60.0
DATA: dict[str, Any] = {
    "source": {"script_text": "print('ran')"},
    "nodes": [{"host": "localhost", "devices": "cpu", "ranks": 1}],
}


class Page(ConsoleView):
    """A console whose messages to its page are collected."""

    def __init__(self, pipelines: MyPipelines) -> None:
        self.sent: queue.Queue[dict[str, Any]] = queue.Queue()
        self.parts: dict[str, Any] = {}
        super().__init__(pipelines)

    def send(self, content: dict[str, Any], buffers: Any = None) -> None:
        self.sent.put(content)

    def open_page(self) -> dict[str, Any]:
        self._handle_custom_msg({"do": "hello", "page": "p"}, [])
        while (said := self.sent.get(timeout=LIMIT_S))["tell"] != "state":
            pass
        self.parts = dict(said["state"])
        return self.parts

    def ask(self, action: str, **arguments: Any) -> Any:
        """Call an action as a page does. Raises: ValueError with what it says."""
        self._handle_custom_msg({"do": "call", "page": "p", "call": "1", "action": action, "arguments": arguments}, [])
        while True:
            said = self.sent.get(timeout=LIMIT_S)
            self._note(said)
            if said["tell"] == "answer":
                if "error" in said:
                    raise ValueError(said["error"])
                return said["value"]

    def wait_for(self, part: str, is_right: Any) -> Any:
        while not is_right(self.parts.get(part)):
            self._note(self.sent.get(timeout=LIMIT_S))
        return self.parts[part]

    def _note(self, said: dict[str, Any]) -> None:
        if said["tell"] == "news":
            self.parts |= said["parts"]

    def names(self) -> dict[str, str]:
        """The ids of the listed ones, by name, as they are told now."""
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
    page.ask("create_example", name="two-copies")
    form = page.wait_for("form", bool)
    assert form["file"] == "pipelines/two-copies.toml" and form["is_right"] and not form["is_changed"]
    assert form["mesh"]["ranks"] == 2 and [each["told"] for each in form["steps"]] == [
        "1 axis",
        "1 node",
        "script text",
    ]


def test_pipeline_is_duplicated_deleted_and_brought_back(page: Page) -> None:
    page.pipelines.create({**DATA, "name": "train"})
    made = page.ask("duplicate", id=page.names()["train"])
    assert made["name"] == "train-2" and page.names()["train-2"] == made["id"]
    page.ask("delete", id=made["id"])
    assert page.wait_for("undo", bool) == {"name": "train-2", "told": "train-2 was moved to pipelines/.trash"}
    assert [*page.names()] == ["train"]
    trash = page.pipelines.folder / ".trash"
    trash.rename(elsewhere := trash.with_name("elsewhere"))
    with pytest.raises(ValueError, match="cannot be brought back"):
        page.ask("undo")
    elsewhere.rename(trash)  # what could not be brought back is still offered
    page.ask("undo")
    assert page.wait_for("undo", lambda undo: undo is None) is None
    assert [*page.names()] == ["train", "train-2"]
    with pytest.raises(ValueError, match="nothing to bring back"):
        page.ask("undo")


def test_pipeline_that_another_tab_has_open_is_deleted_and_its_form_closed(page: Page) -> None:
    page.pipelines.create({**DATA, "name": "train"})
    key = page.names()["train"]
    page.ask("open_pipeline", id=key)
    page.ask("delete", id=key)
    assert page.wait_for("undo", bool)["name"] == "train"
    assert page.form is None and page.state()["form"] is None
    with pytest.raises(ValueError, match="no pipeline is open"):
        page.ask("edit", path="name", typed="other", revision=0, editor="e")


@pytest.mark.parametrize(
    ("action", "arguments", "said"),
    [
        ("delete", {"id": "p99"}, "not in the list any more"),
        ("delete", {"id": "../../etc/passwd"}, "not in the list any more"),
        ("create", {"name": "../up"}, "letters, digits"),
        ("create_example", {"name": "other"}, "one of two-copies"),
        ("edit", {"path": "name", "typed": "x", "revision": 1, "editor": "p"}, "no pipeline is open"),
        ("open_file", {"path": "gone.yaml"}, "it is not there"),
        ("open_file", {"path": "a\0b"}, "is no pipeline"),
        ("change_nodes", {"do": "format", "key": ""}, "one of add"),
    ],
)
def test_what_a_page_may_not_ask_is_refused(page: Page, action: str, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        page.ask(action, **arguments)


def test_edits_are_told_and_saved(page: Page) -> None:
    page.pipelines.create({**DATA, "name": "train"})
    page.ask("open_pipeline", id=page.names()["train"])
    form = page.wait_for("form", bool)
    edit = {"revision": form["revision"], "editor": "p"}
    page.ask("edit", path="env", typed="RANK=1", **edit)
    page.ask("edit", path=f"nodes[{form['rows'][0]}].ranks", typed="x", **edit)
    form = page.wait_for("form", lambda form: len(form["errors"]) == 2)
    assert [*form["errors"]] == [f"nodes[{form['rows'][0]}].ranks", "env"] or set(form["errors"]) == {
        f"nodes[{form['rows'][0]}].ranks",
        "env",
    }
    assert form["is_changed"] and not form["is_right"]
    assert [(each["id"], each["faults"]) for each in form["steps"]] == [("general", 0), ("nodes", 1), ("source", 1)]
    page.ask("close_form")
    assert page.state()["list"]["entries"][0]["is_changed"], "a form with changes is kept"
    page.ask("open_pipeline", id=page.names()["train"])
    assert page.wait_for("form", bool)["draft"]["env"] == "RANK=1"
    page.ask("edit", path="env", typed="A=1", revision=1 << 40, editor="p")
    page.ask("edit", path=f"nodes[{form['rows'][0]}].ranks", typed="2", revision=1 << 40, editor="p")
    page.ask("save", anyway=False, name=None)
    saved = page.pipelines.open("train").spec
    assert saved is not None and saved.env == {"A": "1"} and saved.nodes[0].ranks == 2
    assert not page.state()["form"]["is_changed"]


def test_file_that_changed_is_told_of_and_either_side_is_kept(page: Page) -> None:
    page.pipelines.create({**DATA, "name": "train"})
    page.ask("open_pipeline", id=page.names()["train"])
    page.ask("edit", path="training.steps", typed="5", revision=1 << 40, editor="p")
    other = MyPipelines().open("train")
    MyPipelines().save(other, {**DATA, "name": "train", "training": {"steps": 7}})
    with pytest.raises(ValueError, match="was changed after it was read here"):
        page.ask("save", anyway=False, name=None)
    form = page.wait_for("form", lambda form: form and form["conflict"])
    assert form["conflict"]["changes"] == [["training.steps", "7", "5"]] and form["draft"]["training"]["steps"] == "5"
    page.ask("save", anyway=False, name="train-mine")
    assert page.wait_for("form", lambda form: not form["conflict"])["file"] == "pipelines/train-mine.toml"
    page.ask("open_pipeline", id=page.names()["train"])
    page.ask("edit", path="training.steps", typed="9", revision=1 << 40, editor="p")
    MyPipelines().save(MyPipelines().open("train"), {**DATA, "name": "train", "training": {"steps": 8}})
    with pytest.raises(ValueError, match="was changed after"):
        page.ask("save", anyway=False, name=None)
    page.ask("load_theirs")
    assert page.state()["form"]["draft"]["training"]["steps"] == "8"
    page.ask("edit", path="training.steps", typed="9", revision=1 << 40, editor="p")
    page.ask("save", anyway=True, name=None)
    saved = page.pipelines.open("train").spec
    assert saved is not None and saved.training.steps == 9


def test_run_is_told_as_work_and_then_in_the_list_to_its_end(page: Page) -> None:
    page.pipelines.create({**DATA, "name": "train"})
    page.ask("run", id=page.names()["train"])
    done = page.wait_for("work", lambda work: work and work["is"] != "running")
    assert done == {"what": "starting train", "is": "done"}
    [entry] = page.wait_for("list", lambda found: found["entries"] and found["entries"][0]["job"])["entries"]
    assert entry["job"]["word"] in ("running", "preparing", "succeeded")
    from detrain_nb.jobs import find_job

    def is_over(found: Any) -> bool:
        return bool(found["entries"][0]["job"]["word"] == "succeeded")

    page.wait_for("list", is_over)  # nobody but the view has asked
    job = find_job("train")
    assert page.ask("show_job", id=page.names()["train"]) == page.ask("show_job", id=page.names()["train"])
    page.pipelines.create({**DATA, "name": "never"})
    with pytest.raises(ValueError, match="was never run"):
        page.ask("show_job", id=page.names()["never"])
    job.remove()


def test_what_is_started_is_what_the_form_shows(page: Page) -> None:
    page.pipelines.create({**DATA, "name": "train"})
    page.ask("open_pipeline", id=page.names()["train"])
    page.ask("review")
    harm = {**DATA, "name": "train", "source": {"script_text": "print('harm')"}}
    MyPipelines().save(MyPipelines().open("train"), harm)
    page.ask("start")
    failed = page.wait_for("work", lambda work: work and work["is"] != "running")
    assert failed["is"] == "failed" and "was changed after it was read here, and was not started" in failed["error"]
    assert Record().summaries(limit=10) == []


def test_draft_that_cannot_be_run_says_why(page: Page) -> None:
    page.pipelines.create({"name": "draft"})
    page.ask("run", id=page.names()["draft"])
    failed = page.wait_for("work", lambda work: work and work["is"] == "failed")
    assert "cannot be run: source" in failed["error"]
    page.ask("open_pipeline", id=page.names()["draft"])
    assert page.ask("review") == {"error": "correct what is marked first"}
    with pytest.raises(ValueError, match="to correct first"):
        page.ask("start")


def test_review_and_code_of_a_right_one(page: Page) -> None:
    page.pipelines.create({**DATA, "name": "train"})
    page.ask("open_pipeline", id=page.names()["train"])
    found = page.ask("review")
    assert found["commands"]["nodes"][0]["name"] == "localhost" and "submit(spec)" in found["code"]
    assert page.ask("code", id=page.names()["train"]) == found["code"]


def test_settled_form_is_a_table_of_plain_html(page: Page) -> None:
    page.pipelines.create({**DATA, "name": "train", "description": "<b>bold</b>"})
    (page.pipelines.folder / "<i>odd.toml").write_text("name = 1\x07")
    Record().add("train-1", name="train", nodes="[]", spec="{}", state="running")
    settled = page.settled()
    assert "train" in settled.text and "running" in settled.text and "<i>" not in settled.html
    assert settled.html.count("<tr>") == 3 and "\x07" not in settled.text + settled.html
