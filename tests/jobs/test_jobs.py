"""Real jobs of two ranks on this machine: submitted, followed, stopped and restarted, and their files fetched."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from detrain_nb.errors import DetrainError, JobError, JobFailed, SpecError
from detrain_nb.jobs import Job, JobStatus, LogLine, Submission, find_job, jobs, prune, submit
from detrain_nb.jobs.crowds import find_crowds
from detrain_nb.jobs.record import Record
from detrain_nb.jobs.report_checks import NodeResources
from detrain_nb.jobs.submitting import submitting
from detrain_nb.spec import PipelineSpec
from detrain_nb.transport.local import LocalTransport

from .lying_node import LyingNode

LIMIT_S = 120.0
TRAIN = """
import mmap, os, pathlib, sys, time
import torch, torch.distributed as dist
from detrain_nb import job_spec, log_metrics

spec = job_spec()
dist.init_process_group("gloo")
rank = dist.get_rank()
total = torch.tensor([float(rank)])
shared = pathlib.Path("shared")
shared.write_bytes(bytes(2)) if rank == 0 else None
dist.all_reduce(total)
print(f"rank {rank} of {dist.get_world_size()}: {total.item()}, {spec.training.epochs} epochs, {sys.argv[1:]}")
print("has the secret:", os.environ["A_SECRET"][::-1] == "2retnuh")
for step in range(3):
    log_metrics(step, loss=1.0 / (step + 1))
pathlib.Path("artifacts").mkdir(exist_ok=True)
pathlib.Path(f"artifacts/rank-{rank}.txt").write_text("x" * 1000 * (rank + 1))
torch.save(total, "model.pt") if rank == 0 else None
begun, done = 0, 1
with shared.open("r+b") as file:
    seen = mmap.mmap(file.fileno(), 2)  # to look there is no system call, which would give the GIL away
if rank == 0:  # a thread of gloo gets the GIL, to let go of the tensor, no sooner than when the script has ended
    sys.setswitchinterval(1000)
    dist.all_reduce(total, async_op=True)
    seen[begun] = 1
    while not seen[done]:
        pass
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        pass
else:
    while not seen[begun]:
        time.sleep(0.01)
    shared.unlink()
    dist.all_reduce(total)
    seen[done] = 1
