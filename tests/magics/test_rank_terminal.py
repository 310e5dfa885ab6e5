"""What a rank draws: its rows as in a terminal, of bounded size, in time linear in the length of its output."""

from __future__ import annotations

import time
import unicodedata

import pytest
from detrain_nb.magics.rank_terminal import _NARROW, Drawn, RankTerminal
from hypothesis import example, given
from hypothesis import strategies as st

from detrain_nb.session.output.safe_output import PieceCleaner

UP, ERASE = "\x1b[A", "\x1b[2K"


def drawn(*texts: str) -> list[str]:
    """All final lines of a stream to which ``texts`` were written."""
    terminal = RankTerminal()
    fed = [terminal.feed(text, turn=turn) for turn, text in enumerate(texts)] + [terminal.end()]
    turns = [turn for each in fed for turn in each.turns]
    assert turns == sorted(turns)
    assert all(len(each.turns) == len(each.final) for each in fed)
    return [line for each in fed for line in each.final]


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        (["a\nb", "c\n"], ["a", "bc"]),
        (["a\r\nb\r\n"], ["a", "b"]),
        (["a\n\n\nb\n\n"], ["a", "", "", "b", ""]),
        (["  \n"], ["  "]),
        (["a", "b"], ["ab"]),
        (["\r 10%", "\r 20%", "\r100%\n"], ["100%"]),
        (["\r 10%", "\r 20%"], [" 20%"]),
        (["long text\rshort"], ["shorttext"]),
        (["long text\r\x1b[Kshort"], ["short"]),
        (["50%\r", "\n"], ["50%"]),
        (["10%\b\b\b20%"], ["20%"]),
        (["abc\x1b[2Dx\x1b[1K!"], ["  !"]),
        (["abc\x1b[2G\x1b[K"], ["a"]),
        (["a\nb\nc\x1b[2F\x1b[Jd\n"], ["d"]),
        (["a\nb\n\x1b[2Ax\x1b[Ey\n"], ["x", "y"]),
        (["a\n  \x1b[A\nb\n"], ["a", "b"]),
        (["a\x1b[3Cb"], ["a   b"]),
    ],
)
def test_rows_are_those_of_a_terminal(written: list[str], lines: list[str]) -> None:
    assert drawn(*written) == lines


def test_nested_bars_are_a_row_each_and_one_that_does_not_stay_leaves_none() -> None:
    outer = [f"\router {i}/2" for i in range(3)]
    inner = [f"\n\rinner {i}/9{UP}" for i in range(10)]
    gone = f"\n\r{' ' * 9}\r{UP}"
    loop = "".join([outer[0], *inner, gone, outer[1], *inner])
    terminal = RankTerminal()
    assert terminal.feed(loop).final == []
    assert terminal.block == ["outer 1/2", "inner 9/9"]
    ended = f"{gone}{outer[2]}\n"
    assert [*terminal.feed(ended).final, *terminal.end().final] == ["outer 2/2"]


def test_lines_written_over_bars_move_these_down() -> None:
    clear = f"\r         \r\n\r         \r{UP}"
    bars = f"\router 1/2\n\rinner 3/9{UP}\r"
    assert drawn(bars + clear + "a word\n" + bars) == ["a word", "outer 1/2", "inner 3/9"]


def test_only_what_was_drawn_on_is_a_drawing() -> None:
    lines = drawn("plain\n\x1b[31mred\x1b[0m\n\x1b[m\x1b[Kred\x1b[m\x1b[K\na\r\n\r1%\r2%\n")
    assert [isinstance(line, Drawn) for line in lines] == [False, False, False, False, True]


def test_what_comes_where_a_bar_is_gone_is_no_drawing() -> None:
    gone = f"\n\r 1%{UP}\n\r 2%{UP}\n\r   \r{UP}"
    (bar, warning) = drawn(f"\router 1\router 2{gone}{gone}\r\nUserWarning: careful\n")
    assert (bar, type(bar), warning, type(warning)) == ("outer 2", Drawn, "UserWarning: careful", str)


@pytest.mark.parametrize(
    ("written", "line"),
    [
        ("\x1b[31mred\x1b[0m", "\x1b[31mred\x1b[0m"),
        ("\x1b[01;31mred", "\x1b[1;31mred\x1b[0m"),
        ("\x1b[1mb\x1b[32mg\x1b[22mn\x1b[39m.", "\x1b[1mb\x1b[0m\x1b[1;32mg\x1b[0m\x1b[32mn\x1b[0m."),
        ("\x1b[38;5;12;48;2;1;2;3mx\x1b[39my", "\x1b[38;5;12;48;2;1;2;3mx\x1b[0m\x1b[48;2;1;2;3my\x1b[0m"),
        ("\x1b[31mabc\r\x1b[0mX", "X\x1b[31mbc\x1b[0m"),
        ("漢字\rxyz", "xyz"),
        ("漢字\b\b\b!", " !字"),
        ("e\u0301a\b\bx", "xa"),
        ("👍 ok\rno", "no ok"),
    ],
)
def test_colours_and_wide_letters_keep_their_columns(written: str, line: str) -> None:
    assert drawn(written)[0].rstrip() == line.rstrip()


