"""Ranks that wait for others while the cell runs: the report of a hang, and the position of every rank."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from detrain_nb import Session
from detrain_nb.errors import CellInterrupted, RankError, RankLost
from detrain_nb.session.diagnosis.where_report import Whereabouts
from detrain_nb.session.state.cell_observer import CellObserver

from .inside import core_of

DEADLINE_S = 40.0
PREPARED = """
import asyncio, contextlib, os, pathlib, re, subprocess, sys, time
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
def wait_for(name):
    while not pathlib.Path(folder, name).exists(): time.sleep(0.1)
def load_earlier():
    time.sleep(60)
"""


class Watcher(CellObserver):
    """An observer that collects the lines on waiting ranks and shows nothing.

    It runs in the thread of the cell, and presses stop once, at the first line that ``stops_at`` accepts.
    """

    def __init__(self, stops_at: Callable[[str], bool] = lambda text: False) -> None:
        self.stops_at = stops_at
        self.is_pressed = False
        self.reports: list[str] = []

    def waiting(self, text: str) -> None:
        text = without_numbers(text)
        if self.is_pressed:
            return
        if text not in self.reports[-1:]:
            self.reports.append(text)
        if self.stops_at(text):
            self.is_pressed = True
            raise KeyboardInterrupt


def without_numbers(text: str) -> str:
    """Mask the numbers of collectives and earlier cells, which depend on what was run before."""
    return re.sub(r"of cell \d+, called", "of cell N, called", re.sub(r"#\d+", "#N", text))


def is_report(text: str) -> bool:
    """Return whether ``text`` reports a hang; the line that lists the ranks still in the cell does not."""
    return bool(text) and not text.startswith("waiting for")


def with_hosts(words: str, session: Session) -> str:
    """Return the report with the host of each rank that does not wait, as it appears on several hosts."""
    return re.sub(r"\brank (\d) (?!waits)", r"rank \1 on h\1 ", words) if session.ranks.nodes else words


@pytest.fixture(autouse=True)
def often(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the time between two looks, so that tests are faster than normal use."""
    monkeypatch.setattr(session.settings.limits, "look_gap_s", 0.2)


@pytest.fixture(scope="module")
def hanging(session: Session, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Session]:
    """Yield the session, set to report a wait of 1 s as a hang."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_file.py").write_text("import time\n\n\ndef load():\n    time.sleep(60)\n")
    session.settings.hang_s = 1.0
    session.push({"folder": str(folder)})
    session.run_cell(f"{PREPARED}\nsys.path.append(folder)")
    yield session
    session.settings.hang_s = 5.0


@pytest.fixture
def folder(hanging: Session, tmp_path: Path) -> Path:
    """Return a folder; ``wait_for(name)`` on a rank returns once the file ``name`` exists in it."""
    hanging.push({"folder": str(tmp_path)})
    return tmp_path


# ---- the report


@pytest.mark.here_only
def test_missing_rank_is_named_until_it_comes(hanging: Session, folder: Path) -> None:
    code = """
def load_data():
    wait_for("data")
x = torch.ones(2)
if rank == 1:
    load_data()
