"""My Pipelines: files next to a notebook are listed, opened, saved, run and deleted, without any loss."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from detrain_nb.errors import Conflict, JobError, SpecError
from detrain_nb.jobs.record import Record
from detrain_nb.pipelines import EXAMPLES, MyPipelines, RecentFiles, SpecForm, my_pipelines, spec_file
from detrain_nb.spec import PipelineSpec

DATA: dict[str, Any] = {"source": {"script_text": "print('ran')"}, "training": {"steps": 4}}


def names_of(mine: MyPipelines, search: str = "") -> list[str]:
    return [each.name for each in mine.entries(search)]


def test_list_is_empty_and_makes_nothing_before_something_is_saved(mine: MyPipelines) -> None:
    assert len(mine.entries()) == 0
    assert not mine.folder.exists()


def test_entry_says_mesh_nodes_and_what_is_wrong(mine: MyPipelines) -> None:
    nodes = [{"host": f"gpu{number}", "ranks": 4} for number in (1, 2)]
    mine.create({**DATA, "name": "gpt", "parallelism": {"pp": 2, "tp": 2}, "nodes": nodes})
    mine.create({**DATA, "name": "here"})
    mine.create({"name": "draft", "parallelism": {"pp": 4}, "training": {"steps": "many"}})
    (mine.folder / "broken.toml").write_text("name = [")
    broken, draft, gpt, here = mine.entries()
    assert (gpt.mesh, gpt.nodes, gpt.fault) == ("pp 2, dp_shard 2, tp 2", "gpu1, gpu2 · 8 ranks", "")
    assert here.nodes == "this machine · 2 ranks"
    assert (draft.mesh, draft.nodes, draft.fault) == ("pp 4", "this machine", "2 fields to correct")
    assert not draft.is_spec and draft.is_document
    assert not broken.is_document and "at the end" in broken.fault
    assert "broken.toml" in str(mine.entries()), "listed with its error, not hidden"


def test_files_in_other_formats_are_listed_opened_and_not_doubled(mine: MyPipelines) -> None:
    mine.folder.mkdir()
    (mine.folder / "yours.yaml").write_text("name: yours\nsource: {script_text: print(1)}\n")
    (mine.folder / "theirs.json").write_text('{"name": "theirs", "source": {"script_text": "1"}}')
    (mine.folder / "pipeline.schema.json").write_text("{}")
    assert names_of(mine) == ["theirs", "yours"]
    opened = mine.open("yours")
    assert opened.path.name == "yours.yaml" and opened.spec is not None
    with pytest.raises(Conflict, match=r"yours\.yaml already exists"):
        mine.create({**DATA, "name": "yours"})
    assert mine.duplicate("yours").path.name == "yours-2.toml"
    deleted = mine.delete("theirs")
    assert names_of(mine) == ["yours", "yours-2"]
    assert mine.restore(deleted).name == "theirs.json"


@pytest.mark.parametrize(
    ("search", "found"),
    [("gpu2", ["gpt"]), ("PP 2", ["gpt"]), ("never", ["gpt", "here"]), ("machine here", ["here"]), ("gpu9", [])],
)
def test_search_is_in_name_nodes_mesh_and_status(mine: MyPipelines, search: str, found: list[str]) -> None:
    nodes = [{"host": "gpu1", "ranks": 1}, {"host": "gpu2", "ranks": 1}]
    mine.create({**DATA, "name": "gpt", "parallelism": {"pp": 2}, "nodes": nodes})
    mine.create({**DATA, "name": "here"})
    assert names_of(mine, search) == found


def test_last_job_is_told_from_the_record(mine: MyPipelines) -> None:
    record = Record()

    def add(name: str, number: int, state: str) -> None:
        file = os.fsencode(mine.find(name))
        record.add(f"{name}-{number}", name=name, nodes="[]", spec="{}", state=state, file=file)

    for name in ("well", "ill", "runs", "silent", "begun"):
        mine.create({**DATA, "name": name})
        add(name, 1, "ended")
        record.update(f"{name}-1", exit_code=0, started_at=100.0, ended_at=158.0)
    add("ill", 2, "ended")
    record.update("ill-2", exit_code=3)
    add("runs", 2, "running")
    record.update("runs-2", metrics='{"step": 3, "loss": 0.5}')
    add("silent", 2, "unknown")
    add("begun", 2, "not started")
    told = {each.name: each.job for each in mine.entries()}
    assert {name: (job.sign, job.word, job.count) for name, job in told.items() if job} == {
        "well": ("ok", "succeeded", 1),
        "ill": ("bad", "failed, exit 3", 2),
        "runs": ("run", "running 75 %", 2),
        "silent": ("lost", "unknown", 2),
        "begun": ("ok", "succeeded", 2),  # like `Record.get`: jobs that did not start come last
    }
    assert told["well"] is not None and told["well"].detail.endswith("in 58 s")
    assert names_of(mine, "failed") == ["ill"]


def test_job_is_of_the_file_that_it_was_submitted_from(mine: MyPipelines, home: Path) -> None:
    """A job of the same name from another folder does not count. Earlier releases recorded no file."""
    (home / "another").mkdir()
    other = MyPipelines(home / "another/pipelines")
    for each in (mine, other):
        each.create({**DATA, "name": "train"})
    record = Record()
    record.add("train-1", name="train", nodes="[]", spec="{}", state="ended", file=None)
    assert [job_of(each, "train") for each in (mine, other)] == ["train-1"] * 2, "it may be of both"
    fresh = other.create({**DATA, "name": "train-2"})
    record.add("train-2-1", name="train-2", nodes="[]", spec="{}", state="ended", file=None)
    while fresh.path.stat().st_ctime <= record.get("train-2").submitted_at:  # file times come from a different clock
        os.utime(fresh.path)
    assert job_of(other, "train-2") is None
    record.add("train-3", name="train", nodes="[]", spec="{}", state="ended", file=os.fsencode(mine.find("train")))
    record.add("train-4", name="train", nodes="[]", spec="{}", state="ended")  # its spec is in no file
    assert [job_of(each, "train") for each in (mine, other)] == ["train-3", "train-1"]


def job_of(mine: MyPipelines, name: str) -> str | None:
    [job] = [each.job for each in mine.entries() if each.name == name]
    return job and job.id


def test_record_that_cannot_be_used_leaves_the_list(mine: MyPipelines) -> None:
    mine.create({**DATA, "name": "here"})
    state = Path(os.environ["XDG_STATE_HOME"], "detrain_nb")
    state.mkdir(mode=0o700, exist_ok=True)
    (state / "jobs.sqlite").write_text("this is no database, but longer than its head would be")
    entries = mine.entries()
    assert [each.name for each in entries] == ["here"] and "jobs.sqlite" in entries.notices[0]


@pytest.mark.parametrize("name", ["../up", "a/b", "", " ", ".hidden", "-x", "x" * 64, "a\nb", "a\0b", "ü"])
def test_name_that_is_none_of_a_file_is_refused(mine: MyPipelines, name: str) -> None:
    with pytest.raises(SpecError, match="a-z, A-Z, 0-9"):
        mine.create(DATA, name=name)
    assert not mine.folder.exists()


def test_links_are_not_followed(mine: MyPipelines, tmp_path: Path) -> None:
    mine.create({**DATA, "name": "here"})
    secret = tmp_path / "elsewhere.toml"
    secret.write_text('name = "elsewhere"\n[source]\nscript_text = "1"\n')
    (mine.folder / "link.toml").symlink_to(secret)
    [entry] = mine.entries("link")
    assert "it is a link" in entry.fault and entry.name == "link"
    with pytest.raises(Conflict, match="already exists"):
        mine.create({**DATA, "name": "other"}, name="here")
    linked = MyPipelines(tmp_path / "linked")
    linked.folder.symlink_to(mine.folder)
    for act in (linked.entries, lambda: linked.create({**DATA, "name": "new"}), lambda: linked.delete("here")):
        with pytest.raises(SpecError, match="is a link or not"):
            act()
    assert names_of(mine) == ["here", "link"]


def test_file_changed_by_others_is_not_written_over(mine: MyPipelines) -> None:
    opened = mine.create({**DATA, "name": "train"})
    assert opened.spec is not None
    other = MyPipelines().open("train")  # as another notebook has it
    assert other.spec is not None
    mine.save(opened, opened.spec.with_overrides({"training.steps": 5, "env.TOKEN": "secret-there"}))
    wanted = other.spec.with_overrides({"training.steps": 6, "env.TOKEN": "secret-here"})
    with pytest.raises(Conflict) as caught:
        mine.save(other, wanted)
    told = str(caught.value)
    assert "pipelines/train.toml was changed after it was read here" in told
    assert "training.steps is 5 there and 6 here" in told and "secret" not in told
    assert caught.value.owner and caught.value.changed_at is not None
    assert {each.path for each in caught.value.changes} == {"training.steps", "env.TOKEN"}
    theirs = mine.open("train")
    assert theirs.spec is not None and theirs.spec.training.steps == 5, "nothing was written"
    kept = mine.save(other, wanted, anyway=True)
    assert kept.spec == wanted
    assert mine.save_as("train-mine", wanted).path.name == "train-mine.toml"


def test_file_that_others_have_made_no_document_is_a_conflict(mine: MyPipelines) -> None:
    opened = mine.create({**DATA, "name": "train"})
    for text, told in (
        ("", "is not given there and 'train' here)"),
        ("[", "(it is not a valid document now: at the end: "),
    ):
        opened.path.write_text(text)
        with pytest.raises(Conflict) as caught:
            mine.save(opened, {**DATA, "name": "train"})
        assert told in str(caught.value) and all(each.path for each in caught.value.changes)
    with pytest.raises(SpecError, match="None is not a pipeline"):
        mine.save(mine.open("train"), SpecForm(mine.open("train").spec).spec)  # type: ignore[arg-type]
    assert opened.path.read_text() == "["


def test_file_removed_by_others_is_a_conflict(mine: MyPipelines) -> None:
    opened = mine.create({**DATA, "name": "train"})
    opened.path.unlink()
    with pytest.raises(Conflict, match="was removed after it was read here"):
        mine.save(opened, DATA | {"name": "train"})
    assert mine.save(opened, DATA | {"name": "train"}, anyway=True).spec is not None


SAVER = """
import sys
from detrain_nb.errors import Conflict
from detrain_nb.pipelines import MyPipelines
mine = MyPipelines()
opened = mine.open("train")
print("read", flush=True)
sys.stdin.readline()
try:
    mine.save(opened, {**opened.data, "description": sys.argv[1]})
    print("saved")
