"""Sessions that outlive their process: what the next process finds, what it is shown, and which one may attach."""

from __future__ import annotations

import ast
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from detrain_nb import Session
from detrain_nb.deploy.bringing_up import End, attach_to_agents
from detrain_nb.errors import DetrainError, NodeLost, SessionError, SpecError
from detrain_nb.session import session as session_module
from detrain_nb.session.link.node_link import NodeLink
from detrain_nb.session.session import end_session
from detrain_nb.session.state.cell_observer import CellObserver

from .inside import link_of
from .soon import each_below

_LIMIT_S = 60.0
_SERVE = """
import json, sys
names = {}
for line in sys.stdin:
    try:
        exec(json.loads(line), names)
        said = ["ok", repr(names.pop("answer", None))]
    except BaseException as exc:
        said = [type(exc).__name__, str(exc)]
    print(json.dumps(said), flush=True)
"""


class OtherProcess:
    """A Python process that holds sessions; it runs code that the test sends, and can be killed."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def start(self, code: str) -> None:
        """Send ``code`` to the process, without waiting until it has run."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(code) + "\n")

    def result(self) -> Any:
        """Wait for the code and return its ``answer``; an exception in it becomes an AssertionError."""
        assert self.process.stdout is not None
        kind, said = json.loads(self.process.stdout.readline())
        assert kind == "ok", f"{kind}: {said}"
        return ast.literal_eval(said)

    def run(self, code: str) -> Any:
        self.start(code)
        return self.result()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(_LIMIT_S)

    def leave(self) -> None:
        """Let the process exit normally, as a script does."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        assert self.process.wait(_LIMIT_S) == 0

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Observer(CellObserver):
    """An observer that keeps all it is shown in one list; with ``is_slow`` it never reports output as shown."""

    def __init__(self) -> None:
        self.shown: list[tuple[int | str, str]] = []
        self.is_slow = False

    def output(self, rank: int, stream: str, text: str) -> None:
        self.shown.append((rank, text))

    def notice(self, text: str) -> None:
        self.shown.append(("notice", text))

    def shown_so_far(self) -> Callable[[], bool]:
        return lambda: not self.is_slow

    def text(self, rank: int) -> str:
        return "".join(text for who, text in list(self.shown) if who == rank)

    @property
    def notices(self) -> list[str]:
        return [text for who, text in list(self.shown) if who == "notice"]


@pytest.fixture
def other() -> Iterator[OtherProcess]:
    process = OtherProcess()
    yield process
    process.close()


@pytest.fixture
def name(runtime_folder: Path) -> Iterator[str]:
    """Yield a name for a session; a session of that name is stopped after the test, whoever holds it."""
    chosen = f"mine-{uuid.uuid4().hex[:6]}"
    yield chosen
    if (runtime_folder / chosen).exists():
        Session.attach(chosen, steal=True).stop()


def _start(name: str, ranks: int = 2, **options: Any) -> str:
    said = ", ".join(f"{key}={value!r}" for key, value in options.items())
    return f"from detrain_nb import Session\ns = Session.start({ranks}, device='cpu', name={name!r}, {said})"


def _eventually(holds: Callable[[], Any], *, limit_s: float = _LIMIT_S) -> None:
    deadline = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline, f"not within {limit_s} s"
        time.sleep(0.02)


def _wait_for(path: Path) -> None:
    _eventually(path.exists)


# ---- what the next process finds


def test_interrupt_of_an_attach_lets_go_of_the_agents(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Session.start(1, device="cpu", name=name).detach()
    ends: list[End] = []
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        keep = lambda *given, **how: ends.extend(attach_to_agents(*given, **how)) or ends  # noqa: E731
        patched.setattr(session_module, "attach_to_agents", keep)
        patched.setattr(NodeLink, "__init__", _interrupted)
        Session.attach(name)
    assert [end.sock.fileno() for end in ends] == [-1]
    with Session.attach(name) as session:
        assert session.run_cell("rank").values == {0: 0}


def _interrupted(*args: Any, **options: Any) -> None:
    raise KeyboardInterrupt


def test_ranks_outlive_a_killed_process_with_variables_and_running_cell(
    other: OtherProcess, name: str, tmp_path: Path
) -> None:
    other.run(_start(name))
    other.run("s.run_cell('x = rank + 10')")
    code = (
        f"import time\nopen('{tmp_path}/{{}}'.format(rank), 'w')\nn = 0\nwhile True:\n    n += 1\n    time.sleep(.01)"
    )
    other.start(f"s.run_cell({code!r})")
    _wait_for(tmp_path / "0")
    _wait_for(tmp_path / "1")
    other.kill()
    with Session.attach(name) as session:
        assert session.log.running_cells == {2: (0, 1)}
        with pytest.raises(SessionError, match="still in cell 2"):
            session.pull("x")
        assert session.stop_cells() == {2: "all ranks stopped and kept their variables"}
        assert session.log.running_cells == {}
        assert session.pull("x") == {0: 10, 1: 11}
        first = session.pull("n")
        assert all(n > 0 for n in first.values())
        result = session.run_cell("t = torch.ones(1); dist.all_reduce(t); t.item()")
        assert (result.cell, result.values) == (3, {0: 2.0, 1: 2.0})


@pytest.mark.slow
def test_numbers_of_cells_go_on_and_replay_knows_the_cells_of_before(other: OtherProcess, name: str) -> None:
    other.run(_start(name))
    other.run("s.run_cell('a = [rank]', number=7)")
    other.run("s.run_cell('b = 1; dist.barrier()')")
    other.run("try: s.run_cell('c = 1; 1 / 0')\nexcept Exception: pass")
    other.run("s.run_cell('d = 2', ranks=[0])")
    other.kill()
    with Session.attach(name) as session:
        result = session.run_cell("print('later')")
        assert result.cell == 11
        assert result.stdout == {0: "later\n", 1: "later\n"}
        session.restart(1)
        assert session.log.replay(1) == {7: None, 11: None}
        session.detach()
    with Session.attach(name) as session:
        assert session.log.next_cell() == 14, "replays have numbers of their own"
        assert session.log.replay(1) == {7: None, 11: None}, "and are not replayed"
        assert session.pull("a") == {0: [0], 1: [1]}
        with pytest.raises(SessionError, match="no variable 'b'"):
            session.pull("b", ranks=1)
        assert "division by zero" in str(session.log.replay(1, cells=[9])[9])
        with pytest.raises(SpecError, match="cells that were: 7-11"):
            session.log.replay(1, cells=[12345])


@pytest.mark.slow
def test_cell_that_ended_well_after_the_attach_is_replayed_and_one_that_failed_is_not(
    other: OtherProcess, name: str, tmp_path: Path
) -> None:
    other.run(_start(name, init=False))
    path = tmp_path / "go"
    wait = f"import os, time\nopen('{tmp_path}/' + str(rank), 'w')\n"
    wait += f"while not os.path.exists({str(path)!r}): time.sleep(.01)\n"
    other.run(f"import threading\nthreading.Thread(target=lambda: s.run_cell({wait + 'a = 1'!r}, ranks=[0])).start()")
    _wait_for(tmp_path / "0")
    other.start(f"s.run_cell({wait + '1 / 0'!r}, ranks=[1])")
    _wait_for(tmp_path / "1")
    other.kill()
    with Session.attach(name) as session:
        assert sorted(session.log.running_cells.values()) == [(0,), (1,)]
        well, badly = (cell for cell, _ in sorted(session.log.running_cells.items(), key=lambda item: item[1]))
        path.touch()
        _eventually(lambda: not session.log.running_cells)
        assert session.log.replay("all") == {well: None}
        assert "division by zero" in str(session.log.replay("all", cells=[badly])[badly])


@pytest.mark.slow
def test_group_that_was_ended_is_made_again_before_the_next_cell(other: OtherProcess, name: str) -> None:
    other.run(_start(name))
    other.run("s.run_cell('dist.destroy_process_group()')\nimport time\nlink = s._core.link.node_links[0]")
    other.run("while link._last_number != link._acknowledged: time.sleep(.01)")
    other.kill()
    with Session.attach(name) as session:
        code = "t = torch.ones(1); dist.all_reduce(t); t.item()"
        assert session.run_cell(code).values == {0: 2.0, 1: 2.0}


@pytest.mark.slow
def test_session_without_a_group_stays_without_one(other: OtherProcess, name: str) -> None:
    other.run(_start(name, init=False))
    other.kill()
    with Session.attach(name) as session:
        assert session.run_cell("dist.is_initialized()").values == {0: False, 1: False}
        assert [row.state for row in session.status().ranks] == ["idle", "idle"]


@pytest.mark.parametrize("reported", ["result", "notice"])
def test_rank_that_died_while_nobody_was_there_is_told_with_the_next_cell(
    other: OtherProcess, name: str, reported: str
) -> None:
    other.run(_start(name))
    pids = other.run("s.run_cell('kept = rank')\nanswer = s.run_cell('import os; os.getpid()').values")
    other.kill()
    os.kill(pids[1], signal.SIGKILL)
    _eventually(lambda: not psutil.pid_exists(pids[1]))
    with Session.attach(name) as session:
        observer = Observer() if reported == "notice" else None
        _eventually(lambda: session.status().ranks[1].pid != pids[1])  # the agent may not know of the death yet
        values = session.run_cell("('kept' in globals(), dist.get_world_size())", observer=observer).values
        assert values == {0: (True, 2), 1: (False, 2)}
        [told] = observer.notices if observer else session.news.notices
    assert f"(pid {pids[1]}) ended with signal 9 (SIGKILL)" in told
    assert "rank 1 was restarted, its variables are lost:\n  %distributed replay -r 1" in told


@pytest.mark.slow
def test_attach_while_a_rank_starts_again(other: OtherProcess, name: str) -> None:
    """The report of the rank's death arrives before the agent's answer to the attach."""
    other.run(_start(name))
    other.run("s.run_cell('kept = rank')")
    status = other.run("answer = [(r.pid) for r in s.status().ranks]")
    worker = psutil.Process(status[1]).parent()
    assert worker is not None
    forker = threading.Timer(0.5, worker.resume)
    code = f"import os, signal; os.kill({worker.pid}, signal.SIGSTOP); os.kill(os.getpid(), 9)"
    other.start(f"s.run_cell({code!r}, ranks=1)")
    _eventually(lambda: worker.status() == psutil.STATUS_STOPPED)
    other.kill()
    forker.start()
    with Session.attach(name) as session:
        forker.join()
        session.ranks.wait_until_fresh(1)
        assert session.run_cell("'kept' in globals()").values == {0: True, 1: False}


@pytest.mark.slow
def test_death_that_was_not_told_yet_is_told_by_the_next_one(other: OtherProcess, name: str) -> None:
    other.run(_start(name))
    pid = other.run("answer = s.run_cell('import os; os.getpid()').values[1]")
    os.kill(pid, signal.SIGKILL)
    other.run("import time\nwhile s.status().ranks[1].state != 'idle' or not s._core.state.fresh: time.sleep(.01)")
    other.run("time.sleep(1)")  # time to acknowledge the death
    other.kill()
    with Session.attach(name) as session:
        session.run_cell("1")
        assert "its variables are lost" in session.news.notices[0]


@pytest.mark.slow
def test_death_before_a_cell_that_runs_is_not_taken_for_its_end(other: OtherProcess, name: str, tmp_path: Path) -> None:
    """The spool delivers the death of the old rank while the restarted rank already runs a cell."""
    other.run(_start(name, init=False))
    pid = other.run("answer = s.run_cell('import os; os.getpid()').values[1]")
    os.kill(pid, signal.SIGKILL)
    other.run("import time\nwhile s.status().ranks[1].state != 'idle' or not s._core.state.fresh: time.sleep(.01)")
    code = f"import os, time\nopen('{tmp_path}/' + str(rank), 'w')\n"
    code += f"while not os.path.exists('{tmp_path}/go'): time.sleep(.01)"
    other.start(f"s.run_cell({code!r})")  # without an observer the death is neither shown nor acknowledged
    _wait_for(tmp_path / "1")
    other.kill()
    with Session.attach(name) as session:
        assert session.log.running_cells == {2: (0, 1)}
        (tmp_path / "go").touch()
        _eventually(lambda: not session.log.running_cells)
        assert session.run_cell("rank").values == {0: 0, 1: 1}


@pytest.mark.slow
def test_end_of_the_launcher_while_nobody_was_there_is_told_after_what_was_missed(
    other: OtherProcess,
    name: str,
    processes: Callable[[], set[psutil.Process]],
    runtime_folder: Path,
    tmp_path: Path,
) -> None:
    other.run(_start(name, init=False))
    code = f"import time\nprint('missed', flush=True)\nopen('{tmp_path}/' + str(rank), 'w')\ntime.sleep(600)"
    other.start(f"s.run_cell({code!r})")
    _wait_for(tmp_path / "0")
    _eventually(lambda: any(b"missed" in path.read_bytes() for path in (runtime_folder / name).glob("spool.*")))
    other.kill()
    agent = next(p for p in processes() if "detrain_nb.node.agent.agent" in p.cmdline())
    agent.children()[0].kill()
    _eventually(lambda: not agent.children())
    session = Session.attach(name)
    try:
        assert session.log.text(1, 0) == "missed\n"
        assert isinstance(session.failure, NodeLost)
        with pytest.raises(NodeLost, match="%distributed restart"):
            session.run_cell("1")
    finally:
        session.stop()
    _eventually(lambda: not processes())


# ---- what the next process is shown


@pytest.mark.slow
def test_what_was_printed_meanwhile_comes_whole_in_order_once(other: OtherProcess, name: str, tmp_path: Path) -> None:
    other.run(_start(name, init=False))
    code = f"""
