"""What a board sends to its pages, for synthetic boards and for two real ranks, and what it leaves in a notebook."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from detrain_nb.widgets import Refused, board_view
from detrain_nb.widgets.board_history import CellHistory, format_time, settle
from detrain_nb.widgets.board_rows import head_of, layout_of, notes_of, rank_row
from detrain_nb.widgets.board_view import BoardView

from detrain_nb import Session, widgets
from detrain_nb.errors import CellInterrupted, DetrainError, RankLost, SessionError
from detrain_nb.session.running.board import Board, BoardNote

from ..session.soon import assert_soon
from .made_boards import MadeSession, board_with_a_hang, made_board, made_rank, with_ranks
from .page import LIMIT_S, WithPage

pytestmark = pytest.mark.timeout(240)
HOSTILE = "<img src=x onerror=alert(1)>\x1b[31m\u202egnp.exe\x00\r\nrank 0 died" + "x" * 100_000


def all_text(value: object) -> str:
    """Return every text in ``value``, as a page would show it."""
    if isinstance(value, dict | list):
        return "".join(map(all_text, value.values() if isinstance(value, dict) else value))
    return value if isinstance(value, str) else ""


class Page(WithPage, BoardView):
    def open_page(self) -> dict[str, Any]:
        """Wait for the whole board: it is sent in parts, the ranks last."""
        super().open_page()
        return self.wait_for(
            lambda seen: (
                "layout" in seen and all(f"rank{rank}" in seen for host in seen["layout"] for rank in host["ranks"])
            )
        )

    def wait_for_first_board(self) -> None:
        """Wait for the rates, which arrive after the parts."""
        self.wait_for(lambda _: any(said.get("added", {}).get("rates") for said in self.all_sent))

    @property
    def states(self) -> list[str]:
        ranks = [rank for host in self.seen["layout"] for rank in host["ranks"]]
        return [self.seen[f"rank{rank}"]["state"] for rank in sorted(ranks)]


@pytest.fixture
def made() -> Iterator[Callable[[Board], Page]]:
    """Return a function that makes a view and its page for a session with this board."""
    pages: list[Page] = []

    def make(board: Board) -> Page:
        pages.append(Page(MadeSession(board)))
        pages[-1].open_page()
        return pages[-1]

    yield make
    for page in pages:
        page.close()


# ---- synthetic boards


def test_page_has_a_row_for_each_rank_by_host(made: Callable[[Board], Page]) -> None:
    page = made(made_board(16))
    assert page.seen["layout"][1] == {"name": "gpu2", "where": "alice@gpu2.example.org", "ranks": [*range(8, 16)]}
    assert page.seen["rank3"] == {
        "state": "running",
        "word": "running",
        "at": "line 9: loss.backward()",
        "more": "",
        "cpu": 104,
        "gpu": 93,
        "used": 63_000_000_000,
        "total": 80_000_000_000,
        "rate": 3.4,
        "last": "step 1840 loss 2.403",
        "host": "gpu1",
        "device": "cuda:3",
        "pid": 4003,
        "runs": True,
        "fresh": "",
    }
    head = page.seen["head"]
    assert (head["cell"], head["seconds"], head["rate"], head["ranks"], head["hosts"]) == (12, 42, 3.4, 16, 2)
    assert page.seen["hosts"][0] == {"cpu": 41, "used": 62_000_000_000, "total": 256_000_000_000, "fault": ""}


def test_who_waits_for_whom_and_who_has_died_is_said_with_the_ranks_to_act_on() -> None:
    board = board_with_a_hang()
    assert head_of(board)["counts"] == {
        "running": 54, "waits": 7, "awaited": 1, "died": 1, "unknown": 0, "starting": 1, "idle": 0,
    }  # fmt: skip
    died, waits = notes_of(board)
    assert (died["kind"], died["ranks"], died["down"], died["ready"]) == ("died", [37], False, False)
    assert (waits["kind"], waits["whom"], waits["ranks"]) == ("waits", [19], [16, 17, 18, 20, 21, 22, 23])
    row = rank_row(board.ranks[16], {37}, None)
    assert (row["word"], row["at"]) == ("waits 34 s", "all_reduce #6 for rank 19")
    row = rank_row(board.ranks[37], {37}, None)
    assert (row["state"], row["at"], row["runs"]) == ("died", "ended with signal 9 (SIGKILL)", False)
    row = rank_row(made_rank(0, line=12, earlier_cell=2, source="loss.backward()"), (), None)
    assert row["at"] == "line 12 of cell 2: loss.backward()"
    ready = with_ranks(board, made_rank(37, state="idle"), notes=board.notes[:1])
    assert notes_of(ready)[0]["ready"] and head_of(ready)["counts"]["died"] == 1
    down = with_ranks(board, made_rank(37, state="died"), notes=board.notes[:1])
    assert notes_of(down)[0]["down"]


@pytest.mark.parametrize("place", ["source", "detail", "last_line", "exit", "node", "device", "collective"])
def test_hostile_text_is_cleaned_and_bounded(place: str) -> None:
    states = {"exit": "died", "collective": "waits", "detail": "unknown"}
    view = made_rank(0, state=states.get(place, "running"), **{place: HOSTILE})
    if place == "detail":
        view = replace(view, line=0)
    row = rank_row(view, {0} if place == "exit" else (), None)
    said = all_text(row)
    assert "<img src=x" in said  # a page inserts it as text
    assert len(said) < 4000
    assert not set(said).intersection("\x1b\u202e\x00\r\n")


def test_hostile_notes_names_and_reasons_are_cleaned_and_bounded() -> None:
    board = replace(made_board(1), name=HOSTILE, over=HOSTILE, notes=(BoardNote("waits", (0,), HOSTILE),))
    board = replace(board, nodes=(replace(board.nodes[0], name=HOSTILE, where=HOSTILE, fault=HOSTILE),))
    said = all_text([head_of(board), layout_of(board), notes_of(board)])
    assert len(said) < 8000 and not set(said).intersection("\x1b\u202e\x00\r\n")
    seen = CellHistory().take(board)
    settled = settle(board, seen, board.name, is_well=True)
    assert "<img" not in settled.html and "&lt;img" in settled.html and "\x1b" not in settled.text


def test_unknown_states_and_numbers_that_are_none_are_shown_as_unknown() -> None:
    view = made_rank(0, state="new words", cpu_percent=None, gpu_total_bytes=None, rss_bytes=None, steps_per_s=None)
    row = rank_row(view, (), None)
    assert (row["state"], row["cpu"], row["gpu"], row["used"], row["total"], row["rate"]) == ("unknown", *[None] * 5)


def test_many_ranks_are_told_in_bounded_messages(made: Callable[[Board], Page]) -> None:
    for count, most_bytes in ((64, 40_000), (1000, 600_000)):
        board = made_board(count)
        page = made(board)
        page.wait_for_first_board()
        assert len(json.dumps(page.seen)) < most_bytes
        before = len(page.all_sent)
        page.show(replace(board, as_of=board.as_of + 1, clock_s=board.clock_s + 1))  # only the time has changed
        page.wait_for(lambda seen: seen["head"]["seconds"] == 43)
        page.messages_within(0.3)
        assert sum(len(json.dumps(message)) for message in page.all_sent[before:]) < most_bytes / 20


def test_of_many_ranks_only_those_that_changed_are_told(made: Callable[[Board], Page]) -> None:
    board = made_board(64)
    page = made(board)
    page.wait_for_first_board()
    before = len(page.all_sent)
    page.show(with_ranks(board, made_rank(7, node="gpu1", last_line="another")))
    page.wait_for(lambda seen: seen["rank7"]["last"] == "another")
    page.messages_within(0.3)
    assert [part for message in page.all_sent[before:] for part in message["parts"]] == ["rank7"]


def test_rates_of_the_last_minute_are_kept_for_a_page_that_comes_later(
    made: Callable[[Board], Page],
) -> None:
    board = made_board(2)
    page = made(board)
    for second in range(1, 100):
        page.show(replace(board, clock_s=board.clock_s + second))
    assert len(page.state()["rates"]) == 60 and page.state()["rates"][-1] == [3.4, 3.4]
    page.show(made_board(3))
    assert page.state()["rates"] == [] or len(page.state()["rates"][-1]) == 3


def test_page_that_opens_beside_another_has_each_point_of_the_rates_once(made: Callable[[Board], Page]) -> None:
    board = made_board(2)
    page = made(board)
    page.wait_for_first_board()
    for turn in range(1, 6):
        point = 3.4 + turn
        ranks = [replace(rank, steps_per_s=point) for rank in board.ranks]
        page.show(replace(with_ranks(board, *ranks), clock_s=board.clock_s + turn))
        page.hears("hello", f"q{turn}")
        page.publish("last", turn)
        page.wait_for_part("last", lambda last, turn=turn: last == turn)
        opened = next(at for at, said in enumerate(page.all_sent) if said.get("page") == f"q{turn}")
        told = [each for said in page.all_sent[opened:] for each in said.get("added", {}).get("rates", [])]
        assert page.all_sent[opened]["state"]["rates"][-1] == [point, point]
        assert [point, point] not in told


def test_view_that_nobody_looks_at_neither_listens_nor_samples(
    made: Callable[[Board], Page],
) -> None:
    page = made(made_board(2))
    session: Any = page._session
    assert len(session.listeners) == 1 and [watch.is_open for watch in session.watches] == [True]
    page.hears("bye")
    assert not session.listeners and not any(watch.is_open for watch in session.watches)
    page.hears("hello")
    assert len(session.listeners) == 1 and session.watches[-1].is_open


# ---- the plain form


class Tags(HTMLParser):
    def __init__(self, page: str) -> None:
        super().__init__()
        self.used: set[str] = set()
        self.attributes: set[str] = set()
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.used.add(tag)
        self.attributes.update(name for name, _ in attrs)


def settled_after(*boards: Board, is_well: bool = True) -> Any:
    seen = CellHistory()
    for board in boards:
        seen = seen.take(board)
    return settle(boards[-1], seen, boards[-1].name, is_well=is_well)


def test_settled_form_has_a_summary_and_a_row_for_each_rank() -> None:
    board = made_board(8, per_node=4, seconds=34.0)
    dead = with_ranks(board, made_rank(6, state="starting"), notes=(BoardNote("died", (6,), "rank 6 ended"),))
    idle = [made_rank(rank, state="idle", steps_per_s=None, gpu_used_bytes=0) for rank in range(8)]
    ended = replace(with_ranks(board, *idle), cell=None, as_of=board.as_of + 50)
    settled = settled_after(board, dead, ended)
    first, head, *rows = settled.text.splitlines()
    assert first.startswith(
        "Cell [12] ended after 1 min 24 s: ✓ 7 ranks done, ✕ rank 6 died. Session big, 8 ranks on 2 hosts"
    )
    assert head.split() == ["Rank", "Host", "Device", "State", "Steps/s", "Peak", "Last", "line"]
    failed = settled_after(board, dead, ended, is_well=False).text
    assert (
        "Cell [12] ended after 1 min 24 s: failed or stopped on a rank, ✕ rank 6 died." in failed and "✓" not in failed
    )
    assert len(rows) == 8 and "✓ done" in rows[0] and "3.4" in rows[0] and "60 GB" in rows[0]
    assert "✕ died at 34 s, replaced" in rows[6]
    tags = Tags(settled.html)
    assert tags.used <= {"details", "summary", "b", "table", "thead", "tbody", "tr", "th", "td", "code"}
    assert tags.attributes <= {"style", "open", "cellpadding"}


def test_settled_form_of_many_ranks_has_those_that_were_not_well_and_stays_small() -> None:
    hang = board_with_a_hang()
    for boards, count in (((hang,), 64), ((board_with_a_hang(1000),), 10)):
        settled = settled_after(*boards)
        bundle = settled.bundle(end="live view")
        assert len(json.dumps(bundle, ensure_ascii=False).encode()) <= 50_000
        assert bundle["text/html"].count("<tr>") == count + 1  # a table, not the text that replaces it
    assert "990 ranks of 1000 not listed" in settled.text


@pytest.mark.parametrize(
    "seconds, words", [(None, "0.0 s"), (0.44, "0.4 s"), (34, "34 s"), (84, "1 min 24 s"), (7500, "2 h 5 min")]
)
def test_durations_are_written_as_people_say_them(seconds: float | None, words: str) -> None:
    assert format_time(seconds) == words


# ---- two real ranks


def test_orders_of_a_page_are_bounded_and_a_stop_still_goes(made: Callable[[Board], Page]) -> None:
    """Each set of ranks is a separate order, and each order uses a thread."""
    view = made(made_board(2))
    hold = threading.Event()

    def wait() -> str:
        hold.wait(LIMIT_S)
        return ""

    try:
        with pytest.raises(Refused, match="16 orders are still running"):
            for number in range(100):
                view._order(f"restart of {number}", wait)
        view._order("stop", wait)
    finally:
        hold.set()


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session.start(ranks=2, device="cpu") as started:
        started.run_cell(
            "import os, pathlib, time\ndef wait_for(path):\n    while not pathlib.Path(path).exists(): time.sleep(0.01)"
        )
        yield started


@pytest.fixture
def page(session: Session) -> Iterator[Page]:
    page = Page(session)
    page.open_page()
    yield page
    page.close()


def run_beside(session: Session, code: str) -> tuple[threading.Thread, list[Exception]]:
    """Run a cell in a thread; an exception that it raises is in the list after the thread has finished."""
    raised: list[Exception] = []

    def run() -> None:
        try:
            session.run_cell(code)
        except (DetrainError, KeyboardInterrupt) as exc:
            raised.append(exc)  # type: ignore[arg-type]

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, raised


def test_board_of_a_notebook_without_a_session_says_how_to_start_one() -> None:
    with pytest.raises(SessionError, match="this notebook holds no session"):
        widgets.board()
    with pytest.raises(SessionError, match="this notebook holds no session"):
        widgets.vars()


def test_board_twice_is_two_views(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_view, "_FIRST_LIMIT_S", LIMIT_S)
    first, second = widgets.board(session), widgets.board(session)
    assert first is not second and isinstance(second, BoardView)
    assert "2 ranks" in first.settled().text
    assert not session.log.has_failed(1000)  # no such cell was run
    first.close()
    second.close()


def test_nothing_is_sent_of_an_idle_session(session: Session, page: Page, tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"  # each cell finishes once the board has shown it
    thread, raised = run_beside(session, f"wait_for({str(first)!r})")
    page.wait_for(lambda seen: seen["head"]["cell"] is not None)
    first.touch()
    page.wait_for(lambda _: page.states == ["idle", "idle"])
    page.wait_for(lambda seen: "] took " in seen["head"]["last"])
    thread.join(LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while page.messages_within(2.5):  # usage of the first seconds is still sent; then the board must be silent
        assert time.monotonic() < deadline, "it is told without end"
    assert not raised
    thread, _ = run_beside(session, f"wait_for({str(second)!r})")
    page.wait_for(lambda seen: seen["head"]["cell"] is not None)
    second.touch()
    thread.join(LIMIT_S)


def test_a_rank_that_waits_is_shown_and_a_stop_frees_it_when_nobody_can_come(
    session: Session, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session.settings.limits, "story_s", LIMIT_S)
    session.settings.hang_s = 1.0
    thread, raised = run_beside(
        session, "if rank == 1:\n    while True: time.sleep(0.01)\ndist.all_reduce(torch.ones(2))"
    )
    page.wait_for(lambda seen: page.states == ["waits", "awaited"] and bool(seen["notes"]))
    (note,) = page.seen["notes"]
    assert note["whom"] == [1] and "rank 0 waits in all_reduce" in note["text"]
    assert page.seen["rank0"]["at"].endswith("for rank 1")
    page.asks("look", what="stack", rank=1)
    page.wait_for(lambda seen: bool(seen.get("stack1", {}).get("lines")))  # the stack is read again while it is shown
    assert page.seen["stack1"]["lines"][0].startswith("<cell ")
    page.asks("interrupt", ranks="1")
    page.wait_for(lambda seen: not seen["rank1"]["runs"] and [note["whom"] for note in seen["notes"][:1]] == [[]])
    page.asks("stop")
    thread.join(LIMIT_S)
    assert not thread.is_alive() and isinstance(raised[0], CellInterrupted)
    page.wait_for(lambda seen: page.states == ["idle", "idle"] and seen["said"].get("is") == "done")
    freed, kept, *_ = page.seen["said"]["text"].splitlines()
    assert freed.endswith(": freed") and kept == "all ranks stopped and kept their variables"
    assert page.seen["said"]["text"].partition(": ")[2] == raised[0].note  # the cell's saved error has the same text


def test_stop_from_the_board_frees_the_cell_while_the_ranks_print(
    session: Session, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The cell ends only after its output is shown, which takes a while on a busy machine.
    monkeypatch.setattr(session.settings.limits, "compute_s", LIMIT_S)
    thread, raised = run_beside(session, "i = 0\nwhile True: print('line', i, flush=True); i += 1")
    page.wait_for(lambda _: page.states == ["running", "running"])
    page.asks("look", what="output", rank=1)
    page.wait_for(lambda seen: len(seen.get("output1", {}).get("lines", [])) == 200)
    *lines, _ = page.seen["output1"]["lines"]  # the last line may be incomplete
    numbers = [int(line.split()[1]) for line in lines]
    assert numbers == [*range(numbers[0], numbers[0] + 199)] and page.seen["output1"]["more"]
    page.asks("stop")
    thread.join(LIMIT_S)
    assert not thread.is_alive() and isinstance(raised[0], KeyboardInterrupt)
    page.wait_for(lambda seen: "] failed or was stopped after " in seen["head"]["last"])
    page.wait_for(lambda seen: seen["said"].get("is") == "done")
    assert "stopped" in page.seen["said"]["text"]


def test_what_was_printed_is_cleaned_in_the_pane(session: Session, page: Page) -> None:
    session.run_cell("print('\\x1b[31mred\\x1b[0m <b>\\u202e\\x07'); print('10%\\r20%\\r30%', end='')")
    page.asks("look", what="output", rank=0)
    page.wait_for(lambda seen: bool(seen.get("output0", {}).get("lines")))
    red, bar = page.seen["output0"]["lines"]
    assert red == "red <b>\\u202e" and bar == "30%"


def test_what_cannot_be_done_is_told(session: Session, page: Page) -> None:
    assert "no cell is running on rank 1" in page.refusal("interrupt", ranks="1")
    assert "give the ranks" in page.refusal("restart", ranks="  ")
    assert "rank 7" in page.refusal("restart", ranks="7") or "7" in page.refusal("restart", ranks="7")
    assert "look: what must be one of output, stack" in page.refusal("look", what="code", rank=0)
    assert page.refusal("look", what="output", rank=5) != ""
    assert "takes ranks" in page.refusal("interrupt", rank=1)
    page.asks("stop")
    page.wait_for(lambda seen: seen["said"].get("text") == "no cell is running")


def test_a_killed_rank_is_shown_as_dead_and_replayed_from_the_board(tmp_path: Path) -> None:
    with Session.start(ranks=2, device="cpu") as own:
        own.run_cell("import os, signal\ndef f(): return 3")
        own.run_cell(f"own = f'{tmp_path}/{{rank}}'\nwhile os.path.exists(own + '/wait'): pass\nos.mkdir(own)")
        (tmp_path / "1" / "wait").touch()
        page = Page(own)
        page.open_page()
        thread, raised = run_beside(own, "if rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
        page.wait_for(lambda seen: page.states[1] == "died" and bool(seen["notes"]))
        thread.join(LIMIT_S)
        assert isinstance(raised[0], RankLost)
        assert page.seen["rank1"]["at"] == "ended with signal 9 (SIGKILL)"
        page.wait_for(lambda seen: bool(seen["notes"]) and seen["notes"][0]["ready"])
        page.wait_for(lambda seen: seen["rank1"]["fresh"] == "replaced by a fresh rank without its variables")
        page.asks("replay", ranks="1")
        page.wait_for(lambda seen: seen["head"]["cell"] == 5)
        (tmp_path / "1" / "wait").unlink()
        page.wait_for(lambda seen: seen["said"].get("is") == "failed" and "failed or" in seen["head"]["last"])
        assert page.seen["said"]["text"].splitlines() == [
            "on rank 1:",
            "ran cell 1 again",
            "cell 2 failed",
            "skipped cell 3, as other ranks are needed (select cells with --cells)",
        ]
        settled = page.settled().text
        assert "Cell [5] ended" in settled and "cell 2 failed" in settled and "✓" not in settled
        assert own.run_cell("f()").values[1] == 3
        page.wait_for(lambda _: page.states == ["idle", "idle"])
        page.asks("restart", ranks="0")
        page.wait_for(lambda seen: "restarted;" in seen["said"].get("text", ""))
        with pytest.raises(DetrainError, match="name 'f'"):
            own.run_cell("f()", ranks="0")
    page.wait_for(lambda seen: bool(seen["head"]["over"]))
    assert_soon(lambda: page._is_settled and page._closing.is_set())  # the page is informed shortly before
    assert_soon(lambda: not [each for each in threading.enumerate() if each.name.startswith("detrain_nb board")])