dist.all_reduce(x)
wait_for("end")
"""

    words = "rank 0 waits in all_reduce #N (line 7); rank 1 is in wait_for (line 7 of cell N, called at line 3)"

    def act(text: str) -> bool:
        if text == words:
            (folder / "data").touch()
        elif (folder / "data").exists():
            (folder / "end").touch()
        return False

    watcher = Watcher(act)
    hanging.run_cell(code, observer=watcher, timeout_s=DEADLINE_S)
    reports = [*filter(is_report, watcher.reports)]
    assert words in reports and watcher.reports[-1] == ""
    waits = words.partition(";")[0]
    assert all(report.startswith(waits) for report in reports), reports  # a delayed rank may be reported differently


HANGS = {
    "a rank that has ended the cell": (
        "if rank == 0:\n    dist.barrier()",
        "rank 0 waits in barrier #N (line 2); rank 1 has ended the cell",
    ),
    "function of an earlier cell": (
        "if rank == 0: dist.barrier()\n\nelse: load_earlier()",
        "rank 0 waits in barrier #N (line 1); rank 1 is in load_earlier (line 9 of cell N, called at line 3)",
    ),
    "function of an own file, below a library": (
        "import own_file, concurrent.futures\nif rank == 0: dist.barrier()\nelse:\n"
        "    sorted([1], key=lambda _: own_file.load())",
        "rank 0 waits in barrier #N (line 2); rank 1 is in load (line 4)",
    ),
    "lines below %%time": (
        "%%time\ndef f():\n    dist.barrier()\nif rank == 0: f()\nelse: time.sleep(60)",
        "rank 0 waits in barrier #N (line 3); rank 1 is at line 5",
    ),
    "await": (
        "w = None\nif rank == 0: dist.barrier()\nelse: await asyncio.sleep(60)",
        "rank 0 waits in barrier #N (line 2); rank 1 is at line 3",
    ),
    "C code that holds the GIL": (
        "if rank == 0:\n    dist.barrier()\nelse:\n    re.match('(a+)+$', 'a' * 60 + 'b')",
        "rank 0 waits in barrier #N (line 2); rank 1 is computing at line 4",
    ),
    "recv against recv": (
        "x = torch.ones(2)\ndist.recv(x, 1 - rank)",
        "ranks 0-1 wait in recv (line 2)",
    ),
    "request of a message": (
        "x = torch.ones(2)\nrequest = dist.irecv(x, 1 - rank)\nrequest.wait()",
        "ranks 0-1 wait in request.wait() (line 3)",
    ),
    "new_group in the store": (
        "if rank == 1: dist.new_group([0, 1])\nelse: load_earlier()",
        "rank 1 waits in new_group (line 1); rank 0 is in load_earlier (line 9 of cell N, called at line 2)",
    ),
    "default group that is made": (
        "if rank == 1: dist.init_process_group()\nelse: load_earlier()",
        "rank 1 waits in init_process_group (line 1); rank 0 is in load_earlier (line 9 of cell N, called at line 2)",
    ),
    "other collective": (
        "x = torch.ones(2)\nif rank == 0: dist.all_reduce(x)\nelse: dist.broadcast(x, 1)",
        "rank 0 waits in all_reduce #N (line 2); rank 1 waits in broadcast #N (line 3); "
        "collective #N differs: all_reduce Float[2] on rank 0, broadcast Float[2] on rank 1",
    ),
    "other shapes": (
        "x = torch.ones(5 - rank)\ndist.reduce(x, 0)",
        "ranks 0-1 wait in reduce #N (line 2); reduce #N has different tensors: Float[5] on rank 0, Float[4] on rank 1",
    ),
    "backward of DDP": (
        "model = DistributedDataParallel(torch.nn.Linear(3, 1))\n"
        "for _ in range(2): model(torch.ones(2, 3)).sum().backward()\n"
        "if rank == 0: model(torch.ones(2, 3)).sum().backward()\nelse: load_earlier()",
        "rank 0 waits in all_reduce #N (line 3); rank 1 is in load_earlier (line 9 of cell N, called at line 4)",
    ),
    "parameters of fully_shard": (
        "model = torch.nn.Linear(4, 4)\nfully_shard(model, mesh=init_device_mesh('cpu', (2,)))\n"
        "if rank == 0: model(torch.ones(2, 4))\nelse: load_earlier()",
        "rank 0 waits in all_gather #N (line 3); rank 1 is in load_earlier (line 9 of cell N, called at line 4)",
    ),
    "group with a number": (
        "group = dist.new_group([0, 1])\nif rank == 0: dist.barrier(group)\nelse: load_earlier()",
        "rank 0 waits in barrier #N of group 1 (line 2); "
        "rank 1 is in load_earlier (line 9 of cell N, called at line 3)",
    ),
}
# A rank that has ended, a group in the making, messages, a different collective, the user's line in a library's hang.
# The other hangs are slow tests.
TELLING_HANGS = {
    "a rank that has ended the cell",
    "default group that is made",
    "recv against recv",
    "other collective",
    "backward of DDP",
}


def _case(name: str, code: str, words: str) -> Any:
    marks = [pytest.mark.here_only] if "own_file" in code else []
    marks += [] if name in TELLING_HANGS else [pytest.mark.slow]
    return pytest.param(code, words, id=name, marks=marks)


@pytest.mark.rare_elsewhere("a rank that has ended the cell", "recv against recv", "other collective")
@pytest.mark.parametrize(("code", "words"), [_case(name, *hang) for name, hang in HANGS.items()])
def test_hang_is_reported_while_the_cell_runs(hanging: Session, code: str, words: str) -> None:
    watcher = Watcher(lambda text: text == with_hosts(words, hanging))  # a delayed rank may be reported differently
    with pytest.raises(CellInterrupted):
        hanging.run_cell(code, observer=watcher, timeout_s=DEADLINE_S)
    assert watcher.is_pressed, watcher.reports


def test_cell_of_one_rank_that_calls_a_collective_of_all_is_a_hang(hanging: Session) -> None:
    words = "rank 1 waits in barrier #N (line 1); rank 0 does not run the cell"
    watcher = Watcher(lambda text: text == with_hosts(words, hanging))
    with pytest.raises(CellInterrupted):
        hanging.run_cell("dist.barrier()", ranks=1, observer=watcher, timeout_s=DEADLINE_S)
    assert watcher.is_pressed, watcher.reports


@pytest.mark.rare_elsewhere("dist.recv")
@pytest.mark.parametrize(
    ("wait", "is_watched"),
    [
        ("dist.all_reduce(torch.ones(1))", True),
        pytest.param("dist.all_reduce(torch.ones(1))", False, marks=pytest.mark.slow),
        pytest.param("dist.recv(torch.ones(1), 1)", True, marks=pytest.mark.slow),
    ],
)
def test_who_waits_for_a_rank_that_has_failed_is_freed(
    hanging: Session, monkeypatch: pytest.MonkeyPatch, wait: str, is_watched: bool
) -> None:
    monkeypatch.setattr(hanging.settings.limits, "message_s", 2.0)
    code = f"kept = rank + 1\nif rank == 1:\n    raise ValueError('a bad batch')\n{wait}"
    with pytest.raises(RankError) as caught:
        hanging.run_cell(code, observer=Watcher() if is_watched else None, timeout_s=DEADLINE_S)
    error = caught.value
    assert not isinstance(error, CellInterrupted)
    assert re.match(r"rank 1 on [^:]+: ValueError: a bad batch\nrank 0 on [^:]+: KeyboardInterrupt", str(error))
    assert re.match(r"rank 0 waited in .*\(line 4\): freed\nall ranks stopped and kept their variables\n", error.note)
    total = hanging.run_cell("x = torch.ones(1)\ndist.all_reduce(x)\nx.item() + kept", timeout_s=DEADLINE_S)
    assert total.values == {0: 3.0, 1: 4.0}


@pytest.mark.rare_elsewhere
def test_who_waits_in_vain_for_certain_is_freed_before_it_is_called_a_hang(
    hanging: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hanging.settings, "hang_s", 1000.0)
    with pytest.raises(RankError, match="ValueError: a bad batch") as caught:
        hanging.run_cell("if rank == 1:\n    raise ValueError('a bad batch')\ndist.barrier()", timeout_s=DEADLINE_S)
    assert re.match(r"rank 0 waited in barrier #\d+ \(line 3\): freed\nall ranks stopped", caught.value.note)


@pytest.mark.slow
@pytest.mark.here_only
def test_who_can_still_be_met_when_another_has_failed_is_let_be() -> None:
    """Rank 1 is late for the collective with rank 0 by more than the time after which vain waits are freed."""
    code = """