import os, time
print("before")
open("{tmp_path}/" + str(rank), "w")
while not os.path.exists("{tmp_path}/go"): time.sleep(.01)
for i in range(20_000): print(i)
open("{tmp_path}/done" + str(rank), "w")
while not os.path.exists("{tmp_path}/end"): time.sleep(.01)
for i in range(20_000, 20_100): print(i)
"""
    other.start(f"s.run_cell({code!r})")
    _wait_for(tmp_path / "0")
    _wait_for(tmp_path / "1")
    time.sleep(1)  # time enough to acknowledge output that was not shown
    other.kill()
    (tmp_path / "go").touch()
    _wait_for(tmp_path / "done0")
    _wait_for(tmp_path / "done1")
    with Session.attach(name) as session:
        assert list(session.log.missed) == [1]
        observer = Observer()
        run = session.log.follow(1, observer)
        assert run.running == (0, 1)
        (tmp_path / "end").touch()
        assert run.wait(_LIMIT_S)
        for rank in (0, 1):
            assert observer.text(rank) == "before\n" + "".join(f"{i}\n" for i in range(20_100))
            assert session.log.text(1, rank) == observer.text(rank)
        marks = ["--- possibly shown before:", "--- not shown before:"]
        assert observer.notices == marks, "the process that was killed had the first line, and nobody was shown it"
        session.run_cell("1")
        _eventually(lambda: link_of(session).node_links[0]._acknowledged == link_of(session).node_links[0].last_number)
        session.detach()
    with Session.attach(name) as session:
        assert session.log.missed == {}


@pytest.mark.slow
def test_what_nobody_confirmed_is_shown_again_between_marks(other: OtherProcess, name: str, tmp_path: Path) -> None:
    other.run(_start(name, ranks=1, init=False))
    code = f"import time\nprint(1)\nprint(2)\nopen('{tmp_path}/0', 'w')\ntime.sleep(600)"
    other.start(f"s.run_cell({code!r})")
    _wait_for(tmp_path / "0")
    other.kill()
    first = Session.attach(name)
    _eventually(lambda: first.log.text(1, 0) == "1\n2\n")
    first.detach()
    second = Session.attach(name)
    observer = Observer()
    second.log.follow(1, observer)
    marks = [text for who, text in observer.shown if who == "notice"]
    assert marks == ["--- possibly shown before:", "--- not shown before:"]
    assert observer.shown[0][0] == "notice"
    assert observer.shown[-1][0] == "notice"
    assert observer.text(0) == "1\n2\n"
    second.log.confirm_missed()
    _eventually(lambda: link_of(second).node_links[0]._acknowledged == link_of(second).node_links[0].last_number)
    second.detach()
    with Session.attach(name) as third:
        assert third.log.missed == {}
        third.stop_cells()


@pytest.mark.slow
def test_line_that_was_cut_where_it_was_acknowledged_comes_whole(
    other: OtherProcess, name: str, tmp_path: Path
) -> None:
    other.run(_start(name, ranks=1, init=False))
    code = f"""
