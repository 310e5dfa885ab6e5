"""Frames and messages: what one side writes the other reads, and nothing else gets through."""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detrain_nb.errors import WireError
from detrain_nb.wire import (
    MAX_BODY_BYTES,
    MAX_HEADER_BYTES,
    CellFailed,
    Frame,
    FrameReader,
    Link,
    LinkClosed,
    Output,
    Piece,
    RunCell,
    Value,
    to_frame,
)

MESSAGES = [
    RunCell([0, 1], 7, "print('é')"),
    Output(1, 7, "stdout", b"\x00\xffbytes"),
    CellFailed(0, 7, 0.25, True, "ValueError", "bad", ["line 1"], False),
    Value(3, 1, "x", {"tensor": ["float32", [4]]}),
    Piece([2], 9, "x", 0, b"abc"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_message_arrives_as_it_was_sent(message: object) -> None:
    [frame] = FrameReader().feed(to_frame(message).to_bytes(number=5))
    assert frame.message() == message
    assert frame.number == 5


@given(st.lists(st.sampled_from(MESSAGES), max_size=5), st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_frames_are_whole_however_the_stream_is_cut(messages: list[object], cuts: list[int]) -> None:
    stream = b"".join(to_frame(message).to_bytes() for message in messages)
    reader, frames = FrameReader(), []
    while stream:
        for cut in cuts:
            frames += reader.feed(stream[:cut])
            stream = stream[cut:]
    assert [frame.message() for frame in frames] == messages
    assert reader.is_empty


def _frame(header: object, body: bytes = b"") -> Frame:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return Frame(0, text, body)


RUN_CELL = {"type": "RunCell", "ranks": [0], "cell": 1, "code": "x"}


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        (_frame(b"{"), "not JSON"),
        (_frame(b"[" * 100_000), "not JSON"),
        (_frame(b"\xff"), "not JSON"),
        (_frame([1]), "not a JSON object"),
        (_frame({"type": "Message"}), "no known type"),
        (_frame({"type": "__class__"}), "no known type"),
        (_frame({**RUN_CELL, "cell": "1"}), "RunCell.cell is a str"),
        (_frame({**RUN_CELL, "cell": True}), "RunCell.cell is a bool"),
        (_frame({**RUN_CELL, "cell": 1 << 60}), "RunCell.cell is a int"),
        (_frame({**RUN_CELL, "ranks": [0, "1"]}), "RunCell.ranks is a list"),
        (_frame({**RUN_CELL, "code": None}), "RunCell.code is a NoneType"),
        (_frame({**RUN_CELL, "more": 1}), "no field 'more'"),
        (_frame({"type": "RunCell", "ranks": [0], "cell": 1}), "lacks code"),
        (_frame(RUN_CELL, b"body"), "RunCell has a body"),
        (_frame(b'{"type":"RequestDone","rank":0,"request":NaN}'), "NaN"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_a_message_is_refused(frame: Frame, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        frame.message()


@pytest.mark.parametrize("sizes", [(MAX_HEADER_BYTES + 1, 0), (2, MAX_BODY_BYTES + 1)])
def test_frame_of_absurd_size_is_refused_before_it_arrives(sizes: tuple[int, int]) -> None:
    with pytest.raises(WireError, match="more than any message has"):
        FrameReader().feed(struct.pack("!IIQ", *sizes, 0))


@given(st.binary(max_size=200))
def test_noise_never_raises_anything_else(noise: bytes) -> None:
    reader = FrameReader()
    try:
        for frame in reader.feed(noise):
            frame.message()
    except WireError:
        pass


@pytest.fixture
def ends() -> Iterator[tuple[Link, Link]]:
    a, b = socket.socketpair()
    links = Link(a), Link(b)
    yield links
    for link in links:
        link.close()


def test_link_keeps_what_the_socket_does_not_take(ends: tuple[Link, Link]) -> None:
    sender, receiver = ends
    pieces = [Piece([0], 1, "x", 0, bytes([i]) * (1 << 20)) for i in range(8)]
    for piece in pieces:
        sender.send(piece)
    assert sender.waiting_bytes > 0
    received = []
    while len(received) < len(pieces):
        sender.flush()
        received += [frame.message() for frame in receiver.receive()]
    assert received == pieces
    assert sender.waiting_bytes == 0


def test_link_says_that_the_other_end_is_gone(ends: tuple[Link, Link]) -> None:
    sender, receiver = ends
    receiver.close()
    with pytest.raises(LinkClosed):
        sender.receive()
    with pytest.raises(LinkClosed):
        sender.send(RunCell([0], 1, "x"))
