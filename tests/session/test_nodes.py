"""A session of several nodes, each with its own agent on this machine, and connections that break."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from detrain_nb import Session
from detrain_nb.agents import connect, live_agent, remove_dead_agents, start_agent
from detrain_nb.errors import NodeLost, RankError, RankLost, SessionError, SpecError, TransportError
from detrain_nb.transport import AgentFolders
from detrain_nb.transport.local import LocalTransport
from detrain_nb.wire import CellDone, RankUp, to_frame

from .inside import link_of, state_of
from .soon import assert_soon


class OwnFolder(LocalTransport):
    """A node on this machine with its agents in a separate folder; a test can break the connection to it."""

    is_this_machine = False
    can_resume = True

    def __init__(self, name: str, base: Path) -> None:
        super().__init__()
        self.name = name
        self._base = base / name
        self.place = str(self._base)
        self._base.mkdir(mode=0o700, exist_ok=True)
        self._connection: socket.socket | None = None
        self.is_reachable = True
        self.connections = 0

    def start_agent(self, session: str) -> socket.socket:
        self._folder, self.connections = self._base / session, 0
        self._agent, sock = start_agent(self._folder)
        return self._keep(sock)

    def begin(self, session: str) -> AgentFolders:
        self._folder, self.connections = self._base / session, 1
        return {"folder": str(self._folder), "work_folder": "", "uses": []}

    def connect_agent(self, session: str) -> socket.socket:
        self._folder = self._base / session
        if not self.is_reachable:
            raise NodeLost(f"{self.name} cannot be reached")
        if not live_agent(self._folder):
            raise SessionError(f"no session {session!r} is running there")
        return self._keep(connect(self._folder))

    def _keep(self, sock: socket.socket) -> socket.socket:
        self._connection = sock
        self.connections += 1
        return sock

    def cut(self) -> None:
        """Break the connection and refuse new ones until ``heal``."""
        assert self._connection is not None
        self.is_reachable = False
        self._connection.shutdown(socket.SHUT_RDWR)

    def heal(self) -> None:
        self.is_reachable = True

    @property
    def agent_pid(self) -> int:
        return int((self._folder / "agent.pid").read_text())


@pytest.fixture(scope="module")
def base_of_all(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nodes")
    folder.chmod(0o700)
    return folder


@pytest.fixture
def base(base_of_all: Path) -> Iterator[Path]:
    yield base_of_all
    assert not [path for node in base_of_all.iterdir() for path in node.iterdir()], "a session left its folder behind"


@pytest.fixture(scope="module")
def nodes_of_all(base_of_all: Path) -> list[OwnFolder]:
    return [OwnFolder("left", base_of_all), OwnFolder("right", base_of_all)]


@pytest.fixture
def nodes(base: Path, nodes_of_all: list[OwnFolder]) -> list[OwnFolder]:
    """Two nodes shared by all tests: what a session keeps there serves the next session."""
    for node in nodes_of_all:
        node.heal()
    return nodes_of_all


@pytest.fixture
def two_nodes(nodes: list[OwnFolder]) -> Iterator[Session]:
    with Session.start(1, nodes=nodes, device="cpu") as session:
        yield session


def _later(act: Callable[[], None], after_s: float) -> threading.Thread:
    thread = threading.Thread(target=lambda: (time.sleep(after_s), act()))
    thread.start()
    return thread


def _broken_later(*nodes: OwnFolder, after_s: float, for_s: float) -> threading.Thread:
    """Break the nodes' connections in turn, each once the node before has reconnected. One thread keeps the order."""

    def break_them() -> None:
        for number, node in enumerate(nodes):
            time.sleep(after_s if number else 0.0)
            wanted = node.connections + 1
            node.cut()
            time.sleep(for_s)
            node.heal()
            assert_soon(lambda node=node, wanted=wanted: node.connections == wanted)  # type: ignore[misc]

    return _later(break_them, after_s)


def _numbers(session: Session, cell: int, rank: int) -> list[int]:
    return [int(line) for line in session.log.text(cell, rank).split()]


def test_ranks_of_two_nodes_are_one_group(two_nodes: Session) -> None:
    result = two_nodes.run_cell("t = torch.ones(2) * rank; dist.all_reduce(t); t")
    assert {rank: value.tolist() for rank, value in result.values.items()} == {0: [1.0, 1.0], 1: [1.0, 1.0]}
    assert two_nodes.run_cell("rank, local_rank, world_size").values == {0: (0, 0, 2), 1: (1, 0, 2)}
    two_nodes.push({"x": [1, 2]})
    assert two_nodes.pull("x") == {0: [1, 2], 1: [1, 2]}
    two_nodes.run_cell("y = rank")
    two_nodes.broadcast("y", source=1)
    assert two_nodes.run_cell("y").values == {0: 1, 1: 1}
    assert [rank.host for rank in two_nodes.status().ranks] == ["left", "right"]


