"""Answers of untrusted ranks: the session takes only requested values, and no more bytes than were announced."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable

import psutil
import pytest

from detrain_nb.errors import CellTimeout, NodeLost, SessionError, WireError
from detrain_nb.session.state.requests import Requests
from detrain_nb.session.state.session_state import SessionState
from detrain_nb.values import pack
from detrain_nb.wire import Piece, RequestDone, RequestFailed, Value, json_body


def _description(size: int) -> bytes:
    return json_body(pack(bytes(size), name="x")[0])


def test_value_comes_together_from_its_pieces() -> None:
    requests = Requests()
    request = requests.new([0], ["x"])
    requests.take(Value(0, request.number, "x", _description(2000)))
    requests.take(Piece([0], request.number, "x", 0, b"a" * 1500))
    requests.take(Piece([0], request.number, "x", 0, b"b" * 500))
    requests.take(RequestDone(0, request.number))
    request.wait(0, what="pull")
    assert request.value(0, "x") == b"a" * 1500 + b"b" * 500


@pytest.mark.parametrize(
    "message",
    [
        Value(0, 1, "other", _description(2000)),
        Value(0, 1, "x", _description(2000)),
        Value(0, 1, "x", json_body({"bytes": 1 << 60})),
        Piece([0], 1, "x", 0, b"a" * 2001),
        Piece([0], 1, "x", 1, b"a"),
        Piece([0], 1, "x", -1, b"a"),
        Piece([0], 1, "y", 0, b"a"),
    ],
    ids=["not asked", "twice", "absurd", "too long", "no such buffer", "negative buffer", "no such value"],
)
def test_what_was_not_asked_for_or_announced_is_refused(message: Value | Piece) -> None:
    requests = Requests()
    request = requests.new([0], ["x"])
    requests.take(Value(0, request.number, "x", _description(2000)))
    with pytest.raises(WireError):
        requests.take(dataclasses.replace(message, request=request.number))


def test_value_that_stays_incomplete_is_an_error() -> None:
    requests = Requests()
    request = requests.new([0], ["x"])
    requests.take(Value(0, request.number, "x", _description(2000)))
    requests.take(RequestDone(0, request.number))
    with pytest.raises(WireError, match="rank 0 sent only a part of x"):
        request.value(0, "x")


def test_answer_of_a_rank_that_was_not_asked_changes_nothing() -> None:
    requests = Requests()
    request = requests.new([0])
    requests.take(RequestDone(1, request.number))
    requests.take(RequestDone(0, request.number + 7))
    with pytest.raises(CellTimeout, match=r"pull: rank 0 did not answer within 0 s"):
        request.wait(0, what="pull")


def test_refusals_are_grouped_by_what_they_say() -> None:
    requests = Requests()
    request = requests.new([0, 1, 2])
    for rank, error in enumerate(["no x", "no y", "no x"]):
        requests.take(RequestFailed(rank, request.number, error))
    with pytest.raises(SessionError, match=r"^ranks 0, 2: no x\nrank 1: no y$"):
        request.wait(0, what="pull")


def test_whoever_waits_is_told_when_the_node_is_gone() -> None:
    requests = Requests()
    request = requests.new([0])
    requests.fail_all(NodeLost("gone"))
    with pytest.raises(NodeLost):
        request.wait(5, what="pull")


def test_memory_is_taken_for_what_comes_and_not_for_what_is_announced() -> None:
    requests = Requests()
    request = requests.new([0], ["x"])
    before = psutil.Process().memory_info().rss
    requests.take(Value(0, request.number, "x", json_body({"array": ["|u1", [1 << 30]]})))
    requests.take(Piece([0], request.number, "x", 0, b"a"))
    assert psutil.Process().memory_info().rss - before < 64 << 20


def test_description_that_there_is_no_room_for_is_not_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parsing a description takes many times its size."""
    monkeypatch.setattr("detrain_nb.node.system.memory_room.free_memory_bytes", lambda **_: 300 << 20)
    requests = Requests()
    request = requests.new([0], ["x"])
    requests.take(Value(0, request.number, "x", b"[" + b"[]," * 2_600_000 + b"[]]"))
    with pytest.raises(SessionError, match=r"^x of rank 0 takes .* GB of memory"):
        request.wait(0, what="pull")


def test_value_that_there_is_no_room_for_is_refused_in_words() -> None:
    names = [f"x{number}" for number in range(1000)]
    requests = Requests()
    request = requests.new([0, 1], names)
    for name in names:  # terabytes in total
        requests.take(Value(0, request.number, name, json_body({"int64": 1 << 29})))
    assert request.has_failed
    requests.take(Piece([0], request.number, names[-1], 0, b"a"))  # the request has failed: no caller waits for it
    with pytest.raises(
        SessionError, match=r"^x\d+ of rank 0 takes .* GB of memory, .* GB are free here: pull fewer values"
    ):
        request.wait(0, what="pull")


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state.end_renumbering(),
        lambda state: state.groups.want(True, timeout_s=1.0),
        lambda state: state.groups.check(True),
        lambda state: state.groups.go_on_with({0: 1}),
        lambda state: state.groups.note_end(),
        lambda state: state.groups.note_stale(["x"]),
        lambda state: state.groups.give_up({0: 1}),
        lambda state: state.groups.note_made(),
    ],
)
def test_state_changes_only_while_nothing_is_taken(change: Callable[[SessionState], None]) -> None:
    state = SessionState("mine")
    changes = threading.Thread(target=change, args=(state,))
    with state.held():
        changes.start()
        changes.join(0.1)
        assert changes.is_alive()
    changes.join(10)
    assert not changes.is_alive()
