"""Nothing that comes from a rank runs in the notebook."""

from __future__ import annotations

import ast
import base64
import re
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from detrain_nb.magics.rank_terminal import RankTerminal
from hypothesis import given, settings
from hypothesis import strategies as st

import detrain_nb
from detrain_nb import wire
from detrain_nb.cli import terminal
from detrain_nb.doctor import host_judgement
from detrain_nb.errors import HUNG_UP, DetrainError, RemoteError
from detrain_nb.session.diagnosis import diagnosis, evidence
from detrain_nb.session.diagnosis.evidence import Evidence
from detrain_nb.session.output.image_size import read_size
from detrain_nb.session.output.safe_output import (
    MOST_TEXT_CHARS,
    PieceCleaner,
    clean_text,
    clean_words,
    cleaned,
    one_line,
    quote,
    safe_bundle,
    safe_completions,
    show_hidden,
    variable_names,
)
from detrain_nb.session.state import definitions, rank_deaths, session_state
from detrain_nb.values import buffer_sizes
from detrain_nb.wire import SIZES, Completions, Notice


@pytest.mark.parametrize(
    ("raw", "clean"),
    [
        ("plain é 漢\tx\r\n", "plain é 漢\tx\r\n"),
        ("\x1b[31mred\x1b[0m \x1b[38;5;12mx", "\x1b[31mred\x1b[0m \x1b[38;5;12mx"),
        ("a\x1b[2J\x1b[Hb", "ab"),
        ("a\x1b[2Kb\x1b[1Ac", "abc"),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;ZXZpbA==\x07x", "x"),
        ("\x1bPq#0\x1b\\x", "x"),
        ("\x9b31mx\x08\x00\x07y", "31mxy"),
        ("\x1bcx", "x"),
        ("a\x1b[>4;2mb\x1b[?4mc\x1b[ md", "abcd"),
        ("a\ud800b", "a\ufffdb"),
        ("\x90q\x9c\x9d0;t\x9c\x84x", "q0;tx"),
        ("end\x1b", "end"),
        ("end\x1b[", "end"),
        ("a\x07\x08\x08\x7f\x85b", "ab"),
    ],
)
def test_text_keeps_colours_and_loses_every_other_control(raw: str, clean: str) -> None:
    assert clean_text(raw) == clean


@pytest.mark.parametrize(
    ("raw", "shown"),
    [
        ("gpu1", "gpu1"),
        ("é漢", "é漢"),
        ("a\u202eb\u200bc\ufeff", "a\\u202eb\\u200bc\\ufeff"),
        ("a\nb\tc", "a b c"),
        ("\x1b[31mred\x9b", "\\x1b[31mred\\x9b"),
        ("\ud800", "\\ud800"),
        ("x" * 1000, "x" * 300),
    ],
)
def test_name_shows_what_it_hides_and_changes_nothing_around_it(raw: str, shown: str) -> None:
    assert one_line(raw) == shown


def test_error_keeps_its_lines_and_colours_and_shows_what_it_hides() -> None:
    assert show_hidden("\x1b[31mx\u2066y\x1b]0;t\x07\nz\u200d") == "\x1b[31mx\\u2066y\nz\\u200d"


@pytest.mark.parametrize(
    ("raw", "shown"),
    [("a\r\nb", "a\nb"), ("a\rb", "a\nb"), ("\r\rgood: x", "\n\ngood: x"), ("a\u2028b\u2029c", "a\nb\nc")],
)
def test_words_do_not_go_back_to_what_stands_before_them(raw: str, shown: str) -> None:
    notice = cleaned(Notice(raw))
    assert isinstance(notice, Notice)
    bundle = safe_bundle({"text/plain": raw}, is_this_machine=False)
    assert {notice.text, bundle["text/plain"], show_hidden(raw), clean_words(raw)} == {shown}


@settings(derandomize=True, deadline=None, database=None)
@given(st.text(st.sampled_from("ab \n\r\x0b\x1c\x1e\x85\u2028\u2029\x1b[31m\u202e|"), max_size=30))
def test_words_that_are_quoted_go_on_in_marked_lines(words: str) -> None:
    first, *more = f"rank 1: {quote(words)}".splitlines()
    assert first.startswith("rank 1: ")
    assert all(line.startswith("  | ") for line in more)


def _png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + struct.pack("!II", width, height)


