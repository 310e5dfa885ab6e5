"""The agent on its own: which connections it accepts, and how it handles invalid input."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from detrain_nb.guarded import RUN_MODULE
from detrain_nb.launch import RankConfig, launch_node
from detrain_nb.plan import plan_one_node
from detrain_nb.wire import (
    MAX_HEADER_BYTES,
    Attach,
    Attached,
    CellDone,
    EndSession,
    Frame,
    Kept,
    Launch,
    LauncherEnded,
    Message,
    OpenStore,
    Output,
    Piece,
    RankEnded,
    RankUp,
    Received,
    Refused,
    RunCell,
    StoreOpened,
    Value,
    WorkerUp,
    to_frame,
)

from ..raw_frames import prefix
from .agent_here import Agent, agent_running


@pytest.fixture
def agent() -> Iterator[Agent]:
    with agent_running() as running:
        yield running


def test_agent_says_what_it_runs_on(agent: Agent) -> None:
    notebook = agent.connect()
    notebook.send(Attach("mine", "test"))
    answer = notebook.receive(Attached)
    assert isinstance(answer, Attached)
    assert (answer.pid, answer.host, answer.cpus >= 1) == (agent.process.pid, socket.gethostname(), True)


@pytest.mark.parametrize("holder", ["second", "mine"])
def test_second_notebook_is_refused_and_the_first_goes_on(agent: Agent, holder: str) -> None:
    """A notebook whose holder name equals the session's name is refused like any other."""
    first, second = agent.connect(), agent.connect()
    first.send(Attach("mine", "first"))
    first.receive(Attached)
    second.send(Attach("mine", holder))
    refusal = second.receive(Refused)
    assert isinstance(refusal, Refused)
    assert refusal.reason == "session 'mine' is held by first: %distributed attach --steal takes it over"
    first.send(Launch(["/nonexistent"], {}, [0], 0.0, None))
    assert isinstance(first.receive(LauncherEnded), LauncherEnded)


def test_notebook_of_another_protocol_is_refused(agent: Agent) -> None:
    notebook = agent.connect()
    notebook.send(Attach("mine", "test", protocol=99))
    refusal = notebook.receive(Refused)
    assert isinstance(refusal, Refused)
    assert "install one version" in refusal.reason


def test_notebook_of_before_the_kinds_is_refused_in_words_that_it_reads(agent: Agent) -> None:
    """Before protocol 6, frames had the message type in the header and an eight-byte number."""
    said = {"session": "mine", "holder": "test", "steal": True, "resumes": False, "protocol": 5, "type": "Attach"}
    header = json.dumps(said).encode()
    notebook = agent.connect()
    notebook.sock.sendall(struct.pack("!IIQ", len(header), 0, 0) + header)
    answer = b""
    while data := notebook.sock.recv(1 << 16):
        answer += data
    header_bytes, body_bytes, _ = struct.unpack_from("!IIQ", answer)
    assert (len(answer), body_bytes) == (16 + header_bytes, 0)
    refusal = json.loads(answer[16:])
    assert refusal.pop("reason").endswith("the other one before 6: install one version of detrain_nb on both")
    assert refusal == {"is_taken": True, "type": "Refused"}


@pytest.mark.parametrize("size_bytes", [0, 1 << 20])
def test_notebook_that_counts_hears_what_has_come(agent: Agent, size_bytes: int) -> None:
    """The agent acknowledges at once after much data, otherwise with its next message or soon after."""
    notebook = agent.connect()
    notebook.send(Attach("mine", "test"))
    notebook.receive(Attached)
    for number in (1, 2):
        push = RunCell([0], [1], number, "x" * size_bytes)
        notebook.sock.sendall(to_frame(push).to_bytes(number=number))
        assert notebook.receive(Received) == Received(number)
    notebook.sock.sendall(to_frame(OpenStore("127.0.0.1")).to_bytes(number=3))
    assert isinstance(notebook.receive(StoreOpened), StoreOpened)
    notebook.sock.sendall(to_frame(EndSession()).to_bytes(number=4))
    assert notebook.receive(Received) == Received(4), "before it hangs up"


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        b"\xff" * 64,
        to_frame(RunCell([0], [1], 1, "x")).to_bytes(),
        Frame(0, Attach, b"{}", b"").to_bytes(),
        prefix(255, 2, 0) + b"{}",
        prefix(Attach, 2, 1) + b"{} ",
    ],
    ids=["http", "ones", "no introduction", "empty header", "unknown kind", "introduction with a body"],
)
def test_nonsense_is_hung_up_on_and_others_are_served(agent: Agent, nonsense: bytes) -> None:
    stranger = agent.connect()
    stranger.sock.sendall(nonsense)
    with pytest.raises(EOFError):
        stranger.receive(Message)
    notebook = agent.connect()
    notebook.send(Attach("mine", "test"))
    notebook.receive(Attached)


