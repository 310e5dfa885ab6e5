"""Jobs on hosts over real SSH, some with this machine as a further node: their results, and failures on each side."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from detrain_nb.errors import DetrainError, JobError, JobFailed, LaunchError
from detrain_nb.jobs import Job, LogLine, jobs, submit
from detrain_nb.jobs.record import Record
from detrain_nb.spec import Node, PipelineSpec
from detrain_nb.transport import Transport
from detrain_nb.transport.local import LocalTransport

from ..testbed.machine import wait_until
from ..testbed.nodes import away_from, processes_of_sessions, ssh_nodes
from ..testbed.testbed import Testbed
from .test_job_nodes import TOGETHER

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]
SECRET = "s3cret-of-the-tests"
START = "import torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
WAIT = f"{START}print('ready', flush=True)\nimport time\ntime.sleep(600)"
TICK = f"""
{START}import time
for number in range(300):
    dist.all_reduce(torch.ones(1))
    print("tick", number, flush=True)
    time.sleep(0.05)
"""
THREE = f"""
{START}import sys
print("before the end", flush=True)
dist.barrier()
if dist.get_rank() == 1:
    print("it cannot go on", flush=True)
    sys.exit(3)
dist.barrier()
"""
KEEPER = f"""
import os, time
assert os.environ["WORD"] == "-".join(["s3cret", "of", "the", "tests"])
{WAIT}
"""
RESUME = f"""
import os, pathlib, time
from detrain_nb import job_spec
{START}
checkpoint = job_spec().checkpoint
kept = pathlib.Path(checkpoint.url) / f"step-{{dist.get_rank()}}"
step = int(kept.read_text()) if checkpoint.resume else 0
print("begins at", step, flush=True)
while step < 30 or not checkpoint.resume:
    dist.all_reduce(torch.ones(1))
    step += 1
    part = kept.with_suffix(".part")
    part.write_text(str(step))
    part.replace(kept)
    print("step", step, flush=True)
    time.sleep(0.05)
pathlib.Path("model.pt").write_text(f"{{dist.get_rank()}} at {{step}}")
dist.destroy_process_group()
"""


class StartJob:
    """Submits jobs, and lists them so that the fixture can stop them."""

    def __init__(self) -> None:
        self.jobs: list[Job] = []

    def __call__(
        self, nodes: Sequence[Transport], script: str, name: str, *, values: dict[str, str] | None = None, **fields: Any
    ) -> Job:
        spec = PipelineSpec.from_dict({"name": name, "source": {"script_text": script}, **fields})
        self.jobs.append(submit(spec, nodes=nodes, secrets=values))
        return self.jobs[-1]


@pytest.fixture
def start_job(home: Path) -> Iterator[StartJob]:
    start = StartJob()
    try:
        yield start
    finally:
        for job in start.jobs:
            job.stop(grace_s=1)
            job.close()


def follow_until(job: Job, is_it: Callable[[LogLine], bool], *, count: int = 1) -> list[LogLine]:
    """Return a job's lines up to the ``count``-th one for which ``is_it`` is true; the job keeps running."""
    lines: list[LogLine] = []

    def note(line: LogLine) -> None:
        lines.append(line)
        if sum(map(is_it, lines)) == count:
            raise KeyboardInterrupt

    try:
        status = job.attach(note)
    except KeyboardInterrupt:
        return lines
    pytest.fail(f"{status}\n{lines}")


def is_ready(line: LogLine) -> bool:
    return line.text == "ready"


def kill(testbed: Testbed, host: str, part: str) -> None:
    """Send SIGKILL to every process of detrain_nb on a host that has ``part`` as a word of its command line."""
    for pid, argv in processes_of_sessions(testbed, host).items():
        if part in argv:
            testbed.output(host, "kill", "-9", str(pid))


def wait_until_empty(testbed: Testbed, host: str, job: Job) -> None:
    wait_until(
        lambda: not any(job.id in " ".join(argv) for argv in testbed.processes(host).values()),
        f"the end of all processes of {job.id} on {host}",
    )