"""


def spec_of(script: str, **fields: object) -> PipelineSpec:
    source = {"script_text": script, "arguments": ["it's", "$HOME"]}
    return PipelineSpec.from_dict({"name": "tiny", "source": source, **fields})


@pytest.fixture(scope="module")
def done(home: Path) -> tuple[Job, JobStatus, list[LogLine]]:
    """Return a job that has succeeded, its status, and the lines that it printed."""
    lines: list[LogLine] = []
    spec = spec_of(TRAIN, secrets=["A_SECRET"], training={"epochs": 2})
    job = submit(spec, secrets={"A_SECRET": "hunter2"})
    return job, job.attach(lines.append), lines


@pytest.mark.timeout(LIMIT_S)
def test_job_runs_on_all_ranks_and_its_lines_come(done: tuple[Job, JobStatus, list[LogLine]]) -> None:
    _, status, lines = done
    shown = sorted(map(str, lines))
    assert (status.state, status.exit_code) == ("ended", 0), shown
    for rank in range(2):
        assert f"""[{rank}] rank {rank} of 2: 1.0, 2 epochs, ["it's", '$HOME']""" in shown
        assert f"[{rank}] has the secret: True" in shown


@pytest.mark.timeout(LIMIT_S)
def test_logs_come_again_by_rank(done: tuple[Job, JobStatus, list[LogLine]]) -> None:
    job, _, lines = done
    again = find_job(job.id).logs(rank=1)
    with pytest.raises(SpecError, match=r"has no rank 7: its ranks are 0 to 1"):
        job.logs(rank=7)
    assert [line.text for line in again.lines] == [line.text for line in lines if line.source == "1"]


@pytest.mark.timeout(LIMIT_S)
def test_metrics_of_all_ranks(done: tuple[Job, JobStatus, list[LogLine]], tmp_path: Path) -> None:
    found = [(line["step"], line["rank"], round(line["loss"], 3)) for line in done[0].metrics()]
    assert found == [(step, rank, round(1 / (step + 1), 3)) for step in range(3) for rank in range(2)]
    if importlib.util.find_spec("tensorboard") is None:
        with pytest.raises(SpecError, match="tensorboard is not installed"):
            done[0].write_tensorboard(tmp_path)
    else:
        assert {path.parent.name for path in done[0].write_tensorboard(tmp_path)} == {"rank-0", "rank-1"}


@pytest.mark.timeout(LIMIT_S)
def test_what_it_made_is_fetched(done: tuple[Job, JobStatus, list[LogLine]], tmp_path: Path) -> None:
    fetched = done[0].fetch(to=tmp_path)
    assert fetched.files == ("artifacts/rank-0.txt", "artifacts/rank-1.txt", "model.pt")
    assert (tmp_path / "artifacts/rank-1.txt").read_text() == "x" * 2000
    assert not list(tmp_path.rglob("*.part"))
    assert done[0].fetch(to=tmp_path).num_there == 3
    (tmp_path / "model.pt").write_text("mine")
    with pytest.raises(JobError, match=r"model\.pt in .* differs and was kept"):
        done[0].fetch(to=tmp_path)
    Record().note_fetched(done[0].id, {str(tmp_path / "model.pt"): hashlib.sha256(b"mine").hexdigest()})
    assert done[0].fetch(to=tmp_path).num_there == 2
    assert (tmp_path / "model.pt").read_bytes() != b"mine"
    with pytest.raises(SpecError, match=r"model\.pt is not a folder"):
        done[0].fetch(to=tmp_path / "model.pt")


@pytest.mark.timeout(LIMIT_S)
def test_secret_is_stored_nowhere(done: tuple[Job, JobStatus, list[LogLine]], home: Path) -> None:
    for file in home.rglob("*"):
        if file.is_file():
            assert b"hunter2" not in file.read_bytes(), file


@pytest.mark.timeout(LIMIT_S)
def test_job_is_known_by_name_and_listed(done: tuple[Job, JobStatus, list[LogLine]]) -> None:
    job = done[0]
    assert job.id in [row.id for row in jobs().rows]
    assert job.id in str(jobs())
    assert find_job("tiny").name == "tiny"
    shown = job.show()
    assert shown.plan is not None and shown.plan.world_size == 2
    with pytest.raises(JobError, match="no job"):
        find_job("nothing-of-that-name")


def test_missing_secret_is_named(home: Path) -> None:
    with pytest.raises(SpecError, match="NOT_SET_ANYWHERE"):
        submit(spec_of("pass", secrets=["NOT_SET_ANYWHERE"]))


def test_dry_run_says_what_would_run_and_starts_nothing(home: Path) -> None:
    before = len(jobs())
    told = submit(spec_of("print(1)", image="some/image:1"), dry_run=True)
    assert isinstance(told, Submission)
    assert "\nwarning: image: some/image:1: only exports start containers yet" in str(told)
    assert "torch.distributed.run" in str(told) and "would be sent" in str(told)
    assert len(jobs()) == before


def test_ranks_that_swamp_a_machine_are_refused_and_those_that_crowd_it_noted(home: Path) -> None:
    crowd = spec_of("pass", name="crowd", nodes=[{"host": "localhost", "ranks": 60_000}])
    with pytest.raises(SpecError, match=r"60,000 ranks on localhost, which has .* it has room for \d+$"):
        submit(crowd)
    nine = spec_of("pass", nodes=[{"host": "localhost", "ranks": 9}])
    facts = NodeResources(gpus=0, cpus=1, memory_bytes=10**9, free_bytes=0, torch="2.9.1")
    (note,) = find_crowds(nine.plan(), [LocalTransport()], [facts])
    assert note.startswith(
        "9 ranks on this machine, which has 1 processor and 1.0 GB of free memory: they need about 2"
    )
    assert not list(find_crowds(nine.plan(), [LocalTransport()], [replace(facts, cpus=3, memory_bytes=0)]))


def test_nodes_are_named_as_on_a_command_line_and_other_things_told_of() -> None:
    for hosts in ("localhost,gpu2", ["localhost", "gpu2"]):
        plan = submit(spec_of("pass"), nodes=hosts, dry_run=True).plan
        assert [node.name for node in plan.nodes] == ["localhost", "gpu2"]
    for nodes in (3, [3], ["localhost", 3], [None]):
        with pytest.raises(SpecError, match="give a nodes file, hosts as in"):
            submit(spec_of("pass"), nodes=nodes)  # type: ignore[call-overload]
    for spec, said in (
        (3, "type int, not PipelineSpec: give"),
        ({}, "type dict, .* convert it with PipelineSpec.from_dict"),
    ):
        with pytest.raises(SpecError, match=said):
            submit(spec)  # type: ignore[call-overload]


@pytest.mark.timeout(LIMIT_S)
def test_failed_job_says_which_rank_and_its_last_lines(home: Path, tmp_path: Path) -> None:
    failing = "import os, sys\nprint('about to fail')\nif os.environ['RANK'] == '1': sys.exit(3)"
    job = submit(spec_of(failing, name="failing"))
    status = job.wait()
    assert (status.state, status.exit_code, status.failed_rank) == ("ended", 3, 1)
    with pytest.raises(JobFailed, match="about to fail"):
        status.check()
    with pytest.raises(JobError, match="did not succeed"):
        job.fetch("*", tmp_path)


@pytest.mark.timeout(LIMIT_S)
def test_stopped_job_leaves_no_process(home: Path) -> None:
    sleeping = "import os, time\nprint('pid', os.getpid(), flush=True)\ntime.sleep(1000)"
    job = submit(spec_of(sleeping, name="sleeping"))
    pids: list[int] = []

    def note(line: LogLine) -> None:
        if line.text.startswith("pid "):
            pids.append(int(line.text.split()[1]))
        if len(pids) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.attach(note)
    assert job.status().state == "running"
    with pytest.raises(JobError, match="is already running"):
        submit(spec_of("pass", name="sleeping"))
    with pytest.raises(JobError, match=r"is running: stop it first with find_job\(.*\)\.stop\(\)"):
        job.remove()
    executed = job.execute("echo here; exit 5", on_line=None)
    assert executed.status == 5
    assert (job.stop(grace_s=5).state, job.stop().exit_code) == ("stopped", 143)
    assert [row.state for row in jobs() if row.id == job.id] == ["stopped"]
    _wait_until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    (said,) = home.glob(f"state/detrain_nb/jobs/{job.id}/*/status.json")
    said.write_text("{")
    with pytest.raises(JobError, match=r"cannot be stopped: status\.json is damaged"):
        job.stop()
    job.remove()
    with pytest.raises(JobError):
        find_job(job.id)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_job_goes_on_when_its_notebook_is_killed_and_is_restarted_elsewhere(home: Path) -> None:
    counting = "import os, time\nfor n in range(int(os.environ['COUNT'])): print(n, flush=True); time.sleep(0.01)"
    spec = spec_of(counting, name="counting", env={"COUNT": "200"}, secrets=["A_SECRET"])
    code = "import json, os, sys\nfrom detrain_nb.jobs import submit\nfrom detrain_nb.spec import PipelineSpec\n"
    code += "print(submit(PipelineSpec.from_dict(json.load(sys.stdin))).id, flush=True)\nos.kill(os.getpid(), 9)"
    env = {**os.environ, "A_SECRET": "hunter2"}
    submitted = subprocess.run(
        [sys.executable, "-c", code], input=json.dumps(spec.to_dict()), env=env, text=True, stdout=subprocess.PIPE
    )
    assert submitted.returncode == -signal.SIGKILL, submitted
    job = find_job(submitted.stdout.strip())
    lines: list[str] = []
    assert job.attach(lambda line: lines.append(str(line))).exit_code == 0
    assert [line for line in lines if line.startswith("[1] ")] == [f"[1] {n}" for n in range(200)]
    with pytest.raises(SpecError, match="A_SECRET"):
        job.restart()
    again = job.restart(secrets={"A_SECRET": "hunter2"})
    assert (again.id != job.id, again.name, again.wait().exit_code) == (True, "counting", 0)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_restart_goes_on_from_checkpoints_in_the_folder_of_the_job(home: Path) -> None:
    script = """