def test_worker_that_says_more_than_a_notebook_takes_is_hung_up_on_alone(agent: Agent) -> None:
    notebook, worker = agent.connect(), agent.connect()
    notebook.send(Attach("mine", "test"))
    notebook.receive(Attached)
    worker.send(WorkerUp(0, 1))
    with pytest.raises((EOFError, BrokenPipeError)):
        for _ in range(10):
            worker.send(Refused("x" * MAX_HEADER_BYTES))
        worker.receive(Message)
    notebook.send(OpenStore("127.0.0.1"))
    assert isinstance(notebook.receive(StoreOpened), StoreOpened)


def test_half_a_frame_holds_up_nobody(agent: Agent) -> None:
    half = agent.connect()
    half.sock.sendall(to_frame(WorkerUp(0, 1)).to_bytes()[:-3])
    notebook = agent.connect()
    notebook.send(Attach("mine", "test"))
    notebook.receive(Attached)


@pytest.mark.parametrize("kind", [RunCell, Kept])
def test_notebook_that_attaches_with_nonsense_holds_nothing(agent: Agent, kind: type[Message]) -> None:
    first, second = agent.connect(), agent.connect()
    first.sock.sendall(to_frame(Attach("mine", "first")).to_bytes() + Frame(0, kind, b"{}", b"").to_bytes())
    with pytest.raises(EOFError):
        while True:
            first.receive(Message)
    second.send(Attach("mine", "second"))
    assert isinstance(second.receive((Attached, Refused)), Attached)


@pytest.mark.parametrize("kind", [RankUp, Output, Piece, Value, Kept])
@pytest.mark.parametrize("introduction", [[WorkerUp(0, 1)], []], ids=["with it", "later"])
def test_rank_whose_worker_talks_nonsense_is_told_to_be_gone(
    agent: Agent, introduction: list[Message], kind: type[Message]
) -> None:
    notebook, worker = agent.connect(), agent.connect()
    notebook.send(Attach("mine", "test"), Launch(["sleep", "60"], {}, [0, 1], 0.0, None))
    notebook.receive(Attached)
    if not introduction:
        worker.send(WorkerUp(0, 1), RankUp(0, 1, 0, 2, 1, "here", "cpu", "2.13.0"))
        notebook.receive(RankUp)
    said = b"".join(to_frame(message).to_bytes() for message in introduction)
    worker.sock.sendall(said + Frame(0, kind, b"{}", b"").to_bytes())
    end = notebook.receive(RankEnded)
    assert isinstance(end, RankEnded)
    assert (end.rank, end.exit_code) == (0, -1)
    assert "the agent disconnected its worker" in end.down
    with pytest.raises(EOFError):
        worker.receive(Message)


