"""The end of a generation shuts the connections that its groups opened, and no others."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
from collections.abc import Iterator

import pytest

from detrain_nb.node.groups.connections import Connections

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def _connect(listener: socket.socket) -> Pair:
    ours = socket.create_connection(listener.getsockname())
    theirs, _ = listener.accept()
    theirs.settimeout(5)
    return ours, theirs


def _is_shut(pair: Pair) -> bool:
    ours, theirs = pair
    try:
        ours.send(b"x")
    except BrokenPipeError:
        return theirs.recv(1) == b""
    return theirs.recv(1) != b"x"


def _hear_peer(server: socket.socket, number: int) -> None:
    peer, _ = server.accept()
    with peer:
        assert peer.recv(64) == struct.pack("@n", number)
        assert peer.recv(64) == b""


def test_what_was_recorded_is_shut_and_nothing_else(listener: socket.socket) -> None:
    before = _connect(listener)
    connections = Connections()
    with connections.recording():
        recorded = _connect(listener)
        with connections.recording():
            nested = _connect(listener)
        with socket.create_server(("127.0.0.1", 0)) as server:
            assert connections.shut(most_peers=2) == 4, "both ends of two connections, while it is still recorded"
            # A new listening socket may belong to a group: ``shut`` connects to it as each peer and hangs up.
            for number in range(2):
                _hear_peer(server, number)
            with pytest.raises(TimeoutError):
                socket.create_connection(server.getsockname(), timeout=0.2)
    after = _connect(listener)
    assert _is_shut(recorded)
    assert _is_shut(nested)
    assert not _is_shut(before)
    assert not _is_shut(after)
    for pair in (before, recorded, nested, after):
        for sock in pair:
            sock.close()


def test_socket_that_got_the_number_of_a_closed_one_is_left_alone(listener: socket.socket) -> None:
    connections = Connections()
    with connections.recording():
        recorded = _connect(listener)
    number = recorded[0].fileno()
    users = _connect(listener)
    for sock in recorded:
        sock.close()
    os.dup2(users[0].fileno(), number)
    connections.shut(most_peers=2)
    assert not _is_shut(users)
    os.close(number)
    for sock in users:
        sock.close()


def test_shutting_twice_shuts_once(listener: socket.socket) -> None:
    connections = Connections()
    with connections.recording():
        recorded = _connect(listener)
    assert connections.shut(most_peers=2) == 2
    assert connections.shut(most_peers=2) == 0
    for sock in recorded:
        sock.close()


def test_connections_are_shut_where_no_descriptor_is_left(listener: socket.socket) -> None:
    connections = Connections()
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with connections.recording():
        recorded = _connect(listener)
    with connections.recording():
        new = _connect(listener)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(new[0].fileno(), new[1].fileno()) + 1, before[1]))
        files: list[int] = []
        try:
            with contextlib.suppress(OSError):
                while True:
                    files.append(os.dup(0))
            assert connections.shut(most_peers=2) == 4
        finally:
            for fd in files:
                os.close(fd)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
    for pair in (recorded, new):
        assert _is_shut(pair)
        for sock in pair:
            sock.close()


def test_nobody_is_let_in_any_more_and_who_is_there_stays(listener: socket.socket) -> None:
    connections = Connections()
    with connections.recording(), socket.create_server(("127.0.0.1", 0)) as server:
        ours, theirs = _connect(server)
        connections.let_nobody_in()
        with pytest.raises(TimeoutError):
            socket.create_connection(server.getsockname(), timeout=0.2)
        ours.sendall(b"x")
        assert theirs.recv(1) == b"x"
    others = _connect(listener)
    for sock in (ours, theirs, *others):
        sock.close()
