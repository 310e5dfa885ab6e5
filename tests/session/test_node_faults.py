"""Faults in the processes of a rank, caused by a cell or the machine: the session keeps as much as it can."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from detrain_nb import Session
from detrain_nb.errors import CellInterrupted, RankError, RankLost
from detrain_nb.wire import Kept, to_frame

from .inside import state_of
from .soon import assert_soon
from .training import COLLECTIVE, Watcher, be_patient


@pytest.fixture(scope="module")
def two_here() -> Iterator[Session]:
    with Session.start(ranks=2, device="cpu") as session:
        yield session


@pytest.fixture(autouse=True)
def counter(two_here: Session) -> None:
    be_patient(two_here)
    two_here.run_cell("import os, resource, socket, sys, threading, time\ncounter = 7")


def _pid(session: Session, rank: int) -> int:
    return session.status().ranks[rank].pid


def _stop(session: Session, code: str, *, ranks: int | None = None) -> str:
    """Run a cell, stop it when it has printed ``begun``, and return the note on the stop."""
    with pytest.raises(CellInterrupted) as caught:
        session.run_cell(code, ranks=ranks, observer=Watcher(press_at="begun"))
    return caught.value.note


@pytest.mark.parametrize("command", ["{}; true", "{} | cat", "cd / && {}", "trap '' INT; {}; true"])
def test_stop_ends_all_that_a_command_has_started(two_here: Session, command: str) -> None:
    def sleepers() -> list[psutil.Process]:
        below = psutil.Process(_pid(two_here, 0)).parent().children(recursive=True)
        found = []
        for process in below:
            with contextlib.suppress(psutil.Error):  # it has just exited
                found += [process] * ("61.25" in process.cmdline())
        return found

    assert "kept their variables" in _stop(two_here, f"!echo begun; {command.format('sleep 61.25')}", ranks=0)
    assert_soon(lambda: not sleepers())
    assert two_here.pull("counter") == {0: 7, 1: 7}


_WAITS_WITHOUT_DESCRIPTORS = """
def hang():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, before[1]))
    files = []
    try:
        while True: files.append(open(os.devnull))
    except OSError:
        pass
    try:
        print("begun")
        dist.recv(torch.ones(1), src=1 - rank)
    finally:
        files.clear()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
hang()
"""


def test_ranks_that_have_used_up_their_descriptors_are_freed(two_here: Session) -> None:
    for _ in range(2):
        assert "all ranks stopped and kept their variables" in _stop(two_here, _WAITS_WITHOUT_DESCRIPTORS)
        assert two_here.run_cell(COLLECTIVE).values == {0: 2.0, 1: 2.0}
    assert two_here.pull("counter") == {0: 7, 1: 7}


_BREAKS = {
    "a variable's name is no string": ("globals()[1] = 1", "del globals()[1]"),
    "a module cannot be asked": (
        "class Broken:\n    def __getattr__(self, name): raise ImportError(name)\n"
        "before = sys.modules.pop('torch.distributed.fsdp', None)\nsys.modules['torch.distributed.fsdp'] = Broken()",
        "del sys.modules['torch.distributed.fsdp']\nif before: sys.modules['torch.distributed.fsdp'] = before",
    ),
}


@pytest.mark.parametrize(("broken", "mended"), _BREAKS.values(), ids=list(_BREAKS))
def test_rank_is_freed_whatever_a_cell_has_broken(two_here: Session, broken: str, mended: str) -> None:
    two_here.run_cell(broken)
    try:
        for _ in range(2):
            said = _stop(two_here, "print('begun')\ndist.recv(torch.ones(1), src=1 - rank)")
            assert "all ranks stopped and kept their variables" in said
    finally:
        two_here.run_cell(mended)
    assert two_here.run_cell(COLLECTIVE).values == {0: 2.0, 1: 2.0}


def test_cell_that_fails_for_want_of_a_thread_costs_no_variables(two_here: Session) -> None:
    with pytest.raises(RankError, match="can't start new thread"):
        two_here.run_cell("threading.stack_size(1 << 50)\nthreading.Thread(target=print).start()")
    two_here.run_cell("threading.stack_size(0)")
    assert two_here.pull("counter") == {0: 7, 1: 7}


def test_error_that_cannot_be_explained_is_told_as_it_is(two_here: Session) -> None:
    with pytest.raises(RankError, match="CPU is out of memory"):
        two_here.run_cell("globals()[1] = torch.ones(1)\nraise RuntimeError('CPU is out of memory')")
    two_here.run_cell("del globals()[1]")
    assert two_here.pull("counter") == {0: 7, 1: 7}


_WRITES_WHERE_THE_RANK_SPEAKS = """
if rank == 1:
    for fd in range(3, 64):
        try:
            sock = socket.socket(fileno=os.dup(fd))
        except OSError:
            continue
        if sock.family == socket.AF_UNIX:
            sock.send({said!r})
    time.sleep(60)
