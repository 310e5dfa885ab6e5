"""The record of jobs: it survives a killed writer, several processes share it, and only its user can access it."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from detrain_nb.errors import JobError
from detrain_nb.jobs.record import FORMATS, Record, bring_up_to_date

LIMIT_S = 60


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "state" / "jobs.sqlite"


@pytest.fixture
def record(file: Path) -> Record:
    return Record(file)


def add(record: Record, *ids: str, name: str = "run", spec: str = '{"name": "run"}') -> None:
    for id in ids:
        record.add(id, name=name, nodes="[]", spec=spec, state="submitting")


def test_what_was_noted_down_is_there(record: Record) -> None:
    add(record, "run-1")
    record.update(
        "run-1", state="ended", exit_code=3, started_at=10.5, ended_at=20.0, world_size=4, metrics='{"loss": 1}'
    )
    row = record.get("run-1")
    assert (row.state, row.exit_code, row.started_at, row.ended_at) == ("ended", 3, 10.5, 20.0)
    assert (row.world_size, row.metrics, row.nodes, row.spec) == (4, '{"loss": 1}', "[]", '{"name": "run"}')
    assert row.submitted_at <= row.updated_at <= time.time()
    record.update("run-1", exit_code=None)
    assert record.get("run-1").exit_code is None
    with pytest.raises(JobError, match="job run-1 already exists"):
        add(record, "run-1")
    with pytest.raises(TypeError, match="'spec' is not a field of a job"):
        record.update("run-1", spec="")  # type: ignore[call-arg]


def test_newest_comes_first_and_a_choice_is_by_name(record: Record) -> None:
    add(record, "a-1", "a-2", name="a")
    add(record, "b-1", name="b")
    assert [row.id for row in record.summaries()] == ["b-1", "a-2", "a-1"]
    assert [row.id for row in record.summaries(limit=2)] == ["b-1", "a-2"]
    assert [row.id for row in record.summaries(name="a")] == ["a-2", "a-1"]


def test_job_is_found_by_id_by_name_and_by_a_beginning(record: Record) -> None:
    add(record, "run-20260101-a", "run-20260102-b", "run-20260103-c")
    add(record, "other-20260101-d", name="other")
    assert record.get("run-20260101-a").id == "run-20260101-a"
    assert record.get("run").id == "run-20260103-c"
    record.update("run-20260103-c", state="not started")
    assert record.get("run").id == "run-20260102-b", "the newest that was started"
    record.update("other-20260101-d", state="not started")
    assert record.get("other").id == "other-20260101-d", "where none was"
    assert record.get("run-20260102").id == "run-20260102-b"
    assert record.get("oth").id == "other-20260101-d"
    with pytest.raises(JobError, match=r"several jobs begin with 'run-': run-20260103-c, run-20260102-b, run-.*: give"):
        record.get("run-")
    for wrong in ("no", "%", "run_20260101", "run-20260101-a2"):
        with pytest.raises(JobError, match=r"was submitted from here: jobs\(\) shows those that were"):
            record.get(wrong)
    for wrong in ("", "a\x1b[2J", "\udc80"):
        with pytest.raises(JobError, match="is not a job: give its id"):
            record.get(wrong)


def test_removed_job_takes_its_spec_with_it_unless_another_has_the_same(record: Record, file: Path) -> None:
    add(record, "a", "b")
    add(record, "c", spec='{"name": "else"}')
    record.remove("a")
    assert record.get("b").spec == '{"name": "run"}'
    record.remove("b")
    record.remove("b")
    record.update("b", state="running")
    assert [row.id for row in record.summaries()] == ["c"]
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("SELECT spec FROM specs").fetchall() == [('{"name": "else"}',)]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.text("ab-'%_\U0001f600", min_size=1, max_size=3), st.booleans()), max_size=12))
def test_record_holds_what_a_dict_would(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, bool]]
) -> None:
    record, held = Record(tmp_path_factory.mktemp("record") / "jobs.sqlite"), set[str]()
    for id, is_added in steps:
        if not is_added:
            record.remove(id)
            held.discard(id)
        elif id not in held:
            add(record, id, spec=json.dumps(id))
            held.add(id)
    assert {row.id for row in record.summaries()} == held
    assert all(record.get(id).spec == json.dumps(id) for id in held)


def test_job_is_noted_down_with_its_spec_or_not_at_all(record: Record, file: Path) -> None:
    with pytest.raises(JobError, match=r"NOT NULL constraint failed: jobs\.nodes"):
        record.add("a", name="a", nodes=None, spec="of a", state="submitting")  # type: ignore[arg-type]
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("SELECT * FROM specs").fetchall() == []


# ---- several processes


WRITER = """
import sys
from pathlib import Path
from detrain_nb.jobs.record import Record

