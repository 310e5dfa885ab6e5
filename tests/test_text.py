"""Text for people: tables, sizes, foreign text made harmless, and the spelling of hosts."""

from __future__ import annotations

import math
import sys
import unicodedata

import pytest

from detrain_nb.text import (
    ShownAsText,
    count_of,
    describe_seconds,
    escape,
    format_size,
    html_cells,
    html_table,
    name_some,
    printable,
    short_number,
    show,
    split_target,
    table_lines,
)


@pytest.mark.parametrize(
    ("number", "noun", "words"),
    [(0, "node", "0 nodes"), (1, "node", "1 node"), (1024, "microbatch", "1,024 microbatches")],
)
def test_things_are_counted_in_words(number: int, noun: str, words: str) -> None:
    assert count_of(number, noun) == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.4, "0 s"), (59, "59 s"), (60, "1 min"), (185, "3 min 5 s"), (7800, "2 h 10 min"), (277_200, "3 days 5 h")],
)
def test_seconds_in_words(seconds: float, words: str) -> None:
    assert describe_seconds(seconds) == words


@pytest.mark.parametrize(
    ("value", "shown"),
    [(2.4341, "2.434"), (2.29e-4, "2.29e-04"), (223_456, "223 k"), (math.nan, "nan"), (-math.inf, "-inf"), (0, "0")],
)
def test_numbers_are_short(value: float, shown: str) -> None:
    assert short_number(value) == shown


def test_columns_are_as_wide_as_their_widest_cell_and_no_line_ends_in_blanks() -> None:
    rows = [("rank", "host", "state"), ("0", "a-long-name", "idle"), ("1", "", ""), ("", "", "")]
    assert table_lines(rows) == [
        "rank  host         state",
        "0     a-long-name  idle",
        "1",
        "",
    ]


def test_first_columns_can_be_aligned_to_the_right() -> None:
    rows = [("step", "size", "complete"), ("12000", "1.5 GB", "no: rank 3"), ("7", "12 B", "yes")]
    assert table_lines(rows, num_right=2) == [
        " step    size  complete",
        "12000  1.5 GB  no: rank 3",
        "    7    12 B  yes",
    ]
    assert [len(line) for line in table_lines(rows, num_right=3)] == [25, 25, 25]


def test_first_columns_can_be_wider_than_what_is_in_them() -> None:
    rows = [("pp", "dp", "ranks"), ("0", "more than 6", "0-3")]
    assert table_lines(rows, num_right=2, min_widths=[6, 6]) == [
        "    pp           dp  ranks",
        "     0  more than 6  0-3",
    ]


def test_tables_without_rows_or_columns_have_no_columns() -> None:
    assert table_lines([]) == []
    assert table_lines([], num_right=2, min_widths=[4]) == []
    assert table_lines([(), ()]) == ["", ""]


def test_html_of_a_table_is_escaped_and_its_lines_are_in_one_caption() -> None:
    head = html_cells(["a<b", ""], tag="th")
    body = f"<tr>{html_cells(['<script>', '&'], style='text-align:left')}</tr>"
    assert html_table(head, body, "", caption=["x > y", "'z'"]) == (
        "<div>x &gt; y<br>&#x27;z&#x27;</div><table><thead><tr><th>a&lt;b</th><th></th></tr></thead>"
        "<tbody><tr><td style='text-align:left'>&lt;script&gt;</td><td style='text-align:left'>&amp;</td></tr></tbody>"
        "<tbody></tbody></table>"
    )
    assert html_table("") == "<table><thead><tr></tr></thead></table>"


def test_value_in_a_message_stands_on_one_line() -> None:
    class Model:
        def __repr__(self) -> str:
            return "GPT(\n  (wte): Embedding(8, 2)\n)"

    assert show(Model()) == "GPT( (wte): Embedding(8, 2) )"
    assert show(" two\nlines ") == r"' two\nlines '"
    assert show(f"me:{'secret' * 20}@host:22") == "'me:***@host:22'"


def test_what_is_shown_as_text_keeps_its_columns_and_has_no_markup_of_its_own() -> None:
    class Cut(ShownAsText):
        def __str__(self) -> str:
            return "a  <b>\n1  2"

    assert Cut()._repr_html_().startswith("<pre style='margin:0;")
    assert Cut()._repr_html_().endswith(">a  &lt;b&gt;\n1  2</pre>")