"""


@pytest.mark.parametrize("said", [b"\xff" * 64, to_frame(Kept()).to_bytes()], ids=["no frame", "of an agent"])
def test_rank_that_sends_nonsense_is_replaced_alone(two_here: Session, said: bytes) -> None:
    with pytest.raises(RankLost, match=r"rank 1 .*SIGKILL[\s\S]*an invalid message[\s\S]*rank 0 kept its variables"):
        two_here.run_cell(_WRITES_WHERE_THE_RANK_SPEAKS.format(said=said))
    assert two_here.run_cell(COLLECTIVE).values == {0: 2.0, 1: 2.0}
    assert two_here.run_cell("globals().get('counter')").values == {0: 7, 1: None}


def test_forked_process_says_nothing_in_the_name_of_the_rank(two_here: Session) -> None:
    code = (
        "from IPython.display import display, HTML\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    try: display(HTML('of the child'))\n"
        "    finally: os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "display(HTML('of the rank'))"
    )
    shown = []

    class Displays(Watcher):
        def display(self, rank: int, bundle: object, *args: object, **options: object) -> None:
            shown.append(str(bundle))

    two_here.run_cell(code, ranks=0, observer=Displays())
    assert ["of the rank" in text for text in shown] == [True]


def test_rank_for_which_no_process_can_be_started_is_left_down_alone(two_here: Session) -> None:
    two_here.run_cell("1")
    worker = psutil.Process(_pid(two_here, 1)).ppid()
    before = resource.prlimit(worker, resource.RLIMIT_NOFILE)
    resource.prlimit(worker, resource.RLIMIT_NOFILE, (3, before[1]))  # no more descriptors
    try:
        with pytest.raises(RankLost, match=r"rank 1 is not restarted, no process can be started for it: .*files"):
            two_here.run_cell("if rank == 1: os._exit(1)\ntime.sleep(60)")
        assert two_here.run_cell("counter", ranks=0).values == {0: 7}
        assert [rank.state for rank in two_here.status().ranks] == ["idle", "down"]
    finally:
        resource.prlimit(worker, resource.RLIMIT_NOFILE, before)
    two_here.restart(1)
    assert two_here.run_cell(COLLECTIVE).values == {0: 2.0, 1: 2.0}
    assert psutil.Process(_pid(two_here, 1)).ppid() == worker


def test_generation_that_crossed_a_death_is_ended_on_the_fresh_rank(
    two_here: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent is suspended, so the order to make a generation reaches the fresh rank, which is slow to start."""
    monkeypatch.setattr(two_here.settings.limits, "group_s", 6.0)
    two_here.run_cell("dist.destroy_process_group()")
    state, interpreter = state_of(two_here), psutil.Process(_pid(two_here, 1))
    worker, agent = interpreter.parent(), interpreter.parents()[3]
    assert "detrain_nb.node.agent.agent" in agent.cmdline()
    before, helds = state.groups.number, []
    agent.suspend()
    os.kill(interpreter.pid, signal.SIGKILL)
    while not helds:
        helds = [child for child in worker.children() if child.pid != interpreter.pid]
    helds[0].suspend()

    def go_on() -> None:
        try:
            assert_soon(lambda: state.groups.number > before)
            agent.resume()
            is_ended = lambda: 1 in state.lost and state_of(two_here).groups.is_ended  # noqa: E731
            assert_soon(lambda: is_ended() or state.groups.number > before + 1)  # the latter if rank 1 was already up
        finally:
            agent.resume()
            helds[0].resume()

    with ThreadPoolExecutor(1) as beside:
        going_on = beside.submit(go_on)
        assert two_here.run_cell(COLLECTIVE).values == {0: 2.0, 1: 2.0}
        going_on.result()
