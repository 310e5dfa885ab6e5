"""The connection check between nodes before a launch; a node's report on it is not trusted."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import pytest

from detrain_nb.deploy.ways import address_beside, check_ways, settle_here
from detrain_nb.errors import DetrainError, LaunchError
from detrain_nb.spec import Node
from detrain_nb.transport.local import LocalTransport

_LOOPBACK = ("127.0.0.1", "127.0.0.2", "127.0.0.3")
_Answer = Callable[[dict[str, object]], dict[str, object]]


def _node(name: str) -> LocalTransport:
    return LocalTransport(Node(host="localhost", name=name))


class _Host(LocalTransport):
    """A remote node with arbitrary answers."""

    is_this_machine = False

    def __init__(self, answer: _Answer) -> None:
        super().__init__(Node(host="localhost", name="host"))
        self._answer = answer

    def run_files(self) -> AbstractContextManager[socket.socket]:
        return self._serve()

    @contextlib.contextmanager
    def _serve(self) -> Iterator[socket.socket]:
        ours, theirs = socket.socketpair()

        def serve() -> None:
            with contextlib.suppress(OSError), theirs, theirs.makefile("rwb") as file:
                for line in file:
                    if answer := self._answer(json.loads(line)):
                        file.write(json.dumps(answer).encode() + b"\n")
                        file.flush()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield ours
        finally:
            ours.close()
            thread.join(10)


def _threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if "ways" in thread.name or "files" in thread.name]


def test_nodes_that_reach_each_other_leave_nothing_listening() -> None:
    before = len(os.listdir("/proc/self/fd"))
    check_ways([_node("a"), _node("b"), _node("c")], _LOOPBACK)
    assert not _threads()
    assert len(os.listdir("/proc/self/fd")) <= before  # fewer if garbage of another test was collected


def test_address_that_is_not_the_nodes_own_is_said() -> None:
    with pytest.raises(DetrainError, match=r"b: cannot listen on 198\.51\.100\.7: Cannot assign"):
        check_ways([_node("a"), _node("b")], ["127.0.0.1", "198.51.100.7"])
    assert not _threads()


@pytest.mark.parametrize(
    ("said", "complaint"),
    [
        ({"meet": {"type": "listening", "port": 1 << 16}}, "host: '65536' is not a port"),
        ({"meet": {"type": "listening", "port": True}}, "host: 'True' is not a port"),
        ({"meet": {"type": "failed", "text": "no\x1b[31m room"}}, r"host: no\?\[31m room"),
        ({"reach": {"type": "reached", "faults": ["", ""]}}, "host: invalid report of the connections to 1 nodes"),
        ({"reach": {"type": "reached", "faults": [7]}}, "host: invalid report of the connections to 1 nodes"),
        (
            {"reach": {"type": "reached", "faults": ["x\n" * 4000]}},
            r"^here does not reach host at 127\.0\.0\.2: another machine or program answers there\n"
            r"host does not reach here at 127\.0\.0\.1: (x\?){100}\nlist a host first",
        ),
        ({"reach": {}}, "host: the other side does not answer"),
    ],
)
def test_node_that_says_what_cannot_be_is_named(said: dict[str, dict[str, object]], complaint: str) -> None:
    with socket.create_server(("127.0.0.2", 0)) as stranger:
        stranger.settimeout(10)
        port = stranger.getsockname()[1]
        within_s = 10.0 if said.get("reach", True) else 0.3  # a silent node uses up the whole limit
        usual = {"meet": {"type": "listening", "port": port}, "reach": {"type": "reached", "faults": [""]}}

        def greet() -> None:
            with contextlib.suppress(OSError), stranger.accept()[0] as sock:
                sock.sendall(b"SSH-2.0-a-stranger")

        thread = threading.Thread(target=greet, daemon=True)
        thread.start()
        with pytest.raises(DetrainError, match=complaint):
            check_ways(
                [_node("here"), _Host(lambda order: {**usual, **said}.get(str(order["type"]), {}))],
                ["127.0.0.1", "127.0.0.2"],
                within_s=within_s,
                slack_s=0.5,
            )
        stranger.shutdown(socket.SHUT_RDWR)
        thread.join(10)
    assert not _threads()


def test_nobody_listens_is_said_of_both_ends() -> None:
    with socket.socket() as bound:  # bound, but not listening
        bound.bind(("127.0.0.2", 0))
        said = {
            "meet": {"type": "listening", "port": bound.getsockname()[1]},
            "reach": {"type": "reached", "faults": [""]},
        }
        with pytest.raises(LaunchError, match=r"^here does not reach host at 127\.0\.0\.2: Connection refused\nlist a"):
            check_ways(
                [_node("here"), _Host(lambda order: said.get(str(order["type"]), {}))], ["127.0.0.1", "127.0.0.2"]
            )


def test_address_beside_hosts() -> None:
    assert address_beside("127.0.0.1") == ("127.0.0.1", "lo")
    assert address_beside("198.51.100.7", Node(host="localhost", address="127.0.0.1")) == ("127.0.0.1", "lo")
    with pytest.raises(LaunchError, match=r"at 198\.51\.100\.7, but none of its interfaces has that address: set its"):
        address_beside("127.0.0.1", Node(host="localhost", address="198.51.100.7"))


def test_host_does_not_choose_where_this_machine_listens() -> None:
    host, here = _Host(lambda order: {}), _node("here")
    host.address, host.reached_from = "198.51.100.7", "127.0.0.1"  # its own claim; our end of the connection to it
    settle_here([host, here])
    assert (here.address, here.interface) == ("127.0.0.1", "lo")