except Conflict:
    print("conflict")
"""


def test_of_two_processes_that_save_at_once_one_wins_and_one_is_told(mine: MyPipelines) -> None:
    mine.create({**DATA, "name": "train"})
    savers = [
        subprocess.Popen([sys.executable, "-c", SAVER, text], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for text in ("one", "two")
    ]
    for saver in savers:
        assert saver.stdout is not None and saver.stdout.readline() == "read\n"
    for saver in savers:
        assert saver.stdin is not None
        saver.stdin.write("\n")
        saver.stdin.flush()
    told = [saver.communicate(timeout=60)[0].strip() for saver in savers]
    assert sorted(told) == ["conflict", "saved"]
    winner = ("one", "two")[told.index("saved")]
    assert (mine.open("train").data or {})["description"] == winner


def test_comments_are_kept_in_the_trash(mine: MyPipelines) -> None:
    mine.create({**DATA, "name": "train"})
    file = mine.folder / "train.toml"
    text = f'# the learning rate is from the paper\n"$schema" = "pipeline.schema.json"\n{file.read_text()}'
    file.write_text(text)
    opened = mine.open("train")
    assert opened.spec is not None
    saved = mine.save(opened, opened.spec.with_overrides({"training.steps": 9}))
    assert (saved.data or {})["$schema"] == "pipeline.schema.json"
    assert (mine.folder / ".trash" / "train.before.toml").read_text() == text
    mine.save(saved, saved.spec or {})
    assert len(list((mine.folder / ".trash").iterdir())) == 1, "what we write ourselves has nothing to lose"


def test_duplicate_has_a_free_name_of_its_own(mine: MyPipelines) -> None:
    mine.create({**DATA, "name": "train"})
    for name in ("train-2", "train-3"):
        copy = mine.duplicate("train")
        assert copy.name == copy.path.stem == name
    assert mine.duplicate("train-3").name == "train-4"
    long = mine.create({**DATA, "name": "n" * 63})
    assert mine.duplicate(long.path).name == "n" * 61 + "-2"


def test_deleted_pipeline_comes_back_also_where_its_name_is_taken(mine: MyPipelines) -> None:
    before = mine.create({**DATA, "name": "train"}).text
    deleted = mine.delete("train")
    assert str(deleted) == "train was moved to pipelines/.trash" and names_of(mine) == []
    assert mine.restore(deleted).read_text() == before
    deleted = mine.delete("train")
    mine.create({**DATA, "name": "train"})
    again = mine.delete("train")
    mine.create({**DATA, "name": "train"})
    assert {mine.restore(each).name for each in (deleted, again)} == {"train-2.toml", "train-3.toml"}
    with pytest.raises(SpecError, match=r"no longer in"):
        mine.restore(deleted)


def test_trash_that_is_a_link_takes_nothing(mine: MyPipelines, tmp_path: Path) -> None:
    mine.create({**DATA, "name": "train"})
    (mine.folder / ".trash").symlink_to(tmp_path)
    with pytest.raises(SpecError, match="is a link or not a folder"):
        mine.delete("train")
    assert names_of(mine) == ["train"]


def test_trash_that_has_become_a_link_gives_nothing_back(mine: MyPipelines, tmp_path: Path) -> None:
    mine.create({**DATA, "name": "here"})
    deleted = mine.delete("here")
    (mine.folder / ".trash").rename(tmp_path / "others")
    (mine.folder / ".trash").symlink_to(tmp_path / "others")
    with pytest.raises(SpecError, match="link or not a folder"):
        mine.restore(deleted)
    assert (tmp_path / "others" / "here.toml").exists()


def test_files_opened_elsewhere_are_listed_and_never_moved(mine: MyPipelines, tmp_path: Path) -> None:
    file = tmp_path / "shared.yaml"
    file.write_text("name: shared\nsource: {script_text: print(1)}\n")
    assert mine.open(file).spec is not None
    [entry] = MyPipelines().entries()
    assert (entry.name, entry.is_beside, entry.path) == ("shared", False, file)
    deleted = mine.delete(file)
    assert file.exists() and names_of(mine) == [] and "its file" in str(deleted)
    mine.restore(deleted)
    file.unlink()
    [gone] = mine.entries()
    assert gone.fault == "the file no longer exists"


def test_name_with_suffix_is_of_the_folder_else_of_a_file_where_the_notebook_is(mine: MyPipelines) -> None:
    Path("train.toml").write_text('name = "train"\n[source]\nscript_text = "1"\n')
    assert mine.open("train.toml").path == Path("train.toml").resolve()
    assert mine.find("train").parent == mine.find("other.toml").parent == mine.folder
    created = mine.create({**DATA, "name": "train"})
    assert mine.open("train.toml").path == created.path
    foreign = {
        "titan.toml": ("torchtitan", 'model.flavor = "8B"\n'),
        "start.sh": ("command", "torchrun --nnodes 2 train.py\n"),
        "hosts": ("hostfile", "gpu1\ngpu2\n"),
    }
    for name, (kind, content) in foreign.items():
        Path(name).write_text(content)
        make = "a nodes file of it, for --nodes nodes.toml" if kind == "hostfile" else "it a spec first"
        said = rf"{name}: is not a spec, but of the kind {kind}: make {make}: .*, or use Import… in My Pipelines$"
        with pytest.raises(SpecError, match=said):
            mine.open(Path(name).resolve())
    Path("a.txt").write_text("{ no ]\n")
    with pytest.raises(SpecError, match="must end in one of"):
        mine.open(Path("a.txt").resolve())


def test_list_of_recent_files_that_others_can_write_is_not_believed(mine: MyPipelines, tmp_path: Path) -> None:
    file = tmp_path / "shared.toml"
    file.write_text('name = "shared"\n[source]\nscript_text = "1"\n')
    mine.open(file)
    recent = Path(os.environ["XDG_STATE_HOME"], "detrain_nb", "recent_pipelines.json")
    assert recent.stat().st_mode & 0o077 == 0
    recent.chmod(0o666)
    assert mine.open(file).spec is not None, "it is opened without that list"
    entries = mine.entries()
    [notice] = entries.notices
    assert len(entries) == 0 and "only this user can write" in notice
    recent.chmod(0o600)
    for damaged in ("{", '{"recent": 5}', '{"recent": [1, "relative", "/a\\u0000b", "/\\ud800"]}', "[" * 100_000):
        recent.write_text(damaged)
        assert RecentFiles().paths() == []


def test_pipelines_are_listed_while_others_list_them(mine: MyPipelines) -> None:
    """A view does this: it queries the jobs in a thread next to its pages."""
    mine.folder.mkdir()
    for number in range(400):
        (mine.folder / f"old{number}.toml").write_text("name = 'n'")
    is_over, raised = threading.Event(), list[Exception]()

    def ask() -> None:
        try:
            while not is_over.is_set():
                mine.ask_after_jobs()
        except Exception as exc:  # noqa: BLE001  asserted below
            raised.append(exc)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    asking = [threading.Thread(target=ask) for _ in range(2)]
    try:
        for thread in asking:
            thread.start()
        for _ in range(20):
            new = [mine.folder / f"new{number}.toml" for number in range(20)]
            for file in new:
                file.write_text("name = 'n'")
            assert len(mine.entries()) == 420
            for file in new:
                file.unlink()
    finally:
        sys.setswitchinterval(before)
        is_over.set()
        for thread in asking:
            thread.join(30)
    assert not any(thread.is_alive() for thread in asking) and not raised


def test_entries_are_read_again_only_after_a_change(mine: MyPipelines) -> None:
    mine.create({**DATA, "name": "train"})
    first = mine.entries()[0]
    assert mine.entries()[0] is first
    opened = mine.open("train")
    mine.save(opened, {**DATA, "name": "train", "description": "other"})
    assert mine.entries()[0].description == "other"


def test_files_that_take_long_to_read_do_not_hold_the_list(mine: MyPipelines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository may contain such files: deeply nested tables take seconds to read, and a thousand files an hour."""
    monkeypatch.setattr(my_pipelines, "_READING_S", 0.1)
    mine.create({**DATA, "name": "a"})
    for number in range(3):
        tables = "".join(f"[x{each}.b.c.d.e.f.g.h]\n" for each in range(4000))
        (mine.folder / f"slow{number}.toml").write_text(tables)
    first = mine.entries()
    assert len(first) == 4 and first[0].is_spec, "all are listed, those that were read as they are"
    assert "list again" in first[-1].fault
    for _ in range(3):
        last = mine.entries()
    assert "list again" not in str(last), "they are read in the end"