import os, sys, time
sys.stdout.write("one\\né"); sys.stdout.flush()
os.write(2, "ü".encode()[:1])
open("{tmp_path}/begun", "w")
while not os.path.exists("{tmp_path}/go"): time.sleep(.01)
os.write(2, "ü".encode()[1:] + b"!\\n")
print("nd\\nthree")
"""
    other.run(
        "from detrain_nb.session.state.cell_observer import CellObserver\n"
        "class Shows(CellObserver):\n    def output(self, *a): pass\n    def notice(self, text): pass\n"
        "    def waiting(self, text): pass\n    def shown_so_far(self): return lambda: True"
    )
    other.start(f"s.run_cell({code!r}, observer=Shows())")
    _wait_for(tmp_path / "begun")
    time.sleep(1.5)  # time enough to check several times which output was shown
    other.kill()
    (tmp_path / "go").touch()
    with Session.attach(name) as session:
        observer = Observer()
        run = session.log.follow(1, observer)
        assert run.wait(_LIMIT_S) or run.is_cut_off
        assert observer.notices == [], "all that came before the kill was acknowledged"
        text = observer.text(0)
    assert sorted([text.replace("ü!\n", ""), "ü!\n" if "ü!\n" in text else ""]) == sorted(["énd\nthree\n", "ü!\n"])


@pytest.mark.slow
def test_value_and_error_that_came_meanwhile_are_there(other: OtherProcess, name: str, tmp_path: Path) -> None:
    other.run(_start(name, init=False))
    code = (
        f"import os, time\nopen('{tmp_path}/' + str(rank), 'w')\n"
        f"while not os.path.exists('{tmp_path}/go'): time.sleep(.01)\n1 / (rank - 1)\n[rank]"
    )
    other.start(f"s.run_cell({code!r})")
    _wait_for(tmp_path / "0")
    _wait_for(tmp_path / "1")
    other.kill()
    (tmp_path / "go").touch()
    time.sleep(1)  # usually both arrive before the attach; the test also passes if they do not
    with Session.attach(name) as session:
        run = session.log.follow(1, Observer())
        assert run.wait(_LIMIT_S) or run.is_cut_off
        assert run.bundles() == {0: {"text/plain": "[0]"}}
        assert {rank: error.name for rank, error in run.errors().items()} == {1: "ZeroDivisionError"}


@pytest.mark.slow
def test_end_after_the_attach_is_told_to_who_follows(other: OtherProcess, name: str, tmp_path: Path) -> None:
    other.run(_start(name, init=False))
    code = (
        f"import os, time\nif rank: 1 / 0\nopen('{tmp_path}/0', 'w')\n"
        f"while not os.path.exists('{tmp_path}/go'): time.sleep(.01)\n{{}}['missing']"
    )
    other.start(f"s.run_cell({code!r})")
    _wait_for(tmp_path / "0")
    other.kill()
    with Session.attach(name) as session:
        ended = threading.Event()
        told: list[dict[int, str]] = []

        def on_end(run: Any) -> None:
            told.append({rank: error.name for rank, error in run.errors().items()})
            ended.set()

        run = session.log.follow(1, Observer(), on_end=on_end)
        _eventually(lambda: run.running == (0,))
        assert {rank: error.name for rank, error in run.errors().items()} == {1: "ZeroDivisionError"}
        assert not told
        (tmp_path / "go").touch()
        assert ended.wait(_LIMIT_S)
        assert told == [{0: "KeyError", 1: "ZeroDivisionError"}]


@pytest.mark.slow
def test_death_in_a_cell_of_before_is_told_to_who_follows(other: OtherProcess, name: str, tmp_path: Path) -> None:
    other.run(_start(name, init=False))
    pid = other.run("answer = s.run_cell('import os; os.getpid()').values[1]")
    other.start(f"s.run_cell('import time\\nopen(f\\'{tmp_path}/{{rank}}\\', \\'w\\'); time.sleep(600)')")
    _wait_for(tmp_path / "1")
    other.kill()
    with Session.attach(name) as session:
        observer = Observer()
        run = session.log.follow(2, observer)
        assert run.running == (0, 1)
        os.kill(pid, signal.SIGKILL)
        _eventually(lambda: run.running == (0,))
        _eventually(lambda: f"(pid {pid}) ended with signal 9 (SIGKILL)" in "".join(observer.notices))
        session.stop_cells()
        assert session.run_cell("rank").values == {0: 0, 1: 1}
        assert "its variables are lost" in session.news.notices[0]


@pytest.mark.slow
def test_blocked_cell_of_before_is_freed_and_variables_stay(other: OtherProcess, name: str, tmp_path: Path) -> None:
    other.run(_start(name))
    code = f"x = rank\nopen('{tmp_path}/' + str(rank), 'w')\nif rank == 0: dist.all_reduce(torch.ones(1))"
    other.start(f"s.run_cell({code!r})")
    _wait_for(tmp_path / "1")
    other.kill()
    with Session.attach(name) as session:
        _eventually(lambda: session.log.running_cells == {1: (0,)})  # rank 1 ends the cell just after creating its file
        _eventually(lambda: "all_reduce" in repr(session.ranks.where()))
        [story] = session.stop_cells().values()
        assert "freed" in story
        assert session.pull("x") == {0: 0, 1: 1}
        assert session.run_cell("t = torch.ones(1); dist.all_reduce(t); t.item()").values == {0: 2.0, 1: 2.0}


@pytest.mark.slow
def test_spool_is_bounded_and_says_what_it_dropped_in_its_place(other: OtherProcess, name: str, tmp_path: Path) -> None:
    limit_bytes = 24 << 20
    other.run(_start(name, ranks=1, init=False, spool_limit_bytes=limit_bytes))
    code = f"""