if rank == 2:
    raise ValueError("a bad batch")
if rank == 1:
    end = time.monotonic() + 7
    while time.monotonic() < end: sum(range(1000))
x = torch.ones(1)
if rank < 2:
    dist.all_reduce(x, group=pair)
"""
    with Session.start(ranks=3, device="cpu") as session:
        session.run_cell("import time\npair = dist.new_group([0, 1])")
        with pytest.raises(RankError) as caught:
            session.run_cell(code, timeout_s=DEADLINE_S)
        assert set(caught.value.errors) == {2}
        assert session.pull("x", ranks=[0, 1]) == {0: 2.0, 1: 2.0}


@pytest.mark.slow
@pytest.mark.here_only
def test_who_was_freed_is_given_time_to_end_the_cell(hanging: Session) -> None:
    code = """
if rank == 1:
    raise ValueError("a bad batch")
try:
    dist.all_reduce(torch.ones(1))
finally:
    end = time.monotonic() + 2
    while time.monotonic() < end:
        with contextlib.suppress(KeyboardInterrupt): time.sleep(0.1)
    has_saved = True
"""
    with pytest.raises(RankError) as caught:
        hanging.run_cell(code, timeout_s=DEADLINE_S)
    assert ": freed\nall ranks stopped and kept their variables\n" in caught.value.note
    assert hanging.pull("has_saved", ranks=0) == {0: True}


@pytest.mark.slow
@pytest.mark.here_only
def test_stop_that_is_pressed_while_ranks_are_freed_is_the_first_press(
    hanging: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(*args: object) -> None:
        monkeypatch.delattr(core_of(hanging).rescue, "_free_who_waits")
        raise KeyboardInterrupt

    monkeypatch.setattr(core_of(hanging).rescue, "_free_who_waits", press)
    with pytest.raises(RankError) as caught:
        hanging.run_cell("if rank == 1:\n    raise ValueError('a bad batch')\ndist.barrier()", timeout_s=DEADLINE_S)
    assert re.match(r"rank 0 waited in .*: freed\nall ranks stopped", caught.value.note)
    assert hanging.run_cell("dist.barrier(); rank", timeout_s=DEADLINE_S).values == {0: 0, 1: 1}


@pytest.mark.slow
@pytest.mark.here_only
def test_who_has_work_left_is_let_be_when_another_has_failed(hanging: Session) -> None:
    code = "if rank == 1:\n    raise ValueError('a bad batch')\ntime.sleep(4)\nis_done = True"
    with pytest.raises(RankError) as caught:
        hanging.run_cell(code, observer=Watcher(), timeout_s=DEADLINE_S)
    assert set(caught.value.errors) == {1}
    assert hanging.pull("is_done", ranks=0) == {0: True}


@pytest.mark.rare_elsewhere
def test_shapes_that_gloo_refuses_end_a_rank_with_its_words(hanging: Session) -> None:
    with pytest.raises(RankLost, match=r"(?s)signal 6 \(SIGABRT\).*Received data size doesn't match expected size"):
        hanging.run_cell("dist.all_reduce(torch.ones(4 + rank))", timeout_s=DEADLINE_S)
    hanging.run_cell(PREPARED)  # the definitions that the lost rank had


@pytest.mark.rare_elsewhere("messages")
@pytest.mark.parametrize(
    "code",
    [
        "for _ in range(3000): dist.all_reduce(torch.ones(10))",
        "x = torch.ones(3)\nfor _ in range(50):\n    if rank == 0: time.sleep(0.05); dist.send(x, 1)\n"
        "    else: dist.recv(x, 0)",
        "end = time.monotonic() + 2\nwhile time.monotonic() < end: sum(range(1000))",
        "time.sleep(2)",
        "subprocess.run(['sleep', '2'])",
    ],
    ids=["fast collectives", "messages", "long compute", "sleep", "command"],
)
def test_healthy_work_is_not_reported(hanging: Session, code: str) -> None:
    watcher = Watcher()
    hanging.run_cell(code, observer=watcher, timeout_s=DEADLINE_S)
    assert not [*filter(is_report, watcher.reports)]


@pytest.mark.rare_elsewhere
def test_slow_but_matching_collective_is_not_reported(hanging: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hanging.settings.limits, "look_gap_s", 0.02)
    monkeypatch.setattr(hanging.settings, "hang_s", 0.05)  # each collective takes several times as long
    watcher = Watcher()
    code = "big = torch.ones(60_000_000)\nfor _ in range(6): dist.all_reduce(big)\ndel big"
    hanging.run_cell(code, observer=watcher, timeout_s=DEADLINE_S)
    assert not [report for report in watcher.reports if report.startswith("ranks 0-1 wait in all_reduce")]


# ---- where every rank is


def look_until(session: Session, found: Callable[[Whereabouts], bool]) -> Whereabouts:
    """Look repeatedly until ``found`` accepts the positions of the ranks, and return them."""
    deadline = time.monotonic() + DEADLINE_S
    while not found(seen := session.ranks.where()):
        assert time.monotonic() < deadline, seen
    return seen


class Looking:
    """A run of a cell while another thread looks, as a subshell does; the cell is stopped after the look."""

    def __init__(self, session: Session, code: str, found: Callable[[Whereabouts], bool]) -> None:
        self._done = threading.Event()
        self._found: list[Whereabouts | Exception] = []

        def look() -> None:
            try:
                self._found.append(look_until(session, found))
            except Exception as exc:  # noqa: BLE001
                self._found.append(exc)
            finally:
                self._done.set()

        thread = threading.Thread(target=look)
        thread.start()
        with pytest.raises(CellInterrupted):
            session.run_cell(code, observer=Watcher(lambda _: self._done.is_set()), timeout_s=DEADLINE_S)
        thread.join()

    @property
    def seen(self) -> Whereabouts:
        [found] = self._found
        if isinstance(found, Exception):
            raise found
        return found


def test_where_shows_lines_stacks_and_collectives_from_another_thread(hanging: Session) -> None:
    code = "def f():\n    dist.all_reduce(torch.ones(2))\nif rank == 0:\n    f()\nelse:\n    load_earlier()"
    words = "rank 0 waits in all_reduce #N (line 2); rank 1 is in load_earlier (line 9 of cell N, called at line 6)"

    def found(seen: Whereabouts) -> bool:  # a delayed rank does not report everything
        is_all = without_numbers(seen.summary) == words
        return is_all and seen.verdicts[0].collective is not None and bool(seen.verdicts[1].evidence.call)

    seen = Looking(hanging, code, found).seen
    waits, sleeps = seen.verdicts
    assert [verdict.evidence.line for verdict in seen.verdicts] == [2, 6]
    assert waits.collective is not None
    assert 0 < waits.collective.seconds < DEADLINE_S
    cell = waits.evidence.cell
    assert waits.evidence.stack[-2:] == (f"<cell {cell}>:2 f", f"<cell {cell}>:4 <module>")
    assert sleeps.evidence.call == "time.sleep(60)"
    assert re.search(
        rf"^0 +(?:this machine|\S+) +waits +{cell} +\d+\.\d s +2 +all_reduce #\d+ +\d+\.\d s +now$",
        repr(seen),
        re.MULTILINE,
    )
    assert re.search(rf"^rank 0:\n(  .*\n)*  <cell {cell}>:4 <module>$", repr(seen), re.MULTILINE)
    assert f"&lt;cell {cell}&gt;:2 f" in seen._repr_html_()
    assert "<cell" not in seen._repr_html_()


@pytest.mark.here_only
def test_where_sees_the_line_of_code_that_holds_the_gil_and_the_collective_as_last_known(
    hanging: Session, folder: Path
) -> None:
    code = """