def test_name_of_a_node_chooses_its_ranks(two_nodes: Session) -> None:
    assert two_nodes.run_cell("rank", ranks="right").values == {1: 1}
    assert two_nodes.run_cell("rank", ranks="right,0").values == {0: 0, 1: 1}
    with pytest.raises(SpecError, match=r"no rank or host is called 'middle': .* or a host: left, right"):
        two_nodes.run_cell("rank", ranks="middle")


def test_error_names_the_node(two_nodes: Session) -> None:
    with pytest.raises(RankError, match="rank 1 on right: ZeroDivisionError"):
        two_nodes.run_cell("1 / (1 - rank)")


def test_nothing_active_is_shown_from_another_machine(two_nodes: Session) -> None:
    result = two_nodes.run_cell("from IPython.display import HTML\nHTML('<script>alert(1)</script>')")
    assert [list(of_rank.bundle) for of_rank in result] == [["text/plain"]] * 2


def test_broken_connection_is_made_again_and_the_cell_does_not_notice(
    two_nodes: Session, nodes: list[OwnFolder]
) -> None:
    threads = [_broken_later(nodes[1], nodes[0], nodes[1], after_s=0.2, for_s=0.3)]
    code = "import time\nfor i in range(500):\n    print(i)\n    time.sleep(0.005)\ndist.barrier()\nrank"
    faults: set[str] = set()
    has_ended = threading.Event()

    def look() -> None:
        while not has_ended.wait(0.1):
            faults.update(node.fault for node in two_nodes.status().nodes)

    threads.append(_later(look, 0.0))
    result = two_nodes.run_cell(code)
    has_ended.set()
    for thread in threads:
        thread.join(10)
    faults = {re.sub(r"\d", "N", fault) for fault in faults}
    assert faults == {"", "no connection for N s, trying again"}
    assert result.values == {0: 0, 1: 1}
    for rank in range(2):
        assert _numbers(two_nodes, result.cell, rank) == list(range(500))
    assert nodes[0].connections == 2
    assert nodes[1].connections == 3


def test_what_is_sent_while_the_connection_is_broken_arrives_once(two_nodes: Session, nodes: list[OwnFolder]) -> None:
    two_nodes.run_cell("count = 0")
    for _ in range(5):
        nodes[1].cut()
        healed = _later(nodes[1].heal, 0.2)
        two_nodes.run_cell("count += 1")
        two_nodes.push({"large": bytes(8 << 20)})
        healed.join(10)
    assert two_nodes.run_cell("count, len(large)").values == {0: (5, 8 << 20), 1: (5, 8 << 20)}


def test_words_of_the_agent_do_not_cut_what_ranks_print(two_nodes: Session) -> None:
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            link_of(two_nodes).locate([0, 1], stack=False)  # the agent acknowledges it

    asking = threading.Thread(target=ask)
    asking.start()
    try:
        result = two_nodes.run_cell("for i in range(400): print(str(i % 10) * 99_999)")
    finally:
        ended.set()
        asking.join(10)
    for rank in range(2):
        assert two_nodes.log.text(result.cell, rank) == "".join(f"{str(i % 10) * 99_999}\n" for i in range(400))


def test_values_that_were_under_way_are_asked_for_again(two_nodes: Session, nodes: list[OwnFolder]) -> None:
    two_nodes.run_cell("large = torch.zeros(50_000_000)")
    healed = _broken_later(nodes[1], after_s=0.05, for_s=0.25)
    try:
        found = two_nodes.pull("large", ranks=1)[1]
    except TransportError as exc:
        assert "right: the connection broke while values were being transferred: pull them again" in str(exc)
    else:
        assert len(found) == 50_000_000  # all of it had already arrived
    healed.join(30)
    assert len(two_nodes.pull("large", ranks=1)[1]) == 50_000_000


def test_stop_works_while_a_node_cannot_be_reached(two_nodes: Session, nodes: list[OwnFolder]) -> None:
    two_nodes.run_cell("import time\nkept = rank")

    def cut_and_stop() -> None:
        nodes[1].cut()
        assert_soon(lambda: link_of(two_nodes).node_links[1].broken_at is not None)
        os.kill(os.getpid(), signal.SIGINT)

    stop = _later(cut_and_stop, 0.5)
    with pytest.raises(RankError) as caught:
        two_nodes.run_cell("time.sleep(600)")
    assert "rank 1" in caught.value.note
    stop.join(10)
    nodes[1].heal()
    assert two_nodes.run_cell("kept").values == {0: 0, 1: 1}