def test_this_machine_beside_a_host(testbed: Testbed, start_job: StartJob, tmp_path: Path) -> None:
    lines: list[LogLine] = []
    job = start_job([LocalTransport(Node(host="localhost")), *ssh_nodes(testbed, 1)], TOGETHER, "beside")
    status = job.attach(lines.append)
    assert (status.state, status.exit_code) == ("ended", 0), status
    assert sorted(map(str, lines)) == ["[h0:1] total 1.0", "[localhost:0] total 1.0"]
    assert job.fetch(to=tmp_path).files == ("h0/own.pt", "localhost/own.pt", "same.pt")
    assert [(tmp_path / name / "own.pt").read_text() for name in ("localhost", "h0")] == ["0", "1"]


def test_this_machine_that_no_host_reaches_is_refused(testbed: Testbed, start_job: StartJob) -> None:
    with away_from(testbed, "h0") as address, pytest.raises(LaunchError, match="h0 does not reach localhost at"):
        start_job([LocalTransport(Node(host="localhost", address=address)), *ssh_nodes(testbed, 1)], WAIT, "walled")


@pytest.mark.thorough
@pytest.mark.parametrize("host", ["h0", "h1"])
def test_killed_runner_ends_the_other_host_which_says_whose_it_was(
    testbed: Testbed, start_job: StartJob, host: str
) -> None:
    job, other = start_job(ssh_nodes(testbed), WAIT, f"killed-{host}"), {"h0": "h1", "h1": "h0"}[host]
    follow_until(job, is_ready, count=2)
    kill(testbed, host, "detrain_nb.node.job.runner")
    status = job.wait(150)
    assert status.state == "lost"
    assert status.reports[host].state == "lost"
    assert f"node {host}" in status.reports[other].reason, status
    for each in ("h0", "h1"):
        wait_until_empty(testbed, each, job)


def test_killed_torchrun_ends_the_other_host_at_once_which_says_whose_it_was(
    testbed: Testbed, start_job: StartJob
) -> None:
    job = start_job(ssh_nodes(testbed), WAIT, "killed-torchrun", rendezvous={"silence_s": 600})
    follow_until(job, is_ready, count=2)
    kill(testbed, "h1", "torch.distributed.run")
    status = job.wait(100)
    assert (status.state, status.exit_code) == ("ended", 137), status
    assert status.reports["h0"].reason == "node h1 failed: torchrun was killed by SIGKILL"
    for each in ("h0", "h1"):
        wait_until_empty(testbed, each, job)


@pytest.mark.thorough
def test_job_of_a_killed_host_is_restarted_from_its_checkpoint(
    testbed: Testbed, start_job: StartJob, tmp_path: Path
) -> None:
    folder = "/tmp/of-the-job"  # the folders are not shared: each host has its own at this path
    for host in ("h0", "h1"):
        testbed.output(host, "mkdir", "-p", folder)
    job = start_job(ssh_nodes(testbed), RESUME, "resumed", checkpoint={"url": folder, "resume": False})
    follow_until(job, lambda line: line.text == "step 10", count=2)
    kill(testbed, "h0", "detrain_nb.node.job.runner")
    again = job.restart()
    start_job.jobs.append(again)
    lines: list[LogLine] = []
    assert again.attach(lines.append).exit_code == 0, lines
    begun = [int(line.text.split()[-1]) for line in lines if line.text.startswith("begins at")]
    assert len(begun) == 2
    assert min(begun) >= 10
    assert job.id != again.id
    assert again.fetch(to=tmp_path).files == ("h0/model.pt", "h1/model.pt")
    assert [(tmp_path / f"h{rank}/model.pt").read_text().split()[0] for rank in range(2)] == ["0", "1"]


