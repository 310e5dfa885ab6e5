"""The rendezvous and the joint end of a job's nodes: real torchrun processes on loopback, one per node."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from detrain_nb.launch import STORE_FD_VARIABLE, Program, Rendezvous, launch_job
from detrain_nb.node.job.seal import KEY_BYTES, Seal, SealBroken
from detrain_nb.node.job.watch import Watch

_LIMIT_S = 60.0
_KEY = bytes(range(KEY_BYTES))
_SLEEP = "import time; print('asleep', flush=True); time.sleep(600)"


@dataclass
class _Node:
    """A torchrun process and the files that it writes."""

    process: subprocess.Popen[bytes]
    folder: Path

    def wait(self) -> int:
        try:
            return self.process.wait(_LIMIT_S)
        except subprocess.TimeoutExpired:
            pytest.fail(f"torchrun has not ended: {self.log}")

    @property
    def log(self) -> str:
        return (self.folder / "log").read_text()

    @property
    def reason(self) -> str:
        said: dict[str, str] = json.loads((self.folder / "end.json").read_text())
        return said["reason"]

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while text not in self.log:
            assert time.monotonic() < deadline and self.process.poll() is None, self.log
            time.sleep(0.05)


class _Job:
    """Two nodes, a and b, with one rank each unless told otherwise."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._store = socket.create_server(("127.0.0.1", 0))
        address: tuple[str, int] = self._store.getsockname()
        self.rendezvous = Rendezvous("detrain-job", "job-1", address, timeout_s=40, silence_s=30)
        self._started: list[subprocess.Popen[bytes]] = []

    def start(self, node_rank: int, script: str, *, nodes: Any = 2, env: dict[str, str] | None = None) -> _Node:
        folder = self._folder / "ab"[node_rank]
        folder.mkdir()
        (folder / "script.py").write_text(script)
        is_elastic = self.rendezvous.kind == "detrain-elastic"
        launch = launch_job(
            self.rendezvous,
            Program("script", ("script.py",)),
            nodes=nodes,
            ranks=1,
            node_rank=node_rank,
            python=sys.executable,
            interface="lo",
            local_address=f"127.0.0.{node_rank + 1}",
            node_names=["a", "b"],
            key=_KEY.hex() if is_elastic else "",
            end_file=str(folder / "end.json"),
            extra_env=env,
        )
        environment = {**os.environ, **launch.env}
        handed = [self._store.fileno()] if node_rank == 0 else []
        if handed:
            environment[STORE_FD_VARIABLE] = str(handed[0])
        with open(folder / "log", "wb") as log:
            process = subprocess.Popen(
                launch.argv,
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                pass_fds=handed,
                start_new_session=True,
            )
        self._started.append(process)
        if node_rank == 0:
            self._store.close()  # as the starter of torchrun does: the socket must close when node 0 exits
        return _Node(process, folder)

    def end(self) -> None:
        self._store.close()
        deadline = time.monotonic() + _LIMIT_S
        while left := _processes_in(self._folder):  # includes ranks whose torchrun was killed
            assert time.monotonic() < deadline, left
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        for process in self._started:
            process.wait(_LIMIT_S)


def _processes_in(folder: Path) -> list[int]:
    """Return the pids with a working directory in ``folder``: torchrun starts each rank in a session of its own."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if Path(os.readlink(entry / "cwd")).is_relative_to(folder):
                found.append(int(entry.name))
    return found


@pytest.fixture
def job(tmp_path: Path) -> Iterator[_Job]:
    made = _Job(tmp_path)
    try:
        yield made
    finally:
        made.end()


# Real nodes


def test_scripts_on_two_nodes_train_together_through_a_store_on_one_address(job: _Job) -> None:
    script = """
import os, socket, torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(total)
print("total", total.item(), os.environ["RANK"], os.environ["WORLD_SIZE"])
try:
    socket.create_connection(("127.0.0.9", int(os.environ["MASTER_PORT"])), timeout=5)
except ConnectionRefusedError:
    print("bound to", os.environ["MASTER_ADDR"])
