"""Jobs on hosts over real SSH: broken links, a host that reboots and the restarted job, a host that does not answer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from detrain_nb.jobs import Job, LogLine, submit
from detrain_nb.jobs.record import Record
from detrain_nb.spec import PipelineSpec

from ..testbed.nodes import ssh_nodes
from ..testbed.testbed import Testbed

LIMIT_S = 180.0
StartJob = Callable[[str, int], Job]
COUNT = """
import os, pathlib, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
kept = pathlib.Path(os.environ["KEPT"])
step = int(kept.read_text()) if kept.exists() else 0
print("begins at", step, flush=True)
while step < {steps}:
    total = torch.ones(1)
    dist.all_reduce(total)
    step += 1
    part = kept.with_name(f"part-{{os.getpid()}}")
    part.write_text(str(step))
    part.replace(kept)
    print("step", step, int(total), flush=True)
    time.sleep(0.01)
pathlib.Path("model.pt").write_text(str(step))
dist.destroy_process_group()
"""


def spec_of(name: str, *, steps: int) -> PipelineSpec:
    source = {"script_text": COUNT.format(steps=steps)}
    env = {"KEPT": f"/tmp/kept-{name}"}
    return PipelineSpec.from_dict({"name": name, "source": source, "env": env})


@pytest.fixture
def job_of(testbed: Testbed, home: Path) -> Iterator[StartJob]:
    """Yield a function that submits a job to two hosts; its jobs are stopped after the test."""
    jobs: list[Job] = []

    def start(name: str, steps: int) -> Job:
        jobs.append(submit(spec_of(name, steps=steps), nodes=ssh_nodes(testbed)))
        return jobs[-1]

    try:
        yield start
    finally:
        for job in jobs:
            job.stop(grace_s=2)
            job.close()


def steps_of(lines: list[LogLine], node: str) -> list[int]:
    return [int(line.text.split()[1]) for line in lines if line.node == node and line.text.startswith("step")]


@pytest.mark.thorough
@pytest.mark.timeout(LIMIT_S)
def test_links_that_break_lose_no_line(job_of: StartJob, testbed: Testbed, tmp_path: Path) -> None:
    job = job_of("links", 400)
    lines: list[LogLine] = []
    threads: list[threading.Thread] = []

    def note(line: LogLine) -> None:
        lines.append(line)
        if line.text in ("step 50 2", "step 200 2") and line.node == "h1":
            threads.append(threading.Thread(target=testbed.kill_sessions, args=("h1",)))
            threads[-1].start()

    status = job.attach(note)
    for thread in threads:
        thread.join()
    assert (status.state, status.exit_code) == ("ended", 0), status
    assert len(threads) == 2
    for node in ("h0", "h1"):
        assert steps_of(lines, node) == list(range(1, 401))
    assert any("connection lost" in line.text for line in lines)
    assert job.fetch(to=tmp_path).files == ("model.pt",)


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_job_of_a_killed_host_is_restarted_and_goes_on(job_of: StartJob, testbed: Testbed) -> None:
    job = job_of("killed", 100_000)
    reached = threading.Event()

    def note(line: LogLine) -> None:
        if line.text.startswith("step 51 "):  # from one host; the other one may so far have saved no more than step 50
            reached.set()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        job.attach(note)
    testbed.reboot("h1")
    status = job.wait()
    assert status.state == "node restarted"
    assert status.reports["h0"].exit_code not in (0, None)
    again = job.restart()
    try:
        begun: list[str] = []

        def see(line: LogLine) -> None:
            if line.text.startswith("begins at"):
                begun.append(line.text)
            if len(begun) == 2:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            again.attach(see)
        assert all(int(text.split()[-1]) >= 50 for text in begun)
    finally:
        again.stop(grace_s=2)
        again.close()


@pytest.mark.thorough
@pytest.mark.timeout(LIMIT_S)
def test_node_that_does_not_answer_is_silent_in_the_list(job_of: StartJob, testbed: Testbed) -> None:
    job = job_of("silent", 100_000)
    testbed.stop_sshd("h1", sessions=True)
    try:
        status = job.status()
        assert list(status.silent) == ["h1"]
        assert status.state == "running"
        assert Record().get(job.id).state == "running"
    finally:
        testbed.start_sshd("h1")