def _jpeg(width: int, height: int, *, before: bytes = b"", frame: int = 0xC2) -> bytes:
    """A JPEG header with the two segments that most files have, then ``before``, then the segment with the size."""
    segments = b"\xff\xe0" + struct.pack("!H", 16) + b"JFIF".ljust(14, b"\0") + b"\xff\xdb" + b"\0\x43" + bytes(65)
    return b"\xff\xd8" + segments + before + struct.pack("!BBHBHHB", 0xFF, frame, 17, 8, height, width, 3)


def _gif(width: int, height: int, *, frame: tuple[int, int, int, int] = (0, 0, 1, 1), before: bytes = b"") -> bytes:
    screen = struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    return b"GIF89a" + screen + before + b"," + struct.pack("<HHHH", *frame)


def _as_text(image: bytes) -> str:
    return base64.b64encode(image).decode()


PNG, JPEG, GIF = _as_text(_png(1, 1)), _as_text(_jpeg(1, 1)), _as_text(_gif(1, 1))
ACTIVE = {
    "text/plain": "x\x1b[2J",
    "text/html": "<b>x</b>",
    "image/svg+xml": "<svg/>",
    "image/png": PNG,
    "application/javascript": "alert(1)",
    "application/vnd.jupyter.widget-view+json": {"model_id": "1"},
    "text/vnd.unknown": "x",
}


def test_javascript_and_widgets_of_a_rank_are_never_shown() -> None:
    assert set(safe_bundle(ACTIVE, is_this_machine=True)) == {"text/plain", "text/html", "image/svg+xml", "image/png"}


def test_html_of_another_host_is_not_shown() -> None:
    shown = safe_bundle(ACTIVE, is_this_machine=False)
    assert shown == {"text/plain": "    x", "image/png": PNG}


def test_text_beside_an_image_passes_for_no_rank_s_line() -> None:
    """A terminal shows the text in place of the image, without the label of a rank."""
    text = "\x1b[8;30;40m[good:0] loss 0.1\n[good:0] done"
    shown = safe_bundle({"text/plain": text, "image/png": PNG}, is_this_machine=False)
    assert shown["text/plain"] == "    [good:0] loss 0.1\n    [good:0] done"


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ({"width": 80, "height": 40}, {"width": 80, "height": 40}),
        ({"width": 80, "onload": "alert(1)", "height": "40"}, {"width": 80}),
        ({"width": 10_001, "height": 0}, None),
        ({"width": True, "height": 1.5}, None),
        (80, None),
    ],
)
def test_image_is_shown_in_the_size_that_it_is_to_have(said: object, shown: dict[str, int] | None) -> None:
    sizes = {"image/png": said, "image/jpeg": {"width": 1}, "text/html": {"width": 1}}
    bundle = safe_bundle({"image/png": PNG, SIZES: sizes}, is_this_machine=False)
    assert bundle.get(SIZES) == ({"image/png": shown} if shown else None)
    assert SIZES not in safe_bundle({"image/png": PNG, SIZES: [said]}, is_this_machine=False)


@pytest.mark.parametrize(
    ("mime", "data", "is_one"),
    [
        ("image/png", PNG, True),
        ("image/png", PNG[:4] + "\n" + PNG[4:] + "\n", True),
        ("image/png", PNG + "\n" * 1_000_000, True),
        ("image/jpeg", JPEG, True),
        ("image/gif", GIF, True),
        ("image/png", JPEG, False),
        ("image/png", "iVBORw0KGgo=", False),
        ("image/jpeg", PNG, False),
        ("image/png", "PHN2Zz4=", False),
        ("image/png", PNG[:8] + '"onerror="alert(1)', False),
        ("image/png", PNG + "=" + " " * 1_000_000 + "!", False),
        ("image/png", PNG + " " * 1_000_000 + "!", False),
        ("image/png", PNG + "A" * 1_000_000 + "!", False),
        ("image/png", "", False),
        ("image/png", "\u20ac" * 8, False),
        ("image/jpeg", "<svg onload=alert(1)>", False),
    ],
)
def test_image_of_another_host_begins_as_one_and_is_nothing_else(mime: str, data: str, is_one: bool) -> None:
    shown = safe_bundle({mime: data}, is_this_machine=False)
    assert (mime in shown) is is_one
    assert is_one or shown == {"text/plain": f"... an {mime} whose size cannot be read is not shown ..."}


