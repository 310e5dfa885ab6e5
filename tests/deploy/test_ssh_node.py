"""Connecting to a node over SSH: leaving the node closes every connection, and our code there is complete."""

from __future__ import annotations

import hashlib
import io
import os
import resource
import shutil
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from detrain_nb.deploy import code
from detrain_nb.deploy.code import own_code
from detrain_nb.deploy.ending import end_agents
from detrain_nb.deploy.node_facts import NodeFacts, choose_address
from detrain_nb.deploy.ssh_node import SshNode
from detrain_nb.errors import LaunchError, TransportError
from detrain_nb.node.ssh import bootstrap
from detrain_nb.spec.node import Node
from detrain_nb.transport.ssh import SshConnection

from ..testbed.nodes import ssh_nodes
from ..testbed.testbed import Testbed


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[SshConnection]]:
    """Yield a list of the SSH connections that are opened."""
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
    """A node that is left just before it stores its connection."""

    def __setattr__(self, name: str, value: object) -> None:
        if name == "_connection" and value is not None:
            self.leave()
        super().__setattr__(name, value)


def test_node_that_is_left_while_it_is_reached_has_no_connection(testbed: Testbed, opened: list[SshConnection]) -> None:
    (reached,) = ssh_nodes(testbed, 1)
    node = LeftAtOnce(reached.node, config_path=reached.config_path)
    with pytest.raises(TransportError, match="the connection was closed while it was being opened"):
        node.start_agent("left")
    assert [connection.is_alive for connection in opened] == [False]
    assert not end_agents([reached], "left", holder="test"), "the agent goes on"


def test_full_disk_of_this_machine_is_no_hindrance(testbed: Testbed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Our code is sent to the node without being written to this machine's disk."""
    with zipfile.ZipFile(io.BytesIO(own_code().data)) as packed:
        sources = {name: packed.read(name) for name in packed.namelist()}
    fresh = code.CodeArchive.of({**sources, "detrain_nb/fresh.bin": os.urandom(1 << 20)})
    monkeypatch.setattr(code, "own_code", lambda: fresh)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 19, hard))
    try:
        (node,) = ssh_nodes(testbed, 1)
        node.start_agent("full").close()
        node.leave()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not end_agents(ssh_nodes(testbed, 1), "full", holder="test")


# ---- our code there


def _write_anew(path: Path, text: str) -> None:
    path.unlink()
    path.write_text(text)


@pytest.mark.parametrize(
    "fault",
    [
        lambda folder: os.truncate(folder / "detrain_nb/wire/frames.py", 100),
        lambda folder: os.truncate(folder / "detrain_nb/wire/frames.py", 0),
        lambda folder: (folder / "detrain_nb/copying/json_lines.py").unlink(),
        lambda folder: shutil.rmtree(folder / "detrain_nb/node"),
        lambda folder: [shutil.rmtree(path) if path.is_dir() else path.unlink() for path in folder.iterdir()],
        lambda folder: (folder / bootstrap.LIST_NAME).unlink(),
        lambda folder: _write_anew(folder / bootstrap.LIST_NAME, '{"detrain_nb/wire/frames.py": '),
        lambda folder: _write_anew(folder / bootstrap.LIST_NAME, "[]"),
    ],
    ids=["cut off", "empty", "removed", "folder removed", "folder empty", "no list", "list cut off", "no such list"],
)
def test_code_that_is_not_whole_on_a_node_is_mended(testbed: Testbed, fault: Callable[[Path], object]) -> None:
    (node,) = ssh_nodes(testbed, 1)
    with node.run_files():
        pass
    folder = testbed.path_home("h0") / ".cache/detrain_nb" / own_code().digest
    fault(folder)
    unchanged = {path: path.stat().st_ino for path in folder.rglob("*.py") if path.stat().st_size > 100}
    with node.run_files():
        pass
    with zipfile.ZipFile(io.BytesIO(own_code().data)) as packed:
        assert all((folder / name).read_bytes() == packed.read(name) for name in packed.namelist())
    assert {path: path.stat().st_ino for path in unchanged} == unchanged, "ranks may be importing these"