import os, time
print("first")
open("{tmp_path}/0", "w")
while not os.path.exists("{tmp_path}/go"): time.sleep(.01)
for i in range(60_000): print(f"{{i:01000d}}")
open("{tmp_path}/done", "w")
"""
    other.start(f"s.run_cell({code!r})")
    _wait_for(tmp_path / "0")
    other.kill()
    (tmp_path / "go").touch()
    folder = Path(os.environ["DETRAIN_NB_RUNTIME_DIR"]) / name
    _wait_for(tmp_path / "done")
    sizes = each_below(folder, lambda path: path.stat().st_size if path.name.startswith("spool.") else 0)
    assert sum(sizes) < limit_bytes + (9 << 20)
    with Session.attach(name) as session:
        observer = Observer()
        run = session.log.follow(1, observer)
        assert run.wait(_LIMIT_S) or run.is_cut_off
        at, lost = next((i, text) for i, (who, text) in enumerate(observer.shown) if "were lost" in text)
        assert re.search(r"about [0-9,]{9,} bytes of output were lost .* over its limit of 25,165,824 bytes", lost)
        before, after = (
            "".join(text for who, text in part if who == 0) for part in (observer.shown[:at], observer.shown[at:])
        )
        first, *lines = before.splitlines()[:-1]
        assert (first, list(map(int, lines))) == ("first", list(range(len(lines))))
        numbers = [int(line) for line in after.splitlines()[1:]]
        assert numbers == list(range(numbers[0], 60_000))
        assert numbers[0] > len(lines) + 10_000, "what is between the two was lost"
        [size] = re.findall(r"about ([0-9,]+) bytes", lost)
        assert abs(len(before) + int(size.replace(",", "")) + len(after) - 60_060_000) < 1_000_000
        assert lost in session.news.notices


@pytest.mark.slow
def test_much_that_was_missed_arrives_whole_and_does_not_fill_the_memory(
    other: OtherProcess, name: str, tmp_path: Path
) -> None:
    other.run(_start(name, init=False))
    code = f"""