_COMMENT = b"!\xfe\5hello\3GIF\0"
_THUMBNAIL = b"\xff\xe1" + struct.pack("!H", 2 + len(_jpeg(9, 9))) + _jpeg(9, 9)


@pytest.mark.parametrize(
    ("mime", "image", "is_shown"),
    [
        ("image/png", _png(10_000, 5000), True),
        ("image/png", _png(10_001, 5000), False),
        ("image/png", _png((1 << 32) - 1, 1), False),
        ("image/jpeg", _jpeg(10_000, 5000), True),
        ("image/jpeg", _jpeg(10_001, 5000), False),
        ("image/jpeg", _jpeg(10_001, 5000, before=_THUMBNAIL), False),
        ("image/jpeg", _jpeg(10_000, 5000, before=_THUMBNAIL + b"\xff\xc4\0\3x\xff\xff"), True),
        ("image/jpeg", _jpeg(10_001, 5000, frame=0xC9), False),
        ("image/jpeg", _jpeg(10_001, 5000, before=b"junk"), False),
        ("image/jpeg", _jpeg(10_000, 5000, before=bytes(9) + (b"\xff\xe2\xff\xff" + bytes(65533)) * 20), True),
        ("image/gif", _gif(10_000, 5000, before=_COMMENT * 1000), True),
        ("image/gif", _gif(10_001, 5000), False),
        ("image/gif", _gif(1, 1, frame=(0, 0, 10_001, 5000)), False),
        ("image/gif", _gif(1, 1, frame=(10_000, 0, 1, 5000), before=_COMMENT), False),
    ],
)
def test_image_of_another_host_has_no_more_pixels_than_a_browser_can_hold(
    mime: str, image: bytes, is_shown: bool
) -> None:
    bundle = {"text/plain": "x", mime: _as_text(image)}
    shown = safe_bundle(bundle, is_this_machine=False)
    assert (mime in shown) is is_shown
    if not is_shown:
        assert re.fullmatch(rf"x\n\.\.\. an {mime} of [\d,]+ x [\d,]+ pixels is not shown \.\.\.", shown["text/plain"])
    assert safe_bundle(bundle, is_this_machine=True) == bundle


@pytest.mark.parametrize(
    ("mime", "image"),
    [
        ("image/png", _png(0, 1)),
        ("image/png", _png(1, 1)[:-1]),
        ("image/png", _png(1, 1).replace(b"IHDR", b"CgBI")),
        ("image/jpeg", _jpeg(1, 0)),
        ("image/jpeg", _jpeg(1, 1)[:-4]),
        ("image/jpeg", _jpeg(1, 1, before=b"\xff\xd0\0\x13" + _jpeg(60_000, 60_000)[-19:])),
        ("image/jpeg", _jpeg(1, 1, before=b"\xff\xda\0\2")),
        ("image/jpeg", _jpeg(1, 1, before=(b"\xff\xe1\xff\xff" + bytes(65533)) * 130)),
        ("image/gif", _gif(1, 1)[:-1]),
        ("image/gif", _gif(1, 0, frame=(0, 0, 1, 0))),
        ("image/gif", _gif(1, 1, before=b"!\xfe\5hello\3GIF")),
        ("image/gif", _gif(1, 1, before=b";")),
    ],
)
def test_image_of_another_host_that_does_not_say_its_size_is_not_shown(mime: str, image: bytes) -> None:
    shown = safe_bundle({mime: _as_text(image)}, is_this_machine=False)
    assert shown == {"text/plain": f"... an {mime} whose size cannot be read is not shown ..."}


def test_json_of_another_host_is_clean_and_not_without_end() -> None:
    deep: object = "x"
    for _ in range(500):
        deep = [deep]
    shown = safe_bundle({"application/json": {"\x1b]0;t\x07k": ["\ud800"], "deep": deep}}, is_this_machine=False)
    assert shown["application/json"]["k"] == ["\ufffd"]
    assert len(str(shown)) < 200


