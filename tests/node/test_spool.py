"""The spool: every reader gets all frames once and in order, or a notice of what is missing, even on a full disk."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from detrain_nb.node.agent.spool import Spool
from detrain_nb.wire import Frame, FrameReader, Notice, Output, RequestDone, to_frame

from ..full_disk import files_end_at

_NewSpool = Callable[..., Spool]


def _read_all(spool: Spool, *, limit_bytes: int = 1 << 18) -> list[Frame]:
    reader, frames = FrameReader(), []
    while data := spool.read(limit_bytes):
        frames += reader.feed(data)
    assert reader.is_empty, "the reader was left in the middle of a frame"
    return frames


def _output(index: int, size_bytes: int = 26) -> Frame:
    return to_frame(Output(0, index, "stdout", b"x" * size_bytes))


def _read_again(spool: Spool) -> list[Frame]:
    spool.rewind()
    return _read_all(spool)


def _cells(frames: list[Frame]) -> list[int]:
    return [frame.message().cell for frame in frames if isinstance(frame.message(), Output)]


def _requests(frames: list[Frame]) -> list[int]:
    return [frame.message().request for frame in frames if isinstance(frame.message(), RequestDone)]


def _notices(frames: list[Frame]) -> list[Frame]:
    return [frame for frame in frames if isinstance(frame.message(), Notice)]


def _lost_bytes(notice: Frame) -> int:
    [size] = re.findall(r"about ([0-9,]+) bytes of output were lost", notice.message().text)
    return int(size.replace(",", ""))


def _size_of(frames: list[Frame]) -> int:
    return sum(len(frame.to_bytes()) for frame in frames)


def _size_on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.fixture
def new_spool(tmp_path: Path) -> Iterator[_NewSpool]:
    with contextlib.ExitStack() as opened:

        def make(**options: Any) -> Spool:
            spool = Spool(tmp_path, **options)
            opened.callback(spool.close)
            return spool

        yield make


@pytest.fixture
def a_mark_a_frame(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the spool treat every frame as a large one."""
    monkeypatch.setattr("detrain_nb.node.agent.spool._MARK_BYTES", 1)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a segment hold a few frames, and memory a few segments."""
    monkeypatch.setattr("detrain_nb.node.agent.spool._SEGMENT_BYTES", 600)
    monkeypatch.setattr("detrain_nb.node.agent.spool._MEMORY_SEGMENT_BYTES", 300)
    monkeypatch.setattr("detrain_nb.node.agent.spool._MEMORY_BYTES", 1500)
    monkeypatch.setattr("detrain_nb.node.agent.spool._MARK_BYTES", 150)


def test_frames_come_out_once_numbered_in_order(new_spool: _NewSpool) -> None:
    spool = new_spool()
    for index in range(3):
        spool.append(_output(index))
    first = _read_all(spool)
    for index in range(3, 5):
        spool.append(_output(index))
    frames = first + _read_all(spool)
    assert [frame.number for frame in frames] == [1, 2, 3, 4, 5]
    assert [frame.message().cell for frame in frames] == [0, 1, 2, 3, 4]
    assert not spool.has_more


def test_reader_that_is_behind_reads_over_many_segments(new_spool: _NewSpool, tmp_path: Path) -> None:
    spool = new_spool()
    for index in range(40):
        spool.append(_output(index, 1 << 20))
    assert len(list(tmp_path.iterdir())) > 3
    assert [frame.message().cell for frame in _read_all(spool, limit_bytes=70_000)] == list(range(40))
    spool.close()
    assert not list(tmp_path.iterdir())


def test_reader_that_waits_is_given_what_comes_without_the_disk(new_spool: _NewSpool, tmp_path: Path) -> None:
    spool = new_spool()
    spool.append(_output(0))
    for path in tmp_path.iterdir():
        path.write_bytes(b"")
    assert _cells(_read_all(spool)) == [0]


def test_spool_over_its_limit_drops_the_oldest_and_says_so(new_spool: _NewSpool, tmp_path: Path) -> None:
    spool = new_spool(limit_bytes=24 << 20)
    spool.append(_output(0))
    reader = FrameReader()
    frames = reader.feed(spool.read(20))  # the reader is in the middle of the first segment
    for index in range(1, 100):
        spool.append(_output(index, 1 << 20))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) < 40 << 20
    while data := spool.read():
        frames += reader.feed(data)
    cells = [frame.message().cell for frame in frames if isinstance(frame.message(), Output)]
    assert reader.is_empty
    assert cells[0] == 0
    assert cells == sorted(set(cells))
    assert cells[-1] == 99
    notices = [frame.message().text for frame in frames if isinstance(frame.message(), Notice)]
    assert notices
    assert "over its limit" in notices[0]


def test_next_reader_gets_what_follows_the_acknowledged_number(new_spool: _NewSpool) -> None:
    spool = new_spool()
    for index in range(1, 6):
        spool.append(_output(index))
    first = _read_all(spool)
    spool.acknowledge(2)
    assert spool.acknowledged == 2
    assert _read_again(spool) == first[2:]
    spool.append(_output(6))
    spool.rewind()
    spool.append(_output(7))
    assert _cells(_read_all(spool)) == [3, 4, 5, 6, 7]
    spool.acknowledge(7)
    assert not _read_again(spool)
    spool.append(_output(8))
    assert _cells(_read_again(spool)) == [8]


@pytest.mark.usefixtures("a_mark_a_frame")
def test_what_is_read_ends_with_a_whole_frame(new_spool: _NewSpool) -> None:
    """The agent may send other messages between two reads."""
    spool, reader = new_spool(), FrameReader()
    for index in range(1, 4):
        spool.append(_output(index, 100))
    for count, limit_bytes in enumerate((250, 1, 250), 1):
        assert len(reader.feed(spool.read(limit_bytes))) == 1
        assert reader.is_empty
        assert spool.sent == count
    assert not spool.has_more


@pytest.mark.usefixtures("a_mark_a_frame")
def test_next_reader_begins_after_what_was_acknowledged(new_spool: _NewSpool) -> None:
    spool = new_spool()
    for index in range(1, 4):
        spool.append(_output(index, 100))
    spool.read(250)
    spool.acknowledge(1)
    assert _cells(_read_again(spool)) == [2, 3]
    assert spool.sent == 3


@pytest.mark.usefixtures("a_mark_a_frame")
def test_number_that_was_not_sent_or_is_lower_acknowledges_nothing(new_spool: _NewSpool) -> None:
    spool = new_spool()
    for index in range(1, 6):
        spool.append(_output(index))
    spool.acknowledge(1)
    assert spool.acknowledged == 0, "nothing was sent"
    for _ in range(3):
        spool.read(1)
    assert spool.sent == 3
    spool.acknowledge(4)
    assert spool.acknowledged == 0
    spool.acknowledge(3)
    spool.acknowledge(2)
    assert spool.acknowledged == 3
    assert _cells(_read_again(spool)) == [4, 5]


@pytest.mark.usefixtures("small_segments")
def test_acknowledged_segments_leave_the_disk(new_spool: _NewSpool, tmp_path: Path) -> None:
    spool = new_spool()
    for index in range(1, 41):
        spool.append(_output(index))
    before = _size_on_disk(tmp_path)
    _read_all(spool)
    assert _size_on_disk(tmp_path) == before, "what nobody acknowledged is kept"
    spool.acknowledge(20)
    assert before / 2 <= _size_on_disk(tmp_path) < before / 2 + 600
    assert _cells(_read_again(spool)) == list(range(21, 41))
    spool.acknowledge(40)
    assert len(list(tmp_path.iterdir())) == 1, "more than the one that is being written"
    spool.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("small_segments")
def test_what_was_read_but_not_acknowledged_is_bounded_and_missed_by_the_next_reader_only(
    new_spool: _NewSpool, tmp_path: Path
) -> None:
    spool = new_spool(limit_bytes=3000)
    frames: list[Frame] = []
    for index in range(1, 101):
        spool.append(_output(index, index % 3 * 20))
        frames += _read_all(spool)
        spool.acknowledge(5)
        assert _size_on_disk(tmp_path) <= 3000
    assert _cells(frames) == list(range(1, 101))
    assert len(frames) == 100, "who read everything has lost nothing"
    [notice, *rest] = again = _read_again(spool)
    assert rest == frames[-len(rest) :]
    assert _size_of(rest) > 3000 - 2 * 600, "more was lost than had to be"
    assert notice.number == rest[0].number - 1, "the number is that of the last frame that is missing"
    assert "over its limit of 3,000 bytes" in notice.message().text
    assert _lost_bytes(notice) == _size_of(frames[5 : notice.number])
    assert _read_again(spool) == again, "nobody acknowledged the notice"
    spool.acknowledge(20)  # one of the missing frames
    [notice] = _notices(_read_again(spool))
    assert _lost_bytes(notice) == pytest.approx(_size_of(frames[20 : notice.number]), rel=0.05)
    spool.acknowledge(notice.number)
    assert _read_again(spool) == rest


@pytest.mark.usefixtures("small_segments")
def test_acknowledging_a_part_of_what_is_missing_leaves_the_rest_to_be_told(new_spool: _NewSpool) -> None:
    spool = new_spool(limit_bytes=3000)
    for index in range(4):
        spool.append(_output(index, 146))
    frames, rest = FrameReader(), spool.read(20)  # the reader is in the first segment, so the second is dropped
    for index in range(4, 80):
        spool.append(_output(index))
    while data := spool.read():
        rest += data
    [notice] = _notices(frames.feed(rest))
    spool.acknowledge(notice.number - 10)
    [again, *_] = _read_again(spool)
    assert again.number == notice.number
    assert _lost_bytes(again) == pytest.approx(10 * _size_of([_output(4)]), rel=0.05)


@pytest.fixture
def full_disk() -> Iterator[None]:
    with files_end_at(1 << 16):
        yield


@pytest.mark.usefixtures("full_disk")
def test_full_disk_loses_output_within_bounds_and_never_the_end_of_a_cell(new_spool: _NewSpool) -> None:
    spool = new_spool()
    for index in range(40):
        spool.append(_output(index, 1 << 20))
        spool.append(to_frame(RequestDone(0, index)))
    frames = _read_all(spool)
    ends = [frame.message().request for frame in frames if isinstance(frame.message(), RequestDone)]
    kept = [frame.message().cell for frame in frames if isinstance(frame.message(), Output)]
    assert ends == list(range(40)), "the end of a cell was lost"
    assert 10 < len(kept) < 20, "memory holds 16 MB of output"
    assert len(frames) == len(ends) + len(kept)
    spool.append(_output(99))
    [notice, last] = _read_all(spool)
    assert "the disk is full" in notice.message().text
    assert last.message().cell == 99


@pytest.mark.usefixtures("full_disk")
def test_reader_that_keeps_up_loses_nothing_on_a_full_disk(new_spool: _NewSpool, tmp_path: Path) -> None:
    spool, reader, frames = new_spool(), FrameReader(), []
    for index in range(50):
        spool.append(_output(index, 1 << 20))
        while data := spool.read():
            frames += reader.feed(data)
    assert [frame.message().cell for frame in frames] == list(range(50))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1 << 17


def _fill(spool: Spool, indices: range) -> None:
    """Append 900 KB of output and an end for each index."""
    for index in indices:
        spool.append(_output(index, 900_000))
        spool.append(to_frame(RequestDone(0, index)))


@pytest.mark.usefixtures("full_disk")
def test_memory_is_kept_until_it_is_acknowledged(new_spool: _NewSpool, tmp_path: Path) -> None:
    spool = new_spool()
    _fill(spool, range(12))
    assert not _size_on_disk(tmp_path)
    frames = _read_all(spool)
    assert _cells(frames) == _requests(frames) == list(range(12))
    assert _read_again(spool) == frames
    spool.acknowledge(20)
    _fill(spool, range(12, 24))
    frames = frames[20:] + _read_all(spool)
    assert _cells(frames) == _requests(frames) == list(range(10, 24)), "what was acknowledged left no room"
    assert _read_again(spool) == frames


def test_memory_that_nobody_acknowledges_is_bounded_and_keeps_the_ends_of_cells(
    new_spool: _NewSpool, tmp_path: Path
) -> None:
    spool = new_spool()
    frames: list[Frame] = []
    for index in range(40):
        with files_end_at(0):
            _fill(spool, range(index, index + 1))
        frames += _read_all(spool)
    assert not _size_on_disk(tmp_path)
    kept, notices = _cells(frames), _notices(frames)
    assert sum(map(_lost_bytes, notices)) == (40 - len(kept)) * 900_000, "who read everything was not told all"
    again = _read_again(spool)
    assert again == frames
    assert _requests(again) == list(range(40)), "the end of a cell was lost"
    assert 10 < len(kept) < 20, "memory holds 16 MB of output"


@pytest.mark.usefixtures("full_disk")
def test_memory_makes_room_by_what_was_read_and_tells_the_next_reader(new_spool: _NewSpool) -> None:
    spool = new_spool()
    frames: list[Frame] = []
    for index in range(40):
        spool.append(_output(index, 1 << 20))
        frames += _read_all(spool)
    assert _cells(frames) == list(range(40))
    assert len(frames) == 40
    [notice, *rest] = _read_again(spool)
    assert rest == frames[-len(rest) :]
    assert 10 < len(rest) < 17, "memory holds 16 MB of output"
    assert notice.number == rest[0].number - 1
    assert "the disk is full" in notice.message().text
    assert _lost_bytes(notice) == _size_of(frames[: notice.number])


def test_disk_that_has_room_again_is_used_before_output_is_lost(new_spool: _NewSpool, tmp_path: Path) -> None:
    spool = new_spool()
    with files_end_at(1 << 16):
        _fill(spool, range(12))
    _fill(spool, range(12, 40))
    assert _size_on_disk(tmp_path) > 15 << 20
    frames = _read_all(spool)
    assert _cells(frames) == _requests(frames) == list(range(40))


def test_output_that_found_no_room_is_announced_once_before_the_next_output(new_spool: _NewSpool) -> None:
    spool = new_spool()
    with files_end_at(0):
        _fill(spool, range(20))
        # There is room for these, but after a loss the notice must come first.
        for index in range(20, 30):
            spool.append(_output(index, 900_000 if index % 2 else 0))
    for index in range(100, 110):
        spool.append(_output(index))
    frames = _read_all(spool)
    [notice] = _notices(frames)
    kept = len(_cells(frames[: frames.index(notice)]))
    assert _requests(frames) == list(range(20))
    assert _lost_bytes(notice) == (25 - kept) * 900_000
    assert _cells(frames[frames.index(notice) :]) == list(range(100, 110))


class _Oracle:
    """A list of all frames, which checks that a reader gets each one in its place or a notice that it is missing."""

    def __init__(self, folder: Path, limit_bytes: int) -> None:
        self.frames = [Frame(0, Notice, b"", b"")]  # by number
        self.acknowledged = self.sent = self.given_whole = self.last = 0
        self.gaps = 0
        self._folder = folder
        self._limit_bytes = limit_bytes
        self._refused_bytes = 0
        self._tail = b""

    def append(self, frame: Frame, last_number: int) -> None:
        if last_number == len(self.frames) - 1:
            assert isinstance(frame.message(), Output)
            self._refused_bytes += len(frame.body)
            return
        if last_number == len(self.frames) + 1:
            lost = f"about {self._refused_bytes:,} bytes of output were lost under {self._folder}"
            self._keep(to_frame(Notice(f"{lost}: the disk is full; the ranks kept running")))
            self._refused_bytes = 0
        self._keep(frame)
        assert last_number == len(self.frames) - 1

    def take(self, data: bytes) -> None:
        self._tail += data
        for frame in FrameReader().feed(self._tail):
            self._tail = self._tail[len(frame.to_bytes()) :]
            assert frame.number > self.last, "a frame came again"
            if frame != self.frames[self.last + 1]:
                self._check_gap(frame, self.frames[self.last + 1 : frame.number + 1])
            self.last = frame.number
            self.given_whole = max(self.given_whole, self.last)
        number_in_part = int.from_bytes(self._tail[9:16], "big") if len(self._tail) >= 16 else self.last + 1
        self.sent = max(self.sent, number_in_part if self._tail else self.last)

    def check_sent(self, sent: int) -> None:
        is_known = not self._tail or len(self._tail) >= 16  # a frame's number is in its first 16 bytes
        assert sent == self.sent or (sent > self.sent and not is_known)
        self.sent = sent

    def begin_again(self) -> None:
        self.last, self._tail = self.acknowledged, b""

    def _keep(self, frame: Frame) -> None:
        self.frames.append(frame._replace(number=len(self.frames)))

    def _check_gap(self, notice: Frame, missing: list[Frame]) -> None:
        self.gaps += 1
        if self.last > self.acknowledged or not self.acknowledged:
            assert _lost_bytes(notice) == _size_of(missing)
        else:  # the acknowledged frame may have been dropped: its position is an estimate
            assert 0 < _lost_bytes(notice) <= _size_of(self.frames)
        if "over its limit" in notice.message().text:
            assert _size_of(self.frames[missing[0].number :]) > self._limit_bytes - 3 * 600, "dropped without need"
        elif self._limit_bytes == 1 << 30:
            assert "the disk is full" in notice.message().text
            assert notice.number <= self.given_whole, "nobody was given it"
            assert not _requests(missing), "the end of a cell was lost"


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("is_disk_full_at_times", [False, True])
@pytest.mark.parametrize("limit_bytes", [1 << 30, 4000])
@pytest.mark.parametrize("seed", range(10))
def test_every_reader_gets_all_after_the_acknowledged_number_or_is_told_what_is_missing(
    new_spool: _NewSpool, tmp_path: Path, seed: int, limit_bytes: int, is_disk_full_at_times: bool
) -> None:
    chance = random.Random(seed)
    spool, oracle = new_spool(limit_bytes=limit_bytes), _Oracle(tmp_path, limit_bytes)
    is_disk_full = False
    for step in range(1000):
        match chance.choices(["append", "read", "acknowledge", "rewind", "disk"], [10, 10, 2, 0.3, 0.2])[0]:
            case "append":
                is_output = chance.random() < 0.8
                frame = _output(step, chance.randrange(150)) if is_output else to_frame(RequestDone(0, step))
                with files_end_at(0) if is_disk_full else contextlib.nullcontext():
                    spool.append(frame)
                oracle.append(frame, spool.last_number)
            case "read":
                has_more = spool.has_more
                data = spool.read(chance.choice([1, 15, 100, 500, 2000]))
                assert bool(data) == has_more
                oracle.take(data)
            case "acknowledge":
                number = chance.randrange(oracle.sent + 3)
                spool.acknowledge(number)
                oracle.check_sent(spool.sent)
                if oracle.acknowledged < number <= oracle.sent:
                    oracle.acknowledged = number
                assert spool.acknowledged == oracle.acknowledged
            case "rewind":
                spool.rewind()
                oracle.check_sent(spool.sent)
                oracle.begin_again()
            case "disk":
                is_disk_full = is_disk_full_at_times and not is_disk_full
        assert _size_on_disk(tmp_path) <= limit_bytes + 600
    while data := spool.read():
        oracle.take(data)
    assert oracle.last == spool.last_number == len(oracle.frames) - 1
    assert is_disk_full_at_times or bool(oracle.gaps) == (limit_bytes == 4000)
    spool.close()
    assert not list(tmp_path.iterdir())