import os, time
open("{tmp_path}/" + str(rank), "w")
while not os.path.exists("{tmp_path}/go"): time.sleep(.01)
for i in range(100_000): print(f"{{i:0500d}}")
open("{tmp_path}/done" + str(rank), "w")
"""
    other.start(f"s.run_cell({code!r})")
    _wait_for(tmp_path / "0")
    _wait_for(tmp_path / "1")
    other.kill()
    (tmp_path / "go").touch()
    _wait_for(tmp_path / "done0")
    _wait_for(tmp_path / "done1")
    second = OtherProcess()
    try:
        before, after, counts = second.run(f"""
import psutil, zlib
from detrain_nb import Session
from detrain_nb.session.state.cell_observer import CellObserver
class Counts(CellObserver):
    def __init__(self): self.lines, self.sums = {{0: 0, 1: 0}}, {{0: 0, 1: 0}}
    def output(self, rank, stream, text):
        self.lines[rank] += text.count("\\n"); self.sums[rank] = zlib.crc32(text.encode(), self.sums[rank])
    def notice(self, text): print(text)
    def shown_so_far(self): return lambda: True
before, counts = psutil.Process().memory_info().rss, Counts()
s = Session.attach({name!r})
s.log.follow(1, counts).wait(60)
after = psutil.Process().memory_info().rss
answer = before, after, (counts.lines, counts.sums)
s.stop()
""")
    finally:
        second.close()
    import zlib

    expected = zlib.crc32("".join(f"{i:0500d}\n" for i in range(100_000)).encode())
    assert counts == ({0: 100_000, 1: 100_000}, {0: expected, 1: expected})
    assert after - before < 60 << 20, "100 MB were missed"


# ---- which process may hold the session


def test_own_name_wins_at_once_over_a_process_that_hangs(other: OtherProcess, name: str) -> None:
    other.run(_start(name, init=False, holder=name))
    other.run("s.run_cell('x = rank')")
    other.process.send_signal(signal.SIGSTOP)
    with Session.attach(name, holder=name) as session:
        assert session.run_cell("x").values == {0: 0, 1: 1}
        other.process.send_signal(signal.SIGCONT)
        said = other.run("try: s.run_cell('1')\nexcept Exception as e: answer = type(e).__name__, str(e)")
        taken = f"session '{name}' was taken over by {name}: %distributed attach --steal takes it back"
        assert said == ("SessionError", taken)
        assert session.run_cell("x").values == {0: 0, 1: 1}


@pytest.mark.slow
def test_holder_of_another_name_is_refused_until_it_steals(other: OtherProcess, name: str) -> None:
    other.run(_start(name, init=False, holder="first"))
    with pytest.raises(SessionError, match=f"'{name}' is held by first: %distributed attach --steal takes it over"):
        Session.attach(name)
    assert other.run("answer = s.run_cell('rank').values") == {0: 0, 1: 1}
    with Session.attach(name, steal=True, holder="second") as session:
        assert session.run_cell("rank").values == {0: 0, 1: 1}
        said = other.run("try: s.run_cell('1')\nexcept Exception as e: answer = type(e).__name__, str(e)")
        taken = f"session '{name}' was taken over by second: %distributed attach --steal takes it back"
        assert said == ("SessionError", taken)
        assert "\n" not in said[1]


def test_cell_that_runs_when_its_session_is_stolen_says_so_at_once_and_goes_on(
    other: OtherProcess, name: str, tmp_path: Path
) -> None:
    other.run(_start(name, ranks=1, init=False))
    code = f"import time\nopen('{tmp_path}/0', 'w')\nwhile True: time.sleep(.01)"
    other.start(f"try: s.run_cell({code!r})\nexcept Exception as e: answer = str(e)")
    _wait_for(tmp_path / "0")
    with Session.attach(name, steal=True, holder="thief") as session:
        assert "was taken over by thief" in other.result()
        assert session.log.running_cells == {1: (0,)}
        session.stop_cells()


@pytest.mark.parametrize("how", ["exit", "stop"])
def test_process_that_was_stolen_from_does_not_end_the_ranks(other: OtherProcess, name: str, how: str) -> None:
    other.run(_start(name, init=False))
    with Session.attach(name, steal=True) as session:
        if how == "stop":
            other.run("s.stop()")
        other.leave()
        assert session.run_cell("rank").values == {0: 0, 1: 1}


@pytest.mark.slow
def test_stop_that_has_not_heard_yet_that_the_session_was_taken_does_not_end_the_ranks(
    other: OtherProcess, name: str
) -> None:
    other.run(_start(name, init=False))
    other.run(_SLOW_TO_HEAR)
    with Session.attach(name, steal=True) as session:
        other.run("s.stop()")
        assert session.run_cell("rank").values == {0: 0, 1: 1}


_SLOW_TO_HEAR = """
import time
from detrain_nb.session.link.node_link import NodeLink
take = NodeLink._take
def take_later(self, frame):
    time.sleep(1)
    take(self, frame)
