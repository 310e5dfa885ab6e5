"""The files of a job: its order, status, logs and artifacts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import detrain_nb.node.job.order
from detrain_nb.copying.json_lines import Talk, Untrue
from detrain_nb.jobs.report_checks import NodeReport, read_report
from detrain_nb.node.job.files import list_artifacts, send_artifact
from detrain_nb.node.job.folders import (
    find_job_folder,
    job_folder,
    jobs_folder,
    list_job_folders,
    machine_id,
    remove_job_folder,
)
from detrain_nb.node.job.following import follow
from detrain_nb.node.job.log_file import BoundedLog, find_end, find_tail, last_lines, read_log
from detrain_nb.node.job.log_times import LogTimes, read_times
from detrain_nb.node.job.order import FORMAT, MOST_TEXT_BYTES, JobOrder, JobRefused, JobRendezvous
from detrain_nb.node.job.scopes import outlives_logout
from detrain_nb.node.job.status import Exit, Reserve, Status, is_live, read_status

from ..full_disk import files_end_at
from .jobs_here import make_order, own_folders

# ---- orders

_TEXTS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20)
_NUMBERS = st.integers(0, 1000)
_ORDERS = st.builds(
    JobOrder,
    id=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}", fullmatch=True),
    name=st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True),
    argv=st.lists(_TEXTS, min_size=1, max_size=4).map(tuple),
    nodes=st.lists(_TEXTS, min_size=1, max_size=3).map(tuple),
    ranks=st.lists(_NUMBERS, max_size=4).map(tuple),
    world_size=_NUMBERS,
    python=_TEXTS,
    workdir=_TEXTS,
    env=st.dictionaries(st.from_regex(r"[A-Z_]{1,9}", fullmatch=True), _TEXTS, max_size=3),
    setup=st.lists(_TEXTS, max_size=3).map(tuple),
    gpus=st.none() | st.lists(_NUMBERS, max_size=4).map(tuple),
    rendezvous=st.builds(JobRendezvous, kind=st.sampled_from(["fixed", "elastic"]), port=st.integers(0, 65535)),
    silence_s=st.floats(0, 1e6),
)


@given(_ORDERS)
def test_an_order_is_the_same_after_it_was_written(order: JobOrder) -> None:
    assert JobOrder.from_json(order.to_json()) == order


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.sampled_from(sorted(make_order("0").to_dict())), _JSON)
@example("node_rank", 1)
@example("argv", [])
def test_an_order_is_taken_as_it_is_or_refused_in_words(name: str, value: Any) -> None:
    said = {**make_order("0").to_dict(), name: value}
    try:
        order = JobOrder.from_dict(said)
    except JobRefused as exc:
        assert len(str(exc)) < 300
    else:
        assert json.loads(order.to_json())[name] == value or name in ("rendezvous", "format", "silence_s")


@pytest.mark.parametrize("value", ["x" * (MOST_TEXT_BYTES - 2), "ü" * ((MOST_TEXT_BYTES - 2) // 2)])
def test_order_takes_what_the_kernel_takes(value: str) -> None:
    assert JobOrder.from_dict({**make_order("0").to_dict(), "env": {"A": value}}).env == {"A": value}
    subprocess.run(["/bin/true"], env={"A": value}, check=True)
    longer = value + "xx"
    with pytest.raises(JobRefused, match="the value of A is not a text of at most 131069 bytes"):
        JobOrder.from_dict({**make_order("0").to_dict(), "env": {"A": longer}})
    with pytest.raises(OSError, match="too long"):
        subprocess.run(["/bin/true"], env={"A": longer}, check=True)


def test_what_a_later_release_adds_to_an_order_is_passed_over() -> None:
    order = make_order("0")
    assert JobOrder.from_dict({**order.to_dict(), "colour": "red"}) == order


_FIRST_ORDER = (  # such files are on users' disks: do not change this text
    '{"format": 1, "id": "job-20260102-030405-beef", "name": "job", "argv": ["train.py", "--lr", "0.1"], '
    '"node_rank": 1, "nodes": ["gpu1", "gpu2"], "ranks": [2, 3], "world_size": 4, "python": "/env/bin/python", '
    '"workdir": "~/work", "env": {"A": "1"}, "secret_names": ["HF_TOKEN"], "setup": ["module load cuda"], '
    '"artifacts": ["*.pt"], "spec": {"training": {"epochs": 2}}, "device": "cuda", "gpus": [0, 1], '
    '"address": "10.0.0.2", "interface": "eth0", "rendezvous": {"kind": "elastic", "run_id": "r", '
    '"address": "10.0.0.1", "port": 29500, "timeout_s": 60.0, "max_restarts": 3, "min_nodes": 1, "max_nodes": 2}, '
    '"silence_s": 30.0}'
)


@pytest.mark.parametrize("later", [0, 1])
def test_order_of_the_first_release_is_read_by_each_later_one(later: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(detrain_nb.node.job.order, "FORMAT", FORMAT + later)
    assert JobOrder.from_json(_FIRST_ORDER) == JobOrder(
        "job-20260102-030405-beef",
        "job",
        ("train.py", "--lr", "0.1"),
        node_rank=1,
        nodes=("gpu1", "gpu2"),
        ranks=(2, 3),
        world_size=4,
        python="/env/bin/python",
        workdir="~/work",
        env={"A": "1"},
        secret_names=("HF_TOKEN",),
        setup=("module load cuda",),
        artifacts=("*.pt",),
        spec={"training": {"epochs": 2}},
        device="cuda",
        gpus=(0, 1),
        address="10.0.0.2",
        interface="eth0",
        rendezvous=JobRendezvous("elastic", "r", "10.0.0.1", 29500, 60.0, 3, 1, 2),
        silence_s=30.0,
    )
    assert set(json.loads(_FIRST_ORDER)) <= set(make_order("0").to_dict()), "no name is given up"


def test_order_of_a_later_format_is_refused_with_both_numbers() -> None:
    later = _FIRST_ORDER.replace('"format": 1', f'"format": {FORMAT + 1}')
    with pytest.raises(JobRefused, match=f"has format {FORMAT + 1}, .* this one reads up to format {FORMAT}: use that"):
        JobOrder.from_json(later)
    for number in ("0", "-1", "true", "null", '"1"', "1.0"):
        with pytest.raises(JobRefused, match="is not a valid format number of an order"):
            JobOrder.from_json(_FIRST_ORDER.replace('"format": 1', f'"format": {number}'))


@pytest.mark.parametrize("text", ["", "[" * 100_000, "[]", '{"format": 1}', " " * (1 << 21)])
def test_what_is_no_order_is_refused(text: str) -> None:
    with pytest.raises(JobRefused):
        JobOrder.from_json(text)


# ---- logs


@given(st.lists(st.binary(max_size=60), max_size=40), st.integers(1, 100), st.integers(16, 100))
@settings(deadline=None)
def test_log_keeps_what_came_first_and_last_and_says_where_it_goes_on(
    pieces: list[bytes], first_bytes: int, last_bytes: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rank-0.log"
        log = BoundedLog(path, first_bytes=first_bytes, last_bytes=last_bytes)
        for piece in pieces:
            log.write(piece)
        log.close()
        found: dict[int, int] = {}  # bytes by offset
        offset, data = read_log(path, 0, 7)
        while data:
            assert offset >= len(found) and not found.keys() & range(offset, offset + len(data))
            found.update(enumerate(data, offset))
            offset, data = read_log(path, offset + len(data), 7)
        size = max(found, default=-1) + 1
        written = b"".join(pieces)
        if len(written) <= first_bytes:
            assert bytes(found.values()) == written
            return
        notice_bytes = size - len(written)
        assert notice_bytes == len(
            f"\n[detrain_nb: a long log: its first {first_bytes} bytes and its last {last_bytes} are kept]\n"
        )
        whole = written[:first_bytes] + b"?" * notice_bytes + written[first_bytes:]
        assert set(range(first_bytes)) <= found.keys(), "the beginning"
        assert set(range(max(first_bytes, size - last_bytes), size)) <= found.keys(), "the end"
        assert len(found) <= first_bytes + 2 * last_bytes + notice_bytes
        assert all(found[at] == whole[at] for at in found if not first_bytes <= at < first_bytes + notice_bytes)


def test_last_lines_of_a_log_in_several_files(tmp_path: Path) -> None:
    log = BoundedLog(tmp_path / "rank-0.log", first_bytes=20, last_bytes=160)
    log.write(b"".join(b"line %d\n" % number for number in range(100)))
    log.close()
    assert last_lines(tmp_path / "rank-0.log", 3) == ("line 97", "line 98", "line 99")
    assert last_lines(tmp_path / "rank-1.log", 3) == ()
    (tmp_path / "rank-2.log").write_bytes(b"first\n" + b"\r 10%" * 50 + b"\nlast\n")
    first, bar, last = last_lines(tmp_path / "rank-2.log", 3)
    assert (first, bar[-4:], last) == ("first", " 10%", "last"), "a bar is one line, however often it was drawn"


def _read_on(path: Path, offset: int) -> bytes:
    found = b""
    while (read := read_log(path, offset + len(found), 1 << 16))[1]:
        assert read[0] == offset + len(found), "nothing is missing behind it"
        found += read[1]
    return found


@given(st.text("ab\n", max_size=400), st.integers(0, 50), st.integers(1, 30))
@settings(deadline=None)
def test_tail_of_a_log_is_its_last_lines(text: str, lines: int, block_bytes: int) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        path = Path(folder) / "rank-0.log"
        path.write_text(text)
        patch.setattr("detrain_nb.node.job.log_file._TAIL_BYTES", block_bytes)
        expected = "".join(text.splitlines(keepends=True)[-lines:] if lines else [])
        assert _read_on(path, find_tail(path, lines)).decode() == expected


def test_tail_of_a_long_log_is_looked_for_in_its_end_alone(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    log = BoundedLog(path, first_bytes=200, last_bytes=3200)
    log.write(b"".join(b"line %03d\n" % number for number in range(1000)))
    log.close()
    assert _read_on(path, find_tail(path, 30)) == b"".join(b"line %03d\n" % number for number in range(970, 1000))
    assert len(_read_on(path, find_tail(path, 100_000))) < 3600, "it begins behind what was cut out"
    assert find_tail(path, 100_000, most_bytes=45) == find_end(path) - 45
    (tmp_path / "rank-1.log").write_bytes(b"x" * 1000)
    assert find_tail(tmp_path / "rank-1.log", 1, most_bytes=100) == 900, "a line may have no end"


def test_it_is_known_when_what_a_log_has_was_printed(tmp_path: Path) -> None:
    log = tmp_path / "rank-0.log"
    clock = iter([100.0, 100.5, 101.5, 90.0, 200.0, 300.0, 400.0])  # the clock is set back once, to 90.0
    times = LogTimes(log, most=3, now=lambda: next(clock))
    for size in (0, 5, 10, 20):
        times.note(size)
    assert read_times(log, 0, 100, most=10) == [(0, 100.0), (10, 101.5), (20, 90.0)]
    assert read_times(log, 12, 20, most=10) == [(10, 101.5)]
    assert read_times(log, 0, 100, most=1) == [(20, 90.0)]
    for size in (30, 40, 50):
        times.note(size)
    assert read_times(log, 0, 100, most=10) == [(30, 200.0), (40, 300.0), (50, 400.0)], "the last ones are kept"
    assert read_times(log, 0, 30, most=10) == []
    with files_end_at(3 * 16 + 7):
        LogTimes(log, now=lambda: 1.0).note(60)
    assert read_times(log, 0, 100, most=10)[-1] == (50, 400.0), "half a mark is none"
    assert log.with_name("rank-0.log.times").stat().st_size == 3 * 16
    assert read_times(tmp_path / "rank-1.log", 0, 100, most=10) == []


def test_full_disk_costs_output_which_is_said_when_there_is_room_again(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.log"
    log = BoundedLog(path)
    log.write(b"first\n")
    with files_end_at(10):
        log.write(b"0123456789\n")
        log.write(b"lost\n")
    log.write(b"last\n")
    log.close()
    notice = b"\n[detrain_nb: 12 bytes of output could not be written here: File too large]\n"
    assert path.read_bytes() == b"first\n0123" + notice + b"last\n"


# ---- states


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "job-1" / "machine-0"
    folder.mkdir(parents=True)
    return folder


def _write_status(folder: Path, **fields: Any) -> None:
    Status("job-1", "job", 0, **fields).write(folder)


def test_state_of_a_job_is_what_is_so_not_what_it_said_last(folder: Path) -> None:
    _write_status(folder, state="running")
    assert read_status(folder)["state"] == "running", "this process is there"
    assert read_status(folder, boot=lambda: "another/1")["state"] == "node restarted"
    _write_status(folder, state="running", pid_started=1)
    assert read_status(folder)["state"] == "lost", "another process has its number"
    _write_status(folder, state="running", pid=1 << 22)
    assert read_status(folder)["state"] == "lost"
    Exit(3, "rank 1 exited with 3", 1, ("a", "b"), ended_at=5.0).write(folder)
    status = read_status(folder)
    assert (status["state"], status["exit_code"], status["failed_rank"]) == ("ended", 3, 1)
    assert (status["ended_at"], status["last_lines"]) == (5.0, ["a", "b"])
    assert not is_live(status)
    assert read_status(folder, boot=lambda: "another/1")["state"] == "ended", "before that"


def test_what_the_first_release_has_written_is_read_by_each_later_one(folder: Path) -> None:
    """Such files are on users' disks: do not change this text."""
    (folder / "status.json").write_text(
        '{"format": 1, "id": "job-1", "name": "job", "node_rank": 0, "node": "gpu1", "state": "running", "pid": 77, '
        '"pid_started": 5, "boot": "b0c1/1", "started_at": 1.5, "ended_at": null, "exit_code": null, "reason": "", '
        '"world_size": 2, "restarts": 1, '
        '"ranks": [{"rank": 0, "pid": 78, "exit_code": null}, {"rank": 1, "pid": 79, "exit_code": 3}], '
        '"updated_at": 2.5, "release": "0.1.0"}'
    )
    assert read_report(read_status(folder)).state == "node restarted"
    (folder / "exit.json").write_text(
        '{"format": 1, "exit_code": 3, "reason": "rank 1 exited with 3", "failed_rank": 1, "last_lines": ["a", "b"], '
        '"ended_at": 9.5}'
    )
    assert read_report(read_status(folder)) == NodeReport(
        "job-1",
        0,
        "ended",
        name="job",
        exit_code=3,
        reason="rank 1 exited with 3",
        failed_rank=1,
        last_lines=("a", "b"),
        ranks=(0, 1),
        restarts=1,
        started_at=1.5,
        ended_at=9.5,
    )


