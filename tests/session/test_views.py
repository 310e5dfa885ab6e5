"""Live views of a session: which changes call the callbacks, and what a board shows."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from detrain_nb import Session
from detrain_nb.errors import DetrainError, RankLost, SpecError, TransportError
from detrain_nb.session.running import looks
from detrain_nb.session.running.board import RANK_STATES, Board, RankView
from detrain_nb.session.state.cell_observer import CellObserver

from .hostile import FakeNode
from .inside import link_of, state_of
from .soon import assert_soon

pytestmark = pytest.mark.timeout(120)
_THREAD = "detrain_nb live view"
WAITS = "while not pathlib.Path(path).exists(): pass"


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    """Two ranks on this machine that the tests share; a test leaves them idle."""
    with Session.start(ranks=2, device="cpu") as started:
        started.run_cell(f"import os, pathlib, time\ndef wait_for(path):\n    {WAITS}")
        yield started


@pytest.fixture
def own() -> Iterator[Session]:
    """Two ranks for a single test, which may lose them."""
    with Session.start(ranks=2, device="cpu") as started:
        yield started


class Told:
    """A callback that records the times of its calls."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def __call__(self) -> None:
        self.at.append(time.monotonic())


@pytest.fixture
def running(session: Session, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """A function that runs a cell in the background; ``go`` in it is a path that exists once the test is over."""
    threads: list[threading.Thread] = []

    def run(code: str) -> None:
        session.push({"go": str(tmp_path / "go")})
        threads.append(threading.Thread(target=session.run_cell, args=(code,), daemon=True))
        threads[-1].start()

    yield run
    (tmp_path / "go").touch()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive()


def views_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == _THREAD]


def board_where(session: Session, holds: Callable[[Board], bool], *, limit_s: float = 30.0) -> Board:
    """The first board for which ``holds`` is true."""
    found: list[Board] = []
    there = threading.Event()

    def look(board: Board) -> None:
        if not found and holds(board):
            found.append(board)
            there.set()

    with session.watch(look, every_s=0.2) as watch:
        assert there.wait(limit_s), f"not within {limit_s} s; the last board is {watch.latest}"
    return found[0]


def pass_rounds(session: Session, count: int) -> None:
    """Wait for ``count`` boards. The same thread calls the listeners, for what changed before each board."""
    boards: list[Board] = []
    with session.watch(boards.append, every_s=0.1):
        assert_soon(lambda: len(boards) > count, limit_s=60)


# ---- callbacks for changes


def test_a_change_is_told_soon_and_nothing_is_told_of_an_idle_session(session: Session) -> None:
    told = Told()
    stop = session.on_change(told)
    session.run_cell("x = 1")
    assert_soon(lambda: bool(told.at))
    pass_rounds(session, 2)  # its end on each rank may cause another call than its beginning
    count = len(told.at)
    pass_rounds(session, 10)
    assert len(told.at) == count <= 3
    stop()
    assert_soon(lambda: not views_threads())


