"""The measurements that an agent sends to a watching notebook: of real processes, and of GPUs that nvidia-smi reports.

The nvidia-smi is a program of the test, which prints lines as the real one does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from detrain_nb.metrics import STEP_RECORD, STEPS_VARIABLE, log_metrics, note_step
from detrain_nb.node.agent.gpu_watch import Gpu, GpuWatch, VisibleGpus
from detrain_nb.node.agent.sampler import Sampler
from detrain_nb.node.agent.snapshot import Run
from detrain_nb.node.agent.step_rates import StepRates, make_places
from detrain_nb.session.state.measurements import check_measured
from detrain_nb.wire import (
    Alive,
    Attach,
    Attached,
    EndSession,
    Launch,
    Measure,
    Measured,
    RankEnded,
    RankUp,
    Received,
    WorkerUp,
)

from .agent_here import Agent, Peer, agent_running

pytestmark = pytest.mark.timeout(60)

SMI = """#!{python}
import os, pathlib, sys, time
if "--list-gpus" in sys.argv:
    sys.exit(print("GPU 0: x\\nGPU 1: x"))
folder = pathlib.Path({folder!r})
(folder / f"started-{{os.getpid()}}").write_text(" ".join(sys.argv[1:]))
while True:
    try:
        for line in {lines!r}:
            os.write(1, line.encode() + b"\\n")
    except OSError:
        pass  # as one that hangs in its driver does not notice
    if {ends!r}:
        sys.exit(9)
    time.sleep(0.05)
