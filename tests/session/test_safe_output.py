"""Nothing that comes from a rank runs in the notebook."""

from __future__ import annotations

import pytest

from detrain_nb.session.safe_output import clean_text, one_line, safe_bundle, show_hidden


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


PNG, JPEG = "iVBORw0KGgo=", "/9j/4AAQ"
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
    assert shown == {"text/plain": "x", "image/png": PNG}


@pytest.mark.parametrize(
    ("mime", "data", "is_one"),
    [
        ("image/png", PNG, True),
        ("image/png", PNG[:4] + "\n" + PNG[4:] + "\n", True),
        ("image/jpeg", JPEG, True),
        ("image/gif", "R0lGODlh", True),
        ("image/png", JPEG, False),
        ("image/jpeg", PNG, False),
        ("image/png", "PHN2Zz4=", False),
        ("image/png", PNG[:8] + '"onerror="alert(1)', False),
        ("image/png", "", False),
        ("image/png", "\u20ac" * 8, False),
        ("image/jpeg", "<svg onload=alert(1)>", False),
    ],
)
def test_image_of_another_host_begins_as_one_and_is_nothing_else(mime: str, data: str, is_one: bool) -> None:
    assert (mime in safe_bundle({mime: data}, is_this_machine=False)) is is_one


def test_json_of_another_host_is_clean_and_not_without_end() -> None:
    deep: object = "x"
    for _ in range(500):
        deep = [deep]
    shown = safe_bundle({"application/json": {"\x1b]0;t\x07k": ["\ud800"], "deep": deep}}, is_this_machine=False)
    assert shown["application/json"]["k"] == ["\ufffd"]
    assert len(str(shown)) < 200


@pytest.mark.parametrize("bundle", [None, [], "x", {}, {"text/plain": 3}, {"image/png": ["x"]}, {"text/html": {}}])
def test_what_is_no_bundle_becomes_empty_text(bundle: object) -> None:
    assert safe_bundle(bundle, is_this_machine=True) == {"text/plain": ""}