def test_an_idle_session_that_is_listened_to_asks_its_ranks_nothing(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, asked = link_of(session), []
    locating = link.locating

    def counted(*args: object, **options: object) -> object:
        asked.append(args)
        return locating(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(link, "locating", counted)
    boards: list[Board] = []
    with session.watch(boards.append, every_s=0.1):
        assert_soon(lambda: len(boards) > 15)
    assert not asked
    session.status()
    assert asked, "this is how they are asked"
    assert {rank.state for board in boards for rank in board.ranks} == {"idle"}


def test_many_changes_are_told_ten_times_a_second_at_most(session: Session) -> None:
    told, deadline = Told(), time.monotonic() + 60
    stop = session.on_change(told)
    while len(told.at) < 12:
        assert time.monotonic() < deadline
        session.run_cell("pass")
    stop()
    assert told.at[-1] - told.at[0] > 0.09 * (len(told.at) - 1)


def test_a_callback_that_raises_is_told_of_once_and_called_no_more(session: Session) -> None:
    session.news.pop_notices()
    calls: list[int] = []

    def fail() -> None:
        calls.append(1)
        raise ValueError("no \x1b[31mview\x1b[0m of it")

    told = Told()
    stop_failing, stop = session.on_change(fail), session.on_change(told)
    session.run_cell("pass")
    assert_soon(lambda: bool(session.news.notices))
    seen = len(told.at)
    session.run_cell("pass")
    assert_soon(lambda: len(told.at) > seen)
    (notice,) = session.news.pop_notices()
    assert "was removed because it raised" in notice and "ValueError" in notice and "\x1b" not in notice
    assert len(calls) == 1
    stop_failing()
    stop()


def test_a_callback_may_use_the_session(session: Session) -> None:
    """A callback runs without any lock of the session; otherwise the awaited answer would never be taken."""
    states: list[str] = []

    def look() -> None:
        states.extend(rank.state for rank in session.status().ranks)

    stop = session.on_change(look)
    session.run_cell("pass")
    assert_soon(lambda: bool(states))
    stop()
    assert set(states) <= {"idle", "running"}


def test_who_listens_hears_the_end_and_the_thread_ends_with_the_session(cold_starts: None) -> None:
    session = Session.start(ranks=1, device="cpu")
    told = Told()
    session.on_change(told)
    boards: list[Board] = []
    watch = session.watch(boards.append)
    assert_soon(lambda: bool(boards))
    assert_soon(lambda: len(views_threads()) == 1)
    session.stop()
    assert_soon(lambda: not views_threads())
    assert told.at and boards[-1].over.startswith("this session has ended: %distributed board ")
    assert watch.latest == boards[-1]
    assert not any("was closed" in board.over for board in boards)  # a requested stop is not a loss
    assert session.watch().latest is not None  # and it starts no thread that would never end
    session.on_change(told)()
    assert_soon(lambda: not views_threads())


def test_a_callback_may_stop_the_session() -> None:
    with Session.start(ranks=1, device="cpu") as session:
        stopped = threading.Event()

        def stop() -> None:
            session.stop()
            stopped.set()

        session.on_change(stop)
        with contextlib.suppress(DetrainError):  # the stop may interrupt the cell
            session.run_cell("pass")
        assert stopped.wait(30)
        assert not session.is_alive


def test_what_is_no_callback_is_refused(session: Session) -> None:
    with pytest.raises(SpecError, match="give a function that takes no arguments"):
        session.on_change("print")  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="give a function that takes a board"):
        session.watch(3)  # type: ignore[arg-type]
    for wrong in (0, -1, 1e9, "1", True):
        with pytest.raises(SpecError, match="every_s"):
            session.watch(every_s=wrong)  # type: ignore[arg-type]
    assert_soon(lambda: not views_threads())


# ---- what a board shows


def test_a_cell_that_runs_is_shown_with_its_line(session: Session, running: Callable[[str], None]) -> None:
    running("\n# waits\nprint('step', 7)\nprint('half a \x1b[31mline\x1b[0m', end='', flush=True)\nwait_for(go)")
    board = board_where(session, lambda board: all(rank.earlier_cell == 1 for rank in board.ranks))
    assert board.cell and board.cell.first_line == "# waits" and board.cell.ranks == (0, 1)
    assert abs(board.cell.began_at - time.time()) < 60
    first = board.ranks[0]
    assert (first.state, first.source, first.last_line) == ("running", WAITS, "half a line")
    assert first.line == 3 and first.detail.endswith("in wait_for (line 3 of cell 1, called at line 5)")
    assert board.notes == () and board.over == "" and board.name == session.name


def test_nothing_is_told_of_a_cell_that_goes_on(session: Session, running: Callable[[str], None]) -> None:
    """The ranks are located meanwhile, which is no change."""
    running("wait_for(go)")
    board_where(session, lambda board: all(rank.line for rank in board.ranks))
    told = Told()
    stop = session.on_change(told)
    pass_rounds(session, 25)
    stop()
    assert not told.at


def test_a_rank_that_waits_names_the_one_that_it_waits_for(
    session: Session, running: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session.settings, "hang_s", 1.0)
    told = Told()
    stop = session.on_change(told)
    running("if rank == 1: wait_for(go)\ndist.all_reduce(torch.ones(2))")
    board = board_where(session, lambda board: bool(board.notes))
    stop()
    waits, awaited = board.ranks
    assert (waits.state, waits.waits_for, waits.line) == ("waits", (1,), 2)
    assert waits.collective.startswith("all_reduce #") and (waits.waits_s or 0) >= 1
    assert "for rank 1, for" in waits.detail
    assert (awaited.state, awaited.line, awaited.earlier_cell) == ("awaited", 3, 1)
    (note,) = board.notes
    assert (note.kind, note.ranks) == ("waits", (0,))
    assert "rank 0 waits in all_reduce #" in note.text and "for rank 1, for" in note.text
    assert len(told.at) >= 2  # once as the cell began, once as a rank was found waiting


def test_ranks_that_nobody_can_free_are_stuck(own: Session) -> None:
    """Rank 1 has ended the cell, so it cannot join the collective."""

    def run() -> None:
        with pytest.raises(DetrainError):
            own.run_cell("if rank == 0: dist.all_reduce(torch.ones(2))")

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    board = board_where(own, lambda board: any(note.kind == "stuck" for note in board.notes))
    assert [rank.state for rank in board.ranks] == ["waits", "awaited"]
    assert board.ranks[1].detail == "has ended the cell"
    (note,) = board.notes
    assert note.ranks == (0,) and note.text.endswith("no other rank can join: interrupt the cell to free them")
    own.stop_cells()
    thread.join(30)


def test_a_killed_rank_is_shown_until_the_next_cell_begins(own: Session) -> None:
    told = Told()
    own.on_change(told)
    with pytest.raises(RankLost):
        own.run_cell("import os, signal\nif rank == 1: os.kill(os.getpid(), signal.SIGKILL)\ndist.barrier()")
    board = board_where(own, lambda board: board.ranks[1].state == "idle" and bool(board.ranks[1].exit))
    assert board.ranks[1].exit == "ended with signal 9 (SIGKILL)" and board.ranks[0].exit == ""
    (note,) = board.notes
    assert (note.kind, note.ranks) == ("died", (1,))
    assert note.text == "rank 1 ended with signal 9 (SIGKILL); it was restarted and its variables are lost"
    assert told.at
    own.run_cell("pass")
    board_where(own, lambda board: not board.notes and not any(rank.exit for rank in board.ranks))


def test_a_rank_that_is_left_down_is_dead(own: Session) -> None:
    for _ in range(3):
        with pytest.raises(DetrainError):
            own.run_cell("import os\nif rank == 1: os._exit(3)\nimport time; time.sleep(30)")
        assert_soon(lambda: (gone := state_of(own).lost.get(1)) is None or bool(gone.down))
    board = board_where(own, lambda board: board.ranks[1].state == "died")
    assert "not restarted" in board.ranks[1].detail and "exit code 3" in board.ranks[1].exit
    assert [(note.kind, note.ranks) for note in board.notes] == [("died", (1,))]


def test_a_rank_that_was_replaced_when_asked_has_not_died(own: Session) -> None:
    told = Told()
    own.on_change(told)
    before = own.status().ranks[0].pid
    own.restart(0)
    board = board_where(own, lambda board: board.ranks[0].pid not in (0, before))
    assert board.ranks[0].state == "idle" and board.ranks[0].exit == "" and not board.notes
    assert_soon(lambda: bool(told.at))


class LateNode(FakeNode):
    """A node that can be connected to again only when ``is_there``."""

    can_resume = True
    is_there = True

    def connect_agent(self, session: str) -> socket.socket:
        if not self.is_there:
            raise TransportError("no route to \x1b[31mit")
        return super().connect_agent(session)


def test_a_node_whose_connection_breaks_is_shown_and_so_is_its_return() -> None:
    nodes = [FakeNode("good", 0), LateNode("bad", 1)]
    session = Session.attach("mine", nodes=nodes)  # type: ignore[arg-type]
    try:
        told = Told()
        session.on_change(told)
        nodes[1].is_there = False  # type: ignore[attr-defined]
        nodes[1].leave()
        board = board_where(session, lambda board: board.ranks[1].state == "unknown")
        assert board.ranks[0].state == "idle" and board.ranks[0].node == board.nodes[0].name == "good"
        assert board.nodes[0].fault == "" and board.nodes[1].fault.startswith("no connection for")
        seen = len(told.at)
        assert seen
        nodes[1].is_there = True  # type: ignore[attr-defined]
        assert_soon(lambda: len(told.at) > seen)  # no board is watched, so only the link can report it
        board_where(session, lambda board: board.ranks[1].state == "idle" and not board.nodes[1].fault)
    finally:
        session.detach()
    assert_soon(lambda: not views_threads())


def test_a_node_that_is_lost_takes_its_ranks_with_it() -> None:
    nodes = [FakeNode("good", 0), FakeNode("bad", 1)]
    session = Session.attach("mine", nodes=nodes)  # type: ignore[arg-type]
    try:
        told = Told()
        session.on_change(told)
        nodes[1].leave()
        board = board_where(session, lambda board: board.ranks[1].state == "died")
        assert "node bad is lost" in board.ranks[1].exit and board.nodes[1].fault.startswith("lost: ")
        (note,) = board.notes
        assert (note.kind, note.ranks) == ("lost", (1,)) and note.text.startswith("node bad is lost, with rank 1: ")
        assert "%distributed shrink" in note.text and "%distributed restart" in note.text
        assert_soon(lambda: bool(told.at))
    finally:
        session.detach()


def test_states_are_words_that_views_know(own: Session) -> None:
    with own.watch(every_s=0.1) as watch:
        own.run_cell("pass")
        assert_soon(lambda: watch.latest is not None)
    assert watch.latest and {rank.state for rank in watch.latest.ranks} <= set(RANK_STATES)
    assert watch.latest.nodes[0].ranks == (0, 1) and watch.latest.nodes[0].name == ""
    assert isinstance(watch.latest.ranks[0], RankView)


# ---- the resources that ranks use


def test_what_ranks_use_is_measured_while_somebody_watches(session: Session, running: Callable[[str], None]) -> None:
    running("end = None\nwait_for(go)")
    board = board_where(session, lambda board: all((rank.cpu_percent or 0) > 1 for rank in board.ranks))
    assert all(10 << 20 < (rank.rss_bytes or 0) < 10 << 30 for rank in board.ranks)
    assert all(rank.gpu_name == "" and rank.gpu_percent is None for rank in board.ranks)
    assert all(rank.steps_per_s is None for rank in board.ranks)  # nothing was logged
    (node,) = board.nodes
    assert node.is_sampled and node.host and 0 < (node.cpu_percent or 0) <= 100
    assert 0 < (node.memory_used_bytes or 0) < (node.memory_total_bytes or 0)


def test_nothing_is_measured_when_the_last_watch_is_closed(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    state, came = state_of(session), Told()
    take = state.measurements.take
    monkeypatch.setattr(state.measurements, "take", lambda said, node: (came(), take(said, node)))
    with session.watch(every_s=0.1), session.watch(every_s=0.5):
        assert_soon(lambda: len(came.at) > 8)
    assert_soon(lambda: not views_threads())
    session.status()  # answered after the order that ends the measurements
    count = len(came.at)
    session.run_cell("time.sleep(0.5)")  # nor does any follow on the same connection
    assert len(came.at) == count


def test_a_node_says_one_thing_a_second_for_all_its_ranks(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    state, came = state_of(session), Told()
    monkeypatch.setattr(state.measurements, "take", lambda said, node: came())
    began = time.monotonic()
    with session.watch():
        assert_soon(lambda: len(came.at) >= 4, limit_s=60)
    assert len(came.at) - 2 < time.monotonic() - began


@pytest.mark.parametrize("how", ["log_metrics", "Trainer"])
def test_steps_of_a_loop_are_counted(
    session: Session, running: Callable[[str], None], tmp_path: Path, how: str
) -> None:
    """A Trainer logs on its main rank only, and counts steps on all ranks."""
    code = {
        "log_metrics": """
import detrain_nb
step = 0
while not pathlib.Path(go).exists():
    time.sleep(0.02)
    step += 1
    if rank == 1: detrain_nb.log_metrics(step, loss=1.0, folder=metrics)
""",
        "Trainer": """
import torch.nn.functional as F
from detrain_nb import parallel
from detrain_nb.training import Trainer
def batches():
    while True:
        time.sleep(0.02)
        is_over = torch.tensor(float(pathlib.Path(go).exists()))
        dist.all_reduce(is_over)  # all of them end after the same batch
        if is_over: return
        yield torch.zeros(4, 8), torch.zeros(4, dtype=torch.long)
mesh, shape = parallel.make_mesh(dp_replicate=2, device_type="cpu"), torch.zeros(4, 8)
model = parallel.parallelize(
    torch.nn.Linear(8, 3), mesh, example_inputs=shape, loss=F.cross_entropy, device="cpu"
)
with __import__("contextlib").suppress(Exception):
    given = dict(metrics_folder=metrics, show_progress=False)
    Trainer(model, train=batches(), steps=100_000, **given).fit()
""",
    }[how]
    session.push({"metrics": str(tmp_path / "metrics")})
    running(code)
    ranks = [1] if how == "log_metrics" else [0, 1]
    board = board_where(session, lambda board: all((board.ranks[rank].steps_per_s or 0) > 1 for rank in ranks))
    assert all((board.ranks[rank].steps_per_s or 0) < 50 for rank in ranks)
    if how == "log_metrics":
        assert board.ranks[0].steps_per_s is None


STEPS = "from detrain_nb.metrics import note_step\nfor step in range(150):\n    note_step(step)\n    time.sleep(0.01)\n"


def test_steps_of_the_cell_before_are_not_shown(session: Session, running: Callable[[str], None]) -> None:
    """The first cell ends right after its last step; the second logs none."""
    boards: list[Board] = []
    with session.watch(boards.append, every_s=0.1):
        session.run_cell(STEPS)
        assert any(rank.steps_per_s for board in boards for rank in board.ranks)
        shown = len(boards)
        running("wait_for(go)")
        assert_soon(lambda: bool(boards[-1].cell) and all(rank.line for rank in boards[-1].ranks))
        assert_soon(lambda: len(boards) > shown + 12, limit_s=60)
        later = boards[shown + 1 :]
        assert [rank.steps_per_s for board in later for rank in board.ranks] == [None] * 2 * len(later)


def test_steps_that_come_no_more_are_none(session: Session, running: Callable[[str], None]) -> None:
    running(f"{STEPS}wait_for(go)")
    board_where(session, lambda board: all(rank.steps_per_s for rank in board.ranks))
    board_where(session, lambda board: [rank.steps_per_s for rank in board.ranks] == [0, 0])


def test_the_others_do_not_wait_for_a_rank_that_does_not_answer(
    own: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rank is shown as not responding. Later queries do not wait for it as long as the first one did."""
    own.push({"folder": str(tmp_path)})
    code = "import os\nwhile not os.path.exists(f'{folder}/1'): pass\nwhile not os.path.exists(f'{folder}/2'): pass\n"
    thread = threading.Thread(target=own.run_cell, args=(f"{code}while not os.path.exists(f'{{folder}}/3'): pass",))
    worker = psutil.Process(own.status().ranks[1].pid).parent()
    assert worker is not None
    monkeypatch.setattr(looks, "_LATE_S", 2.0)
    thread.start()
    try:
        board_where(own, lambda board: [rank.line for rank in board.ranks] == [2, 2])
        worker.suspend()
        board = board_where(own, lambda board: board.ranks[1].state == "unknown")
        assert (board.ranks[1].detail, board.ranks[0].line) == ("not responding", 2)
        monkeypatch.setattr(looks, "_LATE_S", 1e9)
        for line in (3, 4):
            (tmp_path / str(line - 2)).touch()
            board_where(own, lambda board: board.ranks[0].line == line)  # noqa: B023
    finally:
        worker.resume()
        for name in "123":
            (tmp_path / name).touch()
    thread.join(60)
    assert not thread.is_alive()


class SlowPage(CellObserver):
    """Takes about 2 MB of output a second, until the test releases it."""

    def __init__(self) -> None:
        self.chars = 0
        self.goes_on = threading.Event()

    def output(self, rank: int, stream: str, text: str) -> None:
        self.goes_on.wait(len(text) / 2e6)
        self.chars += len(text)


@pytest.mark.timeout(500)
def test_a_board_goes_on_beside_output_without_a_pause(
    own: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The output exceeds what the page takes: reports of ranks queue behind seconds of it, or more if busy."""
    monkeypatch.setattr(looks, "_LATE_S", 100.0)
    page, came, go = SlowPage(), Told(), tmp_path / "go"
    take = state_of(own).measurements.take
    monkeypatch.setattr(state_of(own).measurements, "take", lambda said, node: (came(), take(said, node)))
    own.push({"go": str(go)})
    code = "import os\nwhile not os.path.exists(go):\n    for _ in range(1000): print('some', 'words', rank)"
    thread = threading.Thread(target=lambda: own.run_cell(code, observer=page), daemon=True)
    boards: list[Board] = []
    try:
        with own.watch(boards.append, every_s=0.5):
            thread.start()
            assert_soon(lambda: page.chars > 2 << 20, limit_s=100)  # by now everything that can delay the reports does
            count = len(came.at)
            assert_soon(lambda: len(came.at) >= count + 5, limit_s=100)
            is_full = lambda: all(rank.cpu_percent is not None and rank.rss_bytes for rank in boards[-1].ranks)  # noqa: E731
            assert_soon(is_full, limit_s=100)
            assert_soon(lambda: [rank.line for rank in boards[-1].ranks] == [3, 3], limit_s=100)
            assert thread.is_alive() and not page.goes_on.is_set()
    finally:
        go.touch()
        page.goes_on.set()
        thread.join(60)
    assert not thread.is_alive()
