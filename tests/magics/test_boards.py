"""The board of a notebook, shown by a magic or above the first long cell; stopping the session settles it."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.timeout(180)
VIEW = "application/vnd.jupyter.widget-view+json"
ENDLESS = "%%distributed\nimport time\nprint('long')\nwhile True: time.sleep(0.1)"


@pytest.fixture
def own(start_kernel: Any) -> Any:
    """A kernel with two ranks that a test may stop."""
    kernel = start_kernel()
    assert kernel.run("%distributed start -n 2").status == "ok"
    return kernel


def settled_by(outcome: Any) -> dict[str, dict[str, Any]]:
    """The data of each display that the cell updated, by display id."""
    updates = [content for kind, content in outcome.live if kind == "update_display_data"]
    return {content["transient"]["display_id"]: content["data"] for content in updates}


def displayed_views(outcome: Any) -> set[str]:
    shown = [content for kind, content in outcome.live if kind == "display_data" and VIEW in content["data"]]
    return {content["transient"]["display_id"] for content in shown}


def test_long_cell_shows_one_board_above_its_output_and_a_stop_settles_it(own: Any) -> None:
    assert own.run("%distributed config board=auto").status == "ok"
    assert own.run("%%distributed\nprint('short')").shown == [("stdout", "[0-1] short\n")]
    outcome = own.run(ENDLESS, interrupt_when=VIEW)
    (_, board), (_, plain), (stream, text), *_ = outcome.shown
    assert stream == "stdout" and text.startswith("[0-1] long\n")
    assert VIEW in board and "as it was when this cell ran" in plain["text/plain"] and "<table" in plain["text/html"]
    (display_id,) = displayed_views(outcome)
    again = own.run(ENDLESS.replace("%%distributed", "%%distributed --timeout 4"))
    assert again.status == "error" and not displayed_views(again)
    stopped = settled_by(own.run("%distributed stop"))
    settled = stopped.pop(display_id)
    assert [*stopped.values()] == [{"text/plain": ""}], "the plain form is gone that stood below it"
    assert sorted(settled) == ["text/html", "text/plain"] and "<table" in settled["text/html"]


def test_no_board_is_shown_by_itself_unless_it_is_asked_for(own: Any) -> None:
    assert "board=off" in own.run("%distributed config").text()
    assert not displayed_views(own.run(ENDLESS.replace("%%distributed", "%%distributed --timeout 4")))
    first, second = own.run("%distributed board"), own.run("%distributed board")
    assert len(displayed_views(first)) == len(displayed_views(second)) == 1
    assert "board must be one of off, auto, not 'always'" in own.run("%distributed config board=always").error
    ended = settled_by(own.run("%distributed restart"))
    assert ended.keys() >= displayed_views(first) | displayed_views(second)
    assert own.run("%distributed stop").status == "ok"


def test_board_needs_a_session(start_kernel: Any) -> None:
    kernel = start_kernel()
    assert "no session is running: start one" in kernel.run("%distributed board").error
