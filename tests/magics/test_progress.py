"""The line about a copy that is under way: what it says; a front end has one line of it, which goes at the end."""

from __future__ import annotations

import re
from typing import Any

import pytest
from detrain_nb.magics.progress import CopyProgress, format_size

# A copy of so many seconds as put and get tell it, in the real kernel; what it copies is made up.
_COPY = """
import time
commands = get_ipython().detrain_nb_magics[0]._commands._hosts
with commands._progress("put") as progress:
    for part in range({parts} + 1):
        progress(part * 3 // {parts}, part * 30_000_000, {parts} * 30_000_000)
        if part == {fails_at}:
            raise OSError("the disk is full")
        time.sleep(0.05)
print("gpu1: 3 files")
"""
_LINE = re.compile(r"put \[(#*)(\.*)\] +(\d+) %, ([\d.]+ [MG]B) of ([\d.]+ [MG]B)(?:, ([\d.,]+ [MG]B)/s)?, (\d) files?")


class _Drawn:
    """The lines of a copy that is told at the seconds that one wants."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now = 100.0
        self._progress = CopyProgress("get", self.lines.append, now=lambda: self.now)

    def tell(self, at_s: float, files: int, done: int, total: int) -> None:
        self.now = 100.0 + at_s
        self._progress(files, done, total)


def test_line_has_bar_share_bytes_rate_and_files() -> None:
    drawn = _Drawn()
    drawn.tell(2.0, 1, 500_000_000, 2_000_000_000)
    assert drawn.lines == ["get [#######.......................]  25 %, 500 MB of 2 GB, 250 MB/s, 1 file"]


def test_rate_is_that_of_the_last_seconds() -> None:
    drawn = _Drawn()
    for second in range(1, 21):
        drawn.tell(second, 0, 10_000_000 * min(second, 10), 1_000_000_000)
    assert "10 MB/s" in drawn.lines[9]
    assert drawn.lines[-1].endswith("10 %, 100 MB of 1 GB, 0 B/s, 0 files")


def test_line_is_drawn_a_few_times_a_second_and_when_all_is_there() -> None:
    drawn = _Drawn()
    for step in range(1000):
        drawn.tell(step / 1000, 0, step, 1000)
    assert len(drawn.lines) == 5
    drawn.tell(1.0, 1, 1000, 1000)
    assert drawn.lines[-1].startswith("get [##############################] 100 %, 1 kB of 1 kB, ")


def test_hundred_per_cent_is_all_of_it() -> None:
    drawn = _Drawn()
    drawn.tell(1.0, 0, 1_999_999, 2_000_000)
    assert " 99 %" in drawn.lines[0]


def test_what_has_no_size_yet_is_at_the_beginning() -> None:
    drawn = _Drawn()
    drawn.tell(0.0, 0, 0, 0)
    assert drawn.lines == ["get [..............................]   0 %, 0 B of 0 B, 0 files"]


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (999_600, "1 MB"), (1_260_000_000, "1.26 GB"), (3e12, "3,000 GB")],
)
def test_sizes_have_three_digits_and_a_unit(size: float, text: str) -> None:
    assert format_size(size) == text


def test_front_end_has_one_line_that_moves_to_the_end_and_goes(kernel: Any) -> None:
    outcome = kernel.run(_COPY.format(parts=40, fails_at=-1))
    drawn = [content for kind, content in outcome.live if kind.endswith("display_data")]
    assert [kind for kind, _ in outcome.live if kind == "display_data"] == ["display_data"], "one line"
    assert len({content["transient"]["display_id"] for content in drawn}) == 1
    texts = [content["data"]["text/plain"] for content in drawn]
    assert texts.pop() == "", "it is gone in the end"
    found = [match.groups() for match in map(_LINE.fullmatch, texts) if match]
    assert len(found) == len(texts)
    assert len(found) >= 4
    shares = [int(groups[2]) for groups in found]
    assert shares == sorted(shares)
    assert (shares[-1], found[-1][1], found[-1][3]) == (100, "", found[-1][4])
    assert all(groups[5] for groups in found)
    assert outcome.text() == "gpu1: 3 files\n"
    assert outcome.rich() == [""]


def test_copy_that_fails_leaves_no_line(kernel: Any) -> None:
    outcome = kernel.run(_COPY.format(parts=40, fails_at=30))
    drawn = [content["data"]["text/plain"] for kind, content in outcome.live if kind.endswith("display_data")]
    assert drawn[-1] == ""
    assert not any("100 %" in text for text in drawn)
    assert "the disk is full" in outcome.error


def test_short_copy_and_final_output_have_no_line(kernel: Any) -> None:
    assert kernel.run(_COPY.format(parts=2, fails_at=-1)).rich() == []
    kernel.run("%distributed config output=final")
    assert kernel.run(_COPY.format(parts=20, fails_at=-1)).rich() == []
    kernel.run("%distributed config output=live")