import os, pathlib, sys
from detrain_nb import job_spec
kept = pathlib.Path(job_spec().checkpoint.url, os.environ["RANK"])
step = int(kept.read_text()) if kept.exists() else 0
print("begins at", step, flush=True)
kept.parent.mkdir(exist_ok=True)
part = kept.with_suffix(".part")
part.write_text(str(step + 5))
part.replace(kept)
"""

    def follow(job: Job) -> list[str]:
        assert job.wait().exit_code == 0
        return sorted(line.text for line in job.logs().lines)

    job = submit(spec_of(script, name="relative", checkpoint={"url": "checkpoints"}))
    assert follow(job) == ["begins at 0"] * 2
    again = job.restart()
    assert follow(again) == ["begins at 5"] * 2
    (kept,) = home.glob(f"state/detrain_nb/jobs/{job.id}/*/source/checkpoints/0")
    assert kept.read_text() == "5", "those of the first job stay as they are"
    job.remove()
    assert follow(again.restart()) == ["begins at 10"] * 2


@pytest.mark.parametrize("moment", [pytest.param("preparing", marks=pytest.mark.slow), "starting"])
def test_submitter_that_is_killed_before_the_launch_leaves_nothing(moment: str, home: Path) -> None:
    code = f"""
import os
from detrain_nb.jobs import submit
from detrain_nb.spec import PipelineSpec

def end(text):
    if text.startswith({moment!r}):
        os.kill(os.getpid(), 9)