def test_lost_node_is_named_and_the_others_keep_their_variables(two_nodes: Session, nodes: list[OwnFolder]) -> None:
    two_nodes.run_cell("import time\nkept = rank")
    there = psutil.Process(nodes[1].agent_pid).children(recursive=True)
    killed = _later(lambda: os.kill(nodes[1].agent_pid, signal.SIGKILL), 0.5)
    with pytest.raises(RankLost) as caught:
        two_nodes.run_cell("if rank == 0:\n    dist.recv(torch.ones(1), 1)\nelse:\n    time.sleep(600)")
    killed.join(10)
    assert caught.value.ranks == (1,)
    assert "node right is lost" in str(caught.value)
    assert "rank 0 kept its variables" in str(caught.value)
    with pytest.raises(SessionError, match="node right is lost"):
        two_nodes.run_cell("rank")
    assert two_nodes.run_cell("kept", ranks="left").values == {0: 0}
    status = two_nodes.status()
    assert status.ranks[1].state == "down"
    assert [(node.name, node.ranks, node.fault[:5]) for node in status.nodes] == [
        ("left", (0,), ""),
        ("right", (1,), "lost:"),
    ]
    assert not psutil.wait_procs(there, timeout=20)[1], "ranks outlived their agent"
    _tidy_up(nodes[1])


@pytest.mark.slow
def test_those_that_are_left_become_one_group_when_that_is_asked(base: Path) -> None:
    nodes = [OwnFolder(name, base) for name in ("left", "middle", "right")]
    session = Session.start(1, nodes=nodes, device="cpu", name="mine")
    session.run_cell("kept = 10 * rank")
    with pytest.raises(SessionError, match="no node is lost"):
        session.ranks.shrink()
    killed = _later(lambda: os.kill(nodes[1].agent_pid, signal.SIGKILL), 0.3)
    with pytest.raises(RankLost):
        session.run_cell("import time\nif rank == 1:\n    time.sleep(600)\ndist.barrier()")
    killed.join(10)
    with pytest.raises(SessionError, match="%distributed shrink"):
        session.run_cell("kept")
    assert session.ranks.shrink() == {0: 0, 2: 1}
    code = "t = torch.ones(1); dist.all_reduce(t); rank, world_size, kept, t.item(), dist.get_world_size()"
    assert session.run_cell(code).values == {0: (0, 2, 0, 2.0, 2), 1: (1, 2, 20, 2.0, 2)}
    assert [(rank.rank, rank.host) for rank in session.status().ranks] == [(0, "left"), (1, "right")]
    assert session.pull("kept", ranks="right") == {1: 20}
    with pytest.raises(RankLost, match="rank 1 on right"):
        session.run_cell("import os\nif rank == 1:\n    os._exit(3)\ndist.barrier()")
    assert session.run_cell("import os\ndist.barrier()\nrank, os.environ['RANK']").values == {0: (0, "0"), 1: (1, "1")}
    assert session.log.replay(1, cells=[1]) == {1: None}
    session.detach()
    with Session.attach("mine", nodes=[OwnFolder("left", base), OwnFolder("right", base)]) as again:
        assert again.run_cell("dist.barrier()\nrank, kept").values == {0: (0, 0), 1: (1, 10)}
    _tidy_up(nodes[1])


@pytest.mark.slow
def test_node_that_was_lost_while_nobody_was_there_is_told_at_attach(base: Path) -> None:
    nodes = [OwnFolder(name, base) for name in ("left", "middle", "right")]
    first = Session.start(1, nodes=nodes, device="cpu", name="mine")
    first.run_cell("kept = rank")
    agent = psutil.Process(nodes[1].agent_pid)
    first.detach()
    agent.kill()
    assert not psutil.wait_procs([agent], timeout=20)[1]
    with Session.attach("mine", nodes=[OwnFolder(node.name, base) for node in nodes]) as session:
        assert len(session.ranks) == 3
        assert "node middle is lost" in session.news.pop_losses()
        assert [rank.state for rank in session.status().ranks] == ["idle", "down", "idle"]
        assert session.ranks.shrink() == {0: 0, 2: 1}
        assert session.run_cell("dist.barrier()\nkept").values == {0: 0, 1: 2}
    _tidy_up(nodes[1])