def test_colour_of_a_line_does_not_run_into_the_next_rank() -> None:
    assert drawn("\x1b[31ma\nb\x1b[0m\nc") == ["\x1b[31ma\x1b[0m", "\x1b[31mb\x1b[0m", "c"]


def test_letters_that_are_taken_as_narrow_are() -> None:
    narrow = [letter for letter in map(chr, range(0x110000)) if _NARROW.fullmatch(letter)]
    narrow = [letter for letter in narrow if unicodedata.category(letter) != "Cn"]
    wide = [letter for letter in narrow if unicodedata.east_asian_width(letter) in "WF"]
    marks = [letter for letter in narrow if unicodedata.category(letter) in ("Mn", "Me", "Cf")]
    assert (wide, marks) == ([], [])


def test_lines_are_new_at_once_and_taken_back_when_they_are_drawn_on() -> None:
    terminal = RankTerminal()
    assert terminal.feed("a\nb\nc").new == ["a", "b"]
    fed = terminal.feed(f"{UP}\rB")
    assert (fed.is_taken_back, terminal.shown.final, terminal.block) == (True, ["a"], ["B", "c"])
    assert terminal.feed("\n\nd\n").new == ["B", "c"]
    ended = terminal.end()
    assert (ended.final, ended.new) == (["a", "B", "c", "d"], ["d"])


def test_cursor_stays_in_the_last_rows() -> None:
    lines = [f"line {i}" for i in range(100)]
    assert drawn("\n".join(lines) + "\x1b[999999999A\rX")[:77] == [*lines[:76], "Xine 76"]
    assert drawn("a\x1b[999999999Cx") == ["a" + " " * 78 + "x"]
    assert drawn("a\x1b[999999999B\x1b[999999999C\x1b[Bx") == ["a" + " " * 78 + "x"]


def test_letter_that_is_drawn_has_few_marks() -> None:
    assert len(drawn("\rx" + "\u0301" * 100_000)[0]) < 20


def test_cursor_does_not_come_back_to_what_something_else_was_shown_below() -> None:
    terminal = RankTerminal()
    terminal.feed("above\nbar 1\n\rbar 2" + UP)
    assert terminal.settle().final == ["above"]
    terminal.feed("\x1b[9A\rB\n\n")
    assert terminal.end().final == ["Bar 1", "bar 2"]


@pytest.mark.parametrize(
    ("written", "final", "block"),
    [
        ("log\n\r99%\nwarning\n  its line\n", ["log", "99%", "warning", "  its line"], []),
        ("\r99%\nwarning\nunfinished", ["99%", "warning"], ["unfinished"]),
        ("\r99%\nwarning\n\r10%", ["99%", "warning"], ["10%"]),
        (f"\r99%\nwarning\n\router\n\rinner{UP}", ["99%", "warning"], ["outer", "inner"]),
        (f"log\n\router\n\rinner{UP}", ["log"], ["outer", "inner"]),
        (f"one\ntwo{UP}\rONE\nTWO", [], ["ONE", "TWO"]),
    ],
)
def test_what_was_written_below_a_bar_stands_above_what_is_displayed_next(
    written: str, final: list[str], block: list[str]
) -> None:
    """A bar that continues is drawn below the display."""
    terminal = RankTerminal()
    terminal.feed(written)
    assert (terminal.settle().final, terminal.block) == (final, block)
    assert terminal.end().final == block


def test_final_lines_say_in_which_turn_they_were_written_last() -> None:
    terminal = RankTerminal()
    terminal.feed("a\nb", turn=2)
    terminal.feed("\nbar 0", turn=4)
    terminal.feed(UP + "\rB\n", turn=6)
    fed = terminal.end()
    assert (fed.final, list(fed.turns)) == (["a", "B", "bar 0"], [2, 6, 6])
    terminal.feed("gone\r\x1b[Kkept\n" + "x\n" * 100, turn=8)
    fed = terminal.end()
    assert len(fed.final) == len(fed.turns)
    assert set(fed.turns) == {8}


_MOVES = (
    UP,
    "\x1b[B",
    "\x1b[2C",
    "\x1b[D",
    "\x1b[9A",
    "\x1b[K",
    "\x1b[1K",
    ERASE,
    "\x1b[J",
    "\r",
    "\b",
    "\n",
    "\n" * 30,
)
_COLOURS = ("\x1b[31m", "\x1b[1;44m", "\x1b[0m", "\x1b[39m")
_OTHERS = (
    "\x1b]0;title\x07",
    "\x1b]8;;x\x1b\\",
    "\x1b]never\n",
    f"\x1b[{'1' * 200}A",
    "\x1b[ q",
    "\x1bM",
    "\x9b",
    "\x1b",
)
_PARTS = st.sampled_from(["a", "bc", "漢", "é", "\u0301", "x" * 1001, *_MOVES, *_COLOURS, *_OTHERS])