def test_pipeline_that_has_changed_since_it_was_seen_is_not_started(mine: MyPipelines) -> None:
    seen = mine.create({**DATA, "name": "train"})
    mine.save(seen, {**DATA, "name": "train", "source": {"script_text": "print('another')"}})
    with pytest.raises(Conflict, match=r"train.toml was changed after it was read here, and was not started: open it"):
        mine.run("train", as_read=seen, dry_run=True)
    assert mine.run("train", as_read=mine.open("train"), dry_run=True)


@pytest.mark.timeout(300)  # for two jobs; the machine may be busy
def test_pipeline_runs_again_with_the_same_spec(mine: MyPipelines) -> None:
    here = [{"host": "localhost", "devices": "cpu", "ranks": 1}]
    mine.create({**DATA, "name": "train", "nodes": here})
    job = mine.run("train")
    job.wait(120).check()
    assert "ran" in [each.text for each in job.logs().lines]
    MyPipelines("another").create({**DATA, "name": "train", "nodes": here})
    assert job_of(MyPipelines("another"), "train") is None
    [entry] = mine.entries()
    assert entry.job is not None and (entry.job.word, entry.job.count) == ("succeeded", 1)
    again = job.restart()
    again.wait(120).check()
    assert job_of(mine, "train") == again.id
    for each in (job, again):
        each.remove()
    mine.create({"name": "draft"})
    with pytest.raises(SpecError, match=r"draft\.toml cannot be run: source"):
        mine.run("draft")
    with pytest.raises(JobError):
        Record().get("draft")


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda each: each.name)
def test_example_is_a_spec(mine: MyPipelines, example: Any) -> None:
    created = mine.create_example(example)
    assert created.spec is not None and created.spec.check() == []
    [entry] = mine.entries()
    assert entry.axes == example.axes


