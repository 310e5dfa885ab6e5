"""A node that sends what no agent sends: it is disconnected or ignored, and the other node's ranks go on.

The node is a thread that speaks the protocol over a real link to a real session (hostile.py).
"""

from __future__ import annotations

import ast
import contextlib
import gc
import itertools
import json
import os
import pickle
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import detrain_nb
from detrain_nb import Session
from detrain_nb.deploy import known
from detrain_nb.deploy.bringing_up import End
from detrain_nb.errors import (
    CellTimeout,
    DetrainError,
    HostKeyError,
    LaunchError,
    RankError,
    RankLost,
    SessionError,
    SpecError,
    TransportError,
    WireError,
)
from detrain_nb.plan import NodePlan, Plan
from detrain_nb.session.diagnosis.diagnosis import HangWatch, describe_mismatch, judge
from detrain_nb.session.diagnosis.evidence import gather
from detrain_nb.session.diagnosis.where_report import Whereabouts
from detrain_nb.session.link.rank_link import RankLink
from detrain_nb.session.output.safe_output import safe_bundle, safe_completions
from detrain_nb.session.running.start import _open_store
from detrain_nb.session.running.status import RankStatus
from detrain_nb.session.session import end_session
from detrain_nb.session.state.cell import Cell
from detrain_nb.session.state.cell_observer import CellObserver
from detrain_nb.session.state.limits import Limits
from detrain_nb.session.state.rank_deaths import advice, describe_ends, describe_silence
from detrain_nb.spec.node import Node
from detrain_nb.wire import (
    Acknowledge,
    Alive,
    Attach,
    Attached,
    Begin,
    Broadcast,
    CellDone,
    CellFailed,
    ClearOutput,
    Collectives,
    Complete,
    Completions,
    Display,
    EndGeneration,
    EndSession,
    Frame,
    FrameReader,
    GenerationEnded,
    GenerationReady,
    Inspect,
    Inspection,
    Interrupt,
    Kept,
    Launch,
    LauncherEnded,
    Locate,
    Measure,
    Measured,
    Message,
    NewGeneration,
    Notice,
    OpenStore,
    Output,
    Piece,
    Position,
    Pull,
    Push,
    RanCell,
    RankEnded,
    RankUp,
    Received,
    Refused,
    Renumber,
    Replace,
    RequestDone,
    RequestFailed,
    RunCell,
    StartedCold,
    StoreOpened,
    Unfinished,
    Value,
    WorkerUp,
    json_body,
    to_frame,
)

from ..raw_frames import KIND_AT, prefix
from .hostile import IDLE, INFO, FakeNode
from .inside import core_of, link_of, state_of
from .soon import assert_soon

pytestmark = pytest.mark.timeout(60)
MOST_GROWTH_BYTES = 64 << 20


class Eyes(CellObserver):
    """An observer that, as a front end must, encodes all that a cell shows."""

    def __init__(self) -> None:
        self.bundles: list[dict[str, Any]] = []
        self.texts: list[str] = []

    def output(self, rank: int, stream: str, text: str) -> None:
        self.notice(text)

    def display(self, rank: int, bundle: dict[str, Any], display_id: str, is_update: bool) -> None:
        json.dumps(bundle, ensure_ascii=False).encode()
        self.bundles.append(bundle)

    def waiting(self, text: str) -> None:
        self.notice(text)

    def notice(self, text: str) -> None:
        text.encode()
        self.texts.append(text)


class Pair:
    """A session of two ranks: one on an honest node, one on a node that sends whatever a test wants."""

    def __init__(self, limits: Limits | None = None) -> None:
        self.good, self.bad = FakeNode("good", 0), FakeNode("bad", 1)
        self.session = Session.attach("mine", nodes=[self.good, self.bad], limits=limits)
        self._rss = psutil.Process().memory_info().rss

    @property
    def state(self) -> Any:
        return state_of(self.session)

    @property
    def grown_bytes(self) -> int:
        gc.collect()
        return int(psutil.Process().memory_info().rss) - self._rss

    def assert_others_go_on(self) -> None:
        """Check that the honest node's rank runs cells, and that the notebook keeps little of what was sent."""
        assert self.session.is_alive
        assert self.session.run_cell("1", ranks=0).ranks == (0,)
        assert self.state.node_of == {0: 0, 1: 1}
        assert self.state.up.keys() <= {0, 1}
        assert self.session.log.next_cell() < 100
        assert self.grown_bytes < MOST_GROWTH_BYTES

    def assert_hung_up(self, why: str = "") -> None:
        """Check that the bad node was disconnected and is lost, and that nothing else is lost."""
        assert self.bad.wait_until_hung_up_on()
        deadline = time.monotonic() + 60
        while 1 not in self.state.lost_nodes and not self.state.failure and time.monotonic() < deadline:
            time.sleep(0.005)
        assert not self.state.failure
        assert "handling a message failed" not in self.state.lost_nodes[1]
        assert why in self.state.lost_nodes[1]
        self.assert_others_go_on()
        with pytest.raises((RankLost, SessionError), match="bad is lost"):
            self.session.run_cell("1", ranks=1)

    def assert_not_heard(self) -> None:
        """Check that the message was ignored: the bad node runs cells as well."""
        assert self.session.run_cell("1", ranks=1).ranks == (1,)
        assert not self.state.lost_nodes
        self.assert_others_go_on()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.session.detach()


def _header(**said: object) -> bytes:
    return json.dumps(said).encode()


_NOTICE = b'{"text":"x"}'
_OUTPUT = {"rank": 1, "cell": 0, "stream": "stdout"}
_ENDLESS = b'{"rank":1,"cell":0,"seconds":1e999,"has_group":true,"is_collective":false}'
_NESTED = b"[" * 600 + b"]" * 600


@pytest.mark.parametrize(
    "data",
    [
        prefix(Output, 0xFFFFFFFF, 0) + bytes(1000),
        prefix(Output, 2, 0xFFFFFFFF) + bytes(1000),
        prefix(Inspection, 2, (1 << 20) + 1) + bytes(1000),
        prefix(Notice, 2, 1) + bytes(1),
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        Frame(0, Notice, b"[" * 100_000, b"").to_bytes(),
        Frame(0, Notice, b'{"a":' * 100_000, b"").to_bytes(),
        Frame(0, Refused, b'{"reason":"x","type":' + _NESTED + b"}", b"").to_bytes(),
        Frame(0, Notice, b'{"text":"x","text":"y"}', b"").to_bytes(),
        to_frame(replace(IDLE, rank=1, collectives={"seconds": float("nan")})).to_bytes(),
        Frame(0, CellDone, _ENDLESS, b"").to_bytes(),
        Frame(0, RequestDone, b'{"rank":1,"request":' + b"9" * 5000 + b"}", b"").to_bytes(),
        Frame(0, Output, _header(**{**_OUTPUT, "rank": "1"}), b"x").to_bytes(),
        Frame(0, Output, _header(**{**_OUTPUT, "rank": [1]}), b"x").to_bytes(),
        Frame(0, Output, _header(**{**_OUTPUT, "more": 1}), b"x").to_bytes(),
        prefix(255, len(_NOTICE), 0) + _NOTICE,
        prefix(0, len(_NOTICE), 0) + _NOTICE,
        Frame(0, Position, _header(**_OUTPUT), b"").to_bytes(),
        Frame(0, Notice, _header(text="x", type="__import__"), b"").to_bytes(),
        Frame(0, Notice, _header(text="x", type="Message"), b"").to_bytes(),
        Frame(0, Notice, b"{}", b"").to_bytes(),
        Frame(0, Notice, _NOTICE, b"body").to_bytes(),
        Frame(0, Notice, b"", b"").to_bytes(),
        Frame(0, Notice, b'"\xff\xfe"', b"").to_bytes(),
    ],
    ids=[
        "4 GiB header", "4 GiB body", "more than its kind has", "announced body of none", "http", "deep list",
        "deep dict", "deep type", "duplicate key", "NaN", "infinite", "long int", "rank of str", "rank of list",
        "unknown field", "unknown kind", "no kind", "fields of another kind", "type in the header",
        "base type in the header", "no field", "body of none", "empty", "no text",
    ],
)  # fmt: skip
def test_frame_that_is_no_message_ends_the_link_and_nothing_else(pair: Pair, data: bytes) -> None:
    pair.bad.say_bytes(data)
    pair.assert_hung_up()


def test_node_measures_its_own_ranks_and_only_what_it_is_asked_for(pair: Pair) -> None:
    """Measurements that were not requested are dropped."""
    pair.bad.say(MEASURED, is_numbered=False)
    pair.assert_not_heard()
    with pair.session.watch(every_s=0.1) as watch:
        assert_soon(lambda: watch.latest is not None)
        assert watch.latest and watch.latest.ranks[1].rss_bytes is None


def test_agent_of_an_earlier_release_is_not_asked_to_measure() -> None:
    """An agent of an earlier release would stop reading at the unknown order. GPU names are made safe to show."""
    good, new, orders = FakeNode("good", 0), FakeNode("bad", 1), {0: [], 1: []}  # type: ignore[var-annotated]
    new.attached = replace(new.attached, info={**INFO, "measures": True})
    for node, fake in enumerate((good, new)):
        fake.answers[Measure] = lambda message, node=node: orders[node].append(message) or []  # type: ignore[misc]
    session = Session.attach("mine", nodes=[good, new])
    try:
        with session.watch(every_s=0.1) as watch:
            assert_soon(lambda: bool(orders[1]))
            new.say(MEASURED, is_numbered=False)
            assert_soon(lambda: watch.latest is not None and watch.latest.ranks[1].rss_bytes is not None)
            board = watch.latest
        assert board is not None
        assert_soon(lambda: orders[1][-1].for_s == 0)
        assert orders[0] == [] and 0 < orders[1][0].for_s <= 5
        assert [node.is_sampled for node in board.nodes] == [False, True]
        assert board.ranks[0].rss_bytes is None
        rank = board.ranks[1]
        assert (rank.cpu_percent, rank.gpu_percent, rank.gpu_used_bytes, rank.steps_per_s) == (50.0, 7.0, 10, None)
        assert "A" in rank.gpu_name and not {"\x1b", "\u202e"} & set(rank.gpu_name)
        assert (board.nodes[1].cpu_percent, board.nodes[1].memory_used_bytes) == (30.0, 5)
    finally:
        session.detach()


