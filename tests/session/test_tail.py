"""The last lines of a rank in a cell, read as they arrive."""

from __future__ import annotations

from detrain_nb.session.output.log import OutputLog
from detrain_nb.session.output.tail import Tail
from detrain_nb.wire import Output


def printed(text: str, *, rank: int = 0, stream: str = "stdout") -> Output:
    return Output(rank=rank, cell=1, stream=stream, body=text.encode())


def tail_of(log: OutputLog, *, most_lines: int = 3, most_chars: int = 20) -> Tail:
    return Tail(log.reader(1), 0, most_lines=most_lines, most_chars=most_chars)


def test_last_lines_of_one_rank_as_they_come() -> None:
    log = OutputLog()
    tail = tail_of(log)
    assert tail.read() == ([], False)
    log.append(printed("one\ntw"))
    log.append(printed("other\n", rank=1))
    assert tail.read() == (["one", "tw"], False)
    log.append(printed("o\nthree\n", stream="stderr"))
    log.append(printed("four\n"))
    assert tail.read() == (["two", "three", "four"], True)


def test_lines_are_cleaned_cut_and_shown_as_they_were_drawn_last() -> None:
    log = OutputLog()
    log.append(printed("\x1b[31mred\x1b[0m\x07\n 10%\r 20%\r\n" + "x" * 100 + "\n"))
    assert tail_of(log).read() == (["red", " 20%", "x" * 20], False)


def test_of_a_long_log_the_end_is_kept() -> None:
    log = OutputLog()
    for start in range(0, 100_000, 1000):
        log.append(printed("".join(f"line {number}\n" for number in range(start, start + 1000))))
    tail = tail_of(log, most_lines=200)
    lines, is_cut = tail.read()
    assert lines == [f"line {number}" for number in range(99_800, 100_000)] and is_cut
    assert len(tail._end) <= 2 << 16
    assert tail.read() == (lines, True)