@pytest.mark.slow
def test_example_trains_on_this_machine(mine: MyPipelines) -> None:
    mine.create_example(EXAMPLES[0])
    job = mine.run(EXAMPLES[0].name)
    try:
        job.wait(100).check()
        assert any("trained 200 steps" in line.text for line in job.logs().lines)
        [accuracy] = [row["evaluation_accuracy"] for row in job.metrics(rank=0) if "evaluation_accuracy" in row]
        assert accuracy > 0.9
    finally:
        job.remove()


def test_spec_in_plain_python_is_saved_as_it_is(mine: MyPipelines) -> None:
    spec = PipelineSpec.from_dict({**DATA, "name": "train", "env": {"A": "1"}})
    assert mine.create(spec).spec == spec


def test_file_that_another_process_writes_right_now_is_left_to_it(mine: MyPipelines) -> None:
    opened = mine.create({**DATA, "name": "train"})
    with (
        spec_file._saving(opened.path),  # as another process does
        pytest.raises(Conflict, match="is being written by another process right now: save it again"),
    ):
        mine.save(opened, {**DATA, "name": "train", "description": "mine"})
    assert mine.save(opened, {**DATA, "name": "train", "description": "mine"}).spec is not None


def test_odd_files_are_listed_with_what_is_wrong_with_them(mine: MyPipelines) -> None:
    mine.create({**DATA, "name": "here"})
    (mine.folder / "folder.toml").mkdir()
    os.mkfifo(mine.folder / "pipe.toml")  # no process writes to it
    (mine.folder / "large.toml").write_text("# " + "x" * 1_000_001)
    (mine.folder / "latin.toml").write_bytes(b'name = "\xe9"')
    (mine.folder / "deep.toml").write_text("a = " + "[" * 3000 + "]" * 3000)
    (mine.folder / "\x1b[31m\n.toml").write_text('name = "\\u001b[31mred"')
    (mine.folder / "\x1b[2Jnameless.toml").write_text("")
    (mine.folder / "\udcff.toml").write_text("")  # its name is not UTF-8
    found = mine.entries()
    faults = {each.name: each.fault for each in found}
    assert {r"\x1b[2Jnameless", r"\udcff"} < faults.keys()
    assert "Is a directory" in faults["folder"] and "is not a regular file" in faults["pipe"]
    assert "larger than 1 MB" in faults["large"] and "UTF-8" in faults["latin"] and "levels" in faults["deep"]
    assert faults["here"] == "" and len(found) == 9
    assert str(found).replace("\n", "").isprintable()
    opened = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        mine.entries()
    assert len(os.listdir("/proc/self/fd")) <= opened, "nothing stays open"