def test_what_is_measured_for_hours_is_no_flood(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each order raises the limit by the size of its answers, even those of very many ranks."""
    monkeypatch.setattr(pair.session.settings.limits, "unasked_bytes", 100_000)
    long_names, came = replace(MEASURED, gpu_names=["x" * 20_000]), []
    monkeypatch.setattr(pair.state.measurements, "take", lambda said, node: came.append(said))
    for count in range(20):
        link_of(pair.session).send_to(1, Measure(1.0, 5.0))
        pair.bad.say(long_names, is_numbered=False)
        assert_soon(lambda: len(came) > count or pair.state.lost_nodes)  # noqa: B023
    pair.assert_not_heard()


def test_half_a_large_frame_holds_up_nobody(pair: Pair) -> None:
    pair.bad.say_bytes(prefix(Output, 1000, 60 << 20) + bytes(30 << 20))
    pair.assert_others_go_on()


_ANOTHERS = [0, -1, 2, 1 << 53]
MEASURED = Measured([1], [50.0], [1 << 20], [2.5], [-1], [0], ["A\x1b[31m100\u202e"], [7.0], [10], [20], 30.0, 5, 9)


@pytest.mark.parametrize("rank", _ANOTHERS)
@pytest.mark.parametrize(
    "message",
    [
        RankUp(1, 7, 0, 2, 1, "x", "cpu", "2"),
        RankEnded(1, 1, 0, 9, 0, "", "", False, ""),
        RankEnded(1, 1, 0, 0, -1, "", "gone", False, "gone"),
        GenerationReady(1, 1),
        GenerationEnded(1, 1, 0, []),
        Output(1, 0, "stdout", b"x"),
        Display(1, 0, "", False, b"{}"),
        ClearOutput(1, 0, False),
        CellDone(1, 0, 0.0, True, False, b""),
        CellFailed(1, 0, 0.0, True, False, "x", "x", [], False),
        RequestDone(1, 1),
        Value(1, 1, "x", b"null"),
        replace(IDLE, rank=1),
    ],
    ids=lambda message: type(message).__name__,
)
def test_node_speaks_for_no_rank_but_its_own(pair: Pair, message: Any, rank: int) -> None:
    pair.bad.say(replace(message, rank=rank))
    pair.assert_hung_up(f"sent a message for rank {rank}")


@pytest.mark.parametrize(
    "message",
    [
        Piece([], 1, "x", 0, b"x"),
        Piece([0], 1, "x", 0, b"x"),
        Piece([1, 0], 1, "x", 0, b"x"),
        RanCell([0], 1, "x", 1, False, [], False),
        RanCell([1], 1, "x", 1, False, [0], False),
        RanCell([], 1 << 53, "x", 1, False, [], False),
        RanCell([1], -1, "x", 1, False, [1], False),
        Unfinished(1, 0, "stdout", b"x"),
        Unfinished(0, 0, "stdout", b"x"),
        Attached("bad-1", 1, "bad", 0, 1, 0, 0, 0, [1], [1], 1, INFO),
        Attached("other", 1, "bad", 0, 1, 1 << 53, 0, 0, [0, 1], [0, 1], 1 << 53, INFO),
        Output(1, 999, "stdout", b"x"),
        Output(1, -1, "stdout", b"x"),
        Output(1, 0, "../../x", b"x"),
        Display(1, 999, "", False, b"{}"),
        CellDone(1, 1 << 53, 0.0, True, True, b""),
        CellDone(1, 0, 0.0, True, False, b"", ["<b>x</b>"]),
        replace(IDLE, rank=1, rss_bytes=-5),
        replace(IDLE, rank=1, seconds=1e308),
        replace(IDLE, rank=1, age_s=1e308),
        RankEnded(1, 1, 0, 1 << 50, 0, "", "", False, ""),
        RankEnded(1, 1, 0, 0, -(1 << 50), "", "", False, ""),
        CellFailed(1, 0, 0.0, True, False, "x", "x", [], False, False, ["rank", "rank"]),
        *(
            replace(MEASURED, **said)
            for said in (
                {"ranks": [0]},
                {"ranks": [2]},
                {"ranks": [1, 1], "cpu_percent": [1, 1], "rss_bytes": [1, 1], "cells": [1, 1]},
                {"cpu_percent": []},
                {"cpu_percent": [-2]},
                {"cpu_percent": [1e300]},
                {"rss_bytes": [-1]},
                {"rss_bytes": []},
                {"steps_per_s": [1e12]},
                {"steps_per_s": [1.0, 2.0]},
                {"cells": []},
                {"gpus": [1]},
                {"gpus": [-2]},
                {"gpu_names": []},
                {"gpu_percent": [101]},
                {"gpu_used_bytes": [1 << 61]},
                {"gpu_total_bytes": [1, 2]},
                {"node_cpu_percent": 101},
                {"memory_used_bytes": 10},
                {"memory_total_bytes": -1},
                {
                    "gpu_names": ["x"] * 300,
                    "gpu_percent": [1] * 300,
                    "gpu_used_bytes": [1] * 300,
                    "gpu_total_bytes": [1] * 300,
                },
            )
        ),
    ],
    ids=lambda message: f"{type(message).__name__}",
)
def test_message_that_cannot_be_now_ends_the_link(pair: Pair, message: Message) -> None:
    pair.bad.say(message)
    pair.assert_hung_up()
    assert not [cell for cell in pair.session.log.printed if not 0 <= cell <= 1]


@pytest.mark.parametrize(
    "message",
    [
        StoreOpened(-1, "\x1b]52;c;x\x07"),
        Received(1 << 53),
        RequestDone(1, 1),
        Completions(1, 1, ["x"], [], -5, 1 << 53),
        GenerationReady(1, 1 << 53),
        GenerationReady(1, -1, "bad"),
        GenerationEnded(1, 1 << 53, -1, ["\u202ex"]),
        Piece([1], 1 << 53, "x", 0, b"x"),
    ],
    ids=lambda message: type(message).__name__,
)
def test_message_that_is_for_nobody_changes_nothing(pair: Pair, message: Message) -> None:
    pair.bad.say(message, Notice("taken"))
    deadline = time.monotonic() + 60
    while "bad: taken" not in pair.session.news.notices and time.monotonic() < deadline:
        time.sleep(0.002)
    assert pair.state.groups.all_have([0, 1])
    assert pair.state.groups.number == 1
    pair.assert_not_heard()


_NOT_OF_A_NODE = [
    Attach, OpenStore, Launch, Acknowledge, Alive, EndSession, Begin, RunCell, Interrupt, NewGeneration, EndGeneration,
    Replace, Renumber, Locate, Broadcast, Pull, Push, Complete, Inspect, WorkerUp, Collectives,
]  # fmt: skip


@pytest.mark.parametrize("kind", _NOT_OF_A_NODE, ids=lambda kind: kind.__name__)
def test_kind_that_no_node_says_ends_the_link_by_its_prefix(pair: Pair, kind: type[Message]) -> None:
    """If such messages were parsed before they are dropped, a node could hold up the notebook indefinitely."""
    pair.bad.say_bytes(prefix(kind, 1 << 20, 0))
    pair.assert_hung_up(f"{kind.__name__} may not be sent by that side")


@pytest.mark.parametrize("message", [replace(IDLE, rank=1, request=1), GenerationEnded(1, 7, 0, [])], ids=repr)
def test_what_nobody_asked_for_is_not_read_without_end(pair: Pair, message: Any) -> None:
    field = "stack" if isinstance(message, Position) else "stale"
    frame = to_frame(replace(message, **{field: [""] * 100_000})).to_bytes()
    for _ in range((40 << 20) // len(frame)):
        pair.bad.say_bytes(frame)
    pair.assert_hung_up("it sent more than was requested")


def test_answers_to_what_was_asked_have_no_end(pair: Pair) -> None:
    pair.session.settings.limits.unasked_bytes = 0
    long = replace(IDLE, rank=1, stack=["x" * 1000] * 100)
    pair.bad.answers[Locate] = lambda message: [replace(long, request=message.request)]  # type: ignore[attr-defined]
    for _ in range(10):
        assert pair.session.ranks.where().verdicts[1].kind == "idle"
    pair.assert_not_heard()


def test_end_of_a_cell_is_told_by_the_ranks_that_ran_it(pair: Pair) -> None:
    """Otherwise one node could exclude another node's cells from a replay."""
    first, last = (pair.session.run_cell("x = 1", ranks=0).cell for _ in range(2))
    pair.bad.say(CellFailed(1, first, 0.0, True, True, "x", "x", [], False), Notice("taken"))
    assert_soon(lambda: "bad: taken" in pair.session.news.notices)
    pair.bad.say(CellFailed(1, last, 0.0, True, True, "x", "x", [], False))
    pair.assert_hung_up("rank 1 reported the end of cell 2, which it does not run")
    assert list(pair.session.log.replay(0))[:2] == [first, last]


def test_numbers_that_jump_or_run_backwards_are_the_node_s_own_loss(pair: Pair) -> None:
    frame = to_frame(Output(1, 0, "stdout", b"x"))
    for number in (5, 4, 1 << 55, 7, (1 << 56) - 1, 3):
        pair.bad.say_bytes(frame.to_bytes(number=number))
    pair.bad.say(CellDone(1, 0, 0.0, True, False, b""), is_numbered=False)
    pair.assert_others_go_on()
    assert_soon(lambda: len(pair.session.news.notices) >= 2)
    assert re.fullmatch(r"bad: (very many|[\d,]+) messages of its ranks were lost", pair.session.news.notices[0])
    assert all(notice.startswith("bad: ") for notice in pair.session.news.notices)
    assert not pair.state.lost_nodes


@pytest.mark.slow
def test_what_a_node_says_by_the_million_is_not_all_kept(pair: Pair) -> None:
    """Gaps, notices, deaths and restarts of ranks: memory stays bounded whichever of them a node repeats."""
    frame = to_frame(GenerationReady(1, 7))
    for number in range(2, 400_000, 2000):
        pair.bad.say_bytes(b"".join(frame.to_bytes(number=jump) for jump in range(number, number + 2000, 2)))
    for _ in range(256):
        pair.bad.say(Notice("n" * (1 << 19)), is_numbered=False)
    for _ in range(2000):
        pair.bad.say(RankEnded(1, 1, 0, 9, 0, "e" * 60_000, "", True, ""), is_numbered=False)
        pair.bad.say(RankUp(1, 1, 0, 2, 1, "bad", "cpu", "2"), is_numbered=False)
    pair.bad.say_bytes(b"\xff" * 64)
    pair.assert_hung_up()
    assert sum(map(len, pair.session.news.notices)) < 8 << 20


def test_values_reach_other_nodes_when_one_takes_none(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = threading.Event()
    taken = 0

    def take(message: Message) -> list[Message]:
        nonlocal taken
        assert isinstance(message, Piece)
        taken += len(message.body)
        return [RequestDone(0, message.request)] if 0 in message.ranks and not taken % len(value) else []

    pair.good.answers[Push], pair.good.answers[Piece] = lambda message: [], take
    pair.bad.answers[Push] = lambda message: [Notice("late")] if is_over.wait(50) else []
    value = np.zeros(40 << 20, np.uint8)
    with monkeypatch.context() as patched:
        patched.setattr(pair.session.settings.limits, "room_s", 0.5)
        with pytest.raises(CellTimeout, match="push of x: bad received nothing for"):
            pair.session.push({"x": value}, ranks=1)
    pair.session.push({"x": value}, ranks=0)
    is_over.set()


def test_node_that_ends_each_connection_at_once_is_not_connected_to_without_a_pause(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(FakeNode, "can_resume", property(lambda node: node.name == "bad"))
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    times: list[float] = []

    def connect(session: str) -> socket.socket:
        times.append(time.monotonic())
        ours, theirs = socket.socketpair()
        theirs.close()
        return ours

    with _attached(good, bad) as session:
        monkeypatch.setattr(link_of(session).node_links[1], "_connect", lambda: connect("mine"))
        bad._sock.shutdown(socket.SHUT_RDWR)
        assert_soon(lambda: len(times) > 3)
        assert session.run_cell("1", ranks=0).ranks == (0,)
        assert len(times) < 10
        assert times[-1] - times[0] > 0.2


def test_id_of_a_display_is_no_longer_than_a_rank_makes_it(pair: Pair) -> None:
    eyes = Eyes()
    bundle = json.dumps({"text/plain": "x"}).encode()
    with pytest.raises(DetrainError):
        _run(pair, Display(1, 0, "i" * 2001, False, bundle), _DONE, observer=eyes)
    pair.assert_hung_up("display id of rank 1 has 2001 characters, more than 2000")


def test_streams_that_no_rank_has_are_not_kept(pair: Pair) -> None:
    for number in range(2000):
        pair.bad.say(Output(1, 0, f"stream {number}", b"x" * 60_000), is_numbered=False)
    pair.assert_hung_up()


@contextlib.contextmanager
def _attached(*nodes: FakeNode, name: str = "mine", limits: Limits | None = None) -> Iterator[Session]:
    session = Session.attach(name, nodes=nodes, limits=limits)
    try:
        yield session
    finally:
        session.detach()


def _assert_absent(session: Session, why: str = "") -> None:
    """Check that node bad is lost and nothing that it sent counts, and that the honest node goes on."""
    state: Any = state_of(session)
    assert why in state.lost_nodes[1]
    assert (len(session.ranks), session.log.next_cell(), state.groups.number) == (2, 1, 1)
    assert not state.busy
    assert session.run_cell("1", ranks=0).ranks == (0,)
    with pytest.raises((RankLost, SessionError), match="bad is lost"):
        session.run_cell("1", ranks=1)


_ABSURD = [
    {"pid": -1},  # errors advise to kill it
    {"gpus": 1 << 50},
    {"gpus": -1},
    {"cpus": -1},
    {"generation": -1},
    {"generation": 1 << 53},
    {"with_group": [-1]},
    {"ranks": [1, 1]},
    {"ranks": [-1]},
    {"info": None},
    {"info": {"device": "x" * 1000, "backend": 1}},
]


@pytest.mark.parametrize(
    "absurd",
    [
        *_ABSURD,
        {"generation": 1 << 31},
        {"generation": 5000},
        {"with_group": [0, 1]},
        {"ranks": list(range(1, 200_000))},
        {"ranks": [0, 1]},
        {"ranks": [1, 70]},
        {"ranks": []},
    ],
    ids="-".join,
)
def test_node_whose_answer_to_an_attach_cannot_be_counts_as_absent(absurd: dict[str, Any]) -> None:
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    bad.attached = replace(bad.attached, **absurd)
    with _attached(good, bad) as session:
        _assert_absent(session)


@pytest.mark.parametrize(
    "told",
    [
        RankUp(1, 1, 0, 60_000, 1, "bad", "cpu", "2"),
        RankUp(0, 1, 0, 2, 1, "bad", "cpu", "2"),
        RanCell([1], -1, "x", 1, False, [1], False),
        RanCell([1], 3, "x", 1, False, [0, 1], False),
        Unfinished(1, 3, "stdout", b"x"),
        Output(1, 0, "stdout", b"x"),
        RankEnded(0, 1, 0, 9, 0, "", "", False, ""),
    ],
    ids=repr,
)
def test_node_that_remembers_what_cannot_be_counts_as_absent(told: Message) -> None:
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    up = RankUp(1, 1, 0, 2, 1, "bad", "cpu", "2")
    bad.answers[Attach] = lambda _: [told, up, bad.attached]
    with _attached(good, bad) as session:
        _assert_absent(session)


@pytest.mark.parametrize("absurd", _ABSURD, ids="-".join)
def test_absurd_answer_of_the_first_node_to_an_attach_is_an_error_in_words(absurd: dict[str, Any]) -> None:
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    good.attached = replace(good.attached, **absurd)
    with pytest.raises(DetrainError):
        Session.attach("mine", nodes=[good, bad])


@pytest.mark.parametrize("claimed", [(1 << 31) - 1, 1 << 31, (1 << 53) - 1, 1 << 53])
def test_number_of_a_cell_that_a_node_makes_up_keeps_no_honest_node_out_later(claimed: int) -> None:
    """Numbers that continue from the made-up one reach the honest nodes, which report them at the next attach."""
    cells: list[int] = []
    for _ in range(3):
        good, bad = FakeNode("good", 0), FakeNode("bad", 1)
        ran = [RanCell([0], cell, "x", 1, False, [], False) for cell in cells]
        good.answers[Attach] = lambda _, good=good, ran=ran: [
            *ran,
            RankUp(0, 1, 0, 2, 1, "good", "cpu", "2"),
            good.attached,
        ]
        lie = RanCell([1], claimed, "x", 1, False, [], False)
        bad.answers[Attach] = lambda _, bad=bad, lie=lie: [lie, RankUp(1, 1, 0, 2, 1, "bad", "cpu", "2"), bad.attached]
        with _attached(good, bad) as session:
            assert session.run_cell("1", ranks=0).ranks == (0,)
            new = session.run_cell("1", ranks=0).cell
            assert not {new, new - 1} & {*cells, claimed}
            cells += [new - 1, new]
            assert not state_of(session).lost_nodes


def test_cells_that_a_node_remembers_are_no_part_of_what_it_may_say_unasked() -> None:
    """A node may remember thousands of cells, each with thousands of ranks."""
    good, other = FakeNode("good", 0), FakeNode("other", 1)
    ran = [RanCell([0], cell, "x", 1, False, [], False) for cell in range(1, 100)]
    good.answers[Attach] = lambda _: [*ran, RankUp(0, 1, 0, 2, 1, "good", "cpu", "2"), good.attached]
    with _attached(good, other, limits=Limits(unasked_bytes=1 << 11)) as session:
        assert session.log.cells == ran
        assert session.run_cell("1", ranks=0).ranks == (0,)


@pytest.mark.parametrize(("code", "first_line"), [("evil()", 1), ("x = 1", 9)])
def test_rank_is_given_again_only_what_its_own_node_says(code: str, first_line: int) -> None:
    """This also holds if another node reports different code for the same cell; the notebook shows a notice."""
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    ran = [RanCell([0], 3, "x = 1", 1, False, [], False), RanCell([1], 3, code, first_line, False, [], False)]
    given: list[RunCell] = []
    for node, said in zip((good, bad), ran):
        up = RankUp(node.rank, 1, 0, 2, 1, node.name, "cpu", "2")
        node.answers[Attach] = lambda _, told=[said, up, node.attached]: told

    def run(message: Message) -> list[Message]:
        assert isinstance(message, RunCell)
        given.append(message)
        return [CellDone(0, message.cell, 0.1, True, False, b"")]

    good.answers[RunCell] = run
    with _attached(good, bad) as session:
        assert session.log.cells == ran
        assert [text for text in session.news.notices if "nodes disagree on the code of cell 3 " in text]
        for cells in (None, [3]):
            assert session.log.replay(0, cells=cells) == {3: None}
        assert [(run.ranks, run.code, run.first_line) for run in given] == [([0], "x = 1", 1)] * 2


def test_code_of_a_node_is_not_looked_at_to_replay_on_the_ranks_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr("detrain_nb.session.state.history.definitions_of", lambda code: seen.append(code) or code)
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    lie = RanCell([1], 3, "import evil", 1, True, [], False)
    bad.answers[Attach] = lambda _: [lie, RankUp(1, 1, 0, 2, 1, "bad", "cpu", "2"), bad.attached]
    with _attached(good, bad) as session:
        assert session.log.replay(0) == {}
        assert seen == []
        assert session.log.replay(1) == {3: None}
        assert seen == ["import evil"]


def _three_of_which_one_claims_too_much(is_late: bool) -> list[FakeNode]:
    """Return three nodes; the second, bad, also claims rank 2, before or after its real node reports it."""
    nodes = [FakeNode("good", 0), FakeNode("bad", 1), FakeNode("third", 2)]
    ups = [RankUp(rank, 1, 0, 3, 1, nodes[rank].name, "cpu", "2") for rank in range(3)]
    nodes[1].attached = replace(nodes[1].attached, ranks=[1, 2], with_group=[1, 2])
    told = [[ups[0]], [ups[1], replace(ups[2], host="bad")], [ups[2]]]
    last, is_said = nodes[1 if is_late else 2], threading.Event()

    def answer(node: FakeNode) -> Iterator[Message]:
        if node is last:
            is_said.wait(10)
        yield from told[node.rank]
        if node is not last and node.rank:
            is_said.set()
        yield node.attached

    for node in nodes:
        node.answers[Attach] = lambda _, node=node: answer(node)
    return nodes


@pytest.mark.parametrize("is_late", [False, True])
def test_rank_that_two_nodes_claim_is_an_error_that_names_both(is_late: bool) -> None:
    with pytest.raises(SessionError, match=r"(bad and third|third and bad) both claim rank 2 "):
        Session.attach("mine", nodes=_three_of_which_one_claims_too_much(is_late))


@pytest.mark.parametrize("is_late", [False, True])
def test_node_that_claims_a_rank_which_was_noted_of_another_counts_as_absent(is_late: bool) -> None:
    noted = [Node(host=f"{name}.invalid", name=name, ranks=1) for name in ("good", "bad", "third")]
    known.remember("noted", noted, holder="x")
    try:
        with _attached(*_three_of_which_one_claims_too_much(is_late), name="noted") as session:
            assert list(state_of(session).lost_nodes) == [1]
            assert "sent a message for rank 2, which it does not have" in state_of(session).lost_nodes[1]
            assert state_of(session).node_of == {0: 0, 1: 1, 2: 2}
            assert session.run_cell("1", ranks=[0, 2]).ranks == (0, 2)
    finally:
        known.forget("noted")


def test_first_node_that_claims_a_rank_which_was_noted_of_another_is_told_nothing() -> None:
    bad, good = FakeNode("bad", 0), FakeNode("good", 1)
    bad.attached = replace(bad.attached, ranks=[0, 1], with_group=[0, 1])
    nodes = [Node(host=f"{name}.invalid", name=name, ranks=1) for name in ("bad", "good")]
    known.remember("noted", nodes, holder="x")
    words = "bad claims rank 1 of session 'noted', but this machine has recorded it on good: attach where it was"
    try:
        with pytest.raises(SessionError, match=words):
            Session.attach("noted", nodes=[bad, good])
    finally:
        known.forget("noted")


def test_note_of_ranks_that_is_out_of_date_keeps_nobody_out() -> None:
    """Another machine has shrunk the session since the note was made."""
    nodes = [FakeNode("good", 0), FakeNode("other", 1)]
    known.remember("noted", [Node(host=f"{node.name}.invalid", name=node.name, ranks=2) for node in nodes], holder="x")
    try:
        with _attached(*nodes, name="noted") as session:
            assert session.run_cell("1").ranks == (0, 1)
    finally:
        known.forget("noted")


def test_node_that_takes_a_rank_of_the_first_before_it_is_asked_counts_as_absent() -> None:
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)

    def answer(_: Message) -> list[Message]:
        bad.say(RankUp(0, 1, 0, 2, 1, "bad", "cpu", "2"), is_numbered=False)
        bad.wait_until_hung_up_on()
        return [RankUp(0, 1, 0, 2, 1, "good", "cpu", "2"), good.attached]

    good.answers[Attach] = answer
    with _attached(good, bad) as session:
        _assert_absent(session, "a node sent a message for rank 0, which it does not have")


@pytest.mark.parametrize("said", [b"\xff" * 64, to_frame(RankUp(0, 1, 0, 2, 1, "bad", "cpu", "2")).to_bytes(), b""])
def test_node_that_is_lost_just_before_it_is_asked_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)

    def between(*_: object) -> dict[int, int]:  # the first node is attached, the others were not asked yet
        bad.say_bytes(said)
        if not said:
            bad.leave()
        assert bad.wait_until_hung_up_on()
        return {}

    monkeypatch.setattr("detrain_nb.session.running.start.noted_owners", between)
    with _attached(good, bad) as session:
        _assert_absent(session)


def test_node_that_hangs_up_or_says_nothing_when_it_is_attached_to_counts_as_absent() -> None:
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    for act, why in ((bad.leave, "was closed"), (lambda: None, "did not answer within 1 s")):
        bad.answers[Attach] = lambda _, act=act: act() or []
        with _attached(good, bad, limits=Limits(attach_s=1.0)) as session:
            _assert_absent(session, why)


def test_node_that_is_lost_after_it_has_answered_while_another_is_asked_is_lost_alone() -> None:
    nodes = [FakeNode("good", 0), FakeNode("bad", 1), FakeNode("third", 2)]

    def answer(node: FakeNode) -> Iterator[Message]:
        if node.rank == 2:
            assert nodes[1].wait_until_hung_up_on()
        yield RankUp(node.rank, 1, 0, 3, 1, node.name, "cpu", "2")
        yield node.attached
        if node.rank == 1:
            node.say_bytes(b"\xff" * 64)

    for node in nodes:
        node.answers[Attach] = lambda _, node=node: answer(node)
    with _attached(*nodes) as session:
        assert list(state_of(session).lost_nodes) == [1]
        assert session.run_cell("1", ranks=[0, 2]).ranks == (0, 2)


def test_node_that_promises_output_and_sends_none_is_lost_alone() -> None:
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    bad.attached = replace(bad.attached, last_number=1 << 53)
    with _attached(good, bad, limits=Limits(catch_up_s=0.2)) as session:
        _assert_absent(session, "has sent too little of the missed output")


def test_node_that_sends_what_was_missed_in_drops_is_lost_alone() -> None:
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    bad.attached = replace(bad.attached, last_number=1 << 53)

    def drip() -> None:
        while not bad.wait_until_hung_up_on(0.05):
            bad.say(Notice("still at it"))

    def answer(_: Message) -> Iterator[Message]:
        yield RankUp(1, 1, 0, 2, 1, "bad", "cpu", "2")
        yield bad.attached
        threading.Thread(target=drip).start()

    bad.answers[Attach] = answer
    with _attached(good, bad, limits=Limits(catch_up_s=0.3)) as session:
        _assert_absent(session, "has sent too little of the missed output")


def test_nodes_that_send_what_was_missed_in_twentieths_have_one_deadline() -> None:
    good, bad, third = FakeNode("good", 0), FakeNode("bad", 1), FakeNode("third", 2)

    def step(node: FakeNode) -> None:
        for number in range(1 << 48, 1 << 53, 1 << 48):
            if node.wait_until_hung_up_on(0.2):
                return
            node.say_bytes(to_frame(Notice("still at it")).to_bytes(number=number))

    def answer(node: FakeNode) -> Iterator[Message]:
        yield RankUp(node.rank, 1, 0, 3, 1, node.name, "cpu", "2")
        if node is good:
            yield node.attached
        else:
            yield replace(node.attached, last_number=1 << 53)
            threading.Thread(target=step, args=(node,)).start()

    for node in (good, bad, third):
        node.answers[Attach] = lambda _, node=node: answer(node)
    began = time.monotonic()
    with _attached(good, bad, third, limits=Limits(catch_up_s=1.5, catch_up_all_s=2.0)) as session:
        assert time.monotonic() - began < 4
        lost = state_of(session).lost_nodes
        assert lost == {
            n: f"{name} has sent too little of the missed output in 2 s" for n, name in ((1, "bad"), (2, "third"))
        }
        assert session.run_cell("1", ranks=0).ranks == (0,)


def test_node_that_is_slow_to_send_what_was_missed_is_named() -> None:
    """Such a node can hold up an attach for minutes. A user who knows its name can leave it out."""
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    bad.attached = replace(bad.attached, last_number=4)
    is_told, told = threading.Event(), []

    def tell(line: str) -> None:
        told.append(line)
        if "of what bad has kept" in line:
            is_told.set()

    def go_on() -> None:
        is_told.wait(10)
        bad.say(*[Notice("more")] * 4)

    def answer(_: Message) -> Iterator[Message]:
        yield RankUp(1, 1, 0, 2, 1, "bad", "cpu", "2")
        yield bad.attached
        threading.Thread(target=go_on).start()

    bad.answers[Attach] = answer
    session = Session.attach("mine", nodes=[good, bad], limits=Limits(tell_gap_s=0.05), on_progress=tell)
    session.detach()
    assert told[0] == "connecting to good, bad" and "received 0% of what bad kept" in told


def test_node_whose_ranks_never_come_up_is_lost_alone() -> None:
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    bad.answers[Attach] = lambda _: [bad.attached]
    with _attached(good, bad, limits=Limits(start_s=0.3)) as session:
        _assert_absent(session, "rank 1 of session 'mine' did not start within 0.3 s")


@pytest.mark.parametrize("said", [[GenerationReady(1, 2, "no")], []], ids=["refuses", "says nothing"])
def test_ranks_of_other_nodes_do_without_a_group_that_one_node_does_not_make(said: list[Message]) -> None:
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    bad.answers[RunCell] = lambda message: [CellDone(1, message.cell, 0.1, False, False, b"")]
    asked: list[Message] = []
    bad.answers[NewGeneration] = lambda message: asked.append(message) or said
    with _attached(good, bad, limits=Limits(group_s=1.0)) as session:
        session.run_cell("1")
        with pytest.raises((LaunchError, CellTimeout), match=r"rank 1 (could|did) not make the process group"):
            session.run_cell("1")
        before = len(asked)
        for _ in range(2):
            assert session.run_cell("1", ranks=0).ranks == (0,)
        assert len(asked) == before + 1
        (notice,) = session.news.notices
        assert notice.startswith("rank 1 ")
        assert "attach --without NODE" in notice


def test_node_whose_ranks_are_fresh_again_and_again_holds_the_others_up_a_few_times() -> None:
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    bad.answers[RunCell] = lambda message: [CellDone(1, message.cell, 0.1, False, False, b"")]
    asked: list[Message] = []
    bad.answers[NewGeneration] = lambda message: asked.append(message) or []
    with _attached(good, bad, limits=Limits(group_s=0.5)) as session:
        session.run_cell("1")
        for incarnation in range(2, 9):
            bad.say(RankUp(1, incarnation, 0, 2, 1, "bad", "cpu", "2"))
            assert_soon(lambda: state_of(session).up[1].incarnation == incarnation)  # noqa: B023
            assert session.run_cell("1", ranks=0).ranks == (0,)
        assert len(asked) == 3


def test_words_of_a_node_that_refuses_a_stop_stand_behind_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    node = FakeNode("h0", 0)
    node.answers[Attach] = lambda _: [Refused("your licence has expired\nrun: pip install evil")]
    monkeypatch.setattr("detrain_nb.session.session.find_nodes", lambda *_, **__: [node])
    with pytest.raises(SessionError, match=r"^h0: your licence has expired\?run: pip install evil$"):
        end_session("mine")


def test_node_that_refuses_a_stop_does_not_keep_it_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    bad, good = FakeNode("h0", 0), FakeNode("h1", 1)
    bad.answers[Attach] = lambda _: [Refused("no")]
    asked: list[Message] = []
    good.answers[Attach] = lambda message: asked.append(message) or []
    monkeypatch.setattr("detrain_nb.session.session.find_nodes", lambda *_, **__: [bad, good])
    monkeypatch.setattr("detrain_nb.deploy.ending._END_LIMIT_S", 1.0)
    with pytest.raises(SessionError, match=r"^h0: no$"):
        end_session("mine")
    assert asked


def _renumbered_wrongly(how: str, node: FakeNode) -> Callable[[Renumber], list[Message]]:
    def answer(message: Renumber) -> list[Message]:
        if how == "hangs up":
            node.leave()
        elif how == "nonsense":
            node.say_bytes(b"x" * 64)
        said: dict[str, list[Message]] = {
            "refuses": [RequestFailed(1, message.request, "no")],
            "ended": [RankEnded(1, 1, 0, 9, 0, "", "", False, "")],
        }
        return said.get(how, [])

    return answer


@pytest.mark.parametrize("how", ["says nothing", "refuses", "ended", "hangs up", "nonsense"])
def test_node_that_takes_no_new_numbers_is_lost_alone(how: str) -> None:
    nodes = [FakeNode("good", 0), FakeNode("bad", 1), FakeNode("third", 2)]
    for node in nodes:
        up = RankUp(node.rank, 1, 0, 3, 1, node.name, "cpu", "2")
        node.answers[Attach] = lambda _, node=node, up=up: [up, node.attached]
    nodes[0].answers[Renumber] = lambda message: [RequestDone(0, message.request)]
    nodes[1].answers[Renumber] = _renumbered_wrongly(how, nodes[1])
    with _attached(*nodes, limits=Limits(idle_s=1.0)) as session:
        nodes[2].leave()
        assert_soon(lambda: 2 in state_of(session).lost)
        assert session.ranks.shrink() == {0: 0, 1: 1}
        if how in ("says nothing", "refuses"):
            _assert_absent(session, "its ranks did not take their new numbers within 1 s")
        assert session.is_alive and session.run_cell("1", ranks=0).ranks == (0,)


def test_what_a_lost_node_showed_is_shown_as_its_own_when_a_trusted_one_has_its_rank() -> None:
    """Otherwise its HTML would run in the notebook's page, under the trusted node's name."""
    nodes = [FakeNode("good", 0), FakeNode("bad", 1), FakeNode("third", 2)]
    page = json_body({"text/html": "<script>", "text/plain": "x"})
    for node in nodes:
        up = RankUp(node.rank, 1, 0, 3, 1, node.name, "cpu", "2")
        node.answers[Attach] = lambda _, node=node, up=up: [up, node.attached]
        node.answers[Renumber] = lambda message: [RequestDone(message.numbers[0], message.request)]
        node.is_trusted = node.name != "bad"

    def show(rank: int) -> Callable[[Message], list[Message]]:
        said = [Output(rank, 1, "stdout", b"%d\n" % rank), Display(rank, 1, "", False, page)]
        return lambda message: [*said, CellDone(rank, message.cell, 0.1, True, False, page)]

    for node in nodes:
        node.answers[RunCell] = show(node.rank)
    with _attached(*nodes) as session:
        first = session.run_cell("1", values=False)
        nodes[1].leave()
        assert_soon(lambda: 1 in state_of(session).lost)
        assert session.ranks.shrink() == {0: 0, 2: 1}
        nodes[2].say(Output(1, 1, "stdout", b"late\n"), is_numbered=False)
        assert_soon(lambda: first[2].stdout == "2\nlate\n")
        plan, eyes = session.ranks.plan_of(1), Eyes()
        run = session.log.show_again(1, eyes)
        assert plan.node_names == {0: "good", 1: "bad", 2: "third"} and run.ranks == (0, 1, 2)
        assert sorted("text/html" in bundle for bundle in eyes.bundles) == [False, True, True]
        assert {rank: "text/html" in bundle for rank, bundle in run.bundles().items()} == {0: True, 1: False, 2: True}
        assert first[1].stdout == "1\n"
        assert session.ranks.plan_of(99).node_names == {0: "good", 1: "third"}


def test_numbers_of_cells_that_another_node_makes_up_order_no_cells() -> None:
    """Cells numbered after a made-up number would not count at the next attach, and would be sorted before it."""
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    ran = [RanCell([1], cell, "x", 1, False, [], False) for cell in (40, 100_039, (1 << 31) - 1)]
    bad.answers[Attach] = lambda _: [*ran, RankUp(1, 1, 0, 2, 1, "bad", "cpu", "2"), bad.attached]
    with _attached(good, bad) as session:
        assert session.log.next_cell() == 41
        assert [session.run_cell("1", ranks=0).cell for _ in range(2)] == [41, 42]


def test_lines_that_do_not_end_do_not_fill_the_line_to_the_node() -> None:
    """Unfinished lines are sent again with each acknowledgement, and any message of a node can cause one."""
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    told: list[Message] = []
    for cell in range(1, 21):
        told += [RanCell([1], cell, "x", 1, False, [1], False), Unfinished(1, cell, "stdout", b"y" * 65_000)]
    bad.answers[Attach] = lambda _: [*told, RankUp(1, 1, 0, 2, 1, "bad", "cpu", "2"), bad.attached]
    received: list[int] = []
    bad.answers[Unfinished] = lambda line: received.append(len(line.body)) or []  # type: ignore[attr-defined]
    with _attached(good, bad) as session:
        for cell in list(session.log.running_cells):
            session.log.follow(cell, Eyes())
        session.log.confirm_missed()
        began = time.monotonic()
        for number in range(1, 150):
            bad.say_bytes(to_frame(RequestDone(1, 12345)).to_bytes(number=number))
            time.sleep(0.02)
        seconds = time.monotonic() - began
    assert len(received) >= 20, "the test shows nothing"
    assert sum(received) < (1 << 20) * seconds + 3 * 20 * 65_000


def test_end_of_a_rank_without_a_number_ends_its_cell(pair: Pair) -> None:
    end = RankEnded(1, 1, 0, 9, 0, "", "", False, "")
    pair.bad.answers[RunCell] = lambda message: pair.bad.say(end, is_numbered=False) or []  # type: ignore[func-returns-value]
    with pytest.raises(RankLost, match="rank 1 on bad"):
        pair.session.run_cell("1", ranks=1, timeout_s=10)


def test_cells_of_a_node_that_is_dropped_when_it_is_attached_to_are_forgotten() -> None:
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    told = [RanCell([1], cell, "y", 1, False, [1], False) for cell in range(1, 5000)]
    lines = [Unfinished(1, cell, "stdout", b"z") for cell in range(1, 100)]
    bad.answers[Attach] = lambda _: [*told, *lines, replace(bad.attached, gpus=-1)]
    with _attached(good, bad) as session:
        assert (session.log.cells, session.log.printed) == ([], [])
        _assert_absent(session, "reported gpus -1 is out of range (0 to 1024)")


def test_what_an_attach_has_asked_is_over_with_it(pair: Pair) -> None:
    asked = [pair.state._attached_to, pair.state._store_opened, pair.state._ranks_up]
    assert not any(pair.state.requests.are_open(request.number) for request in asked)


def test_time_of_a_cell_is_one_that_can_be(pair: Pair) -> None:
    for seconds, shown in ((1e308, 1e10), (-5.0, 0.0)):
        pair.bad.answers[RunCell] = lambda run, seconds=seconds: [  # type: ignore[misc]
            CellDone(1, run.cell, seconds, True, False, b"")
        ]
        assert pair.session.run_cell("1", ranks=1).seconds == {1: shown}
        assert pair.state.last_seconds[1] == shown


def test_end_without_a_reason_and_very_many_missing_messages_are_told_in_words(pair: Pair) -> None:
    pair.bad.say_bytes(to_frame(Output(1, 0, "stdout", b"x")).to_bytes(number=1))
    pair.bad.say_bytes(to_frame(Output(1, 0, "stdout", b"x")).to_bytes(number=1 << 50))
    assert_soon(lambda: "bad: very many messages of its ranks were lost" in pair.session.news.notices)
    gone = {1: RankEnded(1, 1, 0, 0, -1, "", " ", False, "")}
    assert describe_ends(gone, hosts={}) == "rank 1 is lost: its node gave no reason"


def test_node_says_once_that_it_started_cold(pair: Pair) -> None:
    pair.bad.say(*[StartedCold(f"reason {number}") for number in range(2000)], Notice("taken"))
    assert_soon(lambda: "bad: taken" in pair.session.news.notices)
    assert pair.session.news.notices == ("bad: started cold: reason 0", "bad: taken")


def test_notices_of_a_node_leave_room_for_those_of_others(pair: Pair) -> None:
    cell = threading.Event()

    def run(message: Message) -> Iterator[Message]:
        assert isinstance(message, RunCell)
        for _ in range(2000):
            pair.bad.say(Notice("x"))
        cell.wait(10)
        yield CellDone(0, message.cell, 0.1, True, False, b"", ["rank"])

    pair.good.answers[RunCell] = run
    eyes, last = Eyes(), "bad: too many notices: further ones are dropped until the next cell"
    threading.Thread(target=lambda: assert_soon(lambda: last in eyes.texts) or cell.set()).start()
    pair.session.run_cell("1", ranks=0, observer=eyes)
    cell.set()
    assert [text for text in eyes.texts if "bad" in text][-1] == last
    assert len(eyes.texts) < 300
    assert any("has overwritten rank on rank 0" in text for text in eyes.texts)


def test_what_a_new_connection_meets_is_told() -> None:
    """A changed host key matters most: ssh itself would warn of it prominently."""
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    bad.can_resume = True
    connect_at_first, tries = bad.connect_agent, iter(range(1000))

    def connect(session: str) -> Any:
        if next(tries):
            raise HostKeyError("bad shows another key", advice="ask who runs it\nnow")
        return connect_at_first(session)

    bad.connect_agent = connect
    bad.answers[RunCell] = bad.answers[Locate] = lambda message: []
    with _attached(good, bad) as session:
        eyes = Eyes()
        threading.Timer(0.1, bad.leave).start()
        with pytest.raises(CellTimeout):
            session.run_cell("1", observer=eyes, timeout_s=4)
        assert any("rank 1 continues (bad shows another key: ask who runs it)" in text for text in eyes.texts)
        session.detach()


def test_node_that_cannot_be_reached_can_be_left_out() -> None:
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    bad.connect_agent = _no_route
    words = "^bad: no route\nto continue without their ranks: %distributed attach mine --without bad$"
    with pytest.raises(TransportError, match=words):
        Session.attach("mine", nodes=[good, bad])
    with Session.attach("mine", nodes=[good, bad], without="bad") as session:
        _assert_absent(session, "it was left out")


def test_node_that_does_not_say_all_its_ranks_can_be_left_out() -> None:
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    for node in (good, bad):
        up = RankUp(node.rank, 1, 0, 3, 1, node.name, "cpu", "2")
        node.answers[Attach] = lambda _, node=node, up=up: [up, node.attached]
    with pytest.raises(SessionError, match=r"leave out one that does not report all its ranks \(--without\)$"):
        Session.attach("mine", nodes=[good, bad])
    with Session.attach("mine", nodes=[good, bad], without=["bad"]) as session:
        assert session.run_cell("1", ranks=0).ranks == (0,)
        assert sorted(state_of(session).lost) == [1, 2]


@pytest.mark.parametrize("name", ["good", "nobody"])
def test_first_node_or_one_that_is_none_cannot_be_left_out(name: str) -> None:
    with pytest.raises(SpecError, match=f"cannot attach without '{name}': the nodes that can be left out are: bad$"):
        Session.attach("mine", nodes=[FakeNode("good", 0), FakeNode("bad", 1)], without=name)


def _no_route(session: str) -> socket.socket:
    raise TransportError("no route")


def test_absurd_number_of_gpus_starts_nothing() -> None:
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    good.attached = replace(good.attached, ranks=[], with_group=[])
    bad.attached = replace(bad.attached, ranks=[], with_group=[], gpus=1 << 50)
    with pytest.raises(DetrainError, match="gpus"):
        Session.start(1, nodes=[good, bad])


@pytest.mark.parametrize("ranks", [[1] * 500_000, [1, 1]], ids=["many", "twice"])
def test_rank_that_a_node_remembers_of_a_cell_is_named_once(ranks: list[int]) -> None:
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    bad.answers[Attach] = lambda _: (RanCell(ranks, cell, "x", 1, False, [], False) for cell in range(1, 3))
    with _attached(good, bad) as session:
        _assert_absent(session, "lists a rank of cell 1 twice")


def test_what_a_node_remembers_is_bounded() -> None:
    before = psutil.Process().memory_info().rss
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    bad.answers[Attach] = lambda _: (RanCell([1], cell, "x" * 100_000, 1, False, [], False) for cell in range(1, 3000))
    with _attached(good, bad) as session:
        assert "the node remembers more than " in state_of(session).lost_nodes[1]
        gc.collect()
        assert psutil.Process().memory_info().rss - before < MOST_GROWTH_BYTES


@pytest.mark.parametrize("last_number", [0, 1 << 50], ids=["now", "missed"])
def test_output_of_cells_that_nobody_sent_is_not_kept(last_number: int) -> None:
    before = psutil.Process().memory_info().rss
    good, bad = FakeNode("good", 0), FakeNode("bad", 1)
    bad.attached = replace(bad.attached, last_number=last_number, acknowledged=last_number)
    with _attached(good, bad) as session:
        session.run_cell("1", ranks=0, number=5000)
        for cell in range(1, 5000):
            for stream in ("stdout", "stderr"):
                bad.say(Output(1, cell, stream, b"x" * 60_000), is_numbered=last_number > 0)
        bad.say(Notice("taken"), is_numbered=False)
        assert_soon(lambda: "bad: taken" in session.news.notices or 1 in state_of(session).lost_nodes)
        assert session.log.printed == []
        gc.collect()
        assert psutil.Process().memory_info().rss - before < MOST_GROWTH_BYTES
        assert (1 in state_of(session).lost_nodes) is (last_number == 0)


def test_lines_that_do_not_end_are_kept_up_to_a_size(pair: Pair) -> None:
    for cell in range(1, 2001):
        pair.state.history.begin(RunCell([1], [1], cell, "x"))
    for cell in range(1, 2001):
        pair.bad.say(Output(1, cell, "stdout", b"x" * 60_000), is_numbered=False)
    pair.bad.say(Notice("taken"), is_numbered=False)
    assert_soon(lambda: "bad: taken" in pair.session.news.notices)
    assert pair.grown_bytes < MOST_GROWTH_BYTES


def test_node_that_refuses_later_takes_only_its_own_ranks_with_it(pair: Pair) -> None:
    pair.bad.say(Refused("no\x1b]0;title\x07 more"), is_numbered=False)
    pair.assert_hung_up("no more") if pair.bad.wait_until_hung_up_on(0.5) else None
    pair.assert_others_go_on()


def test_node_that_would_stay_though_nobody_has_asked_it_to_is_hung_up_on(pair: Pair) -> None:
    pair.bad.say(Kept(), is_numbered=False)
    pair.assert_hung_up("its agent stays without having been asked to")


def test_node_that_serves_another_notebook_ends_the_session_here_also_where_it_tells_that_first(pair: Pair) -> None:
    taken = "session 'mine' was taken over by two: %distributed attach --steal takes it back"
    pair.bad.say(Refused(taken, is_taken=True), is_numbered=False)
    assert_soon(lambda: pair.session.failure is not None)
    with pytest.raises(SessionError, match=r"^bad: session 'mine' was taken over by two: %distributed attach --steal"):
        pair.session.run_cell("1")


def test_log_of_a_launcher_cannot_hold_up_the_notebook(pair: Pair) -> None:
    pair.bad.say(LauncherEnded(1, "Root Cause" + "\n" * 100_000 + "x"))
    deadline = time.monotonic() + 5
    while 1 not in pair.state.lost_nodes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert 1 in pair.state.lost_nodes
    pair.assert_others_go_on()


# ---- messages during a cell


def _run(pair: Pair, *answers: Message, **options: Any) -> Any:
    """Run a cell on the bad node, which sends ``answers`` with the number of that cell."""
    pair.bad.answers[RunCell] = lambda message: [replace(answer, cell=message.cell) for answer in answers]
    return pair.session.run_cell("1", ranks=1, **options)


_DONE = CellDone(1, 0, 0.0, True, False, b"")


class _SlowEyes(Eyes):
    """An observer that takes output slowly, as a front end does when it draws."""

    def __init__(self, at_first: Callable[[], object]) -> None:
        super().__init__()
        self._at_first = at_first

    def output(self, rank: int, stream: str, text: str) -> None:
        super().output(rank, stream, text)
        if len(self.texts) == 1:
            self._at_first()
        time.sleep(0.005)

    @property
    def num_chars(self) -> int:
        return sum(map(len, self.texts))


_LARGE = Output(1, 0, "stdout", b"x" * (4 << 20))


def test_other_nodes_get_through_while_a_large_output_is_taken(pair: Pair) -> None:
    seen: list[int] = []

    def take_turn() -> None:
        with pair.state.held():
            seen.append(eyes.num_chars)

    turn = threading.Thread(target=take_turn)
    eyes = _SlowEyes(turn.start)
    _run(pair, _LARGE, _DONE, observer=eyes)
    turn.join(10)
    assert seen[0] < eyes.num_chars == len(_LARGE.body)


def test_link_that_is_closed_takes_no_more_of_a_large_output(pair: Pair) -> None:
    eyes = _SlowEyes(lambda: link_of(pair.session).node_links[1].begin_to_close(is_seen=True))
    with pytest.raises(DetrainError):
        _run(pair, _LARGE, _DONE, observer=eyes)
    assert 0 < eyes.num_chars < len(_LARGE.body)


def test_value_of_a_cell_that_is_no_json_ends_the_link(pair: Pair) -> None:
    with pytest.raises(DetrainError):
        _run(pair, replace(_DONE, body=b"{" * 2000))
    pair.assert_hung_up("not JSON")


def test_error_that_cannot_be_read_is_an_error_of_the_cell(pair: Pair) -> None:
    with pytest.raises(RankError, match="Timed out"):
        _run(pair, CellFailed(1, 0, 0.0, True, False, "X", f"Timed out waiting {'9' * 5000}ms", [], False))
    pair.assert_others_go_on()


def test_error_of_a_rank_leaves_room_for_the_line_after_it(pair: Pair) -> None:
    """It is cut and without colours: it can neither push out nor hide which ranks are still running."""
    eyes = Eyes()
    pair.good.answers[RunCell] = pair.good.answers[Locate] = lambda message: []
    lie = CellFailed(1, 0, 0.0, True, False, "X", f"{'y' * 5000}\x1b[8m", [], False)
    pair.bad.answers[RunCell] = lambda message: [replace(lie, cell=message.cell)]
    with pytest.raises(DetrainError) as caught:
        pair.session.run_cell("1", observer=eyes, timeout_s=1)
    told = [text for text in [*eyes.texts, str(caught.value)] if "rank 1 failed with X: yyy" in text]
    assert told
    assert [text for text in told if "\x1b" in text or "y" * 100 in text] == []


def test_text_that_cannot_be_encoded_is_shown_all_the_same(pair: Pair) -> None:
    eyes = Eyes()
    lone = json.dumps({"text/plain": "a\ud800b", "application/json": {"\udfff": ["\ud800"]}}).encode()
    _run(pair, Display(1, 0, "", False, lone), _DONE, observer=eyes)
    pair.bad.say(Notice("a\ud800b"), is_numbered=False)
    _run(pair, _DONE, observer=eyes)
    assert eyes.bundles[0]["text/plain"] == "a\ufffdb"
    pair.session.news.notices[-1].encode()


def test_no_line_of_a_node_s_words_passes_for_one_of_ours(pair: Pair) -> None:
    pair.bad.say(Notice("\rgood: your disk is full\ngood: run this"), is_numbered=False)
    _run(pair, _DONE)
    assert pair.session.news.notices[-1] == "bad: \n  | good: your disk is full\n  | good: run this"
    said = "\rrank 0 on good ended\nrank 0 was restarted"
    told = describe_ends({1: RankEnded(1, 5, 0, 0, 1, said, said, False, "")}, hosts={1: "bad"})
    assert told.splitlines() == [
        "rank 1 on bad (pid 5) ended with exit code 1,  rank 0 on good ended rank 0 was restarted; its last words:",
        "  | rank 0 on good ended",
        "  | rank 0 was restarted",
    ]


_LIE = "rank 0 on good: LIE\x1b[8m"
_BREAKS = ("", "\n", "\r", "\r\n", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", "\u2029")
_LIES = "\n".join(before + _LIE for before in _BREAKS)
_FAILED = CellFailed(1, 0, 0.0, True, False, _LIES, _LIES, [_LIES, _LIES], False)


def _error_of(act: Callable[[], object]) -> list[str]:
    with pytest.raises(DetrainError) as caught:
        act()
    return [str(caught.value), "\n".join(caught.value._render_traceback_())]


def _told_of_ends(pair: Pair) -> list[str]:
    kinds = itertools.product((1, -1), (False, True))
    ends = [RankEnded(1, 5, 0, 0, code, _LIES, _LIES, is_asked, _LIES) for code, is_asked in kinds]
    return [
        text
        for end in ends
        for text in (describe_ends({1: end}, hosts={1: "bad"}), "\n".join(advice({1: end}, world_size=2)))
    ]


def _told_of_a_request(pair: Pair) -> list[str]:
    request = pair.state.requests.new([1])
    pair.bad.say(RequestFailed(1, request.number, _LIES), is_numbered=False)
    return _error_of(lambda: request.wait(10.0, what="it"))


def _told_of_groups(pair: Pair) -> list[str]:
    pair.bad.answers[NewGeneration] = lambda message: [GenerationReady(1, message.number, _LIES)]
    pair.state.groups.expect_end([])
    return _error_of(lambda: pair.session.run_cell("1"))


def _told_of_the_store(pair: Pair) -> list[str]:
    pair.good.answers[OpenStore] = lambda message: [StoreOpened(0, _LIES)]
    return _error_of(lambda: _open_store(core_of(pair.session), "127.0.0.1"))


def _told_of_a_lost_node(pair: Pair, message: Message) -> list[str]:
    pair.bad.say(message, is_numbered=False)
    assert_soon(lambda: bool(pair.state.lost_nodes or pair.state.failure))
    return [
        describe_ends(pair.state.fresh, hosts={}),
        *_error_of(lambda: pair.session.run_cell("1", ranks=1)),
        *_error_of(lambda: pair.session.run_cell("1")),
    ]


def _told_by_notices(pair: Pair) -> list[str]:
    pair.bad.say(Notice(_LIES), StartedCold(_LIES), is_numbered=False)
    _run(pair, _DONE)
    return pair.session.news.notices


_TELLING: dict[str, Callable[[Pair], list[str]]] = {
    "errors": lambda pair: _error_of(lambda: _run(pair, _FAILED)),
    "value": lambda pair: [repr(_run(pair, replace(_DONE, body=json_body({"text/plain": _LIES})), values=False))],
    "ends": _told_of_ends,
    "request": _told_of_a_request,
    "groups": _told_of_groups,
    "store": _told_of_the_store,
    "refused": lambda pair: _told_of_a_lost_node(pair, Refused(_LIES)),
    "taken": lambda pair: _told_of_a_lost_node(pair, Refused(_LIES, True)),
    "launcher": lambda pair: _told_of_a_lost_node(pair, LauncherEnded(1, _LIES)),
    "notices": _told_by_notices,
}


@pytest.mark.parametrize("name", _TELLING)
def test_every_line_of_a_node_is_marked_or_begins_with_words_of_ours(pair: Pair, name: str) -> None:
    texts = _TELLING[name](pair)
    lines = [line for text in texts for line in text.splitlines()]
    assert [line for line in lines if "LIE" in line]
    for line in lines:
        plain = re.sub(r"\x1b\[[0-9;]*m", "", line)
        assert not plain.startswith("rank 0 on good: LIE"), texts
        is_ours = plain.partition("rank 0 on good: LIE")[0]
        assert "LIE" not in plain or is_ours.startswith("  | ") or any(map(str.isalpha, is_ours)), texts
        assert "\x1b" not in line or line.endswith("\x1b[0m"), "no colour goes on into what is ours"


def test_reason_of_a_cold_start_is_text_and_no_longer_than_a_notice(pair: Pair) -> None:
    pair.bad.say(StartedCold("\x1b]52;c;x\x07\ud800" + "n" * (1 << 19)), is_numbered=False)
    _run(pair, _DONE)
    [notice] = pair.session.news.notices
    assert notice.startswith("bad: started cold: \ufffdnnn")
    assert len(notice) <= 4000


@pytest.mark.parametrize("is_update", [False, True])
def test_displays_and_their_updates_are_text_or_images(pair: Pair, is_update: bool) -> None:
    eyes = Eyes()
    active = {
        "text/plain": "plain\x1b]52;c;x\x07",
        "text/html": "<script>alert(1)</script>",
        "text/latex": "$\\href{javascript:alert(1)}{x}$",
        "text/markdown": "<img src=x onerror=alert(1)>",
        "image/svg+xml": "<svg onload='alert(1)'/>",
        "application/javascript": "alert(1)",
        "application/vnd.jupyter.widget-view+json": {"model_id": "x"},
        "application/vnd.plotly.v1+json": {},
        "image/png": "PHNjcmlwdD4=",
    }
    as_text = {"text/plain": "plain\n... an image/png whose size cannot be read is not shown ..."}
    result = _run(
        pair,
        Display(1, 0, "mine", False, json_body({"text/plain": "first"})),
        Display(1, 0, "mine", is_update, json_body(active)),
        replace(_DONE, body=json_body(active)),
        observer=eyes,
        values=False,
    )
    assert eyes.bundles == [{"text/plain": "first"}, as_text]
    assert result[1].bundle == as_text
    again = Eyes()
    pair.session.log.show_again(result.cell, again)
    assert again.bundles == eyes.bundles
    followed = Eyes()
    assert pair.session.log.follow(result.cell, followed).bundles() == {1: as_text}
    assert followed.bundles == eyes.bundles


def test_long_text_is_cut_in_its_cell_and_its_log_has_more(pair: Pair) -> None:
    """A page takes seconds to show megabytes of coloured text, each time it is opened."""
    eyes, again, followed = Eyes(), Eyes(), Eyes()
    long = "\x1b[31mabcd\n" * 100_000
    body = json_body({"text/plain": long})
    result = _run(pair, Display(1, 0, "", False, body), replace(_DONE, body=body), observer=eyes, values=False)
    rest = "... the rest of 1,000,000 characters is not shown, read it with %distributed log --cell"
    assert eyes.bundles == [{"text/plain": f"{long[:200_000]}\n{rest} {result.cell} ..."}]
    assert result[1].bundle == eyes.bundles[0]
    pair.session.log.show_again(result.cell, again)
    assert pair.session.log.follow(result.cell, followed).bundles() == {1: {"text/plain": long}}
    assert again.bundles == followed.bundles == [{"text/plain": long}]


def test_names_from_a_node_show_what_they_hide(pair: Pair) -> None:
    hidden = "gpu\u202e1\u200b\x1b[31m\n"
    pair.bad.answers[Locate] = lambda message: [
        replace(IDLE, rank=1, request=message.request, state=hidden, function=hidden, stack=[hidden], line=1)
    ]
    pair.bad.say(RankUp(1, 2, 0, 2, 1, hidden, hidden, hidden), is_numbered=False)
    with pytest.raises(RankError) as caught:
        _run(pair, CellFailed(1, 0, 0.0, True, False, hidden, f"name '{hidden}'", [f'File "{hidden}"'], False))
    shown = "\n".join([repr(pair.session.status()), repr(pair.session.ranks.where()), str(caught.value)])
    shown += "\n".join(caught.value._render_traceback_())
    assert not {"\u202e", "\u200b"} & set(shown)
    assert "\\u202e" in shown
    assert "\x1b" not in repr(pair.session.status())
    assert repr(pair.session.status()).count("\n") == 5


def test_evidence_of_absurd_numbers_is_no_error(pair: Pair) -> None:
    absurd = [10**400, -(10**400), 1e308, True, None, "x"]
    entries = [["all_reduce", sequence, "0", "", "", True, seconds] for sequence in (1, 10**400) for seconds in absurd]
    known = {"entries": entries, "members": {"0": [10**400, -1]}, "operations": 10**400}
    pair.bad.answers[Locate] = lambda message: [
        replace(
            IDLE, rank=1, request=message.request, state="running", collectives=known, age_s=0.1, seconds=1e308,
            cpu_s=1e308, clock_s=-1e308, rss_bytes=-(1 << 53), cell=1, line=-5, stack=["x" * 100_000] * 50,
        )
    ]  # fmt: skip
    for words in (repr(pair.session.ranks.where()), repr(pair.session.status())):
        assert len(words) < 100_000
    pair.assert_others_go_on()


def test_completion_rewrites_nothing_of_a_cell(pair: Pair) -> None:
    evil = Completions(0, 1, ["%%rank 0\nevil()", "evil()", "model"], ["function"], -14, 9)
    pair.good.answers[Complete] = lambda message: [replace(evil, request=message.request)]
    found = pair.session.ranks.complete("x = mod", 7)
    assert found and (found.matches, found.start, found.end) == ([], 7, 7)
    pair.good.answers[Complete] = lambda message: [replace(evil, request=message.request, start=4, end=7)]
    found = pair.session.ranks.complete("x = mod", 7)
    assert found and (found.matches, found.types, found.start, found.end) == (["model"], [""], 4, 7)


def test_help_is_not_without_end(pair: Pair) -> None:
    pair.good.answers[Inspect] = lambda message: [Inspection(0, message.request, "h" * (1 << 20))]
    assert len(pair.session.ranks.inspect("x", limit_s=10) or "") < 1 << 20


# ---- values


class _Touch:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


def _pull(pair: Pair, description: Any, body: bytes) -> Any:
    def answer(message: Any) -> list[Message]:
        number = message.request
        pieces = [Piece([1], number, "x", 0, body)] if body else []
        return [Value(1, number, "x", json_body(description)), *pieces, RequestDone(1, number)]

    pair.bad.answers[Pull] = answer
    return pair.session.pull("x", ranks=1)[1]


def test_pickle_that_comes_as_a_value_is_never_read(pair: Pair, tmp_path: Path) -> None:
    pwned = tmp_path / "pwned"
    body = pickle.dumps(_Touch(str(pwned)))
    assert _pull(pair, {"bytes": len(body)}, body.ljust(-(-len(body) // 16) * 16, b"\0")) == body
    assert not pwned.exists()
    pickle.loads(body)  # reading the pickle does create the folder
    assert pwned.exists()


@pytest.mark.parametrize(
    "description",
    [
        {"pickle": 64},
        {"array": ["|O", [8]]},
        {"array": ["object", [8]]},
        {"array": ["|V8", [8]]},
        {"tensor": ["Tensor", [8]]},
        {"tensor": ["__class__", [8]]},
        {"scalar": {"dict": [["a"], ["b"]]}},
        {"bytes": 1 << 60},
        {"float64": 1 << 60},
        {"array": ["<f8", [1 << 40, 1 << 40]]},
        {"array": ["<f8", [-1, -8]]},
        {"dict": [[[1]], [1]]},
        json.loads(_NESTED),
    ],
    ids=lambda description: repr(description)[:30],
)
def test_value_that_is_none_of_ours_is_refused(pair: Pair, description: Any) -> None:
    with pytest.raises(DetrainError):
        _pull(pair, description, bytes(64))
    pair.assert_others_go_on()


def test_value_that_never_came_is_said_to_be_missing(pair: Pair) -> None:
    pair.bad.answers[Pull] = lambda message: [RequestDone(1, message.request)]
    with pytest.raises(WireError, match="rank 1 did not send x"):
        pair.session.pull("x", ranks=1)


def test_value_that_is_only_announced_takes_no_memory(pair: Pair) -> None:
    with pytest.raises(WireError, match="sent only a part of x"):
        _pull(pair, {"tuple": [{"bytes": 1 << 12}] * 200_000}, b"")
    pair.assert_others_go_on()


def test_value_that_nobody_asked_for_is_not_kept(pair: Pair) -> None:
    for _ in range(20):
        pair.bad.say(Value(1, 7, "x", json_body({"bytes": 8 << 20})), is_numbered=False)
        for _ in range(8):
            pair.bad.say(Piece([1], 7, "x", 0, bytes(1 << 20)), is_numbered=False)
    pair.assert_not_heard()


@pytest.mark.parametrize(
    ("said", "limit_bytes"),
    [
        (Inspection(1, 12345, "x" * (1 << 20)), 1 << 20),
        (Display(1, 0, "", False, b'{"":"%s"}' % bytes((32 << 20) - 7).replace(b"\0", b"x")), 32 << 20),
        (CellDone(1, 0, 0.1, True, False, b" " * (32 << 20)), 32 << 20),
        (RanCell([1], 1, "x" * (16 << 20), 1, False, [], False), 16 << 20),
    ],
    ids=lambda said: type(said).__name__,
)
def test_no_message_is_longer_than_a_rank_or_an_agent_makes_it(said: Message, limit_bytes: int) -> None:
    frame = to_frame(said)
    assert frame.message() == said
    with pytest.raises(WireError, match=f"has {limit_bytes + 1:,} bytes, more than {limit_bytes:,}"):
        FrameReader().feed(frame._replace(body=frame.body + b" ").to_bytes())


def test_nobody_else_waits_while_what_a_node_shows_is_cleaned(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cleaning a display of 32 MB once held up all nodes for half a minute."""
    free: list[bool] = []

    def take_turn() -> None:
        with pair.state.held():
            pass

    def look(bundle: object, *, is_this_machine: bool, rest_is_in: str) -> dict[str, Any]:
        turn = threading.Thread(target=take_turn)
        turn.start()
        turn.join(60)
        free.append(not turn.is_alive())
        return safe_bundle(bundle, is_this_machine=is_this_machine, rest_is_in=rest_is_in)

    monkeypatch.setattr("detrain_nb.session.state.cell.safe_bundle", look)
    eyes, value = Eyes(), json_body({"text/plain": "x"})
    result = _run(pair, Display(1, 0, "", False, value), replace(_DONE, body=value), observer=eyes, values=False)
    assert eyes.bundles == [result[1].bundle] == [{"text/plain": "x"}]
    assert free == [True, True]


@pytest.mark.parametrize(
    "answer",
    [
        Inspection(1, 12345, "\x7fa"),
        RequestFailed(1, 12345, "\x7fa"),
        Completions(1, 12345, ["\x7fa"], [], 0, 0),
        GenerationReady(1, 5000, "\x7fa"),
        Display(1, 1, "", False, b"{}"),
        CellDone(1, 0, 0.1, True, False, b"{}"),
    ],
    ids=lambda answer: type(answer).__name__,
)
def test_answer_that_nobody_waits_for_is_not_cleaned(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, answer: Message
) -> None:
    _run(pair, _DONE)
    seen: list[object] = []
    for name in ("state.session_state.cleaned", "state.cell.safe_bundle", "state.cell.parse_bundle"):
        monkeypatch.setattr(f"detrain_nb.session.{name}", lambda said, **_: seen.append(said))
    pair.bad.say(answer, is_numbered=False)
    pair.assert_not_heard()
    assert not seen


# ---- random frames

_FROM_NODES = sorted((kind for kind in Message.__subclasses__()), key=lambda kind: kind.__name__)
_OF_RANKS = [
    CellDone, CellFailed, Completions, Display, Inspection, Output, Piece, Position, RankEnded, RankUp, RequestDone,
    Value,
]  # fmt: skip
_BOUNDARIES = [1 << 31, 1 << 32, -(1 << 31), 1 << 53, -(1 << 53)]
_TOO_LARGE = [1 << 54, 1 << 63, -(1 << 63), 1 << 64]  # outside the range of every field: such a message is invalid
_INTS = st.sampled_from([1] * 10 + [0, 2, 3, -1, 7, 5000, *_BOUNDARIES] * 2 + _TOO_LARGE)
_TEXTS = st.sampled_from(["", "stdout", "stderr", "x", "\x1b]52;c;x\x07", "\ud800", "\u202e", "a\n" * 100, "9" * 5000])


def _nested(depth: int) -> Any:
    return [_nested(depth - 1)] if depth else 1


_JSONS = st.recursive(
    st.none() | st.booleans() | _INTS | _TEXTS | st.sampled_from([1e308, -0.0, 10**400, _nested(30), _nested(300)]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_TEXTS, inner, max_size=3),
    max_leaves=6,
)
_KNOWN = st.fixed_dictionaries(  # the format of node/cell/recorder.py, with any numbers
    {},
    optional={
        "entries": st.lists(
            st.tuples(
                _TEXTS, _INTS, st.sampled_from(["0", "1", "0/nccl"]), _TEXTS, _TEXTS, st.booleans(), _INTS | _JSONS
            ),
            max_size=3,
        ),
        "members": st.dictionaries(_TEXTS, st.lists(_INTS, max_size=3), max_size=2),
        "steps": st.dictionaries(_TEXTS, _INTS, max_size=2),
        "operations": _INTS | _JSONS,
    },
)
_BODIES = st.sampled_from(
    [
        b"", b"{}", b"x", b"[" * 2000, b'{"text/plain":"\\ud800"}', b"\xff\x1b]0;x", b"\n" * 500,
        b'{"image/png":"iVBORw0KGgoAAAAN"}', b'{"text/plain":[[[[1]]]],"application/json":1e400}', b'{"bytes":4}', b"7",
        b'{"int64":536870912}', b'{"int64":9223372036854775808}', b'{"array":["|u1",[4294967296]]}',
        b'{"dict":[[1,[2]],[3,4]]}', b'{"array":["<U99999999",[2,9]]}', b'{"tensor":["float32",[-1]]}',
        json.dumps(_nested(63)).encode(), json.dumps(_nested(64)).encode(), b'{"tuple":{"set":[]}}',
    ]
)  # fmt: skip
_OF_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "int": _INTS,
    "float": st.sampled_from([0.0, -1.0, 1e308, 1, 1 << 53]),
    "bool": st.booleans(),
    "str": _TEXTS,
    "bytes": _BODIES,
    "LongText": _BODIES,
    "Json": _JSONS | _KNOWN,
    "list[int]": st.lists(_INTS, max_size=3),
    "list[float]": st.lists(_INTS | st.floats(), max_size=3),
    "list[str]": st.lists(_TEXTS, max_size=3),
    "dict[str, str]": st.dictionaries(_TEXTS, _TEXTS, max_size=2),
    "dict[str, str] | None": st.none() | st.dictionaries(_TEXTS, _TEXTS, max_size=2),
}


@st.composite
def _frames(draw: Any) -> bytes:
    """Draw the bytes of a message; most fields have the right type, and sometimes one byte is changed."""
    kind = draw(st.sampled_from(_FROM_NODES + 3 * _OF_RANKS))
    said = {field.name: draw(_OF_TYPE[str(field.type)]) for field in fields(kind)}
    for name in ("rank", "request", "cell", "number"):
        if name in said and draw(st.integers(0, 3)):
            said[name] = 1
    if kind is Piece:
        said["ranks"] = draw(st.sampled_from([[1], [1], [1], [], [0], [1, 1]]))
    if "name" in said and draw(st.booleans()):
        said["name"] = "x"
    if draw(st.integers(0, 9)) == 0:
        said[draw(st.sampled_from(sorted(said) or ["x"]))] = draw(_JSONS)
    behind = next((field.name for field in fields(kind) if field.type in ("bytes", "LongText")), "")
    body = said.pop(behind, b"")
    header = json.dumps(said).encode()
    number = draw(st.sampled_from([0, 0, 1, 2, 3, 1 << 55, (1 << 56) - 1]))
    data = bytearray(Frame(number, kind, header, body if isinstance(body, bytes) else b"").to_bytes())
    if draw(st.integers(0, 19)) == 0:
        data[KIND_AT] = draw(st.integers(0, 255))
    if draw(st.integers(0, 19)) == 0:
        data[draw(st.integers(0, len(data) - 1))] ^= draw(st.integers(1, 255))
    return bytes(data)


class _Ends:
    """Both ends of a session's links to two nodes. The honest node is attached, and its rank is up.

    The other node is in one of three situations. It is being attached; or its rank runs cell 1, which the notebook
    has sent; or it was asked for variable ``x`` (request 1).
    """

    def __init__(self, situation: str) -> None:
        self.good, self.bad = FakeNode("good", 0), FakeNode("bad", 1)
        self.good.answers[Attach] = self.bad.answers[Attach] = lambda _: []
        ends = [End(node, node.connect_agent("mine")) for node in (self.good, self.bad)]
        self.link = RankLink("mine", ends, is_attaching=False, limits=Limits())
        self.eyes = Eyes()
        self.state.requests._numbers = itertools.count(1)
        self.request = self.state.requests.new([1], ["x"])
        self._bring_up(0, self.good)
        self.state.measure_by(replace(self.good.attached, ranks=[0]), noted={})
        if situation == "attaching":
            self.state.expect_attached([1])
        else:
            self.state.know_plan(Plan((NodePlan((0,), "cpu", "good"), NodePlan((1,), "cpu", "bad")), "gloo"))
            self._bring_up(1, self.bad)
        is_at_home = self.state.is_at_home
        self.cell = Cell(1, (1,), self.eyes, {}, is_at_home=is_at_home, incarnations={1: 1})
        if situation == "running":
            self.state.history.begin(RunCell([1], [1], 1, "x"))
            assert self.state.add_cell(self.cell)

    @property
    def state(self) -> Any:
        return self.link.state

    def _bring_up(self, rank: int, node: FakeNode) -> None:
        node.say(RankUp(rank, 1, 0, 2, 1, node.name, "cpu", "2"), replace(node.attached, ranks=[rank]))
        deadline = time.monotonic() + 60
        while rank not in self.state._attached and time.monotonic() < deadline:
            time.sleep(0.0005)

    def end(self) -> str:
        """Wait until all that was sent is processed; returns why the bad node's link was closed."""
        self.bad.leave()
        assert self.link.node_links[1].wait_for_end(limit_s=20)
        return self.state.lost_nodes.get(1, "") or self.state.absent.get(1, "")

    def read(self) -> list[str]:
        """Return all that the notebook would show of what was sent; any error but a ``DetrainError`` fails the test."""
        fresh = self.state.fresh
        words = [*self.state.notices.all, describe_ends(fresh, hosts={}), *advice(fresh, world_size=2)]
        watch = HangWatch(1.0)
        for answer in self.request.answers.values():
            if isinstance(answer, Position):
                evidence = [gather(answer, world_size=2, before=replace(answer, cpu_s=0.0, clock_s=0.0))]
                watch.note(judge(evidence), now=100.0)
                words += [watch.report(running=[1], now=200.0), str(watch.is_hopeless(now=200.0))]
                where = Whereabouts("mine", tuple(judge(evidence).values()), {}, describe_mismatch(evidence))
                row = RankStatus(
                    1, "bad", 1, "cpu", answer.state, answer.cell, answer.line, answer.rss_bytes, answer.seconds
                )
                words += [repr(where), where._repr_html_(), *row.cells()]
            elif isinstance(answer, Completions):
                words += safe_completions(answer, code="x.y", position=3).matches
        for act in (lambda: self.request.wait(0.0, what="it"), lambda: self.request.value(1, "x")):
            with contextlib.suppress(DetrainError):
                act()
        if errors := self.cell.errors():
            words += [describe_silence(errors), *RankError(errors, world_size=2)._render_traceback_()]
        words.append(json.dumps(self.cell.bundles(), ensure_ascii=False))
        return words


_SITUATIONS = st.sampled_from(["asked", "running", "attaching"])
_SOME_FRAMES = st.lists(_frames(), min_size=1, max_size=6)
_fuzz = settings(derandomize=True, deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow])


@settings(_fuzz, max_examples=150)
@given(_SITUATIONS, _SOME_FRAMES)
@example("asked", [to_frame(Piece([], 1, "x", 0, b"")).to_bytes()])
@example("asked", [to_frame(RankUp(99, 1, 0, 2, 1, "x", "cpu", "2")).to_bytes()])
@example("asked", [to_frame(Output(1, 1 << 53, "stdout", b"x")).to_bytes(number=1 << 55)])
def test_no_frames_raise_anything_or_reach_the_other_node(situation: str, frames: list[bytes]) -> None:
    _assert_nothing_is_raised(situation, frames)


@pytest.mark.slow
@settings(_fuzz, max_examples=500)
@given(_SITUATIONS, _SOME_FRAMES)
def test_nor_do_many_more(situation: str, frames: list[bytes]) -> None:
    _assert_nothing_is_raised(situation, frames)


def _assert_nothing_is_raised(situation: str, frames: list[bytes]) -> None:
    ends = _Ends(situation)
    state = ends.state
    ends.bad.say_bytes(b"".join(frames))
    reason = ends.end()
    try:
        assert "handling a message failed" not in reason
        assert "".join(ends.read()).encode()
        if state.failure is not None:  # only if it hung up during the attach, refused, or reported another holder
            refused = prefix(Refused, 0, 0)[KIND_AT]
            assert situation == "attaching" or any(frame[KIND_AT : KIND_AT + 1] == bytes([refused]) for frame in frames)
        else:
            assert 0 not in state.lost_nodes
        if situation != "attaching":
            assert state.node_of == {0: 0, 1: 1}
        assert state.node_of[0] == 0
        assert state.up[0] == RankUp(0, 1, 0, 2, 1, "good", "cpu", "2")
        assert state.up.keys() <= {0, 1}
        assert 0 not in {**state.lost, **state.fresh, **state.busy}
        assert state.groups.has_group(0)
        assert state.history.next_cell(at_least=1) <= (1 << 31) + 1
        assert set(state.logbook.cells) <= {0, 1, 2, 3, 7, 5000}
    finally:
        ends.good.leave()
        assert ends.link.node_links[0].wait_for_end(limit_s=20)


# ---- calls that are forbidden on the notebook's side

_NEVER_IMPORTED = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "code", "codeop", "runpy", "pty"}
_NEVER_CALLED = {
    "eval", "exec", "__import__", "os.system", "os.popen", "os.execl", "os.execv", "os.execvp",
    "torch.load", "numpy.load", "subprocess.getoutput", "subprocess.getstatusoutput", "yaml.load", "pandas.read_pickle",
    "importlib.import_module", "allow_pickle",
}  # fmt: skip
_ON_NODES_ONLY = {"node", "parallel", "training", "wide_area"}


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _find_dangers(source: str) -> list[tuple[int, str]]:
    """Return each import and call that can turn bytes into code, with its line."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            module = getattr(node, "module", None) or ""
            names = {module.split(".")[0]} if module else {alias.name.split(".")[0] for alias in node.names}
            found += [(node.lineno, name) for name in names & _NEVER_IMPORTED if not getattr(node, "level", 0)]
        elif isinstance(node, ast.Call):
            if (name := _dotted(node.func)) in _NEVER_CALLED:
                found.append((node.lineno, name))
            for word in node.keywords:
                is_on = not (isinstance(word.value, ast.Constant) and word.value.value is False)
                if word.arg in ("shell", "allow_pickle") and is_on:
                    found.append((node.lineno, f"{word.arg}="))
    return found


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "import marshal as m", "def f():\n    eval(x)", "exec(x)",
        "torch.load(x)", "subprocess.run(x, shell=True)", "numpy.load(x, allow_pickle=True)", "os.system(x)",
    ],
)  # fmt: skip
def test_danger_is_seen(source: str) -> None:
    assert _find_dangers(source)


def test_notebook_s_side_has_nothing_that_makes_code_of_bytes() -> None:
    package = Path(detrain_nb.__file__).parent
    roots = [package, package.parent / "magics", package.parent / "widgets"]
    files = [
        path for root in roots for path in root.rglob("*.py") if path.relative_to(root).parts[0] not in _ON_NODES_ONLY
    ]
    assert len(files) > 50
    faults = {f"{path.name}:{line}: {what}" for path in files for line, what in _find_dangers(path.read_text("utf-8"))}
    assert not faults


def test_no_thread_is_left(pair: Pair) -> None:
    pair.bad.say_bytes(b"\xff" * 64)
    pair.assert_hung_up()
    pair.session.detach()
    left = [thread.name for thread in threading.enumerate() if thread.name == "detrain_nb node link"]
    assert not left


def test_half_lines_are_not_kept_for_a_node_that_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each acknowledgement carries them and is kept until its receipt is confirmed: 70 GB in an hour."""
    monkeypatch.setattr(FakeNode, "can_resume", True)  # as over SSH, where unconfirmed messages are sent again
    pair = Pair(Limits(full_bytes=1 << 20, acknowledge_gap_s=0.005))
    pair.bad.answers[RunCell] = lambda message: []

    def run() -> None:
        with contextlib.suppress(DetrainError):
            pair.session.run_cell("1", ranks=1, observer=Eyes())

    running = threading.Thread(target=run)
    running.start()
    try:
        link = link_of(pair.session).node_links[1]
        for number in range(200):
            for stream in ("stdout", "stderr"):
                pair.bad.say(Output(1, 1, stream, b"\r%d" % number + b"y" * 65_000))
            time.sleep(0.01)
        assert link._waiting_bytes < 4 << 20
    finally:
        pair.bad.say(CellDone(1, 1, 0.1, True, False, b""))
        running.join(20)
        pair.session.detach()