dist.destroy_process_group()
"""
    nodes = [job.start(rank, script) for rank in (0, 1)]
    for rank, node in enumerate(nodes):
        assert node.wait() == 0, node.log
        assert f"total 3.0 {rank} 2\nbound to 127.0.0.1\n" in node.log
        assert not (node.folder / "end.json").exists()


def test_a_node_that_fails_ends_the_others_which_name_it(job: _Job) -> None:
    waiting = job.start(0, _SLEEP)
    failing = job.start(1, "raise SystemExit(3)")
    assert failing.wait() == 1
    assert waiting.wait() == 1, waiting.log
    assert waiting.reason == "node b failed: rank 1 exited with code 3"
    assert f"detrain_nb: {waiting.reason}\n" in waiting.log


@pytest.mark.slow
@pytest.mark.parametrize(
    ("lost", "number", "reason"),
    [
        (1, signal.SIGSTOP, "node b sent no heartbeat for 3 s"),
        pytest.param(
            *(0, signal.SIGSTOP, "node a, which holds the store of the job, did not answer for 3 s"),
            marks=pytest.mark.thorough,
        ),
        (0, signal.SIGKILL, "node a, which holds the store of the job, is down"),
        pytest.param(1, signal.SIGTERM, "node b was stopped", marks=pytest.mark.thorough),
    ],
)
def test_a_lost_node_ends_the_other(job: _Job, lost: int, number: int, reason: str) -> None:
    job.rendezvous = replace(job.rendezvous, silence_s=3)
    nodes = [job.start(rank, _SLEEP) for rank in (0, 1)]
    for node in nodes:
        node.wait_for("asleep")
    os.kill(nodes[lost].process.pid, number)
    other = nodes[1 - lost]
    assert other.wait() == 1, other.log
    assert other.reason == reason


@pytest.mark.thorough
def test_a_node_that_does_not_come_is_named(job: _Job) -> None:
    job.rendezvous = replace(job.rendezvous, timeout_s=1)
    node = job.start(0, _SLEEP)
    assert node.wait() == 1
    assert node.reason == "node b did not join the rendezvous within 1 s: check there why it did not start"


# Elastic


_RESUMES = """
import os, pathlib, signal, sys, time
import torch, torch.distributed as dist
saved = pathlib.Path(sys.argv[0]).resolve().parent.parent / "step"
dist.init_process_group("gloo")
step = int(saved.read_text()) if saved.exists() else 0
print("from step", step, "of", dist.get_world_size(), flush=True)
while step < 6:
    dist.all_reduce(torch.ones(1))
    step += 1
    if dist.get_rank() == 0:
        saved.write_text(str(step))
    dist.barrier()
    if step == 3 and dist.get_rank() == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)
dist.destroy_process_group()
print("done", "DETRAIN_NB_JOB_KEY" in os.environ, flush=True)
"""


@pytest.fixture
def elastic_job(job: _Job) -> _Job:
    job.rendezvous = replace(job.rendezvous, kind="detrain-elastic", max_restarts=2)
    return job


@pytest.mark.slow
def test_a_killed_rank_restarts_the_group_from_its_checkpoint(elastic_job: _Job) -> None:
    nodes = [elastic_job.start(rank, _RESUMES) for rank in (0, 1)]
    for node in nodes:
        assert node.wait() == 0, node.log
        assert "from step 0 of 2\n" in node.log and "from step 3 of 2\n" in node.log
        assert "done False\n" in node.log
    assert _KEY.hex() not in nodes[0].log


@pytest.mark.slow
def test_a_forged_state_ends_an_elastic_job_and_runs_nothing(elastic_job: _Job, tmp_path: Path) -> None:
    node = elastic_job.start(0, _SLEEP, nodes=(1, 1))
    node.wait_for("asleep")
    forge = f"""
import base64, os, pickle
from torch.distributed import TCPStore
class Forged:
    def __reduce__(self):
        return os.mkdir, ({str(tmp_path / "forged")!r},)
