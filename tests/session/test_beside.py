"""``localhost`` as one node of several: it runs without SSH, and is refused if a host cannot reach it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from detrain_nb import Session
from detrain_nb.agents import is_running
from detrain_nb.deploy.known import known_sessions
from detrain_nb.errors import LaunchError, RankError, RankLost, SpecError
from detrain_nb.spec import Node
from detrain_nb.transport import Transport
from detrain_nb.transport.local import LocalTransport

from ..testbed.nodes import away_from, processes_of_sessions, ssh_nodes
from ..testbed.testbed import Testbed
from .soon import assert_soon
from .training import Watcher

_SUM = "t = torch.tensor([rank + 1.0]); dist.all_reduce(t); t.item()"
_STORE = "import os; os.environ['MASTER_ADDR'], os.environ['GLOO_SOCKET_IFNAME']"

Processes = Callable[[], set[psutil.Process]]


def _here(**fields: Any) -> LocalTransport:
    return LocalTransport(Node(host="localhost", **fields))


def _assert_none_is_left(testbed: Testbed, processes: Processes) -> None:
    assert_soon(lambda: not processes())
    assert_soon(lambda: not processes_of_sessions(testbed, "h0"))


def test_localhost_alone_is_a_named_node_on_the_loopback(processes: Processes, tmp_path: Path) -> None:
    workdir = tmp_path / "work"
    nodes = [Node(host="localhost", name="me", ranks=2, workdir=str(workdir))]
    with Session.start(nodes=nodes, device="cpu", name="alone") as session:
        assert session.run_cell(_SUM, ranks="me").values == {0: 3.0, 1: 3.0}
        assert session.run_cell(_STORE).values[0] == ("127.0.0.1", "lo")
        assert session.run_cell("os.getcwd()").values[0] == str(workdir)
        known = known_sessions()["alone"]
        assert [node.name for node in known.nodes] == ["me"] and is_running(known.pid)
        session.detach()
        with Session.attach("alone") as again:
            assert again.ranks.node_names == {0: "me", 1: "me"}
            assert again.run_cell("t.item()").values == {0: 3.0, 1: 3.0}
    assert_soon(lambda: not processes())


@pytest.mark.parametrize(
    ("nodes", "complaint"),
    [
        ("localhost,localhost", "localhost and localhost are both this machine: name it once, with ranks = N"),
        ([Node(host="localhost"), Node(host="localhost", name="b")], "localhost and b are both this machine"),
        ("alice@localhost", "localhost is this machine itself, without SSH: leave out user, or name it 127.0.0.1"),
        ("localhost:2222", "localhost is this machine itself, without SSH: leave out port, or name it 127.0.0.1"),
    ],
)
def test_this_machine_is_named_once_and_without_ssh(nodes: Any, complaint: str) -> None:
    with pytest.raises(SpecError, match=complaint):
        Session.start(nodes=nodes, device="cpu")


@pytest.mark.slow
def test_localhost_beside_a_host(
    testbed: Testbed, processes: Processes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One session covers names, the folder, a stop and a killed rank on either node, because a start is slow."""
    inventory = testbed.inventory
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("answer = 42\n")
    nodes: list[Transport] = [_here(), *ssh_nodes(testbed, 1)]
    with Session.start(1, nodes=nodes, device="cpu") as session:
        assert session.run_cell(_SUM).values == {0: 3.0, 1: 3.0}
        assert session.run_cell(_STORE).values[0] == (inventory.notebook_ip, f"{inventory.prefix}-br")
        assert session.ranks.node_names == {0: "localhost", 1: "h0"}

        assert session.run_cell("import mine, os; mine.answer, os.getcwd()").values[0] == (42, str(tmp_path))
        assert session.run_cell("mine.answer", ranks="h0").values == {1: 42}

        code = "print('begun')\nif rank:\n    dist.all_reduce(t)\nelse:\n    import time; time.sleep(600)"
        with pytest.raises(RankError):
            session.run_cell(code, observer=Watcher(press_at="begun", ranks=2, after_s=(0.2,)))

        for rank, name in session.ranks.node_names.items():
            with pytest.raises(RankLost, match=rf"rank {rank} on {name}"):
                session.run_cell(f"if rank == {rank}: os.kill(os.getpid(), 9)\ndist.barrier()")
            assert session.run_cell(_SUM).values == {0: 3.0, 1: 3.0}
    _assert_none_is_left(testbed, processes)


@pytest.mark.slow
def test_localhost_may_stand_second_and_the_session_is_attached_to(testbed: Testbed, processes: Processes) -> None:
    def nodes() -> list[Transport]:
        return [*ssh_nodes(testbed, 1), _here(ranks=2)]

    first = Session.start(sync=False, nodes=nodes(), device="cpu", name="beside")
    assert first.run_cell(_SUM).values == dict.fromkeys(range(3), 6.0)
    assert first.run_cell(_STORE).values[0] == (testbed.host("h0").ip, "eth0")
    known = known_sessions()["beside"]
    assert [(node.name, node.ranks) for node in known.nodes] == [("h0", 1), ("localhost", 2)]
    first.detach()
    with Session.attach("beside", nodes=nodes()) as second:
        assert second.run_cell("t.item()", ranks="localhost").values == {1: 6.0, 2: 6.0}
        assert second.run_cell(_SUM).values == dict.fromkeys(range(3), 6.0)
    _assert_none_is_left(testbed, processes)


@pytest.mark.slow
def test_machine_that_a_host_does_not_reach_is_refused_before_any_rank_starts(
    testbed: Testbed, processes: Processes
) -> None:
    with away_from(testbed, "h0") as address, pytest.raises(LaunchError) as caught:
        Session.start(1, sync=False, nodes=[_here(address=address), *ssh_nodes(testbed, 1)], device="cpu")
    assert str(caught.value).splitlines() == [
        f"h0 does not reach localhost at {address}: no answer within 3 s",
        "list a host first that all nodes reach, and leave localhost out",
    ]
    _assert_none_is_left(testbed, processes)