class _PrintsOn:
    """A writer to the notebook: the job prints another line whenever something is sent to it."""

    def __init__(self, log: Path) -> None:
        self.sent, self._log = b"", log

    def write(self, data: bytes) -> None:
        self.sent += data
        assert len(self.sent) < 100_000, "it has no end"
        with self._log.open("ab") as log:
            log.write(b"later\n")

    def flush(self) -> None:
        """Do nothing: there is no buffer."""


def test_log_of_a_job_that_prints_all_the_time_has_an_end(jobs: Path) -> None:
    part = job_folder("job-1", 0)
    part.mkdir(parents=True)
    _write_status(part, state="running")
    (part / "rank-0.log").write_bytes(b"first\n")
    notebook = _PrintsOn(part / "rank-0.log")
    follow(Talk(io.BufferedReader(io.BytesIO()), notebook), {"id": "job-1", "once": True}, wait=lambda limit_s: False)
    assert b"first\n" in notebook.sent and b"later" not in notebook.sent


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"format": 2, "release": "9.9", "state": "running"}', "was written by release 9.9: this one"),
        ("{", "status.json is damaged"),
        ("[]", "status.json is damaged"),
        ('{"format": 1', "status.json is damaged"),
        ("[" * 100_000, "status.json is damaged"),
        (" " * (2 << 20), "has more than 1048576 bytes"),
        ('{"format": 1}', "status.json is damaged"),
        ('{"format": 1, "state": 5}', "status.json is damaged"),
    ],
)
def test_status_that_cannot_be_read_says_why(folder: Path, text: str, reason: str) -> None:
    (folder / "status.json").write_text(text)
    status = read_status(folder)
    assert (status["state"], status["id"], status["node_rank"]) == ("unreadable", "job-1", 0)
    assert reason in status["reason"]


