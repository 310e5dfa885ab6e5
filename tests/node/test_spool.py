"""The spool: everything once and in order, on a disk that is full too."""

from __future__ import annotations

import resource
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from detrain_nb.node.spool import Spool
from detrain_nb.wire import Frame, FrameReader, Notice, Output, RequestDone, to_frame


def _read_all(spool: Spool, *, limit_bytes: int = 1 << 18) -> list[Frame]:
    reader, frames = FrameReader(), []
    while data := spool.read(limit_bytes):
        frames += reader.feed(data)
    assert reader.is_empty, "the reader was left in the middle of a frame"
    return frames


def _output(index: int, size_bytes: int = 10) -> Frame:
    return to_frame(Output(0, index, "stdout", b"x" * size_bytes))


def test_frames_come_out_once_numbered_in_order(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for index in range(3):
        spool.append(_output(index))
    first = _read_all(spool)
    for index in range(3, 5):
        spool.append(_output(index))
    frames = first + _read_all(spool)
    assert [frame.number for frame in frames] == [1, 2, 3, 4, 5]
    assert [frame.message().cell for frame in frames] == [0, 1, 2, 3, 4]
    assert not spool.has_more


def test_reader_that_is_behind_reads_over_many_segments(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    for index in range(40):
        spool.append(_output(index, 1 << 20))
    assert len(list(tmp_path.iterdir())) > 3
    assert [frame.message().cell for frame in _read_all(spool, limit_bytes=70_000)] == list(range(40))
    spool.close()
    assert not list(tmp_path.iterdir())


def test_spool_over_its_limit_drops_the_oldest_and_says_so(tmp_path: Path) -> None:
    spool = Spool(tmp_path, limit_bytes=24 << 20)
    spool.append(_output(0))
    reader = FrameReader()
    frames = reader.feed(spool.read(20))  # the reader stands in the middle of the first segment
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


@pytest.fixture
def full_disk() -> Iterator[None]:
    """A file of this process may have 64 KiB: the kernel refuses the rest, as a full disk does."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    signal.signal(signal.SIGXFSZ, before)


@pytest.mark.usefixtures("full_disk")
def test_full_disk_loses_output_within_bounds_and_never_the_end_of_a_cell(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
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
def test_reader_that_keeps_up_loses_nothing_on_a_full_disk(tmp_path: Path) -> None:
    spool, reader, frames = Spool(tmp_path), FrameReader(), []
    for index in range(50):
        spool.append(_output(index, 1 << 20))
        while data := spool.read():
            frames += reader.feed(data)
    assert [frame.message().cell for frame in frames] == list(range(50))
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1 << 17