def test_names_that_are_too_many_are_counted() -> None:
    assert [name_some(names) for names in ([], ["a"], ["a", "b", "c"])] == ["", "a", "a, b, c"]
    assert name_some(["a", "b", "c", "d", "e"]) == "a, b, c and 2 more"
    assert name_some(["a", "b", "c"], most=2, separator="; ") == "a; b and 1 more"


@pytest.mark.parametrize(
    ("size", "text"),
    [
        *((0, "0 B"), (999, "999 B"), (999.6, "1 kB"), (1000, "1 kB"), (1234, "1.23 kB")),
        *((999_400, "999 kB"), (999_600, "1 MB"), (999_600_000, "1 GB"), (1_260_000_000, "1.26 GB")),
        *((999.4e9, "999 GB"), (999.6e9, "1,000 GB"), (3e12, "3,000 GB"), (-12_345, "-1.23e+04 B")),
    ],
)
def test_sizes_have_three_digits_and_a_unit(size: float, text: str) -> None:
    assert format_size(size) == text


@pytest.mark.parametrize(
    ("size", "smallest", "text"),
    [
        *((0, "B", "0 B"), (999, "B", "999 B"), (1000, "B", "1.0 kB"), (999_949, "B", "999.9 kB")),
        *((10**6, "B", "1.0 MB"), (10**9, "B", "1.0 GB"), (1234 * 10**9, "B", "1,234.0 GB")),
        *((0, "MB", "0 MB"), (67_108_864, "MB", "67 MB"), (999_999_999, "MB", "1,000 MB"), (10**9, "MB", "1.0 GB")),
        *((1.25e12, "MB", "1,250.0 GB"), (512, "kB", "1 kB"), (1_550_000, "kB", "1.6 MB")),
    ],
)
def test_sizes_have_tenths_down_to_the_smallest_unit(size: float, smallest: str, text: str) -> None:
    assert format_size(size, smallest=smallest) == text


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("\x1b[31mred\x1b[0m \x1b]0;title\x07", "?[31mred?[0m ?]0;title?"),
        ("\x9b2J\x90q\x9c\x85", "?2J?q??"),
        ("one\r\ntwo\ttabs\x0b\x0c\0\x7f", "one??two?tabs????"),
        ("txt.\u202eexe\u2066\u200b\ufeff", "txt.?exe???"),
        ("line\u2028\u2029\ud800\U000e0001\U0010ffff", "line?????"),
        ("näme 漢字 😀 _-'\"<&>", "näme 漢字 😀 _-'\"<&>"),
        ("", ""),
    ],
)
def test_what_controls_a_terminal_or_turns_the_writing_is_replaced(said: str, shown: str) -> None:
    assert printable(said, "?") == shown
    assert printable(said, "") == shown.replace("?", "")
    assert printable(said, lambda char: "?" * len(char)) == shown


def test_what_does_not_print_is_shown_as_in_the_source_of_a_program() -> None:
    assert printable("a\x1b[1m\r\n\x9b\u202e\ud800\U000e0001") == "a\\x1b[1m\\r\\n\\x9b\\u202e\\ud800\\U000e0001"
    assert escape("\0") == "\\x00"


def test_no_character_is_left_that_is_a_control_a_format_a_surrogate_or_ends_a_line() -> None:
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    for instead in ("", "?", escape):
        left = printable(every, instead)
        kinds = {unicodedata.category(char) for char in set(left)}
        assert kinds.isdisjoint({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
        assert len(left.splitlines()) == 1
        assert left.encode()


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("gpu1", (None, "gpu1", None, False)),
        ("me@gpu1:22", ("me", "gpu1", "22", False)),
        ("me@corp.org@gpu1", ("me@corp.org", "gpu1", None, False)),
        ("me@[fe80::1%eth0]:00022", ("me", "fe80::1%eth0", "00022", True)),
        ("[]", (None, "", None, True)),
        ("", (None, "", None, False)),
        # other forms are kept whole, so that the text of the host shows what is wrong
        ("me@fe80::1", ("me", "fe80::1", None, False)),
        ("@gpu1", ("", "gpu1", None, False)),
        ("gpu1:", (None, "gpu1:", None, False)),
        ("gpu1:\u0663", (None, "gpu1:\u0663", None, False)),
        ("a\nb@[::1", ("a\nb", "[::1", None, False)),
    ],
)
def test_host_is_taken_apart_with_all_that_was_written(
    text: str, parts: tuple[str | None, str, str | None, bool]
) -> None:
    assert split_target(text) == parts
