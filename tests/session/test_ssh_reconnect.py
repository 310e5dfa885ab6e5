"""A link whose connection breaks makes a new one, whatever fails meanwhile, and does not delay its callers."""

from __future__ import annotations

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from detrain_nb.errors import TransportError
from detrain_nb.session.link import node_link
from detrain_nb.session.link.node_link import NodeLink
from detrain_nb.session.state.limits import Limits
from detrain_nb.session.state.session_state import SessionState
from detrain_nb.wire import Alive, Attach, FrameReader, Locate, Received, RunCell, to_frame

from .soon import interrupted

_LIMIT_S = 10.0


class Node:
    """The other end of a link: each connection is a socket of the test, unless ``fail`` raises."""

    def __init__(self) -> None:
        self.fail: Callable[[int], None] = lambda _: None
        self.tries = 0
        self.closed: list[str] = []
        self.close: Callable[[str], object] = self.closed.append
        self.has_broken = threading.Event()
        ours, self.sock = socket.socketpair()
        self.limits = Limits()
        self.link = NodeLink(ours, _Told(self), 0, connect=self._connect, limits=self.limits)

    def _connect(self) -> socket.socket:
        self.tries += 1
        self.fail(self.tries)
        ours, self.sock = socket.socketpair()
        return ours

    def hang_up(self) -> None:
        self.link.send(Attach("mine", "holder"))
        self.sock.close()
        assert self.has_broken.wait(_LIMIT_S)

    def wait_until_connected(self) -> None:
        deadline = time.monotonic() + _LIMIT_S
        while self.link.broken_at is not None and not self.closed:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert not self.closed
        self.sock.settimeout(_LIMIT_S)


class _Told(SessionState):
    """The state of a session that notifies the test when a connection breaks and when the link ends."""

    def __init__(self, node: Node) -> None:
        super().__init__("mine")
        self._told = node

    def break_off(self, node: int) -> None:
        self._told.has_broken.set()

    def close(self, reason: str, node: int = 0) -> None:
        self._told.close(reason)


@pytest.fixture
def node() -> Iterator[Node]:
    node = Node()
    yield node
    node.link.close()
    node.sock.close()


def test_no_error_of_this_machine_loses_a_node(node: Node) -> None:
    errors = [OSError(errno.EMFILE, "Too many open files"), TransportError("away"), OSError(errno.ENOSPC, "full")]

    def fail(tries: int) -> None:
        if tries <= len(errors):
            raise errors[tries - 1]

    node.fail = fail
    node.hang_up()
    node.wait_until_connected()
    assert node.tries == len(errors) + 1
    assert isinstance(FrameReader().feed(node.sock.recv(1 << 16))[0].message(), Attach)


def test_start_that_is_interrupted_before_its_connection_is_served_ends_quietly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An exception in the thread would fail the test."""
    serve = NodeLink._run

    def serve_what_is_closed(link: NodeLink) -> None:
        link._link.sock.close()
        serve(link)

    monkeypatch.setattr(NodeLink, "_run", serve_what_is_closed)
    node = Node()
    node.link.wait_for_end(limit_s=_LIMIT_S)
    node.sock.close()
    assert (node.closed, node.tries) == (["the start was interrupted"], 0)


def test_end_is_waited_for_also_after_a_wait_that_was_interrupted(node: Node) -> None:
    """Python treats a thread as ended once a join of it was interrupted."""
    is_released = threading.Event()
    node.close = lambda _: is_released.wait(_LIMIT_S)
    node.link.begin_to_close(is_seen=True)
    with interrupted(0.05) as begin:
        begin()
        node.link.wait_for_end(limit_s=_LIMIT_S)
    assert not node.link.wait_for_end(limit_s=0.05)
    is_released.set()
    assert node.link.wait_for_end(limit_s=_LIMIT_S)


def test_what_is_sent_meanwhile_holds_up_nobody(node: Node) -> None:
    is_connected = threading.Event()

    def fail(_: int) -> None:
        is_connected.wait(_LIMIT_S)

    node.fail = fail
    node.hang_up()
    sending = threading.Thread(target=lambda: [node.link.send(Locate([0], number, False)) for number in range(2000)])
    sending.start()
    sending.join(_LIMIT_S / 2)
    is_held_up = sending.is_alive()
    is_connected.set()
    sending.join(_LIMIT_S)
    assert not is_held_up
    node.wait_until_connected()
    reader, got = FrameReader(), 0
    while got < 2000:
        got += sum(isinstance(frame.message(), Locate) for frame in reader.feed(node.sock.recv(1 << 16)))


def test_node_that_answers_no_sign_of_life_is_connected_to_again(node: Node) -> None:
    node.limits.alive_gap_s = 0.05
    node.fail = lambda tries: setattr(node.limits, "alive_gap_s", 0.3)  # from then on there is time for the answers
    node.link.send(Attach("mine", "holder"))
    silent = node.sock
    assert node.has_broken.wait(_LIMIT_S), "it was waited for, though it says nothing"
    node.wait_until_connected()
    silent.close()
    node.has_broken.clear()
    reader, answered = FrameReader(), 0
    while answered < 2 + node_link._MOST_UNANSWERED:
        signs = [frame for frame in reader.feed(node.sock.recv(1 << 16)) if isinstance(frame.message(), Alive)]
        answered += len(signs)
        node.sock.sendall(to_frame(Received(0)).to_bytes() * len(signs))
    assert not node.has_broken.is_set(), "it answers"


def test_what_is_under_way_on_a_slow_connection_gives_the_node_time(node: Node) -> None:
    node.limits.alive_gap_s = 0.02
    node.link.send(Attach("mine", "holder"))
    node.link.send(RunCell([0], [1], 1, "#" * 100_000))
    began = time.monotonic()
    reader, got = FrameReader(), 0
    node.sock.settimeout(_LIMIT_S)
    while got < 10 * node_link._MOST_UNANSWERED:
        got += sum(isinstance(frame.message(), Alive) for frame in reader.feed(node.sock.recv(1 << 16)))
    assert not node.has_broken.is_set(), f"given up after {time.monotonic() - began} s"
