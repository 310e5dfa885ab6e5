"""Nothing that comes from a rank runs in the notebook."""

from __future__ import annotations

import pytest

from detrain_nb.session.safe_output import clean_text, safe_bundle


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
        ("end\x1b", "end"),
        ("end\x1b[", "end"),
    ],
)
def test_text_keeps_colours_and_loses_every_other_control(raw: str, clean: str) -> None:
    assert clean_text(raw) == clean


ACTIVE = {
    "text/plain": "x\x1b[2J",
    "text/html": "<b>x</b>",
    "image/svg+xml": "<svg/>",
    "image/png": "aGk=",
    "application/javascript": "alert(1)",
    "application/vnd.jupyter.widget-view+json": {"model_id": "1"},
    "text/vnd.unknown": "x",
}


def test_javascript_and_widgets_of_a_rank_are_never_shown() -> None:
    assert set(safe_bundle(ACTIVE, is_this_machine=True)) == {"text/plain", "text/html", "image/svg+xml", "image/png"}


def test_html_of_another_host_is_not_shown() -> None:
    shown = safe_bundle(ACTIVE, is_this_machine=False)
    assert shown == {"text/plain": "x", "image/png": "aGk="}


@pytest.mark.parametrize("bundle", [None, [], "x", {}, {"text/plain": 3}, {"image/png": ["x"]}, {"text/html": {}}])
def test_what_is_no_bundle_becomes_empty_text(bundle: object) -> None:
    assert safe_bundle(bundle, is_this_machine=True) == {"text/plain": ""}
