"""The form of a pipeline: no typed text is lost, the spec decides what is valid, and the generated code is the same."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from detrain_nb.documents import format_document, parse_document
from detrain_nb.errors import DetrainError, SpecError
from detrain_nb.pipelines import EXAMPLES, SpecForm, draft_form, review_export, review_spec
from detrain_nb.pipelines.form import number_nodes
from detrain_nb.pipelines.form_fields import FIELDS, HOW_OF, KIND_PATH, NODE_FIELDS, SOURCE_KINDS, STEPS
from detrain_nb.spec import Finding, Node, PipelineSpec

RIGHT: dict[str, Any] = {"name": "train", "source": {"script_text": "print('ran')"}}
WHOLE: dict[str, Any] = {
    "name": "whole",
    "description": "two\nlines",
    "parallelism": {"pp": 2, "schedule": "GPipe", "microbatches": 4, "compile": True, "precision": "bf16"},
    "training": {"steps": 100, "batch_size": 32, "learning_rate": 1e-05, "dev": True, "scheduler": "wsd"},
    "nodes": [
        {"host": "gpu1", "ranks": 2, "env": ["HF_TOKEN"], "setup": ["module load cuda", "ulimit -n 4096"]},
        {"host": "gpu2", "devices": [0, 1], "name": "second", "port": 2222},
    ],
    "source": {
        "git": {"url": "https://example.org/gpt.git", "ref": "main"},
        "entry": "train.py",
        "arguments": ["--text", "a b", "", "'", "--list", "1,2"],
        "setup": ["pip list"],
    },
    "data": {"url": "s3://bucket/data", "chunks": ["a", "b, c"]},
    "checkpoint": {"url": "s3://bucket/checkpoints", "keep": "all", "resume": False, "interval": 5},
    "artifacts": [],
    "env": {"A": "1", "B": "two\nlines = odd"},
    "secrets": ["TOKEN"],
    "rendezvous": {"max_restarts": 3, "timeout_s": 60.5},
}


def test_every_field_of_a_spec_is_in_one_step_and_described() -> None:
    sections = {path.partition(".")[0] for path in FIELDS} | {"nodes"}
    assert sections == set(PipelineSpec.model_fields)
    assert {each.step for each in FIELDS.values()} == set(STEPS)
    for each in [*FIELDS.values(), *NODE_FIELDS.values()]:
        assert each.title and each.hint, each.path
        json.dumps(each.to_json())
    assert {name: each.title for name, each in NODE_FIELDS.items()} == {
        name: field.title for name, field in Node.model_fields.items()
    }, "a node's fields are called as in the form of nodes"
    assert HOW_OF.keys() <= FIELDS.keys() and "--model_name" in FIELDS["name"].to_json()["how"]
    port, seed = NODE_FIELDS["port"], FIELDS["training.seed"]
    assert (port.low, port.high, port.kind, port.is_required) == (1, 65535, "number", False)
    assert (seed.low, seed.high) == (0, (1 << 32) - 1)
    assert FIELDS["parallelism.activations"].choices == ("none", "selective", "full")
    assert FIELDS["parallelism.dp_shard"].default == "-1" and FIELDS["name"].is_required
    assert {path for path, each in FIELDS.items() if each.is_required} == {
        *("name", KIND_PATH, "source.git.url", "source.entry"),
        *(f"source.{kind}" for kind in SOURCE_KINDS if kind != "git"),
    }, "of a source those of its kinds, where one is chosen"


@pytest.mark.parametrize("data", [RIGHT, WHOLE, *(dict(each.data) for each in EXAMPLES)], ids=lambda each: each["name"])
def test_spec_is_typed_and_read_as_equal(data: dict[str, Any]) -> None:
    spec = PipelineSpec.from_dict(data)
    form = SpecForm(spec)
    assert form.spec == spec and form.document == spec.to_dict()
    texts = [typed for path in FIELDS if not isinstance(typed := form.typed(path), str | bool)]
    assert texts == [], "only texts and ticks are typed"


def test_wrong_value_stays_and_is_told_of_beside_its_field() -> None:
    form = SpecForm(RIGHT)
    before = form.spec
    form.edit("training.batch_size", "3o")
    assert form.typed("training.batch_size") == "3o" and form.draft["training"] == {"batch_size": "3o"}
    assert form.errors == {
        "training.batch_size": "'3o': give a whole number, 1 to 1,000,000,000,000: samples per step, over all replicas"
    }
    assert form.spec is before and not form.is_right
    form.edit("training.batch_size", "30")
    assert form.errors == {} and form.spec is not None and form.spec.training.batch_size == 30 and form.is_right
    form.edit("training.batch_size", "")
    assert form.spec == before


@pytest.mark.parametrize(
    ("path", "typed", "where"),
    [
        ("name", "", "name"),
        ("training.learning_rate", "0", "training.learning_rate"),
        ("parallelism.pp", "0", "parallelism"),
        ("parallelism.pp", "3", "parallelism"),
        ("source.arguments", "--a 'b", "source.arguments"),
        ("env", "TOKEN", "env"),
        ("env", "A=1\nA=2", "env"),
        ("env", "RANK=1", "env.RANK"),
        ("source.script_text", "def", "source.script_text"),
        ("source.kind", "git", "source.git.url"),
        ("source.kind", "notebook", "source.notebook"),
        ("nodes[0].port", "99999", "nodes[0].port"),
        ("nodes[0].devices", "gpu", "nodes[0].devices"),
        ("artifacts", "/etc", "artifacts[0]"),
        ("secrets", "A, A", "secrets"),
        ("checkpoint.interval", "5", "checkpoint.url"),
        ("rendezvous.min_nodes", "2", "rendezvous.min_nodes"),
    ],
)
def test_fault_is_found_by_the_path_of_its_field(path: str, typed: str, where: str) -> None:
    form = SpecForm({**RIGHT, "nodes": [{"host": "gpu1", "ranks": 2}]})
    form.edit(path, typed)
    assert [*form.errors] == [where], form.errors
    assert form.typed(path) == typed


@pytest.mark.parametrize(("path", "typed"), [("name", ""), ("training.steps", "x"), ("env", "TOKEN")])
def test_fault_of_a_script_is_told_while_other_fields_are_wrong(path: str, typed: str) -> None:
    form = SpecForm(RIGHT)
    form.edit(path, typed)
    form.edit("source.script_text", "x = 1\ndef")
    assert [*form.errors] == [path, "source.script_text"]
    assert form.errors["source.script_text"].startswith("the text, line 2: is not Python")
    form.edit("source.script_text", "x = 1")
    assert [*form.errors] == [path]


def test_warning_of_a_check_names_the_node_by_its_place() -> None:
    nodes = [{"host": "gpu1", "ranks": 1}, {"host": "gpu2", "ranks": 1, "relative_speed": 1.0}]
    form = SpecForm({**RIGHT, "nodes": nodes})
    form.edit("nodes[0].relative_speed", "0.2")
    assert [*form.warnings] == ["nodes[0].relative_speed"] and form.is_right


@pytest.mark.timeout(30)
def test_what_is_found_of_thousands_of_nodes_has_their_places() -> None:
    """A file of a repository may have them; searching all nodes for each finding took minutes, at each edit."""
    names = ["gpu.1", "gpu", *(f"h{number}" for number in range(20_000))]
    fields = [*(f"nodes.{name}.ranks" for name in reversed(names)), "nodes.gpu.env.HOME", "nodes.x.ranks", "training"]
    found = number_nodes([Finding(field, "") for field in fields], names)
    assert [each.field for each in found[-5:]] == [
        *("nodes[1].ranks", "nodes[0].ranks", "nodes[1].env.HOME", "nodes.x.ranks", "training")
    ]
    assert found[0].field == "nodes[20001].ranks"


def test_text_of_one_kind_of_source_waits_while_another_is_chosen() -> None:
    form = SpecForm(RIGHT)
    form.edit(KIND_PATH, "path")
    form.edit("source.path", "gpt")
    assert form.errors == {"source.entry": "is missing: path is a folder: give the Python file in it to run"}
    form.edit(KIND_PATH, "git")
    form.edit("source.git.url", "https://example.org/a.git")
    form.edit("source.entry", "train.py")
    assert form.spec is not None and form.spec.source.kind == "git"
    form.edit(KIND_PATH, "script_text")
    assert form.spec.source.kind == "script_text" and form.spec.source.entry is None
    form.edit(KIND_PATH, "git")
    assert form.spec.source.git is not None and form.typed("source.script_text") == RIGHT["source"]["script_text"]


def test_what_no_file_can_hold_is_refused_with_its_place() -> None:
    with pytest.raises(SpecError, match=r"^training\.steps: 2020-01-01 is a date or a time"):
        SpecForm({**RIGHT, "training": {"steps": date(2020, 1, 1)}})
    with pytest.raises(SpecError, match=r"^source: the key \('script',\) is not a string"):
        SpecForm({"source": {("script",): "train.py"}})


def test_spec_that_is_assigned_is_shown() -> None:
    form = SpecForm()
    assert form.spec is None and {"name", "source"} == {*form.errors}
    told: list[int] = []
    stop = form.on_change(lambda: told.append(form.revision))
    form.spec = PipelineSpec.from_dict(WHOLE)
    assert form.typed("training.learning_rate") == "1e-05" and form.typed("nodes[1].devices") == "0, 1"
    for path in ("nodes.1.devices", "nodes.x.devices"):
        with pytest.raises(SpecError, match=r"is not a field: write a field of a node as nodes\[0\]\.host"):
            form.edit(path, "0")
    for other in (None, 5, "train.toml"):
        with pytest.raises(SpecError, match=r"is not a pipeline: give a PipelineSpec, or a mapping of fields"):
            form.spec = other  # type: ignore[assignment]
    stop()
    form.edit("name", "other")
    assert told == [2]


def test_file_with_faults_is_shown_as_it_is_and_can_be_mended() -> None:
    data = {"name": 5, "training": {"steps": "many", "stepz": 3}, "nodes": ["gpu1", {"host": "gpu2"}], "colour": "red"}
    form = SpecForm(data)
    assert form.typed("training.steps") == "many" and form.typed("name") == "5" and form.typed("colour") == "red"
    assert form.document["colour"] == "red" and form.document["training"]["stepz"] == 3
    for path in ("colour", "training.stepz"):
        assert "is not a field" in form.errors[path]
        with pytest.raises(SpecError, match="only be removed"):
            form.edit(path, "blue")
        form.edit(path, "")
    form.edit("name", "train")
    form.edit("training.steps", "9")
    form.edit("nodes[0].host", "gpu1")
    form.edit("source.module", "package.train")
    assert form.errors == {} and form.spec is not None and [node.host for node in form.spec.nodes] == ["gpu1", "gpu2"]


@pytest.mark.parametrize(
    "path", ["", "nothing", "training", "nodes", "nodes[0]", "nodes[7].host", "training.steps.x", "a" * 9000]
)
def test_path_that_is_no_field_is_refused(path: str) -> None:
    form = SpecForm({**RIGHT, "nodes": [{"host": "gpu1"}]})
    before = form.draft
    with pytest.raises(SpecError, match=r"not a field|no such node"):
        form.edit(path, "x")
    with pytest.raises(SpecError):
        form.edit(path, "")
    with pytest.raises(SpecError):
        form.edit("name", 5)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="at most"):
        form.edit("name", "x" * 1_000_000)
    assert form.draft == before


def test_nodes_are_added_copied_moved_and_brought_back() -> None:
    form = SpecForm(RIGHT)
    first = form.add_node({"host": "gpu1", "ranks": "2", "name": "one"})
    second = form.copy_node(first)
    form.edit(f"nodes[{second}].host", "gpu2")
    assert form.spec is not None and [(each.name, each.ranks) for each in form.spec.nodes] == [("one", 2), ("gpu2", 2)]
    form.move_node(second, -5)
    assert form.rows == [second, first] and [each.host for each in form.spec.nodes] == ["gpu2", "gpu1"]
    form.edit(f"nodes[{first}].port", "x")
    assert [*form.errors] == ["nodes[1].port"]
    form.remove_node(first)
    assert form.errors == {} and len(form.spec.nodes) == 1
    form.restore_node(first)
    assert form.typed(f"nodes[{first}].port") == "x"
    for act in (
        lambda: form.remove_node("n99"),
        lambda: form.restore_node(second),
        lambda: form.add_node({"hots": "a"}),
    ):
        with pytest.raises(SpecError):
            act()


def test_form_takes_no_more_than_a_file_could_hold_several_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draft_form, "_MOST_CHARS_IN_ALL", 20_000)
    form = SpecForm()
    long = "x" * 2500
    key = form.add_node({"setup": long})
    for _ in range(20):
        form.remove_node(form.copy_node(key))
    assert len(json.dumps(form._removed)) < 20_000, "what was removed is kept as far as there is room"
    form.edit("description", long)
    with pytest.raises(SpecError, match="more than 20,000 characters"):
        for _ in range(20):
            form.copy_node(key)
    with pytest.raises(SpecError, match="more than 20,000 characters"):
        form.edit("name", long)
    assert form.edit("description", ""), "it can be made less"


def test_edit_of_an_old_revision_is_kept_as_a_conflict(monkeypatch: pytest.MonkeyPatch) -> None:
    form = SpecForm({**RIGHT, "training": {"steps": 4}})
    seen = form.revision
    assert form.edit("training.steps", "5000", revision=seen, editor="one")
    assert form.edit("training.seed", "1", revision=seen, editor="two"), "another field: no conflict"
    assert form.edit("training.steps", "50", revision=seen, editor="one"), "its own edits do not disturb an editor"
    assert not form.edit("training.steps", "4000", revision=seen, editor="two")
    [conflict] = form.conflicts
    assert (conflict.path, conflict.theirs, conflict.mine) == ("training.steps", "50", "4000")
    assert form.typed("training.steps") == "50"
    form.resolve("training.steps", keep="mine", editor="two")
    assert form.typed("training.steps") == "4000" and form.conflicts == ()
    form.edit("training.steps", "1", revision=seen, editor="one")
    with monkeypatch.context() as patch, pytest.raises(SpecError, match="would have more than"):
        patch.setattr(draft_form, "_MOST_CHARS_IN_ALL", 10)
        form.resolve("training.steps", keep="mine", editor="one")
    assert [each.mine for each in form.conflicts] == ["1"], "what could not be applied is kept"
    form.resolve("training.steps", keep="theirs", editor="one")
    assert form.typed("training.steps") == "4000" and form.conflicts == ()
    assert form.edit("training.steps", "2", revision=form.revision, editor="one")
    with pytest.raises(SpecError, match="no conflict"):
        form.resolve("training.steps", keep="mine", editor="one")


def test_edit_of_a_node_that_another_editor_removed_brings_it_back() -> None:
    form = SpecForm({**RIGHT, "nodes": [{"host": "gpu1", "ranks": 1}, {"host": "gpu2", "ranks": 1}]})
    seen, (first, second) = form.revision, form.rows
    form.remove_node(first)
    assert form.edit(f"nodes[{second}].ranks", "3", revision=seen, editor="two"), "it has moved, but is the same"
    assert not form.edit(f"nodes[{first}].ranks", "2", revision=seen, editor="two")
    [conflict] = form.conflicts
    assert conflict.theirs is None
    form.resolve(conflict.path, keep="mine", editor="two")
    assert form.spec is not None and [(each.host, each.ranks) for each in form.spec.nodes] == [("gpu1", 2), ("gpu2", 3)]


def test_load_is_a_change_of_every_field() -> None:
    form = SpecForm(RIGHT)
    seen = form.revision
    form.load({**RIGHT, "name": "theirs"}, editor="one")
    assert not form.edit("name", "mine", revision=seen, editor="two")
    assert form.edit("name", "mine", revision=form.revision, editor="two")


# ---- whatever is typed

_PATHS = sorted({*FIELDS, *(f"nodes[{at}].{name}" for at in range(2) for name in NODE_FIELDS)})
_TYPED = st.one_of(
    st.text(max_size=12),
    st.sampled_from(
        ["", "1", "-1", "0", "2", "1e-3", "cpu", "0, 1", "gpu1", "a.py", "[1]", '{"a": 1}', "--x 'y", "A=1"]
    ),
    st.sampled_from([*SOURCE_KINDS, "1F1B", "all", "none", "A=1", "train.ipynb", "https://example.org/a.git"]),
    st.booleans(),
)


class Edits(RuleBasedStateMachine):
    """Any sequence of edits: each field keeps the last text typed into it, and spec, document and file agree."""

    @initialize(data=st.sampled_from([{}, RIGHT, WHOLE]))
    def begin(self, data: dict[str, Any]) -> None:
        self.form = SpecForm(copy.deepcopy(data))
        while len(self.form.rows) < 2:
            self.form.add_node({"host": f"gpu{len(self.form.rows)}"})
        self.last: dict[str, Any] = {}

    @rule(path=st.sampled_from(_PATHS), typed=_TYPED)
    def edit(self, path: str, typed: str | bool) -> None:
        assert self.form.edit(path, typed)
        self.last[self.form.key_path(path)] = typed

    @rule(path=st.sampled_from(_PATHS), typed=_TYPED, keep=st.sampled_from(["mine", "theirs"]))
    def edit_elsewhere(self, path: str, typed: str | bool, keep: str) -> None:
        """Edit in another tab that has seen no edit since the form was created."""
        key = self.form.key_path(path)
        there = self.form.typed(path)
        if self.form.edit(path, typed, revision=1, editor="tab"):
            self.last[key] = typed
            return
        assert [each.mine for each in self.form.conflicts if each.path == key] == [typed]
        assert self.form.typed(path) == there
        self.form.resolve(key, keep=keep, editor="tab")
        self.last[key] = typed if keep == "mine" else there

    @rule(by=st.sampled_from([-1, 1]))
    def move(self, by: int) -> None:
        self.form.move_node(self.form.rows[0], by)

    @rule()
    def take_away_and_bring_back(self) -> None:
        key = self.form.rows[0]
        self.form.remove_node(key)
        self.form.restore_node(key)

    @invariant()
    def nothing_typed_is_lost(self) -> None:
        for path, typed in getattr(self, "last", {}).items():
            assert self.form.typed(path) == typed and type(self.form.typed(path)) is type(typed)

    @invariant()
    def spec_is_right(self) -> None:
        if not hasattr(self, "form") or self.form.spec is None:
            return
        assert PipelineSpec.from_dict(self.form.spec.to_dict()) == self.form.spec
        if not self.form.errors:
            assert PipelineSpec.from_dict(self.form.document) == self.form.spec

    @invariant()
    def file_of_it_says_the_same(self) -> None:
        if not hasattr(self, "form"):
            return
        try:
            text = format_document(self.form.document, ".toml")
        except DetrainError:
            return  # no file can contain it
        again = SpecForm(parse_document(text, ".toml"))
        if not self.form.errors:
            assert again.spec == self.form.spec


Edits.TestCase.settings = settings(
    max_examples=30, stateful_step_count=20, deadline=None, suppress_health_check=[*HealthCheck]
)
TestEdits = Edits.TestCase


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(st.sampled_from(_PATHS[:40]), _TYPED, max_size=8))
def test_whatever_is_typed_makes_a_document_of_plain_json(typed: dict[str, Any]) -> None:
    form = SpecForm({**RIGHT, "nodes": [{"host": "a"}, {"host": "b"}]})
    for path, each in typed.items():
        form.edit(path, each)
    assert json.loads(json.dumps(form.document)) == form.document
    assert all(isinstance(path, str) and said for path, said in form.errors.items())


# ---- the generated code


@pytest.mark.parametrize("data", [RIGHT, WHOLE, dict(EXAMPLES[0].data)], ids=lambda each: each["name"])
def test_code_builds_an_equal_spec(data: dict[str, Any], tmp_path: Path) -> None:
    form = SpecForm(data)
    code = form.to_code().replace("job = submit(spec)\njob\n", "import json; print(json.dumps(spec.to_dict()))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == form.document
    assert max(map(len, code.splitlines())) <= 130


@given(st.text(max_size=60))
@settings(max_examples=100, deadline=None)
def test_code_says_any_script_as_it_is(script: str) -> None:
    try:
        spec = PipelineSpec.from_dict({"name": "train", "source": {"script_text": script}, "description": ""})
    except SpecError:
        return
    built: dict[str, Any] = {}
    exec(SpecForm(spec).to_code().replace("job = submit(spec)\njob\n", ""), built)
    assert built["spec"] == spec


@pytest.mark.timeout(240)  # the machine may be busy
def test_code_submits_the_pipeline(home: Path) -> None:
    form = SpecForm({**RIGHT, "nodes": [{"host": "localhost", "devices": "cpu", "ranks": 1}]})
    code = f"{form.to_code()}\njob.wait(120).check()\nprint([line.text for line in job.logs().lines])\njob.remove()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=home, timeout=200)
    assert "'ran'" in done.stdout, done.stdout + done.stderr


def test_code_of_what_is_no_pipeline_is_refused() -> None:
    with pytest.raises(SpecError, match="not a pipeline yet: name: is missing"):
        SpecForm().to_code()


def test_review_says_what_each_node_would_run(home: Path) -> None:
    nodes = [{"host": "gpu1", "ranks": 2}, {"host": "gpu2", "ranks": 2}]
    spec = PipelineSpec.from_dict({**RIGHT, "parallelism": {"pp": 2}, "training": {"batch_size": 8}, "nodes": nodes})
    found = review_spec(spec)
    assert json.loads(json.dumps(found)) == found
    assert [node["name"] for node in found["plan"]["nodes"]] == ["gpu1", "gpu2"]
    assert found["plan"]["nodes"][1]["ranks"][0] == {
        "rank": 2,
        "device": "cpu",
        "places": {"pp": 1, "dp_replicate": 0, "dp_shard": 0, "tp": 0},
        "stages": [1],
    }
    assert found["plan"]["bubble"] == 1 / (4 + 1), "two stages, four microbatches"
    assert found["plan"]["schedule"] == "1F1B" and review_spec(PipelineSpec.from_dict(RIGHT))["plan"]["schedule"] == ""
    assert [each["name"] for each in found["commands"]["nodes"]] == ["gpu1", "gpu2"]
    assert "--nnodes=2" in found["commands"]["nodes"][0]["command"]
    assert 'name = "train"' in found["documents"]["toml"]
    unsaid = PipelineSpec.from_dict({**RIGHT, "parallelism": {"pp": 2}, "nodes": nodes})
    split_up = spec.with_overrides({"parallelism.schedule": "ZBVZeroBubble"})
    assert [review_spec(each)["plan"]["bubble"] for each in (unsaid, split_up)] == [None, None], "nothing is guessed"
    unknown = review_spec(spec.with_overrides({"parallelism.pp": 3}))
    assert "mesh" in unknown["plan"]["error"] and "mesh" in unknown["commands"]["error"]


def test_export_is_of_one_format_and_an_error_says_which_option_it_is_about() -> None:
    two = [{"host": "gpu1"}, {"host": "gpu2"}]
    spec = PipelineSpec.from_dict({**RIGHT, "nodes": two})
    right = review_export(spec, "slurm", {"gpus": " 4 ", "time": "02:00:00", "account": ""})
    assert "#SBATCH --gpus-per-node=4" in right["text"] and "#SBATCH --time=02:00:00" in right["text"]
    assert "--account" not in right["text"] and not right["more"], "what is empty was not given"
    long = review_export(spec.with_overrides({"source": {"script_text": "x = 1\n" * 100_000}}), "slurm", {})
    assert len(long["text"]) < 310_000 and len(long["text"]) + long["more"] > 600_000
    for option, typed, said in [
        ("time", "2 hours", "--time '2 hours': give minutes, HH:MM:SS or"),
        ("time", "abc", "--time 'abc': give minutes, HH:MM:SS or DAYS-HH:MM:SS"),
        ("gpus", "four", "--gpus 'four': give a whole number, 0 to"),
        ("gpus", "1" * 5000, "give a whole number, 0 to"),
    ]:
        wrong = review_export(spec, "slurm", {option: typed})
        assert said in wrong["error"] and wrong["option"] == option
    unlike = spec.with_overrides({"nodes": [{"host": "gpu1", "ranks": 1}, {"host": "gpu2", "ranks": 2}]})
    told = review_export(unlike, "slurm", {})
    assert "gpu2" in told["error"] and (told["option"], told["field"]) == ("", ""), "it is about the whole"
    bare = review_export(spec, "pytorchjob", {})
    assert "starts a container" in bare["error"] and bare["field"] == "image"
    assert "no option --time" in review_export(spec, "torchrun", {"time": "1"})["error"]


def test_review_names_fields_that_look_like_something_else(home: Path) -> None:
    """Text from a repository may reverse the writing direction, and so show another command than the one that runs."""
    plain = {"script_text": "if 1:\n\tprint('ä')", "setup": ["pip install torch"]}
    turned = {"script_text": "print('\u202eran')", "setup": ["true \u2066# install", "pip install\u200b torch"]}
    fields = {**RIGHT, "nodes": [{"host": "localhost", "devices": "cpu", "ranks": 1}]}
    assert review_spec(PipelineSpec.from_dict({**fields, "source": plain}))["commands"]["warnings"] == []
    assert review_spec(PipelineSpec.from_dict({**fields, "source": turned}))["commands"]["warnings"] == [
        "source.script_text has characters that are invisible, or change the direction of text: U+202E",
        "source.setup has characters that are invisible, or change the direction of text: U+200B, U+2066",
    ]