record = Record(Path(sys.argv[1]))
for number in range(int(sys.argv[3])):
    id = f"{sys.argv[2]}-{number}"
    record.add(id, name=sys.argv[2], nodes="[]", spec='{"n": %d}' % number, state="submitting")
    record.update(id, state="running", world_size=number)
    print(id, flush=True)
"""


def start_writer(file: Path, name: str, count: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", WRITER, str(file), name, str(count)], stdout=subprocess.PIPE, text=True
    )


def test_two_notebooks_and_a_shell_write_at_once(file: Path) -> None:
    """The file does not exist yet, so the three processes also create it at the same time."""
    writers = [start_writer(file, name, 15) for name in "abc"]
    try:
        said = [writer.communicate(timeout=LIMIT_S)[0].split() for writer in writers]
    finally:
        for writer in writers:
            writer.kill()
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    rows = {row.id: row for row in Record(file).summaries()}
    assert sorted(rows) == sorted(id for ids in said for id in ids) and len(rows) == 45
    assert all(row.state == "running" and row.world_size == int(id[2:]) for id, row in rows.items())


def test_kernel_that_is_killed_while_it_writes_loses_nothing(file: Path) -> None:
    for number in range(3):
        writer = start_writer(file, f"w{number}", 100_000)
        try:
            assert writer.stdout
            said = [writer.stdout.readline().strip() for _ in range(10)]
            writer.send_signal(signal.SIGKILL)
            said += writer.stdout.read().split("\n")[:-1]
        finally:
            writer.kill()
            writer.communicate(timeout=LIMIT_S)
        rows = {row.id: row.state for row in Record(file).summaries(name=f"w{number}")}
        assert set(said) <= set(rows) and len(rows) <= len(said) + 1
        assert all(rows[id] == "running" for id in said)
    with closing(sqlite3.connect(file)) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert db.execute("PRAGMA journal_mode").fetchone() == ("delete",)


def test_who_holds_it_too_long_is_told(file: Path, record: Record) -> None:
    add(record, "a")
    with closing(sqlite3.connect(file, isolation_level=None)) as other:
        other.execute("BEGIN EXCLUSIVE")
        with pytest.raises(JobError, match=r"cannot be used: another process has locked it for 0\.1 s"):
            Record(file, busy_limit_s=0.1).update("a", state="ended")
        other.execute("ROLLBACK")
    assert record.get("a").state == "submitting"


# ---- 10,000 jobs


def test_list_of_ten_thousand_reads_no_spec_and_no_more_than_it_shows(file: Path, record: Record) -> None:
    """The listing uses the index by time; benchmarks/jobs.py measures how long it takes."""
    add(record, "first", spec=json.dumps({"script_text": "x" * 2000}))
    with closing(sqlite3.connect(file)) as db, db:
        db.execute(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 9999) "
            "INSERT INTO jobs SELECT 'run-' || i, name, 'ended', 0, submitted_at + i, 1.0, 2.0, 4, '', 3.0, release, "
            "spec_digest, nodes, storage, source, file FROM jobs, n WHERE id = 'first'"
        )
        plan = db.execute(
            "EXPLAIN QUERY PLAN SELECT id FROM jobs ORDER BY submitted_at DESC, id DESC LIMIT 200"
        ).fetchall()
    assert "USING INDEX jobs_by_time" in str(plan)
    rows = record.summaries()
    assert len(rows) == 10_000 and rows[0].id == "run-9999" and rows[-1].id == "first"
    assert len(record.summaries(limit=200)) == 200


# ---- other releases


def test_record_of_a_newer_release_is_refused_and_left_alone(file: Path, record: Record) -> None:
    add(record, "a")
    with closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA user_version = 7")
    before = file.read_bytes()
    for use in (record.summaries, lambda: record.get("a"), lambda: record.remove("a"), lambda: add(record, "b")):
        with pytest.raises(JobError, match="by a newer release: it has format 7, and this one reads up to 4: update"):
            use()
    assert file.read_bytes() == before


def test_record_of_an_older_release_gets_what_it_lacks_and_all_or_nothing(tmp_path: Path) -> None:
    file = tmp_path / "a.sqlite"
    formats = [
        ["CREATE TABLE a (x)", "INSERT INTO a VALUES (1)"],
        ["ALTER TABLE a ADD COLUMN y"],
        ["CREATE TABLE b (z)"],
    ]
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        bring_up_to_date(db, file, formats[:1])
        with pytest.raises(sqlite3.OperationalError):
            bring_up_to_date(db, file, [*formats[:2], ["CREATE TABLE c (z)", "not SQL"]])
        assert db.execute("SELECT * FROM a").fetchall() == [(1,)]
        bring_up_to_date(db, file, formats)
        bring_up_to_date(db, file, formats)
        assert db.execute("SELECT * FROM a").fetchall() == [(1, None)]
        assert db.execute("PRAGMA user_version").fetchone() == (3,)


def test_jobs_of_an_older_release_keep_all_and_have_no_storage_and_no_known_file(file: Path, record: Record) -> None:
    file.parent.mkdir(mode=0o700)
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        bring_up_to_date(db, file, FORMATS[:1])
        db.execute("INSERT INTO specs VALUES ('digest', '{}')")
        db.execute(
            "INSERT INTO jobs (id, name, state, submitted_at, updated_at, release, spec_digest, nodes) "
            "VALUES ('old-1', 'old', 'ended', 1, 2, '0', 'digest', '[]')"
        )
    assert (record.get("old").id, record.get("old").storage, record.get("old").source) == ("old-1", "", "")
    assert record.get("old").file is None
    record.add("new-1", name="new", nodes="[]", spec="{}", state="submitting", storage="s3://bucket/folder")
    assert (record.get("new").storage, record.get("new").file) == ("s3://bucket/folder", b"")


def test_damaged_record_is_told(file: Path, record: Record) -> None:
    add(record, "a")
    file.write_bytes(b"no database" * 1000)
    with pytest.raises(JobError, match="file is not a database: move it away, and a new one is created"):
        record.summaries()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("PRAGMA user_version = 0", "table jobs already exists"),
        ("DROP TABLE specs", "no such table: (main[.])?specs"),
        ("ALTER TABLE jobs DROP COLUMN metrics", "no such column: metrics"),
    ],
)
def test_record_that_another_program_has_changed_says_what_to_do(
    change: str, said: str, file: Path, record: Record
) -> None:
    add(record, "a")
    with closing(sqlite3.connect(file)) as db:
        db.execute(change)
    with pytest.raises(JobError, match=f"jobs.sqlite cannot be used: {said}: move it away, and a new one is created"):
        record.get("a")


# ---- this user's alone


def test_record_is_its_users_alone_whatever_the_umask(file: Path, record: Record) -> None:
    before = os.umask(0)
    try:
        add(record, "a")
    finally:
        os.umask(before)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700


def test_record_that_others_could_have_made_is_refused(file: Path, record: Record, tmp_path: Path) -> None:
    add(record, "a")
    elsewhere = tmp_path / "elsewhere.sqlite"
    file.rename(elsewhere)
    file.symlink_to(elsewhere)
    with pytest.raises(JobError, match="is not a file that only this user can write: move it away"):
        record.summaries()
    file.unlink()
    os.mkfifo(file)
    with pytest.raises(JobError, match="is not a file that only this user can write"):
        record.summaries()
    file.unlink()
    elsewhere.rename(file)
    file.chmod(0o666)
    with pytest.raises(JobError, match=r"jobs.sqlite \(mode 0666, uid \d+\) is not a file that only this user"):
        record.summaries()
    file.chmod(0o600)
    file.parent.chmod(0o755)
    with pytest.raises(JobError, match=r"is open to others: chmod 700 .*state, or set XDG_STATE_HOME"):
        record.summaries()
    file.parent.chmod(0o700)
    assert [row.id for row in record.summaries()] == ["a"]


def test_folder_in_which_others_can_put_another_is_refused(tmp_path: Path) -> None:
    open_to_all = tmp_path / "all"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    with pytest.raises(JobError, match=r"other users can replace .*: they can write to .*all"):
        Record(open_to_all / "state" / "jobs.sqlite").summaries()


def test_place_where_no_folder_can_be_is_said(tmp_path: Path) -> None:
    (tmp_path / "state").touch()
    with pytest.raises(JobError, match=r"state: .*: make it a writable folder, or set XDG_STATE_HOME"):
        Record(tmp_path / "state" / "jobs.sqlite").summaries()


def test_record_is_where_the_state_of_programs_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    add(Record(), "a")
    assert [path.name for path in (tmp_path / "detrain_nb").iterdir()] == ["jobs.sqlite"]
    monkeypatch.setenv("XDG_STATE_HOME", "relative")  # the XDG standard ignores relative paths
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Record().summaries() == []
    assert (tmp_path / ".local/state/detrain_nb/jobs.sqlite").exists()


def test_newest_of_names_are_those_that_started_by_their_files(record: Record) -> None:
    failed = "not started"
    for id, state in (("a-1", "ended"), ("a-2", "ended"), ("b-1", "ended"), ("a-3", failed), ("c-1", failed)):
        record.add(id, name=id[0], nodes="[]", spec="{}", state=state, file=b"/here")
    record.add("a-4", name="a", nodes="[]", spec="{}", state="ended", file=b"/there/\xff")
    record.add("a-5", name="a", nodes="[]", spec="{}", state="ended")
    found = record.newest_of(["a", "b", "c", "d", *(f"e{number}" for number in range(1500))])
    assert {of: (job.id, count) for of, (job, count) in found.items()} == {
        ("a", b"/here"): ("a-2", 3),
        ("b", b"/here"): ("b-1", 1),
        ("c", b"/here"): ("c-1", 1),
        ("a", b"/there/\xff"): ("a-4", 1),
        ("a", b""): ("a-5", 1),
    }