submit(PipelineSpec.from_dict({{"name": "killed-{moment}", "source": {{"script_text": "1"}}}}), on_progress=end)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended
    with pytest.raises(DetrainError, match=r"hung up|broke"):  # not because a job of this name is already running
        submit(spec_of("pass", name=f"killed-{moment}"), nodes=[LyingNode({})])
    row = [row for row in jobs(limit_s=30).rows if row.name == f"killed-{moment}"][-1]
    _wait_until(lambda: not list((home / "state/detrain_nb/jobs").glob(f"killed-{moment}-*/*")))
    assert row.state in ("not started", "preparing", "lost")
    _wait_until(lambda: find_job(row.id).status().state == "not started")


@pytest.mark.parametrize("moment", ["connecting", "preparing"])
def test_interrupt_before_the_launch_says_that_nothing_was_started_and_leaves_no_job(moment: str, home: Path) -> None:
    def interrupt(text: str) -> None:
        if text.startswith(moment):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)  # SIGINT interrupts this sleep

    with pytest.raises(KeyboardInterrupt, match="nothing was started"):
        submit(spec_of("pass", name="interrupted"), on_progress=interrupt)
    assert not [row for row in jobs().rows if row.name == "interrupted"]


@pytest.mark.timeout(LIMIT_S)
def test_restart_says_where_the_source_is_another_one_now(home: Path, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print(1)")
    job = submit(PipelineSpec.from_dict({"name": "changing", "source": {"script": str(script)}}))
    again = job.restart()
    assert not again.notices
    script.write_text("print(2)")
    third = again.restart()
    assert third.notices == (f"the source has changed since {again.id}: the job runs it as it is now",)
    third.stop()


def test_storage_that_is_none_leaves_no_job(home: Path) -> None:
    with pytest.raises(SpecError, match="bogus"):
        submit(spec_of("pass", name="stored"), storage="bogus://x")
    assert not [row for row in jobs().rows if row.name == "stored"]


def test_old_jobs_are_pruned_and_others_stay(home: Path) -> None:
    record = Record()
    for job, state in (("old-20200101-000000-beef", "ended"), ("older-20200101-000000-beef", "not started")):
        record.add(job, name=job[:5], nodes="[]", spec="{}", state=state)
        record.update(job, ended_at=time.time() - 40 * 86400)
    record.add("new-20260101-000000-beef", name="new", nodes="[]", spec="{}", state="ended")
    record.update("new-20260101-000000-beef", ended_at=time.time())
    before = {row.id for row in jobs(ask=False)}
    assert sorted(prune(30)) == ["old-20200101-000000-beef", "older-20200101-000000-beef"]
    assert before - {row.id for row in jobs(ask=False)} == {"old-20200101-000000-beef", "older-20200101-000000-beef"}


def test_job_whose_node_is_gone_is_forgotten_only_when_asked_to(home: Path) -> None:
    record, job = Record(), "gone-20200101-000000-beef"
    record.add(job, name="gone", nodes='[{"host": "127.0.0.1", "port": 1}]', spec="{}", state="not started")
    record.update(job, ended_at=time.time() - 40 * 86400)
    with pytest.raises(JobError, match=r"does not answer.*: anyway=True forgets the job here"):
        find_job(job).remove()
    assert prune(30) == []
    assert prune(30, anyway=True) == [job]


def test_two_submits_at_once_are_one(home: Path) -> None:
    with submitting("at-once"), pytest.raises(JobError, match="being submitted by another process"):
        submit(spec_of("pass", name="at-once"))
    assert not [row for row in jobs().rows if row.name == "at-once"]


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        ("file://store", r"file://store: write file:///\.\.\."),
        ("sftp://host/store", "would accept any host key"),
    ],
)
def test_storage_that_cannot_be_is_refused_before_a_node_is_asked(home: Path, storage: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        submit(spec_of("pass", name="nowhere"), nodes=[LyingNode({})], storage=storage)


def test_storage_is_kept_unless_it_has_a_password(home: Path) -> None:
    seen: list[str] = []
    for storage, kept in (("s3://bucket/folder", "s3://bucket/folder"), ("s3://me:hunter2@bucket/folder", "")):
        with pytest.raises(DetrainError, match=r"hung up|broke"):
            submit(
                spec_of("pass", name="stored-there"),
                nodes=[LyingNode({})],
                storage=storage,
                on_progress=lambda text: seen.append(Record().get("stored-there").storage),
            )
        assert seen[-1] == kept


def _wait_until(is_so: object, limit_s: float = 60.0) -> None:
    deadline = time.monotonic() + limit_s
    while not is_so():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.sched_yield()