@pytest.mark.thorough
def test_one_of_two_submits_at_once_is_refused_wherever_they_come_from(
    testbed: Testbed, start_job: StartJob, tmp_path: Path
) -> None:
    outcomes: list[Job | DetrainError] = []

    def start() -> None:
        try:
            outcomes.append(start_job(ssh_nodes(testbed), WAIT, "twice"))
        except DetrainError as exc:
            outcomes.append(exc)

    threads = [threading.Thread(target=start) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [refused] = [each for each in outcomes if isinstance(each, DetrainError)]
    assert "twice" in str(refused)
    [job] = [each for each in outcomes if isinstance(each, Job)]
    spec = PipelineSpec.from_dict({"name": "twice", "source": {"script_text": WAIT}})
    elsewhere = Record(tmp_path / "record.sqlite")  # as of a notebook on another machine, which does not have this job
    with pytest.raises(DetrainError, match=rf"h[01]: a job named twice is already running on this node: {job.id}"):
        submit(spec, nodes=ssh_nodes(testbed), record=elsewhere)
    assert job.status().state == "running"
    assert testbed.output("h0", "ls ~/.local/state/detrain_nb/jobs | grep -c ^twice").strip() == "1"


@pytest.mark.thorough
def test_first_host_that_is_lost_before_the_nodes_meet_ends_the_other(testbed: Testbed, start_job: StartJob) -> None:
    job = start_job(ssh_nodes(testbed), WAIT, "early")
    kill(testbed, "h0", "detrain_nb.node.job.runner")
    status = job.wait(60)
    assert "node h0, which holds the store of the job, is down" in status.reports["h1"].reason, status
    wait_until_empty(testbed, "h1", job)


@pytest.mark.thorough
def test_script_that_exits_3_ends_the_job_with_3_its_rank_and_its_last_lines(
    testbed: Testbed, start_job: StartJob
) -> None:
    job = start_job(ssh_nodes(testbed), THREE, "three")
    status = job.wait(150)
    assert (status.state, status.exit_code, status.exit_status) == ("ended", 3, 3), status
    assert (status.failed_node, status.failed_rank) == ("h1", 1)
    assert status.last_lines == ("before the end", "it cannot go on")
    assert "node h1 failed: rank 1 exited with code 3" in status.reports["h0"].reason
    with pytest.raises(JobFailed, match=r"rank 1 on h1"):
        status.check()
    with pytest.raises(JobError, match="did not succeed: failed, exit 3"):
        job.fetch()


@pytest.mark.thorough
def test_packets_that_are_lost_for_a_while_lose_no_line(testbed: Testbed, start_job: StartJob) -> None:
    job = start_job(ssh_nodes(testbed), TICK, "cut")
    lines: list[LogLine] = []
    threads: list[threading.Thread] = []

    def cut() -> None:
        testbed.cut("h1", "notebook")
        time.sleep(8)  # longer than the rest of the job takes, so its end is learned only after heal()
        testbed.heal("h1", "notebook")

    def note(line: LogLine) -> None:
        lines.append(line)
        if line.text == "tick 100" and line.node == "h1":
            threads.append(threading.Thread(target=cut))
            threads[-1].start()

    status = job.attach(note)
    for thread in threads:
        thread.join()
    assert (status.state, status.exit_code) == ("ended", 0), status
    for node in ("h0", "h1"):
        told = [line.text for line in lines if line.node == node and line.text.startswith("tick")]
        assert told == [f"tick {number}" for number in range(300)]
    assert len(threads) == 1


@pytest.mark.thorough
def test_host_that_answers_nothing_is_listed_as_it_was_last_known(testbed: Testbed, start_job: StartJob) -> None:
    job = start_job(ssh_nodes(testbed), WAIT, "silent")
    follow_until(job, is_ready, count=2)
    testbed.cut("h1", "notebook")
    (row,) = [row for row in jobs(limit_s=3) if row.id == job.id]  # while h1 does not answer
    assert row.state == "running"
    testbed.heal("h1", "notebook")
    assert job.status().state == "running"


# Without h1, the rank on h0 would wait in init_process_group (WHEN=meeting) or in an all_reduce (WHEN=training).
LEFT_ALONE = """
import os, time, torch, torch.distributed as dist
from detrain_nb import job_spec
job = job_spec()
print("ranks", os.environ["WORLD_SIZE"], "shards", job.parallelism.dp_shard, "batch", job.batch, flush=True)
if os.environ["WHEN"] == "meeting" and os.environ["DETRAIN_NB_JOB"].endswith("/1"):
    time.sleep(600)
dist.init_process_group("gloo")
print("met", flush=True)
while dist.get_world_size() == 2:
    dist.all_reduce(torch.ones(1))
    time.sleep(0.05)
dist.destroy_process_group()
"""


@pytest.fixture
def alone(start_job: StartJob, testbed: Testbed, request: pytest.FixtureRequest) -> Job:
    """Return a job that can continue without h1, once its ranks have started to meet or to train."""
    when = request.param
    rendezvous = {"min_nodes": 1, "max_restarts": 1, "silence_s": 3, "timeout_s": 60}
    given = {"env": {"WHEN": when}, "training": {"batch_size": 8}, "rendezvous": rendezvous}
    job = start_job(ssh_nodes(testbed), LEFT_ALONE, f"alone-{when}", **given)
    follow_until(job, lambda line: line.text.startswith({"meeting": "ranks 2", "training": "met"}[when]), count=2)
    return job


def check_went_on(job: Job, *, restarts: int) -> None:
    status = job.wait(90)
    assert (status.state, status.exit_code) == ("ended", 0), status
    assert status.reports["h0"].restarts == restarts
    rounds = [line.text for line in job.logs(node="h0").lines if line.text.startswith("ranks")]
    assert rounds == ["ranks 2 shards 2 batch batch 8 = 2 replicas x 4 samples", "ranks 1 shards 1 batch batch 8"]


@pytest.mark.parametrize("alone", ["meeting", "training"], indirect=True)
def test_elastic_job_goes_on_without_a_host_that_vanishes_without_a_word(testbed: Testbed, alone: Job) -> None:
    testbed.cut("h1", "h0")
    try:
        check_went_on(alone, restarts=0)
    finally:
        testbed.heal("h1", "h0")
    said = [line.text for line in alone.logs(torchrun=True, node="h0").lines]
    assert any("node h1 sent no heartbeat for 3 s: the ranks restart without it" in line for line in said)


@pytest.mark.thorough
@pytest.mark.parametrize("alone", ["training"], indirect=True)
def test_elastic_job_goes_on_without_a_host_whose_torchrun_is_killed(testbed: Testbed, alone: Job) -> None:
    kill(testbed, "h1", "torch.distributed.run")
    check_went_on(alone, restarts=1)


@pytest.mark.thorough
def test_secret_is_in_no_command_line_file_or_log(testbed: Testbed, start_job: StartJob, home: Path) -> None:
    nodes = [LocalTransport(Node(host="localhost")), *ssh_nodes(testbed)]
    job = start_job(nodes, KEEPER, "kept", values={"WORD": SECRET}, secrets=["WORD"])
    follow_until(job, is_ready, count=3)
    for host in ("h0", "h1"):
        assert processes_of_sessions(testbed, host)
        assert SECRET not in str(testbed.processes(host))
        found = testbed.exec(host, f"grep -rl {SECRET} ~ /tmp /run /dev/shm", capture_output=True, text=True)
        assert found.stdout == ""
    own = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if os.access(path, os.R_OK)]
    assert not any(SECRET.encode() in argv for argv in own)
    for path in home.rglob("*"):
        assert not path.is_file() or SECRET.encode() not in path.read_bytes(), path
    assert SECRET not in repr(job) + str(job) + str(job.show()) + str(job.logs(torchrun=True))
    assert set(job.execute("echo ${WORD-none}", on_line=None).statuses.values()) == {0}