def test_full_disk_leaves_room_for_the_last_words_of_a_job(folder: Path) -> None:
    reserve = Reserve(folder)
    with files_end_at(0):
        reserve.write(Exit(3))  # fails: the disk is full
    assert {path.name: path.stat().st_size for path in folder.iterdir()} == {".reserve": 0}, "it was given up"
    reserve.write(Exit(3))
    assert read_exit(folder) == 3


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount a disk")
def test_full_disk_takes_each_state_of_a_job_and_its_last_words(folder: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k,mode=700", "tmpfs", str(folder)], check=True)
    try:
        reserve, status = Reserve(folder), Status("job-1", "job", 0)
        for state in ("preparing", "running", "stopping"):
            _fill(folder / "made-by-a-rank")
            status.state = state
            reserve.write(status)
            assert read_status(folder)["state"] == state
        _fill(folder / "made-by-a-rank")
        reserve.write(Exit(3))
        assert read_exit(folder) == 3
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _fill(path: Path) -> None:
    """Write until the disk is full."""
    with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass


def test_state_is_on_the_disk_before_it_has_its_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced, fsync = [], os.fsync

    def note(opened: int) -> None:
        synced.append((os.fstat(opened).st_ino, os.fstat(opened).st_size, (folder / "exit.json").exists()))
        fsync(opened)

    monkeypatch.setattr(os, "fsync", note)
    Exit(3).write(folder)
    state = (folder / "exit.json").stat()
    assert synced == [(state.st_ino, state.st_size, False)]


def read_exit(folder: Path) -> object:
    return json.loads((folder / "exit.json").read_text())["exit_code"]


# ---- folders


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Path]:
    tmp_path.chmod(0o700)
    with own_folders(tmp_path) as folder:
        yield folder


