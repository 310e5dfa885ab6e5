"""A file that is followed loses no line and repeats none, however its contents are split into pieces."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detrain_nb.errors import SpecError
from detrain_nb.jobs.following import Wanted
from detrain_nb.jobs.log_lines import FollowedFile, LogLine
from detrain_nb.metrics import log_metrics, read_metrics_line

LINES = st.lists(st.text(st.characters(codec="ascii", exclude_categories=["Cc"]), max_size=30), max_size=20)


@given(LINES, st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), max_size=40))
def test_lines_come_once_in_order_whatever_is_sent_again(lines: list[str], pieces: list[tuple[int, int]]) -> None:
    data = "".join(f"{line}\n" for line in lines).encode()
    file, shown = FollowedFile(), []
    for back, size in [*pieces, (0, len(data))]:
        begin = max(0, file.offset - back)
        shown += file.take(begin, data[begin : begin + size + back])
    shown += file.end()
    assert shown == lines
    assert file.offset == len(data)


def test_cut_is_said() -> None:
    file = FollowedFile()
    assert file.take(0, b"one\ntw") == ["one"]
    assert file.take(1006, b"last\n") == ["tw", "... 1,000 bytes were cut out here ...", "last"]


def test_pieces_are_what_was_written_with_what_is_missing_on_a_line_of_its_own() -> None:
    file = FollowedFile()
    assert file.take_piece(0, b"one\n 10%") == b"one\n 10%"
    assert file.take_piece(3, b"\n 10%\r 20%") == b"\r 20%"
    assert file.take_piece(1013, b"last\n") == b"\n... 1,000 bytes were cut out here ...\nlast\n"


_BARS = (
    "\repoch:   0%|          | 0/9 [00:00<?, ?it/s]step 0\n"
    "\repoch:  33%|###      | 3/9 [00:01<00:02,  9.9it/s, loss=[1]]   step 3\n"
    "\repoch: 5it [00:01,  2.0s/it]\repoch: 100%|#####| 9/9 [00:02<00:00,  9.9it/s]\n"
    "done [00:00<?, ?it/s] x\n"
)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=60))
def test_print_takes_the_place_of_a_bar_however_their_bytes_come(sizes: list[int]) -> None:
    data, file, at = _BARS.encode(), FollowedFile(), 0
    lines: list[str] = []
    for size in [*sizes, len(data)]:
        lines += file.take(at, data[at : at + size])
        at = min(len(data), at + size)
    last = "epoch: 100%|#####| 9/9 [00:02<00:00,  9.9it/s]"
    assert lines == ["step 0", "step 3", last, "done [00:00<?, ?it/s] x"]


def test_bar_that_is_drawn_for_hours_is_one_line() -> None:
    file, at = FollowedFile(), 0
    for step in range(5000):
        frame = f"\r{step}/5000 [00:00<?, ?it/s]".encode()
        assert file.take(at, frame) == []
        at += len(frame)
    assert len(file.rest) < 1 << 17
    assert file.take(at, b"\n") == ["4999/5000 [00:00<?, ?it/s]"]


@pytest.mark.timeout(30)
def test_what_is_almost_a_bar_holds_up_nobody() -> None:
    """The search for progress bars holds the GIL; without its limits, each of these pieces took a second."""
    data, file = b"\r" + b"[0000, " * 40 + b"x]" + b" " * (1 << 22) + b"\n", FollowedFile()
    for number in range(50):
        assert file.take_piece(number * len(data), data) == data


def test_very_long_line_comes_in_parts() -> None:
    file = FollowedFile()
    shown = file.take(0, b"x" * 1_000_000)
    assert "".join([*shown, *file.end()]) == "x" * 1_000_000
    assert max(map(len, shown)) <= 1 << 16


def test_lines_of_many_metrics_come_whole_and_one_that_nobody_would_read_is_refused(tmp_path: Path) -> None:
    for step in range(3):
        log_metrics(step, {f"grad_norm/{number:0100d}": 0.25 for number in range(999)}, folder=str(tmp_path))
    with pytest.raises(SpecError, match=r"step 3 takes 300,0[0-9]{2} bytes: a line has room for 262,144"):
        log_metrics(3, loss=0.5, note="x" * 300_000, folder=str(tmp_path))
    data, lines = (tmp_path / "rank-0.jsonl").read_bytes(), list[str]()
    file = FollowedFile.of("metrics/rank-0.jsonl")
    for at in range(0, len(data), 100_000):
        lines += file.take(at, data[at : at + 100_000])
    found = [values for line in lines if (values := read_metrics_line(line))]
    assert [(values["step"], len(values)) for values in found] == [(step, 999 + 3) for step in range(3)]


def test_where_a_line_is_from() -> None:
    assert str(LogLine("", "3", "text")) == "[3] text"
    assert str(LogLine("gpu1", "3", "text")) == "[gpu1:3] text"
    assert str(LogLine("gpu1", "", "text")) == "[gpu1] text"


def test_what_is_wanted() -> None:
    assert Wanted().wants("rank-1.log") and Wanted().wants("setup.log") and not Wanted().wants("metrics/rank-1.jsonl")
    assert Wanted(rank=1).wants("rank-1.log") and not Wanted(rank=1).wants("rank-11.log")
    assert not Wanted(rank=1).wants("setup.log")
    assert Wanted(has_logs=False, has_metrics=True).wants("metrics/rank-1.jsonl")
