"""A node over SSH that is left, or cannot be served by this machine, while it is reached: no connection stays."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from typing import Any

import pytest

from detrain_nb.deploy import code, end_agents
from detrain_nb.deploy.ssh_node import SshNode
from detrain_nb.errors import TransportError
from detrain_nb.transport.ssh import SshConnection

from ..testbed.nodes import ssh_nodes
from ..testbed.testbed import Testbed


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SshConnection]]:
    """The connections that are made."""
    found: list[SshConnection] = []
    open_one = SshConnection.open

    def note(*args: Any, **options: Any) -> SshConnection:
        found.append(open_one(*args, **options))
        return found[-1]

    monkeypatch.setattr(SshConnection, "open", note)
    yield found
    for connection in found:
        connection.close()


class LeftAtOnce(SshNode):
    """It is left in the moment before it knows its connection."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "_connection" and value is not None:
            self.leave()
        super().__setattr__(name, value)


def test_node_that_is_left_while_it_is_reached_has_no_connection(testbed: Testbed, opened: list[SshConnection]) -> None:
    (reached,) = ssh_nodes(testbed, 1)
    node = LeftAtOnce(reached.node, config_path=reached._config_path)
    with pytest.raises(TransportError, match="it was left while the connection was made"):
        node.start_agent("left")
    assert [connection.is_alive for connection in opened] == [False]
    assert not end_agents([reached], "left", holder="test"), "the agent goes on"


def test_full_disk_of_this_machine_is_said_and_is_no_reason_to_give_up(
    testbed: Testbed, opened: list[SshConnection], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our code goes there once more."""
    archive = code._archive({"detrain_nb/fresh.py": b"#" * 100_000})
    monkeypatch.setattr(code, "own_code", lambda: code.CodeArchive("0" * 32, archive.data + bytes(1 << 20)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, hard))
    try:
        with pytest.raises(TransportError, match=r"this machine: .*File too large"):
            ssh_nodes(testbed, 1)[0].start_agent("full")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [connection.is_alive for connection in opened] == [False]