def _tidy_up(node: OwnFolder) -> None:
    """Remove what a killed agent has left, and check that its folder is gone."""
    remove_dead_agents(node._folder.parent)
    assert not node._folder.exists()


def test_groups_that_cells_make_are_made_again_after_a_death(nodes: list[OwnFolder]) -> None:
    """The session makes no default group: a fresh rank must count the groups that it makes as the others do."""
    reduced = "ones = torch.ones(1)\ndist.all_reduce(ones)\nones.item()"
    grouped = f"dist.init_process_group()\n{reduced}"
    both = {0: 2.0, 1: 2.0}
    first = Session.start(1, nodes=nodes, device="cpu", init=False, group_timeout_s=20, name="mine")
    for _ in range(2):
        assert first.run_cell(grouped).values == both
    with pytest.raises(RankLost):
        first.run_cell("import os, signal\nif rank == 1:\n    os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    assert first.run_cell(grouped).values == both
    first.detach()
    with Session.attach("mine", nodes=nodes) as again:
        assert again.run_cell(reduced).values == both
        again.restart(0)
        assert again.run_cell(grouped).values == both
        again.settings.check_collectives()
        again.run_cell(grouped)
        with pytest.raises(RankError, match="different collectives"):
            again.run_cell("dist.all_reduce(torch.ones(1 + rank))")


def test_first_node_takes_the_session_with_it(cold_starts: None, nodes: list[OwnFolder]) -> None:
    session = Session.start(1, nodes=nodes, device="cpu")
    there = psutil.Process(nodes[1].agent_pid).children(recursive=True)
    killed = _later(lambda: os.kill(nodes[0].agent_pid, signal.SIGKILL), 0.5)
    with pytest.raises(NodeLost, match="left: the connection to the agent of session"):
        session.run_cell("import time\ntime.sleep(600)")
    killed.join(10)
    assert not session.is_alive
    session.stop()
    assert not psutil.wait_procs(there, timeout=10)[1], "ranks of the other node go on"


def test_session_is_attached_to_on_all_nodes(base: Path) -> None:
    first = Session.start(1, nodes=[OwnFolder("left", base), OwnFolder("right", base)], device="cpu", name="mine")
    assert first.status().group_timeout_s == 600.0
    first.run_cell("kept = rank\nprint(rank)")
    first.detach()
    with Session.attach("mine", nodes=[OwnFolder("left", base), OwnFolder("right", base)]) as again:
        assert len(again.ranks) == 2
        assert not again.log.missed
        assert again.status().group_timeout_s == 600.0
        assert again.run_cell("dist.barrier()\nkept").values == {0: 0, 1: 1}
        assert again.run_cell("rank", ranks="right").values == {1: 1}
        assert again.log.replay("right", cells=[1]) == {1: None}


@pytest.mark.slow
def test_node_that_speaks_for_the_rank_of_another_is_hung_up_on(two_nodes: Session) -> None:
    ranks = link_of(two_nodes)
    forged = to_frame(CellDone(0, 1, 0.0, True, False, b""))
    link = ranks.node_links[1]
    two_nodes.run_cell("kept = rank")
    ours, theirs = socket.socketpair()
    link._connect = lambda: ours
    theirs.settimeout(10)
    link._link.sock.shutdown(socket.SHUT_RDWR)
    theirs.recv(1 << 16)  # the request to attach
    up = RankUp(1, 1, 0, 2, 1, "right", "cpu", "2")
    attached = state_of(two_nodes)._attached[1]
    for frame in (to_frame(up), to_frame(attached), forged._replace(number=link.last_number + 1)):
        theirs.sendall(frame.to_bytes(number=frame.number))
    while theirs.recv(1 << 16):  # until the notebook closes the connection
        pass
    theirs.close()
    with pytest.raises((RankLost, SessionError), match="node right is lost"):
        two_nodes.run_cell("dist.barrier()")
    assert "sent a message for rank 0, which it does not have" in state_of(two_nodes).lost_nodes[1]
    assert two_nodes.run_cell("kept", ranks=0).values == {0: 0}


def test_nobody_is_left_when_one_node_cannot_start(base: Path, processes: Callable[[], set[psutil.Process]]) -> None:
    class Broken(OwnFolder):
        def start_agent(self, session: str) -> socket.socket:
            raise NodeLost(f"{self.name} cannot be reached")

    with pytest.raises(NodeLost, match="right cannot be reached"):
        Session.start(1, nodes=[OwnFolder("left", base), Broken("right", base)], device="cpu")
    assert_soon(lambda: not processes())