store = TCPStore("127.0.0.1", {elastic_job.rendezvous.endpoint[1]}, None, False)
store.set("torch.rendezvous.job-1", base64.b64encode(pickle.dumps(Forged())).decode())
"""
    subprocess.run([sys.executable, "-c", forge], timeout=_LIMIT_S, check=True)
    assert node.wait() == 1
    assert "the rendezvous state is invalid: " in node.reason
    assert not (tmp_path / "forged").exists()


@pytest.mark.thorough
def test_an_elastic_job_ends_with_node_0_and_says_so(elastic_job: _Job) -> None:
    elastic_job.rendezvous = replace(elastic_job.rendezvous, silence_s=15)
    first, second = (elastic_job.start(rank, _SLEEP) for rank in (0, 1))
    for node in (first, second):
        node.wait_for("asleep")
    os.kill(first.process.pid, signal.SIGKILL)
    assert second.wait() == 1, second.log
    assert second.reason == "node a, which holds the store of the job, is down"
    assert f"detrain_nb: {second.reason}\n" in second.log


@pytest.mark.thorough
def test_a_node_that_joins_later_is_taken_in(elastic_job: _Job) -> None:
    elastic_job.rendezvous = replace(elastic_job.rendezvous, timeout_s=600)
    script = """
import os, time
print("ranks", os.environ["WORLD_SIZE"], flush=True)
while os.environ["WORLD_SIZE"] == "1":
    time.sleep(0.05)
"""
    first = elastic_job.start(0, script, nodes=(1, 2), env={})
    first.wait_for("ranks 1\n")  # the wait for another node is not a fraction of timeout_s
    assert "detrain_nb: waiting for 2 nodes; starts with fewer 10 s after 1 joined\n" in first.log
    second = elastic_job.start(1, script, nodes=(1, 2))
    for node in (first, second):
        assert node.wait() == 0, node.log
        assert "ranks 2\n" in node.log


# The seal


def test_a_sealed_text_is_read_by_those_who_have_the_key() -> None:
    writer, reader = Seal(_KEY, "state"), Seal(_KEY, "state")
    assert reader.open(writer.close(b"text")) == b"text"


@pytest.mark.parametrize("changed", [0, 7, 8, 39, 40, -1])
def test_a_changed_byte_breaks_the_seal(changed: int) -> None:
    sealed = bytearray(Seal(_KEY, "state").close(b"text"))
    sealed[changed] ^= 1
    with pytest.raises(SealBroken, match="not written by a node of this job"):
        Seal(_KEY, "state").open(bytes(sealed))


def test_another_key_another_purpose_and_what_is_no_seal_are_refused() -> None:
    sealed = Seal(bytes(KEY_BYTES), "state").close(b"text")
    for seal in (Seal(_KEY, "state"), Seal(bytes(KEY_BYTES), "other")):
        with pytest.raises(SealBroken):
            seal.open(sealed)
    for size in (0, 39, 2 << 20):
        with pytest.raises(SealBroken, match="are not a sealed text"):
            Seal(_KEY, "state").open(bytes(size))
    with pytest.raises(ValueError, match="has 32 bytes, not 3"):
        Seal(b"abc", "state")


def test_an_older_text_and_another_of_the_same_number_are_refused() -> None:
    first, other, reader = Seal(_KEY, "state"), Seal(_KEY, "state"), Seal(_KEY, "state")
    one, same_number = first.close(b"one"), other.close(b"another")
    reader.open(one)
    assert reader.open(one) == b"one"  # reading the same text again is allowed
    with pytest.raises(SealBroken, match="text 1 was replayed after text 1"):
        reader.open(same_number)
    first.open(one)
    reader.open(first.close(b"two"))
    with pytest.raises(SealBroken, match="text 1 was replayed after text 2"):
        reader.open(one)


def test_a_backend_refuses_what_was_forged_replayed_or_removed() -> None:
    from torch.distributed import HashStore
    from torch.distributed.elastic.rendezvous.api import RendezvousStateError

    from detrain_nb.node.job.elastic import SealedBackend

    store = HashStore()
    ours, theirs = SealedBackend(store, "job-1", _KEY), SealedBackend(store, "job-1", _KEY)
    assert ours.get_state() is None
    first = ours.set_state(b"one", None)
    assert first is not None and first[0] == b"one" and first[2]
    found = theirs.get_state()
    assert found is not None and found[0] == b"one"
    key = "torch.rendezvous.job-1"
    before = store.get(key)
    second = theirs.set_state(b"two", found[1])
    assert second is not None and second[0] == b"two" and second[2]
    late = ours.set_state(b"three", first[1])
    assert late is not None and late[0] == b"two" and not late[2], "the other one was faster"
    for forged in (before, b"", base64.b64encode(pickle.dumps(b"forged" * 9)), b"Y2FuaW1hZGFt"):
        store.set(key, forged.decode())
        with pytest.raises(RendezvousStateError, match="rendezvous state is invalid"):
            ours.get_state()


def test_where_ranks_met_in_an_earlier_round_is_not_believed() -> None:
    from torch.distributed import HashStore, PrefixStore
    from torch.distributed.elastic.rendezvous.api import RendezvousStateError

    from detrain_nb.node.job.elastic import RanksMeeting

    store = HashStore()
    rounds = [PrefixStore(f"round.{number}", store) for number in (0, 1)]
    RanksMeeting(rounds[0], _KEY, "job-1", 0).tell("127.0.0.1", 4000)
    assert RanksMeeting(rounds[0], _KEY, "job-1", 0).find() == ("127.0.0.1", 4000)
    for key in store.list_keys():
        store.set(key.replace("round.0", "round.1"), store.get(key).decode())
    with pytest.raises(RendezvousStateError, match="not written by a node of this job"):
        RanksMeeting(rounds[1], _KEY, "job-1", 1).find()


# The watch, on a store in memory


class _Memory:
    """A store in memory that all nodes share; it hangs, as with a silent node 0, while ``answers`` is cleared."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.answers = threading.Event()
        self.answers.set()

    def set(self, key: str, value: str) -> None:
        self.answers.wait()
        self.values[key] = value.encode()

    def set_first(self, key: str, value: str) -> None:
        if key not in self.values:
            self.set(key, value)

    def get(self, key: str) -> bytes | None:
        self.answers.wait()
        return self.values.get(key)