def test_folder_of_jobs_that_others_can_enter_is_refused(jobs: Path) -> None:
    assert jobs_folder() == jobs
    jobs.chmod(0o755)
    with pytest.raises(JobRefused, match=r"is open to others: chmod 700"):
        jobs_folder()


def test_state_home_where_nothing_can_be_written_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/1")
    with pytest.raises(JobRefused, match=r"/proc/1/detrain_nb: .*: make it a writable folder, or set XDG_STATE"):
        jobs_folder()


def test_state_home_that_is_a_relative_path_is_passed_over(jobs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", "state")
    monkeypatch.setenv("HOME", str(jobs.parents[2]))
    assert jobs_folder() == jobs.parents[2] / ".local/state/detrain_nb/jobs"


def test_jobs_of_this_machine_are_listed_the_newest_first_beside_those_of_others(jobs: Path) -> None:
    ids = ["b-20260102-030405-aaaa", "a-20260102-030406-aaaa", "c-20250102-030405-aaaa"]
    for job in ids:
        for part in (f"{machine_id()}-0", "000000000000-1"):
            (jobs_folder() / job / part).mkdir(parents=True)
    (jobs / "not an id").mkdir()
    assert [folder.parent.name for folder in list_job_folders()] == [ids[1], ids[0], ids[2]]
    remove_job_folder(job_folder(ids[0], 0))
    assert (jobs / ids[0] / "000000000000-1").is_dir(), "another machine's"
    with pytest.raises(JobRefused, match="this node has no job b-20260102-030405-aaaa with node rank 0"):
        find_job_folder(ids[0], 0)


@pytest.mark.parametrize("job", ["..", "a/b", "", ".hidden", "a" * 97, 5, None])
def test_id_that_leads_elsewhere_is_none(jobs: Path, job: Any) -> None:
    with pytest.raises(JobRefused, match="is not a job id"):
        job_folder(job, 0)


# ---- artifacts


class _Notebook:
    """A writer that keeps what would be sent to the notebook."""

    def __init__(self) -> None:
        self.said = b""

    def write(self, data: bytes) -> None:
        self.said += data

    def flush(self) -> None: ...


@pytest.fixture
def job(jobs: Path) -> JobOrder:
    order = make_order("0")
    folder = jobs_folder() / order.id / f"{machine_id()}-0"
    for inner in ("source/out/deep", "artifacts", "source/.git"):
        (folder / inner).mkdir(parents=True)
    (folder / "order.json").write_text(order.to_json())
    for name in ("a.pt", "out/b.pt", "out/deep/c.txt", "train.py", ".git/d.pt"):
        (folder / "source" / name).write_text(name)
    (folder / "artifacts/e").write_text("e")
    (folder / "source/link.pt").symlink_to("/etc/passwd")
    (folder / "source/up").symlink_to(folder)
    os.mkfifo(folder / "source/pipe.pt")
    return order


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        ([], ["a.pt", "out/b.pt", "artifacts/e"]),
        (["*.pt"], ["a.pt", "out/b.pt"]),
        (["out/"], ["out/b.pt", "out/deep/c.txt"]),
        (["./out/*.pt"], ["out/b.pt"]),
        (["*"], ["a.pt", "train.py", "out/b.pt", "out/deep/c.txt", "artifacts/e"]),
        (["../*", "/etc/*", "up/*", "order.json"], []),
    ],
)
def test_patterns_name_files_of_the_job_alone(job: JobOrder, patterns: list[str], names: list[str]) -> None:
    notebook = _Notebook()
    list_artifacts(Talk(None, notebook), {"id": job.id, "node_rank": 0, "patterns": patterns})  # type: ignore[arg-type]
    assert [name for name, *_ in json.loads(notebook.said)["files"]] == names