def test_text_that_is_too_long_is_cut_before_it_is_cleaned() -> None:
    long = "\x7fa" * MOST_TEXT_CHARS
    shown = safe_bundle({"text/plain": long, "application/json": [long, {long: long}]}, is_this_machine=True)
    kept = "a" * (MOST_TEXT_CHARS // 2)
    assert shown["text/plain"] == f"{kept}\n... the rest of {len(long):,} characters is not shown ..."
    assert shown["application/json"] == [kept, {"": ""}]


@pytest.mark.parametrize("bundle", [None, [], "x", {}, {"text/plain": 3}, {"image/png": ["x"]}, {"text/html": {}}])
def test_what_is_no_bundle_becomes_empty_text(bundle: object) -> None:
    assert safe_bundle(bundle, is_this_machine=True) == {"text/plain": ""}


# ---- completions


def _complete(code: str, match: str, start: int, end: int | None = None) -> list[str]:
    """The completions that remain when a rank offers ``match`` at the end of ``code``."""
    found = Completions(0, 1, [match], ["x"], start, len(code) if end is None else end)
    safe = safe_completions(found, code=code, position=len(code))
    assert 0 <= safe.start <= safe.end == len(code)
    assert all(text.startswith(code[safe.start :]) for text in safe.matches)
    return safe.matches


@pytest.mark.parametrize(
    ("code", "match", "start"),
    [
        ("mod", "model", 0),
        ("x = mod", "model", 4),
        ("print(", "model", 6),
        ("print(se", "sep=", 6),
        ("model.__c", ".__class__", 5),
        ("import numpy.li", "numpy.linalg", 7),
        ("caf", "caf\u00e9", 0),
        ("d['x", "x y", 3),
        ('d["', "layer1.0/weight", 3),
        ("d[b'", "k", 4),
        ("d[", "'x y'", 2),
        ("d[", "3", 2),
        ("d['a']['", "b", 8),
    ],
)
def test_completion_of_a_name_an_attribute_or_a_key_is_offered(code: str, match: str, start: int) -> None:
    assert _complete(code, match, start) == [match]


@pytest.mark.parametrize(
    ("code", "match", "start", "end"),
    [
        ("%%distributed\nx = mod", "%%rank 0\nx = model", 0, None),
        ("x = mod", "y = model", 0, None),
        ("x = mod", "model; evil()", 4, None),
        ("x = mod", "model()", 4, None),
        ("x = mod", "odd", 5, None),
        ("x = mod", "el", 7, None),
        ("x = mod", "model", 4, 6),
        ("x = mod", "model", 4, 1 << 53),
        ("x = mod", "model", -1, None),
        ("x = mod", "model", 1 << 53, None),
        ("x = mod", "", 7, None),
        ("mod", "mod\u202eel", 0, None),
        ("mod", "mod el", 0, None),
        ("mod", "mod\n", 0, None),
        ("mod", "mod" + "x" * 1000, 0, None),
        ("%ti", "%time", 0, None),
        ("os.system('", "rm -rf x", 11, None),
        ("d['x", "x']; evil(); d['x", 3, None),
        ("d['x", "x\\", 3, None),
        ("d[", "'x']; evil(); d['x'", 2, None),
        ("d['x'", "; evil()", 5, None),
    ],
)
def test_completion_that_would_rewrite_the_cell_is_not_offered(
    code: str, match: str, start: int, end: int | None
) -> None:
    assert _complete(code, match, start, end) == []


def test_completions_are_not_without_end() -> None:
    names = [f"name_{number}" for number in range(100_000)]
    found = safe_completions(Completions(0, 1, names, [], 0, 4), code="name", position=4)
    assert found.matches == names[:2000]
    assert found.types == [""] * 2000


# ---- code that reads a node's text takes linear time, not quadratic

_MUCH = 1_000_000  # characters: in quadratic time these would take days
_LIMIT_S = 10.0


def _as_image(text: str) -> object:
    return safe_bundle({"image/png": PNG + text}, is_this_machine=False)


def _as_completion(text: str) -> object:
    return safe_completions(Completions(0, 1, [text], [text], 2, 2), code="d[", position=2)


def _as_dtype(text: str) -> object:
    try:
        return buffer_sizes({"array": [text, [1]]})
    except DetrainError as exc:
        return str(exc)


def _as_json(text: str) -> object:
    try:
        return wire.parse_json(text.encode())
    except DetrainError as exc:
        return str(exc)


def _as_bundle(text: str) -> object:
    return wire.count_values(text.encode())


def _as_image_text(text: str) -> object:
    return safe_bundle({"image/png": PNG, "text/plain": text}, is_this_machine=False)


def _as_silence(text: str) -> object:
    return rank_deaths.describe_silence({0: RemoteError(0, "gpu1", "RuntimeError", text)})


def _as_frame(text: str) -> object:
    return diagnosis._is_in_standard_library(Evidence(0, "running", stack=(text,)))


def _as_output(text: str) -> object:
    return PieceCleaner().clean(text.encode())


def _as_drawing(text: str) -> object:
    return RankTerminal().feed(text)


@pytest.mark.parametrize("unseen", ["\u3164", "\u115f", "\u1160", "\uffa0", "\u034f", "\ufe0f", "\U000e0100", "\u2800"])
def test_what_is_drawn_as_nothing_is_no_part_of_a_name(unseen: str) -> None:
    """Python allows most of these characters in names: a name that looks the same would set another variable."""
    found = Completions(1, 1, [f"lr{unseen}", "lrs"], ["", ""], 0, 2)
    assert safe_completions(found, code="lr", position=2).matches == ["lrs"]
    assert unseen not in one_line(f"gpu{unseen}1")
    assert variable_names([f"lr{unseen}", "model", "run this: x", "x" * 81, "a.b", ""]) == ["model"]
    if unseen != "\ufe0f":  # emoji use this one
        assert unseen not in show_hidden(f"detrain_nb{unseen}: done")


def test_image_of_many_blanks_takes_no_more_memory_than_it_has() -> None:
    bundle = {"image/png": PNG + " ab" * 1_000_000}
    tracemalloc.start()
    try:
        assert "image/png" in safe_bundle(bundle, is_this_machine=False)
        assert tracemalloc.get_traced_memory()[1] < 4 * len(bundle["image/png"])
    finally:
        tracemalloc.stop()
    for wrong in ("=ab=", "ab=c", "ab===", "a\u00e4b", 'ab"', "a=b="):
        assert "image/png" not in safe_bundle({"image/png": PNG + wrong}, is_this_machine=False), wrong
    for right in ("", "abc=", "ab==", "ab==\n", "ab\n=="):
        assert "image/png" in safe_bundle({"image/png": PNG + right}, is_this_machine=False), right


def test_number_that_no_front_end_has_is_shown_as_text() -> None:
    shown = safe_bundle({"application/json": [1 << 60, -(1 << 5000), True]}, is_this_machine=False)
    assert shown["application/json"] == [1 << 60, str(-(1 << 5000)), True]


_READERS: dict[str, tuple[Callable[[str], object], str, list[str]]] = {  # function, start of a text, parts to repeat
    "safe_output._fault_of_image": (_as_image, "A", [" ", "A", "A ", "=", "= ", "A\n"]),
    "image_size._read_jpeg": (
        lambda text: read_size("image/jpeg", b"\xff\xd8" + text.encode("latin-1")),
        "",
        ["\xff", "\xff\xe1\0\0", "\xff\xe1\0\2", "\xff\xe1\0\3\xff"],
    ),
    "image_size._read_gif": (
        lambda text: read_size("image/gif", b"GIF89a" + bytes(7) + text.encode("latin-1")),
        "",
        ["!!\0", "!", "!\xfe\1!", "\1"],
    ),
    "safe_output._ESCAPES": (clean_text, "\x1b[", ["\x1b", "\x1b[", "\x1b[0", ";", "\x1b]", "\x1b ", "\x9b"]),
    "safe_output._ESCAPES_BUT_MOVES": (
        _as_output,
        "\x1b[",
        ["\x1b", "\x1b[", "\x1b[0", ";", "\x1b]", "\x1b[A", "\x1b[9", "\b"],
    ),
    "safe_output._BEGUN": (_as_output, "\x1b", ["\x1b", "\x1b[", "\x1b]", "0", " ", "\x1b]x", "x\x1b"]),
    "rank_terminal._TOKENS": (_as_drawing, "\x1b[31m", ["x\x1b[m", "\x1b[1;"]),
    "rank_terminal._STYLES": (_as_drawing, "\x1b[31mx\r", ["\x1b[1mx\n\x1b[Ay\n"]),
    "rank_terminal._NARROW": (_as_drawing, "\r", ["x", "漢", "\u0301", "x漢"]),
    "safe_output._NEEDS_CLEANING": (clean_text, "\n", ["x", "\x1b[m"]),
    "safe_output._OTHER_ENDS": (clean_words, "\r", ["\r", "\r\n", "\u2028"]),
    "safe_output._SURROGATES": (clean_text, "\x1b]", ["\ud800", "\udfff\x1b"]),
    "safe_output._COLOUR": (_as_image_text, "\x1b[", ["\x1b[", "0;", "\x1b[0", "m"]),
    "safe_output._HIDDEN": (show_hidden, "\x1b", ["\u202e", " "]),
    "safe_output._UNSEEN": (one_line, "\x1b", ["\u3164", "x"]),
    "safe_output._NAMES": (_as_completion, "x", ["x", ".", ".x", "="]),
    "safe_output._KEY": (_as_completion, "'", ["'", '"', "x", "\\"]),
    "definitions._IPYTHON_LINE": (
        lambda text: definitions._IPYTHON_LINE.match(text[:-1]),
        " ",
        [" ", "x", "x ", "=", "? ", "#", "%"],
    ),
    "definitions._FSTRING": (definitions._FSTRING.search, "f", ["f", "fR", "x"]),
    "definitions._SETTING_UP": (definitions._SETTING_UP.match, "%", ["load_ext", "env"]),
    "definitions._AROUND_PYTHON": (definitions._AROUND_PYTHON.match, "%%", ["time", "%"]),
    "errors.HUNG_UP": (HUNG_UP.search, "c", ["connection ", "broken ", "remote process ", "c"]),
    "evidence._NO_NAME": (evidence._as_name, "a", ["(", "a", "a("]),
    "evidence._TENSORS": (evidence._TENSORS.fullmatch, "Float[", ["1", ", ", "]Float[", "1], Float[", ".", "... (1"]),
    "evidence._OF_CELL": (evidence._OF_CELL.match, "<cell 1", ["1", ">:1", "<cell 1", " "]),
    "rank_deaths._TIMED_OUT": (_as_silence, "timed out waiting ", ["timed out waiting for 1", "1", "t"]),
    "diagnosis._STANDARD_LIBRARY": (_as_frame, "/lib/python3.", ["/lib64/python3.1", "1", "/lib"]),
    "diagnosis._NO_CALL": (lambda text: diagnosis._NO_CALL.sub("", text), "a", [" ", "\u3164", "a ", "a"]),
    "diagnosis._called_name": (diagnosis._called_name, "a", ["(", ")", "a(", " ", "."]),
    "session_state._last_words": (
        session_state._last_words,
        "Root Cause\n",
        ["\n", " ", "rank : ", "rank: x\n", "exitcode : \t", "="],
    ),
    "values._ARRAY_DTYPE": (_as_dtype, "<M8[", ["9", "[", "<U9"]),
    "text._DECODER": (_as_json, "[", [" ", "[", '{"a":', "1", "1.", "1e9", '"', "\\u0041", "-", "\\"]),
    "text.count_values": (_as_bundle, '"', ['"', "\\", '\\"', ",", "[{"]),
    "terminal._LABEL": (terminal._split_label, "[1", ["1", ",1", "-1,1", "["]),
    "terminal._COLOURS": (lambda text: terminal._COLOURS.sub("", text), "\x1b[", ["\x1b[0", "0", ";"]),
    "host_judgement._VERSION": (host_judgement._VERSION.fullmatch, "2.1", ["1", "1.", "+"]),
    "host_judgement._BUILD": (host_judgement._BUILD.fullmatch, "2.1", ["+cu1", "1", "+rocm1", "."]),
}


@pytest.mark.parametrize("name", _READERS)
def test_what_reads_a_node_s_words_takes_time_by_their_length(name: str) -> None:
    read, begin, repeated = _READERS[name]
    for part in repeated:
        began = time.thread_time()
        read(begin + part * (_MUCH // len(part)) + "!")
        assert time.thread_time() - began < _LIMIT_S, f"{part!r} again and again"


def test_every_expression_that_reads_a_node_s_words_is_among_them() -> None:
    package = Path(detrain_nb.__file__).parent
    beside = (package / name for name in ("values.py", "errors.py"))
    files = [*(package / "session").rglob("*.py"), *(package / "wire").glob("*.py"), *beside]
    found = set()
    for path in files:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("re."):
                found.add(f"{path.stem}.{ast.unparse(node.targets[0])}")
    of_our_own_values = {"values._SURROGATE"}
    assert found - of_our_own_values <= _READERS.keys()
    assert len(found) >= 8


@pytest.mark.parametrize("label", ["[0-99999]", "[0-99999,99999-0]", f"[{'9' * 5000}]"])
def test_line_that_claims_absurd_ranks_is_text(label: str) -> None:
    assert terminal._split_label(f"{label} x") == ([-1], f"{label} x")