work = dist.all_reduce(torch.ones(2), async_op=True) if rank == 0 else None
wait_for("go")
def power():
    return pow(3, 10 ** 9)
power()
"""

    def found(seen: Whereabouts) -> bool:
        if "wait_for" in seen.summary and seen.verdicts[0].evidence.pending:
            (folder / "go").touch()
        are_old = all(each.evidence.function == "power" and each.evidence.age_s > 0.5 for each in seen.verdicts)
        return are_old and seen.summary == "ranks 0-1 are computing in power (line 5)"  # false while the CPUs are busy

    seen = Looking(hanging, code, found).seen
    assert seen.verdicts[0].evidence.stack[0].endswith(":5 power")
    row = next(line for line in repr(seen).splitlines() if line.startswith("0 "))
    assert re.search(r"computes .* 5 +all_reduce #\d+ +\d+\.\d s +\d+\.\d s ago$", row)


def test_where_sees_the_line_that_awaits(hanging: Session) -> None:
    code = "async def inner():\n    await asyncio.sleep(60)\nasync def outer():\n    await inner()\nawait outer()"
    seen = Looking(hanging, code, lambda seen: seen.summary == "ranks 0-1 are in inner (line 2)").seen
    cell = seen.verdicts[0].evidence.cell
    assert seen.verdicts[0].evidence.stack[-3:] == tuple(
        f"<cell {cell}>:{place}" for place in ("2 inner", "4 outer", "5 <module>")
    )


def test_names_that_are_not_ascii_are_shown_as_they_are(hanging: Session) -> None:
    code = "def größe_数():\n    time.sleep(60)\ngröße_数()"
    Looking(hanging, code, lambda seen: seen.summary == "ranks 0-1 are in größe_数 (line 2)").seen  # noqa: B018


def test_function_is_the_users_where_the_stack_goes_through_ours(hanging: Session) -> None:
    code = "def make_groups():\n    return dist.new_group([0, 1])\nif rank == 0: make_groups()\nelse: load_earlier()"
    seen = Looking(hanging, code, lambda seen: seen.verdicts[0].waits_in == "new_group").seen
    assert any("/detrain_nb/node/" in frame for frame in seen.verdicts[0].evidence.stack)
    assert seen.verdicts[0].evidence.function == "make_groups"


@pytest.mark.slow
def test_only_members_of_a_group_are_waited_for() -> None:
    code = """
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
if rank != 1:
    dist.all_reduce(torch.ones(2), group=mesh["tp"].get_group())