def test_end_leaves_the_spool_of_its_successor_alone(agent: Agent) -> None:
    """A slow launcher delays the agent's exit; by then another session may use the same folder."""
    notebook, worker = agent.connect(), agent.connect()
    notebook.send(Attach("mine", "test"), Launch(["sh", "-c", "sleep 3; true"], {}, [0], 0.0, None))
    notebook.receive(Attached)
    worker.send(WorkerUp(0, 1), RankUp(0, 1, 0, 1, 1, "here", "cpu", "2.13.0"))
    notebook.receive(RankUp)
    [spool] = agent.folder.glob("spool.*")
    notebook.send(EndSession())
    deadline = time.monotonic() + 60
    while agent.folder.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    agent.folder.mkdir(mode=0o700)
    spool.write_text("of another session")
    assert agent.process.poll() is None, "it is still about to end"
    assert agent.process.wait(60) == 0
    assert spool.read_text() == "of another session"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_other_user_is_turned_away_even_with_the_folder_open(agent: Agent) -> None:
    for folder in (agent.folder.parent, agent.folder):
        folder.chmod(0o777)
    (agent.folder / "agent.sock").chmod(0o777)
    code = (
        "import os, socket, sys\nos.setgid(12345); os.setuid(12345)\n"
        "s = socket.socket(socket.AF_UNIX); s.settimeout(20); s.connect(sys.argv[1])\n"
        "try:\n    print(s.recv(1))\nexcept ConnectionResetError:\n    print(b'')\n"
    )
    said = subprocess.run(
        [sys.executable, "-c", code, str(agent.folder / "agent.sock")], capture_output=True, text=True, check=True
    )
    assert said.stdout == "b''\n"


@pytest.mark.slow
def test_agent_that_reads_no_further_says_that_it_is_there(agent: Agent) -> None:
    """If a rank reads nothing, the agent stops reading from the notebook, but must still send it signs of life."""
    notebook, worker = agent.connect(), agent.connect()
    notebook.send(Attach("mine", "test"))
    notebook.receive(Attached)
    worker.send(WorkerUp(0, 1), RankUp(0, 1, 0, 2, 1, "here", "cpu", "2.13.0"))
    notebook.receive(RankUp)
    for number in (1, 2):
        push = RunCell([0], [1], number, "x" * (12 << 20))
        notebook.sock.sendall(to_frame(push).to_bytes(number=number))
    for _ in range(3):  # after all messages have arrived, the last one only shows that the agent lives
        assert isinstance(notebook.receive(Received), Received)


def test_second_agent_for_the_folder_leaves_at_once(agent: Agent) -> None:
    again = subprocess.run(
        [sys.executable, "-c", RUN_MODULE, "detrain_nb.node.agent.agent", str(agent.folder)],
        cwd="/", capture_output=True, text=True, timeout=20, check=False,
    )  # fmt: skip
    assert again.returncode == 1
    assert f"another agent serves {agent.folder}" in again.stderr


def test_messages_of_ranks_are_numbered_without_a_gap_and_the_end_is_clean(agent: Agent) -> None:
    plan = plan_one_node(ranks=2, device="cpu", backend=None, gpus=0)
    config = RankConfig("agent.sock", str(agent.folder), "cpu", "gloo", seed=0, threads=1)
    notebook = agent.connect()
    notebook.send(Attach("mine", "test"), OpenStore("127.0.0.1"))
    port = notebook.receive(StoreOpened).port
    start = {"run_id": "mine", "store": ("127.0.0.1", port), "interface": "lo", "start": "fork", "extra_env": {}}
    launch = launch_node(plan, config, node_rank=0, python=sys.executable, **start)
    notebook.send(Launch(launch.argv, launch.env, [0, 1], 0.0, None))
    for _ in range(2):
        notebook.receive(RankUp)
    notebook.send(RunCell([0, 1], [1, 1], 1, "print('x')"))
    for _ in range(2):
        notebook.receive(CellDone)
    assert notebook.numbers == list(range(1, len(notebook.numbers) + 1))
    notebook.send(EndSession())
    with pytest.raises(EOFError):
        notebook.receive(Message)
    assert agent.process.wait(60) == 0
    assert not list(agent.folder.parent.iterdir())


@pytest.mark.slow
def test_full_disk_under_the_spool_is_told_and_the_cell_goes_on(tmp_path: Path) -> None:
    """A limit of 200 KB on the size of every file of these processes imitates a full disk."""
    code = """
import resource, signal, sys
from detrain_nb import Session
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
with Session.start(ranks=1, device="cpu", init=False, folder=sys.argv[1]) as session:
    result = session.run_cell("for i in range(50_000): print('x' * 60)\\n'done'")
    print(result.values, session.news.notices)
    print(session.run_cell("1 + 1").values)
"""
    said = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=100, check=False
    )
    assert "{0: 'done'}" in said.stdout, said.stderr
    assert "cannot be written" in said.stdout
    assert "{0: 2}" in said.stdout