def test_job_whose_own_files_a_rank_has_removed_has_none_to_fetch(job: JobOrder) -> None:
    shutil.rmtree(folder := jobs_folder() / job.id / f"{machine_id()}-0")
    folder.mkdir()
    for ask in (list_artifacts, send_artifact):
        with pytest.raises(JobRefused, match=r"is incomplete: its order\.json was removed"):
            ask(Talk(None, _Notebook()), {"id": job.id, "node_rank": 0, "name": "a.pt"})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    ["link.pt", "up/order.json", "../order.json", "pipe.pt", "out", "artifacts/../order.json", "", "/etc/passwd"],
)
def test_what_is_no_file_of_the_job_is_not_sent(job: JobOrder, name: str) -> None:
    notebook = _Notebook()
    with pytest.raises((JobRefused, Untrue)):
        send_artifact(Talk(None, notebook), {"id": job.id, "node_rank": 0, "name": name})  # type: ignore[arg-type]
    assert notebook.said == b""


@pytest.mark.parametrize(("mode", "is_private"), [(0o600, True), (0o640, False)])
def test_file_that_nobody_else_can_read_is_sent_as_such(job: JobOrder, mode: int, is_private: bool) -> None:
    (job_folder(job.id, 0) / "source/a.pt").chmod(mode)
    notebook = _Notebook()
    send_artifact(Talk(None, notebook), {"id": job.id, "node_rank": 0, "name": "a.pt"})  # type: ignore[arg-type]
    assert json.loads(notebook.said.partition(b"\n")[0])["private"] is is_private