if rank != 0:
    load_earlier()
"""
    with Session.start(ranks=4, device="cpu") as session:
        session.settings.hang_s = 1.0
        session.run_cell(PREPARED)
        looking = Looking(session, code, lambda seen: "waits" in seen.summary and "1-3 are in" in seen.summary)
    assert looking.seen.verdicts[0].missing == (1,)
    assert re.fullmatch(
        r"rank 0 waits in all_reduce #1 of group \d \(mesh_tp\) \(line 4\); "
        r"ranks 1-3 are in load_earlier \(line 9 of cell 1, called at line 6\)",
        looking.seen.summary,
    )


def test_where_says_when_no_cell_runs(hanging: Session) -> None:
    seen = hanging.ranks.where()
    assert seen.summary == "no cell is running"
    assert [verdict.kind for verdict in seen.verdicts] == ["idle", "idle"]


def test_look_does_not_disturb_what_a_cell_does_with_signals(hanging: Session) -> None:
    code = """
import signal
caught = []
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM, signal.SIGIO):
    signal.signal(number, lambda number, frame: caught.append(number))
time.sleep(60)
"""
    Looking(hanging, code, lambda seen: seen.summary == "ranks 0-1 are at line 6")
    assert hanging.pull("caught") == {0: [], 1: []}


# ---- earlier collectives and groups are not mistaken for current ones


@pytest.mark.rare_elsewhere
def test_collectives_of_an_ended_generation_are_forgotten(hanging: Session) -> None:
    many = "for _ in range(7): dist.all_reduce(torch.ones(2))\nif rank == 0: dist.all_reduce(torch.ones(2))"
    with pytest.raises(CellInterrupted):
        hanging.run_cell(many, observer=Watcher(is_report), timeout_s=DEADLINE_S)
    code = "if rank == 0: dist.broadcast(torch.ones(2), 0)\nelse: dist.recv(torch.ones(2), 0)"
    seen = Looking(hanging, code, lambda seen: "recv" in seen.summary or "#" in seen.summary).seen
    known = [[str(collective) for collective in verdict.evidence.collectives] for verdict in seen.verdicts]
    assert known in ([["broadcast #1"], []], [[], []])
    assert not seen.mismatch


@pytest.mark.rare_elsewhere
def test_collectives_of_a_group_that_was_made_anew_are_not_taken_for_its_own(hanging: Session) -> None:
    code = """
