"""The view of variables without a page: what it sends, rereads and leaves behind."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from detrain_nb.widgets import vars_view
from detrain_nb.widgets.actions import Refused
from detrain_nb.widgets.vars_view import VarsView

from detrain_nb import Session, widgets
from detrain_nb.errors import CellInterrupted, SessionError, SpecError
from detrain_nb.session.running.variable_facts import RankVariable
from detrain_nb.session.running.variable_table import gather_variables
from detrain_nb.session.state.cell_observer import CellObserver

from ..session.soon import assert_soon
from .page import LIMIT_S

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session.start(ranks=2, device="cpu") as started:
        started.run_cell("import time; grid = torch.arange(40.).reshape(8, 5) + rank; count = 3")
        yield started


class Told:
    """A view, and what it publishes to pages."""

    def __init__(self, view: VarsView, monkeypatch: pytest.MonkeyPatch) -> None:
        self.view = view
        self._parts: dict[str, list[Any]] = {}
        self._changed = threading.Condition()
        monkeypatch.setattr(view, "publish", self._publish)

    def _publish(self, part: str, value: Any) -> None:
        json.dumps(value, allow_nan=False)
        with self._changed:
            self._parts.setdefault(part, []).append(value)
            self._changed.notify_all()

    def wait_for(self, part: str, fits: Callable[[Any], bool] = lambda value: True) -> Any:
        """Return the first value of ``part`` that ``fits``; earlier values are discarded."""
        with self._changed:
            assert self._changed.wait_for(lambda: any(map(fits, self._parts.get(part, []))), LIMIT_S)
            return next(value for value in self._parts.pop(part) if fits(value))


@pytest.fixture
def told(session: Session, monkeypatch: pytest.MonkeyPatch) -> Iterator[Told]:
    view = widgets.vars(session, ["grid", "count", "later"])
    assert isinstance(view, VarsView)
    yield Told(view, monkeypatch)
    view.close()
    assert_soon(lambda: all(thread.name != "detrain_nb variables" for thread in threading.enumerate()))


def test_state_is_the_table_as_plain_json(told: Told) -> None:
    table = told.view.state()["table"]
    assert [(row["name"], row["words"], row["ranks"]) for row in table["rows"]] == [
        ("count", "same on 2", [0, 1]),
        ("grid", "differs on every rank", [0, 1]),
    ]
    assert (table["counts"], table["error"], table["as_of"]) == ({"same": 1, "own": 1}, "", "")
    assert table["notes"] == ["no variable matches 'later'"]
    assert "2 names on 2 ranks" in told.view.settled().text and "<table>" in told.view.settled().html


def test_preview_is_read_in_the_background_and_told_again_when_asked_again(told: Told) -> None:
    for count in (1, 2):
        assert told.view.preview("grid", 1) is None
        seen = told.wait_for("preview")
        assert (seen["count"], seen["name"], seen["rank"], seen["note"]) == (count, "grid", 1, "first 5 x 5 of 8 x 5")
        assert seen["rows"][0] == ["0", "1.0000", "2.0000", "3.0000", "4.0000", "5.0000"]
        assert [sum[0] for sum in seen["sums"]] == [0, 1]
    told.view.preview("missing", 0)
    assert "there is no variable 'missing'" in told.wait_for("preview")["error"]
    told.view.preview("grid", 5)
    assert "rank 5 does not exist" in told.wait_for("preview")["error"]


def test_page_is_checked(told: Told) -> None:
    preview = told.view._actions["preview"]
    for arguments in ({"name": "x"}, {"name": "x", "rank": -1}, {"name": "x" * 201, "rank": 0}, {"name": 1, "rank": 0}):
        with pytest.raises(Refused):
            preview.call(told.view, arguments)


def test_busy_rank_is_told_while_the_last_table_stays(told: Told, session: Session) -> None:
    going = threading.Event()

    class Eyes(CellObserver):
        def output(self, rank: int, stream: str, text: str) -> None:
            going.set()

    def run() -> None:
        with pytest.raises(CellInterrupted):
            session.run_cell("print('runs')\nwhile True: time.sleep(0.01)", observer=Eyes())

    thread = threading.Thread(target=run)
    told.view.on_pages(are_there=True)
    thread.start()
    assert going.wait(30)
    try:
        assert re.fullmatch(r"ranks 0-1 run cell \[\d+\]", told.wait_for("running", bool))
        told.view.refresh()
        table = told.wait_for("table")
        assert len(table["notes"]) == 1 and table["notes"][0].startswith("ranks 0-1 are busy: running cell ")
        assert len(table["rows"]) == 2 and table["as_of"]
        told.view.preview("grid", 0)
        assert told.wait_for("preview")["error"].startswith("rank 0 is busy: running cell ")
    finally:
        session.stop_cells()
        thread.join(30)
    session.run_cell("later = 1")  # finished before the view can show it as running
    # The variables may have been read once between the two cells.
    table = told.wait_for("table", lambda table: not table["notes"] and len(table["rows"]) == 3)
    assert [row["name"] for row in table["rows"]] == ["count", "grid", "later"] and not table["as_of"]
    assert told.wait_for("running", lambda words: not words) == ""
    told.view.on_pages(are_there=False)


def test_what_is_wrong_is_said_when_it_is_made() -> None:
    with Session.start(ranks=1, device="cpu") as session:
        with pytest.raises(SpecError, match="rank 7"):
            widgets.vars(session, ranks=7)
        view = widgets.vars(session)
    view._read_table(limit_s=5)
    assert "has ended" in view.state()["table"]["error"]
    with pytest.raises(SessionError):
        widgets.vars(session)


def test_row_is_short_however_much_ranks_say_of_it() -> None:
    """Each rank may have its own reason, and a page receives thousands of rows after each cell."""
    on = {
        rank: RankVariable("A", "", None, "", "", None, "", False, f"{rank} {'because ' * 24}") for rank in range(1000)
    }
    [row] = gather_variables({rank: {"x": each} for rank, each in on.items()}, {}, left_out=0, most=10).rows
    assert len(vars_view._cells(row)["why"]) < 1000 and "and 997 more" in vars_view._cells(row)["why"]
