"""The contract of transports (transport/__init__.py), tested on each of those in conftest.py."""

from __future__ import annotations

import contextlib
import re
import shutil
import socket
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

import detrain_nb
from detrain_nb.deploy.files import get, put
from detrain_nb.deploy.jobs import open_job_talk
from detrain_nb.deploy.sync import check
from detrain_nb.errors import DetrainError, SessionError
from detrain_nb.node.job.order import JobOrder
from detrain_nb.plan import NodeOffer
from detrain_nb.transport import Transport
from detrain_nb.wire import (
    Attach,
    Attached,
    EndSession,
    FrameReader,
    Launch,
    Message,
    OpenStore,
    StoreOpened,
    to_frame,
)

from .conftest import MakeTransport

_LIMIT_S = 40.0
_END_LIMIT_S = 20.0
_JOB = "import os, sys; from detrain_nb import log_metrics; print('rank', os.environ['RANK']); sys.exit(3)"


@pytest.fixture(autouse=True)
def closed_streams() -> Iterator[None]:
    yield
    while Notebook.opened:
        Notebook.opened.pop().close()


@pytest.fixture
def session(make_transport: MakeTransport) -> Iterator[str]:
    """Yield an unused session name; a session that was started under it is ended."""
    name = f"contract-{uuid.uuid4().hex[:8]}"
    yield name
    transport = make_transport()
    with contextlib.suppress(DetrainError):
        notebook = Notebook(transport.connect_agent(name))
        notebook.send(Attach(name, "the tests", steal=True), EndSession())
        notebook.wait_for_end()
        transport.wait_for_end(limit_s=_END_LIMIT_S)


class Notebook:
    """The notebook's end of the byte stream to an agent."""

    opened: ClassVar[list[socket.socket]] = []  # closed after the test

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.opened.append(sock)
        self._reader = FrameReader()
        self._arrived: list[Message] = []
        sock.settimeout(_LIMIT_S)

    def send(self, *messages: Message) -> None:
        self.sock.sendall(b"".join(to_frame(message).to_bytes() for message in messages))

    def receive(self, kind: type[Message]) -> Message:
        """Return the next message of this kind; others are dropped."""
        while True:
            while self._arrived:
                message = self._arrived.pop(0)
                if isinstance(message, kind):
                    return message
            data = self.sock.recv(1 << 16)
            assert data, f"the stream ended before {kind.__name__}"
            self._arrived += [frame.message() for frame in self._reader.feed(data)]

    def attach(self, session: str) -> Attached:
        self.send(Attach(session, "the tests"))
        answer = self.receive(Attached)
        assert isinstance(answer, Attached)
        return answer

    def wait_for_end(self) -> None:
        with contextlib.suppress(OSError):
            while self.sock.recv(1 << 16):
                pass


def test_nothing_that_is_asked_of_a_transport_is_missing(make_transport: MakeTransport) -> None:
    """Callers use these attributes without a check that they exist."""
    transport = make_transport()
    assert isinstance(transport, Transport)
    assert (transport.account, transport.contact, transport.cache) == (None, None, ""), "it was not reached"
    assert transport.shares_paths is transport.is_this_machine
    transport.ask_meanwhile([])


def test_nobody_asks_a_transport_what_it_has() -> None:
    package = Path(detrain_nb.__file__).parent
    names = "|".join({*Transport.__annotations__, *vars(Transport)})
    probe = re.compile(rf"\b(?:has|get)attr\((?!observer)[\w.]+, \"(?:{names}|facts|questions)\"")
    sources = [path for room in ("transport", "deploy", "session", "doctor") for path in (package / room).rglob("*.py")]
    assert len(sources) > 50
    assert not [path for path in sources if probe.search(path.read_text(encoding="utf-8"))]


