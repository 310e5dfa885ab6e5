"""What a start reports about each node, and that its callbacks can abort it at any moment."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from detrain_nb import Session
from detrain_nb.deploy import ssh_node
from detrain_nb.deploy.known import known_sessions
from detrain_nb.deploy.start_steps import PHASES, StartStep
from detrain_nb.doctor import examine, host_probe
from detrain_nb.errors import TransportError
from detrain_nb.spec import Node
from detrain_nb.transport import ssh_socket

from ..testbed.testbed import Testbed

pytestmark = pytest.mark.timeout(120)
_HERE = [Node(host="localhost", ranks=2)]


class _Ended(Exception):
    """Raised by a callback to abort a start."""


def test_each_phase_of_a_node_is_told_to_its_end() -> None:
    steps: list[StartStep] = []
    with Session.start(nodes=_HERE, on_step=steps.append) as session:
        assert session.run_cell("rank").values == {0: 0, 1: 1}
    phases = list(dict.fromkeys(step.phase for step in steps))
    assert phases == ["connect", "ranks", "group"]  # this machine has the folder: nothing is sent
    for phase in phases:
        told = [step for step in steps if step.phase == phase]
        assert {step.node for step in told} == {"localhost"}
        assert [step.state for step in told].count("done") == 1 and told[-1].state == "done"
        if phase != "connect":
            assert (told[-1].done, told[-1].total) == (2, 2)
            assert [step.done for step in told] == sorted({step.done for step in told})


@pytest.mark.parametrize("moment", ["reaching", "importing torch", "making the process group"])
def test_what_a_follower_raises_ends_the_start_and_leaves_nothing(moment: str) -> None:
    def follow(line: str) -> None:
        if moment in line or (moment == "reaching" and "importing" not in line):
            raise _Ended

    with pytest.raises(_Ended):
        Session.start(nodes=_HERE, name="given-up", on_progress=follow)
    assert "given-up" not in known_sessions()
    with Session.start(nodes=_HERE, name="given-up") as session:
        assert len(session.ranks) == 2


@pytest.mark.slow
def test_start_and_examination_end_while_a_host_does_not_answer(
    testbed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(f"Include {testbed.inventory.ssh_config}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    testbed.cut("h1", "notebook")
    nodes = [Node(host=host, python=sys.executable, devices="cpu") for host in ("h0", "h1")]
    _wait_for_hosts(600.0, monkeypatch)  # longer than this test may take
    for asked in (None, lambda path: None):
        with pytest.raises(_Ended):
            Session.start(nodes=nodes, on_progress=_Follower(), ask_passphrase=asked)
        with pytest.raises(_Ended):
            examine(nodes, meanwhile=_Follower(), ask_passphrase=asked)


def _wait_for_hosts(limit_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set how long a start waits for the connection to a host."""
    monkeypatch.setattr(ssh_socket, "_TCP_LIMIT_S", limit_s)
    monkeypatch.setattr(host_probe, "_CONNECT_LIMIT_S", limit_s)
    monkeypatch.setitem(ssh_node.connect_to.__kwdefaults__, "limit_s", limit_s)


class _Follower:
    """Aborts the start at its tenth call, when the connections to both hosts are being made."""

    def __init__(self) -> None:
        self._num_calls = 0

    def __call__(self, line: str = "") -> None:
        self._num_calls += 1
        if self._num_calls == 10:
            raise _Ended


@pytest.mark.slow
def test_node_that_cannot_be_reached_is_told_with_its_reason(
    testbed: Testbed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "config").write_text(f"Include {testbed.inventory.ssh_config}\n")
    monkeypatch.setenv("HOME", str(tmp_path))
    (work := tmp_path / "work").mkdir()
    monkeypatch.chdir(work)
    testbed.stop_sshd("h1")
    steps: list[StartStep] = []
    nodes = [Node(host=host, python=sys.executable, devices="cpu") for host in ("h0", "h1")]
    with pytest.raises(TransportError, match="h1"):
        Session.start(nodes=nodes, on_step=steps.append)
    [failed] = [step for step in steps if step.state == "failed"]
    assert (failed.node, failed.phase) == ("h1", "connect") and failed.error
    assert StartStep("h0", "connect", "done") in steps
    testbed.start_sshd("h1")
    steps.clear()
    (work / "mine.py").write_text("x = 1\n")
    with Session.start(nodes=nodes, on_step=steps.append) as session:
        assert session.run_cell("import mine; mine.x").values == {0: 1, 1: 1}
    for node in ("h0", "h1"):
        assert [step.phase for step in steps if step.node == node and step.state == "done"] == list(PHASES)