def test_file_that_grows_while_it_is_read_comes_to_an_end(job: JobOrder) -> None:
    class Growing(Talk):
        def tick(self) -> None:
            with open(grown, "ab") as file:
                file.write(b"more" if file.tell() < 1000 else b"")

    notebook = _Notebook()
    grown = job_folder(job.id, 0) / "source/a.pt"
    size = grown.stat().st_size
    list_artifacts(Growing(None, notebook), {"id": job.id, "node_rank": 0, "patterns": ["a.pt"]})  # type: ignore[arg-type]
    assert json.loads(notebook.said)["files"][0][1] == size < grown.stat().st_size


# ---- outliving a logout


def test_scope_is_asked_for_only_where_the_user_may_linger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The systemd-run of this test drops its options and becomes the command, as the real one does for a scope."""
    program = tmp_path / "systemd-run"
    program.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n')
    program.chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    linger = tmp_path / "linger"
    linger.mkdir()
    assert outlives_logout("job-1", linger=str(linger)) == [], "no bus, no lingering"
    (tmp_path / "bus").touch()
    assert outlives_logout("job-1", linger=str(linger)) == []
    (linger / pwd.getpwuid(os.getuid()).pw_name).touch()
    scope = outlives_logout("job-1", linger=str(linger))
    assert scope[0] == str(program)
    assert subprocess.run([*scope, "echo", "a b"], capture_output=True, text=True, timeout=20).stdout == "a b\n"