def test_job_is_prepared_launched_and_followed_to_its_end(
    make_transport: MakeTransport, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's ranks find our code on the node."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))  # for jobs on this machine
    transport = make_transport()
    order = JobOrder(f"contract-20260102-030405-{uuid.uuid4().hex[:4]}", "contract", ("-c", _JOB))
    with open_job_talk(transport) as talk:
        talk.say("prepare", order=order.to_dict(), source="")
        port = talk.hear("prepared")["port"]
        talk.say("launch", store=["127.0.0.1", port], key="")
        talk.hear("launched")
    assert transport.python and transport.address
    with open_job_talk(transport) as talk:  # the stream that launched it is closed
        talk.say("follow", id=order.id, node_rank=0, offsets={})
        printed = b""
        while (said := talk.hear("data", "status", "end"))["type"] != "end":
            if said["type"] == "status":
                (job,) = said["jobs"]
            elif said["name"] == "rank-0.log":
                printed += b"".join(talk.read(said["size"]))
            else:
                list(talk.read(said["size"]))
        assert (printed, job["state"], job["exit_code"]) == (b"rank 0\n", "ended", 3)
        talk.say("remove", id=order.id, node_rank=0)
        talk.hear("removed")


def test_files_go_there_and_back(make_transport: MakeTransport, tmp_path: Path) -> None:
    transport, there = make_transport(), f"/var/tmp/{tmp_path.name}-{uuid.uuid4().hex[:8]}"
    (tmp_path / "tree" / "inner").mkdir(parents=True)
    (tmp_path / "tree" / "inner" / "file").write_bytes(b"x" * (2 << 20))
    assert put(transport, tmp_path / "tree", there).files == 1
    assert get(transport, f"{there}/tree", tmp_path / "back").size_bytes == 2 << 20
    assert (tmp_path / "back" / "tree" / "inner" / "file").read_bytes() == b"x" * (2 << 20)
    assert check([transport], there).is_anywhere
    shutil.rmtree(there, ignore_errors=True)  # exists here if the node is this machine


def test_agent_that_was_started_answers(make_transport: MakeTransport, session: str) -> None:
    answer = Notebook(make_transport().start_agent(session)).attach(session)
    assert answer.pid > 0
    assert answer.free_bytes > 0
    assert answer.ranks == []


def test_name_that_runs_already_is_refused_and_goes_on(make_transport: MakeTransport, session: str) -> None:
    first = Notebook(make_transport().start_agent(session))
    with pytest.raises(SessionError, match=f"{session!r} is already running"):
        make_transport().start_agent(session)
    assert first.attach(session).pid > 0


def test_agent_that_is_not_there_is_not_connected_to(make_transport: MakeTransport, session: str) -> None:
    with pytest.raises(SessionError, match=session):
        make_transport().connect_agent(session)


def test_agent_goes_on_without_us_and_is_connected_to_again(make_transport: MakeTransport, session: str) -> None:
    transport = make_transport()
    notebook = Notebook(transport.start_agent(session))
    pid = notebook.attach(session).pid
    notebook.sock.close()
    transport.leave()
    again = Notebook(make_transport().connect_agent(session))
    assert again.attach(session).pid == pid


def test_notebook_that_is_gone_holds_the_session_no_longer(make_transport: MakeTransport, session: str) -> None:
    first = make_transport()
    notebook = Notebook(first.start_agent(session))
    notebook.attach(session)
    other = make_transport()
    notebook.sock.close()
    first.leave()
    deadline = time.monotonic() + _LIMIT_S
    while True:
        second = Notebook(other.connect_agent(session))
        second.send(Attach(session, "another"))
        with contextlib.suppress(AssertionError):  # refused until the agent knows that the first one has gone
            assert isinstance(second.receive(Attached), Attached)
            break
        assert time.monotonic() < deadline, "the session is held by nobody"
        second.sock.close()
        time.sleep(0.05)


def test_stream_carries_what_is_large_unharmed(make_transport: MakeTransport, session: str) -> None:
    """The info of a launch is sent to the agent, which returns it to a notebook that attaches later."""
    info = {"numbers": list(range(100_000)), "text": "\u00e9\n\0" * 1000}
    transport = make_transport()
    notebook = Notebook(transport.start_agent(session))
    notebook.attach(session)
    notebook.send(Launch([transport.python, "-c", "import time; time.sleep(60)"], {}, [0], _LIMIT_S, info))
    notebook.sock.shutdown(socket.SHUT_WR)
    notebook.wait_for_end()
    transport.leave()
    said = Notebook(make_transport().connect_agent(session)).attach(session).info
    assert said.items() >= info.items()  # an agent adds its features


def test_address_that_is_none_is_refused_and_the_agent_goes_on(make_transport: MakeTransport, session: str) -> None:
    notebook = Notebook(make_transport().start_agent(session))
    notebook.attach(session)
    for address in ("nowhere.invalid", "x" * 100_000, "a..b", "\0"):
        notebook.send(OpenStore(address))
        answer = notebook.receive(StoreOpened)
        assert isinstance(answer, StoreOpened)
        assert answer.error
        assert not answer.port


def test_ports_are_on_the_address_that_the_node_says(make_transport: MakeTransport, session: str) -> None:
    transport = make_transport()
    notebook = Notebook(transport.start_agent(session))
    notebook.attach(session)
    assert transport.address
    assert transport.interface
    notebook.send(OpenStore(transport.address))
    answer = notebook.receive(StoreOpened)
    assert isinstance(answer, StoreOpened)
    assert answer.port > 0, answer.error


def test_session_that_was_ended_leaves_nothing(make_transport: MakeTransport, session: str) -> None:
    transport = make_transport()
    notebook = Notebook(transport.start_agent(session))
    notebook.attach(session)
    notebook.send(EndSession())
    notebook.wait_for_end()
    transport.wait_for_end(limit_s=_END_LIMIT_S)
    with pytest.raises(SessionError, match=session):
        make_transport().connect_agent(session)
    Notebook(make_transport().start_agent(session)).attach(session)  # the name is free again


def test_what_is_known_once_it_was_reached(make_transport: MakeTransport, session: str) -> None:
    transport = make_transport()
    transport.start_agent(session).close()
    assert Path(transport.python).is_absolute()
    assert Path(transport.work_folder(str(Path.cwd()))).is_absolute()
    assert transport.offer(2) == NodeOffer(transport.name, (0, 1))
    assert all(isinstance(value, str) for value in transport.env.values())
    assert transport.is_this_machine is not transport.can_resume, "a stream on this machine ends with its agent"
    assert not transport.is_trusted


def test_sessions_of_one_node_do_not_disturb_each_other(make_transport: MakeTransport, session: str) -> None:
    other = f"{session}-2"
    ours = Notebook(make_transport().start_agent(session))
    transport = make_transport()
    theirs = Notebook(transport.start_agent(other))
    assert ours.attach(session).pid != theirs.attach(other).pid
    theirs.send(EndSession())
    theirs.wait_for_end()
    transport.wait_for_end(limit_s=_END_LIMIT_S)
    ours.send(OpenStore("nowhere"))
    assert isinstance(ours.receive(StoreOpened), StoreOpened)