NodeLink._take = take_later
"""


@pytest.mark.slow
def test_end_of_the_process_ends_a_session_that_it_attached_to(
    other: OtherProcess, name: str, processes: Callable[[], set[psutil.Process]], runtime_folder: Path
) -> None:
    other.run(_start(name, init=False))
    other.kill()
    second = OtherProcess()
    try:
        second.run(f"from detrain_nb import Session\ns = Session.attach({name!r})")
        second.leave()
    finally:
        second.close()
    _eventually(lambda: not processes())
    assert not (runtime_folder / name).exists()


@pytest.mark.slow
def test_end_of_the_process_leaves_a_session_that_it_detached_from(other: OtherProcess, name: str) -> None:
    other.run(_start(name, init=False))
    other.run("s.run_cell('x = rank')\ns.detach()")
    said = other.run("try: s.run_cell('1')\nexcept Exception as e: answer = str(e)")
    assert said == f"session {name!r} has ended: start another one" or "has disconnected" in said
    other.leave()
    with Session.attach(name) as session:
        assert session.pull("x") == {0: 0, 1: 1}


def test_detached_session_is_attached_to_by_the_same_process_and_nothing_is_shown_twice(
    name: str, processes: Callable[[], set[psutil.Process]]
) -> None:
    first = Session.start(ranks=1, device="cpu", init=False, name=name)
    result = first.run_cell("x = 5\nprint('once')")
    first.detach()
    assert not first.is_alive
    session = Session.attach(name)
    try:
        assert session.log.missed == {}
        assert session.pull("x") == {0: 5}
        assert session.run_cell("print('again')").cell == 2
        assert result.stdout == {0: "once\n"}
    finally:
        session.stop()
    _eventually(lambda: not processes())


@pytest.mark.slow
def test_session_whose_processes_were_left_ends_when_it_has_lingered(
    other: OtherProcess, name: str, processes: Callable[[], set[psutil.Process]], runtime_folder: Path
) -> None:
    other.run(_start(name, init=False, linger_s=1.0))
    other.run('s.run_cell(\'import subprocess; p = subprocess.Popen(["sleep", "600"], start_new_session=True)\')')
    other.kill()
    _eventually(lambda: not processes())
    assert not list(runtime_folder.glob(f"*{name}*"))
    with pytest.raises(SessionError, match=f"no session '{name}' is running on this machine; running sessions: "):
        Session.attach(name)


@pytest.mark.slow
def test_attach_ends_the_wait_for_a_notebook(other: OtherProcess, name: str) -> None:
    other.run(_start(name, init=False, linger_s=6.0))
    other.kill()
    with Session.attach(name) as session:
        time.sleep(7)
        assert session.run_cell("rank").values == {0: 0, 1: 1}


@pytest.mark.slow
def test_session_that_waits_for_weeks_waits(other: OtherProcess, name: str) -> None:
    other.run(_start(name, init=False, linger_s=1e8))
    other.kill()
    time.sleep(0.5)
    with Session.attach(name) as session:
        assert session.run_cell("rank").values == {0: 0, 1: 1}


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_linger_that_is_no_time_is_refused(seconds: float) -> None:
    with pytest.raises(SpecError, match="give a number of seconds"):
        Session.start(ranks=1, linger_s=seconds)


@pytest.mark.slow
def test_session_that_another_process_holds_is_not_ended_by_name(other: OtherProcess, name: str) -> None:
    other.run(_start(name, init=False, holder="first"))
    with pytest.raises(SessionError, match="held by first"):
        end_session(name)
    assert other.run("answer = s.run_cell('rank').values") == {0: 0, 1: 1}
    other.kill()
    end_session(name)
    with pytest.raises(SessionError, match=f"no session '{name}' is running"):
        end_session(name)


@pytest.mark.slow
def test_process_killed_while_ranks_start_leaves_them_to_the_next(
    other: OtherProcess, name: str, runtime_folder: Path
) -> None:
    other.start(_start(name))
    _wait_for(runtime_folder / name / "launcher.log")
    other.kill()
    with Session.attach(name) as session:
        assert session.run_cell("t = torch.ones(1); dist.all_reduce(t); t.item()").values == {0: 2.0, 1: 2.0}


def test_attach_to_what_is_no_session_is_one_clear_error(name: str) -> None:
    with pytest.raises(DetrainError, match=r"session name '\.\./x'"):
        Session.attach("../x")
    with pytest.raises(SessionError, match=f"no session '{name}' is running on this machine"):
        Session.attach(name)