for _ in range(7): dist.broadcast(torch.ones(2), 0)
dist.init_process_group()
if rank == 0: dist.all_reduce(torch.ones(2))
else: load_earlier()
"""
    words = "rank 0 waits in all_reduce #N (line 4); rank 1 is in load_earlier (line 9 of cell N, called at line 5)"
    words = with_hosts(words, hanging)
    watcher = Watcher(lambda text: text == words)  # a delayed rank may be reported differently
    with pytest.raises(CellInterrupted):
        hanging.run_cell(code, observer=watcher, timeout_s=DEADLINE_S)
    assert watcher.is_pressed and not any("not the same" in text or "different" in text for text in watcher.reports)


def test_recorder_gives_what_was_enqueued_since(hanging: Session) -> None:
    code = """
from detrain_nb.node.cell.recorder import read_collectives
dist.destroy_process_group(); dist.init_process_group()
dist.all_reduce(torch.ones(2))
since_ns = time.time_ns()
dist.broadcast(torch.ones(3, dtype=torch.int64), 0)
dist.barrier()
while any(entry[5] for entry in read_collectives(since_ns=since_ns)): time.sleep(0.001)  # it says so a little later
[entry[:6] for entry in read_collectives(since_ns=since_ns)], len(read_collectives(since_ns=time.time_ns()))
"""
    entries = [["broadcast", 2, "0", "", "Long[3]", False], ["barrier", 3, "0", "", "", False]]
    assert hanging.run_cell(code).values == {0: (entries, 0), 1: (entries, 0)}


def test_recorder_keeps_the_last_collective_of_every_group(hanging: Session) -> None:
    code = """
from detrain_nb.node.cell.recorder import read_collectives
group = dist.new_group([0, 1])
dist.all_reduce(torch.ones(2), group=group)
for _ in range(50): dist.all_reduce(torch.ones(2))
found = read_collectives(since_ns=0)
len(found) < 40, [entry[:2] for entry in found if entry[2] == "1"][-1:]
"""
    assert hanging.run_cell(code).values == {0: (True, [["all_reduce", 1]]), 1: (True, [["all_reduce", 1]])}