def test_code_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power loss, a node then has all of the code or none of it."""
    files = {"detrain_nb/__init__.py": b"", "detrain_nb/node/agent/agent.py": b"x = 1"}
    archive = tmp_path / "archive"
    archive.write_bytes(code.pack_files(files))
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()[:32]
    synced: set[int] = set()
    needed: set[int] = set()
    fsync, rename = os.fsync, os.rename

    def note_fsync(handle: int) -> None:
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    def note_rename(made: str, folder: str) -> None:
        needed.update(path.stat().st_ino for path in (Path(made), *Path(made).rglob("*")))
        assert needed <= synced
        rename(made, folder)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "rename", note_rename)
    bootstrap._unpack_whole(str(archive), str(tmp_path / digest), digest)
    assert len(needed) == 7, "four folders, two files and their list"
    assert tmp_path.stat().st_ino in synced, "and the name itself"


_LIAR = """#!{python}
import json, sys
facts = dict.fromkeys(["python", "host", "home", "reached_at"], "/") | {{"type": "facts", "cache": "/tmp", "have": []}}
print("\\ndetrain-nb bootstrap 1")
print(json.dumps(facts | {{"python_version": [3, 12, 0], "versions": {{"ipython": "9"}}, "addresses": []}}), flush=True)
for line in sys.stdin.buffer:
    order = json.loads(line)
    sys.stdin.buffer.read(order.get("size", 0))
    is_code = order["type"] == "unpack"
    answer = {{"type": "unpacked"}} if is_code else {{"type": "code", "incomplete": {incomplete}}}
    print(json.dumps(answer), flush=True)
"""


@pytest.mark.parametrize("incomplete", [f'["{own_code().digest}"]', "5"])
def test_node_that_never_has_all_of_our_code_is_not_sent_it_without_end(testbed: Testbed, incomplete: str) -> None:
    liar = testbed.path_home("h0") / "liar"
    liar.write_text(_LIAR.format(python=sys.executable, incomplete=incomplete))
    liar.chmod(0o700)
    (node,) = ssh_nodes(testbed, 1, python="~/liar")
    with pytest.raises(LaunchError, match="code was written to /tmp twice and is still incomplete: check that disk"):
        node.run_files().__enter__()


_FACTS = dict.fromkeys(["python", "host", "home", "cache", "reached_at"], "/") | {"have": [], "versions": {}}
_FACTS |= {"python_version": [3, 12, 0], "addresses": [["lo", "127.0.0.1"]]}


@pytest.mark.parametrize("version", [[3], [], 3, None, "3.12", [2, 7], [3, -1], [3, 10**6], [3, "x" * 100_000], {}])
def test_python_of_a_node_is_one_that_can_be(version: object) -> None:
    assert NodeFacts.read(_FACTS).python_version == (3, 12)
    with pytest.raises(TransportError, match=r"^the node's report about itself is invalid: .{,200}$"):
        NodeFacts.read(_FACTS | {"python_version": version})


def test_addresses_of_a_node_by_the_thousand_are_not_all_named() -> None:
    facts = NodeFacts.read(
        _FACTS | {"addresses": [["lo", f"10.0.{number >> 8}.{number & 255}"] for number in range(30_000)]}
    )
    with pytest.raises(LaunchError, match=r"set its address to one of 10\.0\.0\.0 \(lo\)") as caught:
        choose_address(Node(host="h"), facts.addresses, reached_at="192.0.2.1", peer_address="192.0.2.2")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "address", ["0.0.0.0", "::", "224.0.0.1", "ff02::1", "255.255.255.255", "::ffff:127.0.0.1", "a"]
)
def test_address_that_is_no_single_machines_is_not_taken(address: str) -> None:
    facts = NodeFacts.read(_FACTS | {"addresses": [["eth0", address], ["eth1", "192.0.2.1"]]})
    with pytest.raises(LaunchError, match=r"at 192\.0\.2\.2, but none .* one of 192\.0\.2\.1 \(eth1\)$"):
        choose_address(Node(host="h"), facts.addresses, reached_at=address, peer_address="192.0.2.2")
    with pytest.raises(LaunchError, match="but none of its interfaces has that address"):
        choose_address(Node(host="h"), [("eth0", address)], reached_at=address, peer_address=address)