_Watches = Callable[..., tuple[Watch, "_Ended"]]


class _Ended:
    """What `Watch` calls when another node has ended the job."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self._came = threading.Event()

    def __call__(self, reason: str) -> None:
        self.reasons.append(reason)
        self._came.set()

    def wait(self) -> list[str]:
        assert self._came.wait(_LIMIT_S)
        return self.reasons


@pytest.fixture
def watches() -> Iterator[tuple[_Memory, _Watches]]:
    memory, made = _Memory(), []

    def make(node_rank: int, **more: Any) -> tuple[Watch, _Ended]:
        ended = _Ended()
        given = {"num_nodes": 2, "names": ["a", "b"], "silence_s": 0.3, "beat_s": 0.02, **more}
        made.append(Watch(lambda: memory, node_rank=node_rank, on_end=ended, **given))
        return made[-1], ended

    try:
        yield memory, make
    finally:
        memory.answers.set()
        for watch in made:
            watch.tell_end("the test is over")


def test_what_a_node_says_of_its_end_is_cleaned_and_bounded(watches: tuple[_Memory, _Watches]) -> None:
    memory, make = watches
    for said, heard in (
        ({"reason": "\x1b]0;x\x07" + "b" * 5000}, "\\x1b]0;x\\x07" + "b" * 1994),
        ({"reason": ["x"]}, "another node ended the job without a valid reason"),
        ([[[]]], "another node ended the job without a valid reason"),
    ):
        memory.values.pop("end", None)
        watch, ended = make(1)
        memory.set("end", json.dumps(said))
        watch.start()
        assert ended.wait() == [heard]


def test_a_silent_node_is_named_and_one_that_is_done_is_not(watches: tuple[_Memory, _Watches]) -> None:
    memory, make = watches
    for rank in (1, 2):
        memory.set(f"beat/{rank}", "1")
    memory.set("done/1", "1")
    watch, ended = make(0, num_nodes=3, names=["a", "b", "c"])
    watch.start()
    assert ended.wait() == ["node c sent no heartbeat for 0.3 s"]


def test_nodes_of_an_elastic_job_may_go(watches: tuple[_Memory, _Watches]) -> None:
    memory, make = watches
    memory.set("beat/1", "1")
    watch, ended = make(0, is_fixed=False)
    watch.start()
    watch.tell_done(_LIMIT_S)  # waits for node b until its heartbeats stop
    assert ended.reasons == [] and "end" not in memory.values


def test_a_store_that_hangs_is_a_lost_node_0(watches: tuple[_Memory, _Watches]) -> None:
    memory, make = watches
    watch, ended = make(1)
    memory.answers.clear()
    watch.start()
    assert ended.wait() == ["node a, which holds the store of the job, did not answer for 0.3 s"]
