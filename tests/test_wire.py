"""Frames and messages: one side reads what the other writes, and everything else is refused."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detrain_nb.errors import WireError
from detrain_nb.wire import (
    MAX_BODY_BYTES,
    MAX_BUNDLE_VALUES,
    MAX_DESCRIPTION_BYTES,
    MAX_HEADER_BYTES,
    MAX_ORDER_HEADER_BYTES,
    Attach,
    CellDone,
    CellFailed,
    Collectives,
    Display,
    Frame,
    FrameReader,
    Inspection,
    Link,
    LinkClosed,
    Message,
    Notice,
    Output,
    Piece,
    Position,
    RanCell,
    RequestDone,
    RequestFailed,
    RunCell,
    Unfinished,
    Value,
    count_values,
    json_body,
    parse_bundle,
    read_text,
    to_frame,
)
from detrain_nb.wire.messages import KINDS, NUMBERS

from .raw_frames import KIND_AT, prefix

_ANY_TEXT = st.text(st.characters() | st.characters(categories=["Cs"]))


@given(parts=st.lists(_ANY_TEXT, max_size=8), size=st.integers(1, 9))
def test_text_is_read_in_pieces_as_in_one(parts: list[str], size: int) -> None:
    data = "".join(parts).encode("utf-8", "surrogatepass")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("detrain_nb.wire.json_text._TEXT_BYTES", size)
        for given_as in (data, memoryview(data)):
            assert read_text(given_as) == data.decode("utf-8", "surrogatepass")
        for wrong in (data + b"\xed", b"\xff" + data, data + b"\xed\xa0"):
            with pytest.raises(WireError, match="not text"):
                read_text(wrong)


def test_others_have_their_turn_while_halves_of_surrogates_are_read() -> None:
    """Python calls an error handler for each of them while holding the GIL: 90 s for a gigabyte."""
    turns, is_read = 0, threading.Event()

    def count() -> None:
        nonlocal turns
        while not is_read.wait(0.001):
            turns += 1

    thread = threading.Thread(target=count)
    thread.start()
    assert len(read_text(b"\xed\xa0\x80" * 2_000_000)) == 2_000_000
    is_read.set()
    thread.join()
    assert turns > 5


MESSAGES = [
    RunCell([0, 1], [1, 2], 7, "print('é')"),
    Output(1, 7, "stdout", b"\x00\xffbytes"),
    CellFailed(0, 7, 0.25, True, True, "ValueError", "bad", ["line 1"], False, overwritten=["rank"]),
    Value(3, 1, "x", json_body({"tensor": ["float32", [4]]})),
    RanCell([0], 7, "print('é\ud800')", 1, False, [], False),
    Inspection(0, 1, "help\n"),
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


def _frame(kind: type[Message], header: object, body: bytes = b"") -> Frame:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return Frame(0, kind, text, body)


RUN_CELL = {"ranks": [0], "incarnations": [1], "cell": 1, "code": "x"}


@pytest.mark.parametrize(
    ("frame", "complaint"),
    [
        (_frame(RunCell, b"{"), "not JSON"),
        (_frame(RunCell, b"[" * 100_000), "not JSON"),
        (_frame(RunCell, b"\xff"), "not JSON"),
        (_frame(RequestFailed, '{"rank":0,"request":0,"error":"é"}'.encode()), "plain ASCII"),
        (_frame(RequestFailed, b'{"rank":0,"request":0,"error":"\x7f"}'), "plain ASCII"),
        (_frame(Inspection, {"rank": 0, "request": 0}, b"\xff"), "not text"),
        (_frame(Inspection, {"rank": 0, "request": 0, "text": "x"}), "no field 'text'"),
        (_frame(RunCell, [1]), "not a JSON object"),
        (_frame(RunCell, {**RUN_CELL, "type": "RunCell"}), "RunCell has no field 'type'"),
        (_frame(RunCell, {**RUN_CELL, "__class__": "Output"}), "RunCell has no field '__class__'"),
        (_frame(RunCell, {**RUN_CELL, "cell": "1"}), r"RunCell.cell has an invalid value \(type str\)"),
        (_frame(RunCell, {**RUN_CELL, "cell": True}), r"RunCell.cell has an invalid value \(type bool\)"),
        (_frame(RunCell, {**RUN_CELL, "cell": 1 << 60}), r"RunCell.cell has an invalid value \(type int\)"),
        (_frame(RunCell, {**RUN_CELL, "ranks": [0, "1"]}), r"RunCell.ranks has an invalid value \(type list\)"),
        (_frame(RunCell, {**RUN_CELL, "code": None}), r"RunCell.code has an invalid value \(type NoneType\)"),
        (_frame(RunCell, {**RUN_CELL, "more": 1}), "no field 'more'"),
        (_frame(RunCell, {"ranks": [0], "incarnations": [1], "cell": 1}), "lacks the field code"),
        (
            _frame(CellDone, {"rank": 0, "cell": 1, "seconds": 1 << 1100, "has_group": True}),
            r"seconds has an invalid value \(type int\)",
        ),
        (_frame(RunCell, RUN_CELL, b"body"), "RunCell has an unexpected body"),
        (_frame(RequestDone, b'{"rank":0,"request":NaN}'), "NaN"),
        (_frame(RequestDone, b'{"rank":0,"request":1e400}'), "1e400 is too large"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_a_message_is_refused(frame: Frame, complaint: str) -> None:
    with pytest.raises(WireError, match=complaint):
        _read(frame.to_bytes())


def test_every_message_has_a_number_of_its_own_that_is_not_given_again() -> None:
    """New messages are numbered after the last one; the number of a removed message stays unused."""
    assert sorted(NUMBERS, key=repr) == sorted(Message.__subclasses__(), key=repr)
    assert len(KINDS) == len(NUMBERS)
    assert all(0 < number < 256 for number in KINDS)
    assert [KINDS[number].__name__ for number in (1, 9, 26, 37, 40, 48)] == [
        "Attach", "RunCell", "Refused", "Output", "CellDone", "RankEnded",
    ]  # fmt: skip


@pytest.mark.parametrize("number", sorted(set(range(256)) - KINDS.keys()))
def test_frame_of_unknown_kind_is_refused_before_it_arrives(number: int) -> None:
    complaint = f"unknown kind {number}" if number else "install one version of detrain_nb on both"
    for sizes in ((2, 0), (0, 0), (MAX_HEADER_BYTES, MAX_BODY_BYTES)):
        with pytest.raises(WireError, match=complaint):
            FrameReader().feed(prefix(number, *sizes))


def test_agent_of_before_the_kinds_reads_who_attaches_and_by_which_protocol() -> None:
    """Such an agent refuses with a message instead of closing the connection; its frames had the type in the header."""
    data = to_frame(Attach("mine", "me")).to_bytes()
    header_bytes, body_bytes, _ = struct.unpack_from("!IIQ", data)
    assert (16 + header_bytes, body_bytes) == (len(data), 0)
    said = {"session": "mine", "holder": "me", "steal": False, "resumes": False, "protocol": 6, "type": "Attach"}
    assert json.loads(data[16:]) == said


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_kind_that_does_not_have_the_fields_is_refused(message: Message) -> None:
    data = bytearray(to_frame(message).to_bytes())
    read = []
    for other, kind in KINDS.items():
        data[KIND_AT] = other
        if {f.name: f.type for f in fields(kind)} == {f.name: f.type for f in fields(message)}:  # type: ignore[arg-type]
            assert _read(data) == kind(**vars(message))
            read.append(kind)
        else:
            with pytest.raises(WireError, match=f"^{kind.__name__} (has|lacks)"):
                _read(data)
    assert set(read) == ({Output, Unfinished} if isinstance(message, Output) else {type(message)})


@given(message=st.sampled_from(MESSAGES), number=st.integers(0, (1 << 56) - 1), size=st.integers(0, 15))
def test_prefix_that_is_cut_off_is_no_frame_yet(message: Message, number: int, size: int) -> None:
    data = to_frame(message).to_bytes(number=number)
    reader = FrameReader()
    assert reader.feed(data[:size]) == []
    assert reader.is_empty == (size == 0)
    [frame] = reader.feed(data[size:])
    assert (frame.number, frame.kind, frame.message()) == (number, type(message), message)
    assert frame.size_bytes == len(data)


def test_number_that_has_no_room_reaches_no_other_field() -> None:
    with pytest.raises(OverflowError):
        to_frame(MESSAGES[0]).to_bytes(number=1 << 56)


@pytest.mark.parametrize("kind", [Output, RunCell])
@pytest.mark.parametrize("sizes", [(MAX_HEADER_BYTES + 1, 0), (2, MAX_BODY_BYTES + 1), (0xFFFFFFFF, 0xFFFFFFFF)])
def test_frame_of_absurd_size_is_refused_before_it_arrives(kind: type[Message], sizes: tuple[int, int]) -> None:
    with pytest.raises(WireError, match="more than any message"):
        FrameReader().feed(prefix(kind, *sizes))


@pytest.mark.parametrize(
    ("kind", "sizes", "complaint"),
    [
        (Notice, (2, 1), "Notice has an unexpected body"),
        (RunCell, (2, MAX_BODY_BYTES), "RunCell has an unexpected body"),
        (Inspection, (2, (1 << 20) + 1), r"Inspection has 1,048,577 bytes, more than 1,048,576"),
        (CellDone, (2, (32 << 20) + 1), "more than 33,554,432"),
        (Display, (2, (32 << 20) + 1), "more than 33,554,432"),
        (RanCell, (2, (16 << 20) + 1), "more than 16,777,216"),
        (Position, ((1 << 19) + 1, 0), "Position has 524,289 bytes of header, more than 524,288"),
    ],
)
def test_frame_larger_than_any_of_its_kind_is_refused_before_it_arrives(
    kind: type[Message], sizes: tuple[int, int], complaint: str
) -> None:
    with pytest.raises(WireError, match=complaint):
        FrameReader().feed(prefix(kind, *sizes))


def test_what_is_announced_takes_no_memory_before_it_comes() -> None:
    announced = prefix(Output, MAX_HEADER_BYTES, MAX_BODY_BYTES) + b"{"
    assert _peak_bytes(lambda: FrameReader().feed(announced)) < 10_000


@given(
    st.integers(0, 255) | st.sampled_from(sorted(KINDS)),
    st.integers(0, 40) | st.integers(0, 0xFFFFFFFF),
    st.integers(0, 40) | st.integers(0, 0xFFFFFFFF),
    st.binary(max_size=80) | st.sampled_from([b"{}", b'{"rank":0,"request":1}', b'{"text":"x"}']),
)
def test_what_is_announced_is_a_message_or_refused_or_waited_for(
    kind: int, header_bytes: int, body_bytes: int, rest: bytes
) -> None:
    with contextlib.suppress(WireError):
        for frame in FrameReader().feed(prefix(kind, header_bytes, body_bytes) + rest)[:1]:
            assert frame.kind is KINDS[kind]
            assert (len(frame.header), len(frame.body)) == (header_bytes, body_bytes)
            assert isinstance(frame.message(), frame.kind)


WORST = ["{},", "[],", '{"":0},', '{"a":[0.5]},', '"ab",', "0.5,", "1234567,"]


@pytest.mark.parametrize("part", WORST)
def test_longest_header_of_a_node_takes_no_more_memory_than_a_large_message(part: str) -> None:
    """The Python objects of JSON are many times as large: about 400 MB for 16 MB."""
    begin, end = b'{"rank":0,"request":0,"known":[', b"0]}"
    count = (MAX_HEADER_BYTES - len(begin) - len(end)) // len(part)
    data = Frame(0, Collectives, begin + part.encode() * count + end, b"").to_bytes()
    assert MAX_HEADER_BYTES - 100 < len(data) < MAX_HEADER_BYTES + 100
    peak_bytes = _peak_bytes(lambda: _read(data))
    assert 2 * MAX_HEADER_BYTES < peak_bytes < MAX_BODY_BYTES


def test_description_of_a_value_that_nobody_asked_for_is_not_parsed() -> None:
    data = to_frame(Value(0, 1, "x", b"[" + b"{}," * (MAX_DESCRIPTION_BYTES // 3 - 2) + b"0]")).to_bytes()
    peak_bytes = _peak_bytes(lambda: _read(data))
    assert peak_bytes < 4 * MAX_DESCRIPTION_BYTES
    message = _read(data)
    assert isinstance(message, Value) and len(message.body) < MAX_DESCRIPTION_BYTES
    with pytest.raises(WireError, match="described in more than 1,048,576 values"):
        message.description  # noqa: B018


def test_description_that_is_longer_than_any_is_refused_unread() -> None:
    message = Value(0, 1, "x", b"[" * (MAX_DESCRIPTION_BYTES + 1))
    with pytest.raises(WireError, match="described in 8,388,609 bytes, more than 8,388,608"):
        message.description  # noqa: B018


def _read(data: bytes | bytearray) -> object:
    [frame] = FrameReader().feed(data)
    return frame.message()


def _peak_bytes(act: Callable[[], object]) -> int:
    """Return the peak memory that Python has held."""
    tracemalloc.start()
    try:
        act()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("part", ["[],", '{"":{}},', '"",', "0,", '"\\\\",', '"\\"",'])
def test_bundle_of_more_values_than_any_has_is_refused_before_it_takes_memory(part: str) -> None:
    data = b'{"a":[' + part.encode() * (MAX_BODY_BYTES // 4 // len(part)) + b"0]}"

    def parse() -> None:
        with pytest.raises(WireError, match="more than 65,536 values"):
            parse_bundle(data)

    assert _peak_bytes(parse) < 12 * len(data)


def test_bundle_of_as_many_values_as_one_may_have_takes_little_memory() -> None:
    """The bundle stays in the result, for each cell and each rank."""
    nested = b'{"":' * 19 + b"{}" + b"}" * 19
    data = b'{"application/json":[' + b",".join([nested] * (MAX_BUNDLE_VALUES // 40 - 1)) + b"]}"
    assert 0.9 * MAX_BUNDLE_VALUES < count_values(data) < MAX_BUNDLE_VALUES
    assert _peak_bytes(lambda: parse_bundle(data)) < 20 << 20


def test_text_of_a_bundle_may_be_long_whatever_is_in_it() -> None:
    bundle = {"text/html": '<a href="x">[1, 2],{}\\</a>' * 100_000, "text/plain": "x"}
    assert count_values(json_body(bundle)) < 10
    assert parse_bundle(json_body(bundle)) == bundle


@pytest.mark.parametrize("data", [b"[]", b'"x"', b"1", b"null"])
def test_bundle_that_is_no_table_is_refused(data: bytes) -> None:
    with pytest.raises(WireError, match="mime type"):
        parse_bundle(data)


def test_notebook_may_say_more_in_a_header() -> None:
    data = to_frame(RunCell([0], [1], 1, "x" * (MAX_HEADER_BYTES + 1))).to_bytes()
    [frame] = FrameReader(max_header_bytes=MAX_ORDER_HEADER_BYTES).feed(data)
    assert len(frame.message().code) == MAX_HEADER_BYTES + 1  # type: ignore[attr-defined]
    with pytest.raises(WireError, match="more than any message"):
        FrameReader().feed(data)


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
        sender.send(RunCell([0], [1], 1, "x"))