"""
LINES = [
    "0, GPU-aaaa1111-0000, NVIDIA H100 80GB HBM3, 37, 1024, 81559",
    "1, GPU-bbbb2222-0000, NVIDIA H100 80GB HBM3, [N/A], 20480, 81559",
]


def write_smi(folder: Path, lines: list[str], *, ends: bool = False) -> str:
    """Write a program named nvidia-smi; return a PATH that starts with its folder."""
    program = folder / "bin" / "nvidia-smi"
    program.parent.mkdir()
    program.write_text(SMI.format(python=sys.executable, folder=str(folder), lines=lines, ends=ends))
    program.chmod(0o755)
    return f"{program.parent}{os.pathsep}{os.environ['PATH']}"


def smi_pids(folder: Path) -> list[int]:
    """Return the pids of the nvidia-smi processes that were started, in any order."""
    return [int(path.name.partition("-")[2]) for path in folder.glob("started-*")]


def soon(holds: Callable[[], object], limit_s: float = 20.0) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def busy() -> Iterator[int]:
    """Yield the pid of a process that keeps a CPU busy."""
    with subprocess.Popen([sys.executable, "-c", "x = b'x' * (60 << 20)\nwhile True: pass"]) as process:
        yield process.pid
        process.kill()


def watched(agent: Agent, *ups: RankUp, env: dict[str, str] | None = None) -> Peer:
    """Return a notebook that is attached to a session with these ranks."""
    notebook = agent.connect()
    launch = Launch(["sleep", "60"], env or {}, [up.rank for up in ups], 30.0, {"device": "cpu"})
    notebook.send(Attach("mine", "test"), launch)
    notebook.receive(Attached)
    for up in ups:
        agent.connect().send(WorkerUp(up.rank, 1), up)
        notebook.receive(RankUp)
    return notebook


def up(rank: int, pid: int, *, device: str = "cpu", local_rank: int | None = None) -> RankUp:
    return RankUp(rank, 1, rank if local_rank is None else local_rank, 4, pid, "here", device, "2.13.0")


def measured(notebook: Peer, holds: Callable[[Measured], object] = lambda _: True) -> Measured:
    """Return the first measurement for which ``holds`` is true."""
    while True:
        found = notebook.receive(Measured)
        assert isinstance(found, Measured)
        if holds(found):
            return found


# ---- processes


def test_agent_says_that_it_measures_beside_what_it_was_told() -> None:
    with agent_running() as agent:
        watched(agent, up(0, os.getpid()))
        again = agent.connect()
        again.send(Attach("mine", "test"))
        answer = again.receive(Attached)
        assert isinstance(answer, Attached) and answer.info == {
            "device": "cpu",
            "measures": True,
            "tells_variables": True,
        }


def test_processor_time_and_memory_of_ranks_are_measured(busy: int) -> None:
    with agent_running() as agent:
        notebook = watched(agent, up(2, busy), up(3, os.getppid()))
        notebook.send(Measure(0.3, 60.0))
        first = measured(notebook)
        assert first.ranks == [2, 3] and first.cpu_percent == [-1, -1]  # no time has passed yet
        said = measured(notebook, lambda each: each.cpu_percent[0] > 0 and each.rss_bytes[0] > 50 << 20)
        assert said.cpu_percent[0] < 190
        assert said.gpus == [-1, -1] and said.gpu_names == [] and said.steps_per_s == [-1, -1] == said.cells
        assert 0 < said.node_cpu_percent <= 100
        assert 0 < said.memory_used_bytes < said.memory_total_bytes
        assert notebook.numbers == [1, 2], "what is measured is not kept"


def test_a_rank_that_has_ended_is_not_measured(busy: int) -> None:
    with agent_running() as agent:
        notebook = watched(agent, up(0, busy))
        worker = agent.connect()
        worker.send(WorkerUp(1, 1), up(1, os.getpid()), RankEnded(1, 1, 0, 9, 0, "", "", False, ""))
        notebook.receive(RankEnded)
        notebook.send(Measure(0.1, 5.0))
        assert measured(notebook).ranks == [0]


def test_nothing_is_measured_without_an_order_nor_after_it() -> None:
    """The agent answers a sign of life after all earlier messages: its answer shows that no measurement was sent."""
    with agent_running() as agent:
        notebook = watched(agent, up(0, os.getpid()))
        assert not said_until_answered(notebook)
        notebook.send(Measure(0.1, 0.4))
        assert 1 <= len(said_for(notebook, 1.2)) <= 9
        assert not said_until_answered(notebook)


def test_an_order_can_be_taken_back() -> None:
    with agent_running() as agent:
        notebook = watched(agent, up(0, os.getpid()))
        notebook.send(Measure(0.1, 60.0))
        measured(notebook)
        notebook.send(Measure(0.1, 0.0))
        said_until_answered(notebook)
        assert not said_for(notebook, 0.4)


def said_for(notebook: Peer, seconds: float) -> list[Measured]:
    """Return the measurements of the next ``seconds``; only a wait can show that none is sent."""
    threading.Event().wait(seconds)
    return said_until_answered(notebook)


def said_until_answered(notebook: Peer) -> list[Measured]:
    notebook.send(Alive())
    said = []
    while not isinstance(message := notebook.receive((Measured, Received)), Received):
        assert isinstance(message, Measured)
        said.append(message)
    return said


@pytest.mark.parametrize("order", [Measure(1e-9, 1e15), Measure(-5.0, 60.0)])
def test_an_order_has_bounds(order: Measure) -> None:
    sampler = Sampler()
    sampler.take_order(order)
    assert sampler.measure([], {}) is not None
    assert sampler.measure([], {}) is None, "not at once again"
    assert sampler.due_at is not None and 0.05 < sampler.due_at - time.monotonic() < 61
    sampler.end()
    assert sampler.due_at is None and sampler.measure([], {}) is None


# ---- GPUs


def test_gpus_of_ranks_are_named_and_their_nvidia_smi_ends_with_the_order(tmp_path: Path) -> None:
    with agent_running(PATH=write_smi(tmp_path, LINES)) as agent:
        ranks = up(4, os.getpid(), device="cuda:0", local_rank=0), up(5, os.getpid(), device="cuda:1", local_rank=1)
        notebook = watched(agent, *ranks, env={"CUDA_VISIBLE_DEVICES": "1,GPU-aaaa1111"})
        notebook.send(Measure(0.1, 60.0))
        said = measured(notebook, lambda each: each.gpu_names)
        assert said.gpus == [1, 0]
        assert said.gpu_percent == [37, -1]
        assert said.gpu_used_bytes == [1024 << 20, 20480 << 20] and said.gpu_total_bytes == [81559 << 20] * 2
        assert said.gpu_names == ["NVIDIA H100 80GB HBM3"] * 2
        [pid] = smi_pids(tmp_path)
        options = (tmp_path / f"started-{pid}").read_text()
        assert options.startswith("--query-gpu=index,uuid,name,") and options.endswith("-l 1")
        notebook.send(Measure(0.1, 0.2))
        soon(lambda: is_gone(pid))
        assert agent.process.poll() is None


def test_no_nvidia_smi_is_started_for_ranks_on_the_cpu(tmp_path: Path) -> None:
    with agent_running(PATH=write_smi(tmp_path, LINES)) as agent:
        notebook = watched(agent, up(0, os.getpid()))
        notebook.send(Measure(0.1, 5.0))
        measured(notebook, lambda each: each.node_cpu_percent > 0)
        assert not smi_pids(tmp_path)


@pytest.mark.parametrize("how", ["killed", "left", "session ended"])
def test_the_nvidia_smi_ends_with_its_agent_or_notebook(tmp_path: Path, how: str) -> None:
    with agent_running(PATH=write_smi(tmp_path, LINES)) as agent:
        notebook = watched(agent, up(0, os.getpid(), device="cuda:0"))
        notebook.send(Measure(0.1, 60.0))
        measured(notebook, lambda each: each.gpu_names)
        [pid] = smi_pids(tmp_path)
        if how == "killed":
            agent.process.send_signal(signal.SIGKILL)
        elif how == "left":
            notebook.sock.close()
        else:
            notebook.send(EndSession())
        soon(lambda: is_gone(pid))


def test_an_nvidia_smi_that_ends_again_and_again_is_left_alone(tmp_path: Path) -> None:
    with agent_running(PATH=write_smi(tmp_path, LINES, ends=True)) as agent:
        notebook = watched(agent, up(0, os.getpid(), device="cuda:0"))
        notebook.send(Measure(0.1, 60.0))
        soon(lambda: len(smi_pids(tmp_path)) == 3)
        soon(lambda: all(map(is_gone, smi_pids(tmp_path))))
        assert all(each.gpus in ([0], [-1]) for each in said_for(notebook, 2.0))
        assert len(smi_pids(tmp_path)) == 3


@pytest.mark.parametrize(
    "lines",
    [
        ["NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."],
        ["x" * 300_000],
        ["0, GPU-x, name, 1, 2", "99999, GPU-x, name, 1, 2, 3", "-1, GPU-x, name, 1, 2, 3"],
    ],
    ids=["no driver", "a line without end", "other fields"],
)
def test_lines_that_name_no_gpu_are_passed_over(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", write_smi(tmp_path, [*lines, "7, GPU-y, A, B, 100, 5, 6"]))
    with contextlib.closing(Closable(GpuWatch())) as watch:
        soon(watch.gpus.read)
        assert watch.gpus.read() == [Gpu(7, "GPU-y", "A,B", 100, 5 << 20, 6 << 20)]


@pytest.mark.timeout(60)
def test_an_nvidia_smi_that_prints_without_an_end_holds_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nexec yes '{LINES[0]}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    before = {*psutil.Process().children()}
    with contextlib.closing(Closable(GpuWatch())) as watch:
        soon(lambda: watch.gpus.read() == [] and before.issuperset(psutil.Process().children()))


class Closable:
    """For contextlib.closing."""

    def __init__(self, gpus: GpuWatch) -> None:
        self.gpus = gpus

    def close(self) -> None:
        self.gpus.end()


def test_a_node_without_nvidia_smi_has_no_gpus(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with contextlib.closing(Closable(GpuWatch())) as watch:
        assert watch.gpus.read() == []


ALIKE = [Gpu(0, "GPU-aa-0", "H100", 1, 2, 3), Gpu(1, "GPU-ab-1", "H100", 1, 2, 3)]
MIXED = [ALIKE[0], Gpu(1, "GPU-ab-1", "T4", 1, 2, 3)]


@pytest.mark.parametrize(
    ("variable", "order", "device", "gpus", "position"),
    [
        (None, "", "cuda:1", ALIKE, 1),
        ("1,0", "", "cuda:0", ALIKE, 1),
        ("1", "", "cuda:1", ALIKE, -1),
        ("GPU-ab", "", "cuda:0", ALIKE, 1),
        ("GPU-a", "", "cuda:0", ALIKE, -1),  # a prefix of both uuids
        ("GPU-ab", "", "cuda:0", MIXED, 1),
        (None, "", "cuda:1", MIXED, -1),  # CUDA numbers the fastest GPU first
        (None, "PCI_BUS_ID", "cuda:1", MIXED, 1),
        ("MIG-41d2", "", "cuda:0", ALIKE, -1),
        ("7", "", "cuda:0", ALIKE, -1),
        ("", "", "cuda:0", ALIKE, -1),
        (None, "", "cpu", ALIKE, -1),
        (None, "", "cuda:x", ALIKE, -1),
        (None, "", "cuda", [], -1),
    ],
)
def test_gpu_of_a_rank_is_the_one_that_cuda_shows_it(
    variable: str | None, order: str, device: str, gpus: list[Gpu], position: int
) -> None:
    assert VisibleGpus(variable, order=order).find(device, gpus) == position


# ---- steps

BEGAN = {0: 0.0, 7: 0.0}  # start times of the cells, by rank


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make this process the second rank of a node, with the agent's folder as its working directory."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(STEPS_VARIABLE, make_places(2))
    monkeypatch.setenv("LOCAL_RANK", "1")
    return tmp_path / "steps"


def test_steps_that_are_logged_are_counted(places: Path, tmp_path: Path) -> None:
    rates, own = StepRates(), [up(7, os.getpid(), local_rank=1)]
    assert rates.read(own, began_s=BEGAN, now=time.monotonic()) == {}
    for step in range(10):
        log_metrics(step, loss=1.0, folder=str(tmp_path / "metrics"))
    pid, calls, step, clock_ns = list(STEP_RECORD.iter_unpack(places.read_bytes()))[1]
    assert (pid, calls, step) == (os.getpid(), 10, 9)
    assert 0 <= time.monotonic() - clock_ns / 1e9 < 10
    assert rates.read(own, began_s=BEGAN, now=time.monotonic()) == {}, "of one point nothing is known"
    threading.Event().wait(0.1)
    note_step(19)
    assert 10 < rates.read(own, began_s=BEGAN, now=time.monotonic())[7] < 100


def write_point(places: Path, step: int, clock_s: float, *, pid: int | None = None) -> None:
    """Write the step record of a rank that logs every step."""
    record = STEP_RECORD.pack(os.getpid() if pid is None else pid, max(0, step), step, int(clock_s * 1e9))
    places.write_bytes(bytes(STEP_RECORD.size) + record)


def test_a_rate_is_that_of_the_ranks_own_clock(places: Path) -> None:
    """Steps of 3 s give a rate of 1/3 per second, however often the rate is read in between."""
    rates, own = StepRates(), [up(0, os.getpid(), local_rank=1)]
    now = 100.0
    for _ in range(60):
        write_point(places, 5 + int((now - 100) / 3), 100 + int((now - 100) / 3) * 3)
        rate = rates.read(own, began_s=BEGAN, now=now).get(0)
        now += 0.5
    assert rate == pytest.approx(1 / 3, rel=0.01)
    assert rates.read(own, began_s=BEGAN, now=now + 15)[0] < rate, "none has come for a while"
    assert rates.read(own, began_s=BEGAN, now=now + 60)[0] == 0, "nor for a minute"


def test_a_rank_that_makes_no_more_steps_makes_fewer_and_then_none(places: Path) -> None:
    rates, own, found = StepRates(), [up(0, os.getpid(), local_rank=1)], []
    for second in range(20):
        write_point(places, 100 * min(second, 10), 100.0 + min(second, 10))
        found.append(rates.read(own, began_s=BEGAN, now=100.0 + second).get(0))
    assert found[0] is None and found[1:13] == [pytest.approx(100)] * 12
    assert 100 > (found[13] or 0) > (found[14] or 0) > (found[15] or 0) > 0 and found[16:] == [0] * 4


def test_steps_of_an_earlier_cell_are_none_of_this_one(places: Path) -> None:
    rates, own = StepRates(), [up(0, os.getpid(), local_rank=1)]
    for now in (100.0, 101.0):
        write_point(places, int(now), now)
        rates.read(own, began_s=BEGAN, now=now)
    assert rates.read(own, began_s={}, now=101.5) == {}, "it runs no cell"
    assert rates.read(own, began_s={0: 102.0}, now=103.0) == {}
    write_point(places, 150, 104.0)
    assert rates.read(own, began_s={0: 102.0}, now=104.0) == {}, "of one point nothing is known"
    write_point(places, 155, 105.0)
    assert rates.read(own, began_s={0: 102.0}, now=105.0) == {0: pytest.approx(5.0)}


@pytest.mark.parametrize(("step", "apart_s"), [(1 << 62, 1.0), (100_000, 1e-5)])
def test_steps_that_are_no_count_of_steps_do_not_end_the_session(places: Path, step: int, apart_s: float) -> None:
    """A script may log tokens, or continue from a checkpoint.

    The rate is capped, because a notebook disconnects a node that reports an impossible one.
    """
    sampler, own = Sampler(), [up(0, os.getpid(), local_rank=1)]
    sampler.take_order(Measure(0.1, 10.0))
    begun = time.monotonic()
    runs = {0: Run(1, begun - apart_s - 1.0)}
    write_point(places, 0, begun - apart_s - 0.1)
    assert sampler.measure(own, runs)
    write_point(places, step, begun - 0.1)
    while (said := sampler.measure(own, runs)) is None:
        threading.Event().wait(0.02)
    check_measured(said)
    assert said.steps_per_s == [Measured.MOST_STEPS_PER_S]


def test_a_training_that_begins_again_counts_from_there(places: Path) -> None:
    rates, own = StepRates(), [up(0, os.getpid(), local_rank=1)]
    for now, step in ((100.0, 500), (101.0, 600), (102.0, 0), (103.0, 2)):
        write_point(places, step, now)
        found = rates.read(own, began_s=BEGAN, now=now)
    assert found == {0: pytest.approx(2.0)}


def test_another_process_in_the_place_of_a_rank_is_not_it(places: Path) -> None:
    rates, own = StepRates(), [up(0, os.getpid(), local_rank=1)]
    for now in (100.0, 101.0):
        write_point(places, int(now), now, pid=1)
        assert rates.read(own, began_s=BEGAN, now=now) == {}


def test_ranks_of_a_file_that_is_not_whole_have_no_rate(places: Path) -> None:
    places.write_bytes(b"x" * (STEP_RECORD.size + 5))
    assert (
        StepRates().read([up(0, 1, local_rank=1), up(1, 1, local_rank=-1), up(2, 1, local_rank=0)], began_s={}, now=1.0)
        == {}
    )
    places.unlink()
    assert StepRates().read([up(0, 1, local_rank=1)], began_s={}, now=1.0) == {}


@pytest.mark.parametrize("local_rank", ["2", "-1", "x", "", "99999999999999999999"])
def test_a_rank_without_a_place_writes_nothing(places: Path, local_rank: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    note_step(3)
    assert places.read_bytes() == bytes(2 * STEP_RECORD.size)


def test_no_file_and_a_link_are_left_alone(places: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(places.read_bytes())
    places.unlink()
    note_step(3)
    places.symlink_to(other)
    note_step(3)
    assert other.read_bytes() == bytes(2 * STEP_RECORD.size)