@given(st.lists(_PARTS, max_size=30).map("".join), st.lists(st.integers(0, 400), max_size=8))
@example("\n" * 30 + "\x1b[18A\n\x1b[9A", [])  # wiped rows do not make the terminal higher
@example(f"\x1b[31m{'x' * 1000}{UP}a", [8])  # the longest row that can be drawn on, in colour
def test_pieces_make_no_difference(text: str, cuts: list[int]) -> None:
    data = text.encode()

    def lines_of(pieces: list[bytes]) -> list[str]:
        cleaner = PieceCleaner()
        return drawn(*(cleaner.clean(piece) for piece in pieces))

    ends = sorted({*(cut for cut in cuts if cut < len(data)), len(data)})
    pieces = [data[start:end] for start, end in zip([0, *ends], ends)]
    whole = lines_of([data])
    assert lines_of(pieces) == whole
    assert lines_of([data[i : i + 1] for i in range(len(data))]) == whole


@pytest.mark.parametrize(
    "piece",
    [
        *("\x1b[999999999A", "\x1b[999999999Bx", "\x1b[999999999C\x1b[1K", "\x1b[999999999A\x1b[J\n", "x\b", "漢\b\b"),
        *("\x1b[31m", "\x1b[31mx\x1b[0m", "\u0301", "x", "x\n", "\x1b]x", "\x1b[1"),
    ],
)
def test_time_and_memory_are_linear_in_what_a_rank_sends(piece: str) -> None:
    terminal, cleaner = RankTerminal(), PieceCleaner()
    started = time.thread_time()
    for _ in range(40):
        terminal.feed(cleaner.clean(piece.encode() * 2_500))
    for _ in range(5_000):
        terminal.feed(cleaner.clean(piece.encode()))
    assert time.thread_time() - started < 10
    assert sum(map(len, terminal.block)) < 300_000
    assert (len(terminal._rows) <= 24, len(cleaner._begun) < 200) == (True, True)


_WIDE = "漢" * 499
_MUCH = 250_000  # bytes in one message


@pytest.mark.parametrize(
    ("before", "piece"),
    [
        (_WIDE, "\x1b[J"),
        (_WIDE, "\x1b[C"),
        (_WIDE, "\x1b[999999999G"),
        (_WIDE, "\x1b[1K"),
        (f"{_WIDE}\n" * 23, "\x1b[24A\x1b[C\x1b[B\x1b[C"),
        ("", "漢\x1b[J" * 900 + "\n"),
        ("\x1b[31ma\x1b[32mb" * 80, "\x1b[C"),
        ("a\n" + " " * 240_000 + "😀", "\x1b[A\n"),
        (("\x1b[31mx\x1b[32my" * 400 + "\x1b[0m\n") * 23, "\x1b[2A\x1b[Bx\x1b[A\n"),
        (f"\x1b[31m{'w' * 990}\x1b[0m\n" * 23, "\x1b[23A" + "\x1b[1Kx\n" * 23),
    ],
)
def test_control_sequence_takes_no_time_by_the_width_of_its_row(before: str, piece: str) -> None:
    terminal = RankTerminal()
    terminal.feed(before)
    text = PieceCleaner().clean(piece.encode() * (_MUCH // len(piece.encode())))
    began = time.thread_time()
    terminal.feed(text)
    assert time.thread_time() - began < 2.5


@pytest.mark.parametrize(
    ("before", "piece"),
    [
        ("\x1b[31m" + "ab\x1b[32m" * 120_000, "x"),
        (("\x1b[31ma\x1b[32mb" * 450 + "\n") * 23, "\x1b[A\rx\n"),
        (f"{_WIDE}\n" * 23, "\x1b[24A\rx\x1b[24B"),
    ],
)
def test_small_message_takes_no_time_by_all_that_was_written_before(before: str, piece: str) -> None:
    terminal, cleaner = RankTerminal(), PieceCleaner()
    terminal.feed(cleaner.clean(before.encode()))
    began = time.thread_time()
    for _ in range(250):
        terminal.feed(cleaner.clean(piece.encode()))
        assert terminal.block
    assert time.thread_time() - began < 2.5


@pytest.mark.parametrize("piece", ["a\x1b[m", "a\x1b[9K", "a\x1b[1J", "a\x1b[K", "a\x1b[31m\x1b[m"])
def test_sequence_without_effect_does_not_copy_its_row(piece: str) -> None:
    """A character such as an emoji makes each copy of the row four times as large."""
    terminal, cleaner = RankTerminal(), PieceCleaner()
    terminal.feed("😀" + "a" * 100_000)
    text = piece * (1_000_000 // len(piece))
    lines: list[str] = []
    began = time.thread_time()
    for start in range(0, len(text), 65_536):
        lines += terminal.feed(cleaner.clean(text[start : start + 65_536].encode())).final
    assert time.thread_time() - began < 1.5
    assert "".join([*lines, *terminal.end().final]) == "😀" + "a" * (100_000 + text.count("a"))


@pytest.mark.parametrize("begin", ["\x1b]", "\x1b[1", "\x1b "])
def test_sequence_that_never_ends_is_not_kept(begin: str) -> None:
    cleaner = PieceCleaner()
    for part in (begin, *[begin[-1] * 1000] * 100):
        assert cleaner.clean(part.encode()) == ""
        assert len(cleaner._begun) < 200
