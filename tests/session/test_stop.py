"""The stop button: waiting ranks are freed, computing ranks are left alone, variables stay, all run the next cell.

In every test a DDP model, a fully sharded model, a mesh and a subgroup exist. No group's timeout (30 minutes) passes
here: a rank that waited was freed by the stop, and the log says so.
"""

from __future__ import annotations

import contextlib
import logging
import operator
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from detrain_nb import Session
from detrain_nb.errors import CellInterrupted, CellTimeout, RankError, SessionError
from detrain_nb.session.state.cell_observer import CellObserver
from detrain_nb.wire import Message, Replace, RunCell

from ..failing_cells import FAILING_CELLS
from .inside import core_of, link_of
from .soon import assert_soon
from .training import COLLECTIVE, STALE, Watcher, assert_works, be_patient, equip, press_stop

_NEVER = "while True: time.sleep(0.01)"
_SLOW_C = "sum(range(400_000_000))"  # holds the GIL for seconds and handles no signal


@pytest.fixture(scope="module")
def equipped(two_ranks: Callable[[], Session]) -> Iterator[Session]:
    with two_ranks() as session:
        yield session


@pytest.fixture(autouse=True)
def training(equipped: Session, caplog: pytest.LogCaptureFixture) -> None:
    """Runs before every test; the log shows which generations ended."""
    be_patient(equipped)
    equip(equipped)
    caplog.set_level(logging.INFO, logger="detrain_nb.session")
    caplog.clear()


@contextlib.contextmanager
def _presses(*seconds: float) -> Iterator[None]:
    """Press stop after each of ``seconds``; no press is pending when the block ends."""
    timers = [threading.Timer(delay, press_stop) for delay in seconds]
    for timer in timers:
        timer.start()
    with _none_is_left_of(timers):
        yield


@contextlib.contextmanager
def _none_is_left_of(presses: list[threading.Timer]) -> Iterator[None]:
    """Fail the test on a press that no cell took; its KeyboardInterrupt would end the whole pytest run."""
    try:
        try:
            yield
        finally:
            for press in presses:
                press.cancel()
                press.join()
    except KeyboardInterrupt:
        pytest.fail("stop was pressed when no cell ran")


def _stop(session: Session, code: str, *presses: float) -> CellInterrupted:
    """Run a cell, press stop ``presses`` seconds after all ranks have begun it, and return the exception."""
    watcher = Watcher(press_at="the cell begins", ranks=len(session.ranks), after_s=presses or (0.4,))
    try:
        with pytest.raises(CellInterrupted) as caught:
            session.run_cell(f"print('the cell begins')\n{code}", observer=watcher, first_line=0, timeout_s=60)
    finally:
        watcher.press_no_more()
    return caught.value


def _stop_when_begun(session: Session, code: str, *, ranks: int) -> CellInterrupted:
    """Run a cell, press stop once ``ranks`` ranks have printed ``begun``, and return the exception."""
    with pytest.raises(CellInterrupted) as caught:
        session.run_cell(code, observer=Watcher(press_at="begun", ranks=ranks, after_s=(0.3,)), timeout_s=60)
    return caught.value


def _freed(caplog: pytest.LogCaptureFixture) -> set[int]:
    """The ranks whose generation was ended, if any connection was shut: a rank's peer may shut it first."""
    found = re.findall(r"generation \d+ ended on rank (\d+): (\d+) connections shut", caplog.text)
    return {int(rank) for rank, _ in found} if any(int(count) for _, count in found) else set()


def _assert_freed(caplog: pytest.LogCaptureFixture, *ranks: int) -> None:
    """Wait for the generations of ``ranks`` to end. A rank may end its cell before it reports this of its groups."""
    assert_soon(lambda: _freed(caplog) >= set(ranks))


def _counters(session: Session) -> dict[int, int]:
    return dict(session.pull("counter"))


_BLOCKED = {
    "all_reduce on rank 0": ("if rank == 0: dist.all_reduce(torch.ones(1))", "rank 0 waited in all_reduce"),
    "all_reduce on rank 1": ("if rank == 1: dist.all_reduce(torch.ones(1))", "rank 1 waited in all_reduce"),
    "the other in Python": (
        f"if rank == 0: dist.barrier()\nelse:\n    {_NEVER}",
        "rank 0 waited in barrier",
    ),
    "recv against recv": ("dist.recv(torch.ones(1), src=1 - rank)", "ranks 0-1 waited in recv"),
    "two groups crossed": (
        "dist.all_reduce(x, group=subgroup if rank else None)",
        "waited in all_reduce",
    ),
    "group of a mesh": ("if rank == 0: dist.all_reduce(x, group=mesh.get_group())", "rank 0 waited in all_reduce"),
    "DDP": ("if rank == 0: ddp(x).sum().backward()", "rank 0 waited in"),
    "fully_shard": ("if rank == 1: sharded(x).sum().backward()", "rank 1 waited in"),
    "store": ("if rank == 0: dist.new_group([0, 1])", "rank 0 waited in new_group"),
    "store, other rank": ("if rank == 1: dist.new_group([0, 1])", "rank 1 waited in new_group"),
    "default group": ("if rank == 0: dist.init_process_group()", "rank 0 waited in init_process_group"),
    "object collective": ("if rank == 0: dist.all_gather_object([None] * 2, 'x')", "rank 0 waited in all_gather"),
    "asynchronous": ("if rank == 0: dist.all_reduce(x, async_op=True).wait()", "rank 0 waited in all_reduce"),
    "the other sleeps": ("if rank == 0: dist.barrier()\ntime.sleep(60)", "rank 0 waited in barrier"),
    "the other in a subprocess": (
        "if rank == 0: dist.barrier()\nelse: subprocess.run(['sleep', '60'])",
        "rank 0 waited in barrier",
    ),
    "the other awaits": (
        "import asyncio\nif rank == 0: dist.barrier()\nawait asyncio.sleep(60)",
        "rank 0 waited in barrier",
    ),
    "the other in a DataLoader": (
        "class Slow(torch.utils.data.Dataset):\n"
        "    def __len__(self): return 8\n"
        "    def __getitem__(self, i): time.sleep(60)\n"
        "if rank == 0: dist.barrier()\n"
        "for batch in torch.utils.data.DataLoader(Slow(), num_workers=2): pass",
        "rank 0 waited in barrier",
    ),
    "not the same collective": (
        "dist.all_reduce(x) if rank else dist.broadcast(x, 0)",
        r"differs: broadcast Float\[2, 4\] on rank 0, all_reduce Float\[2, 4\] on rank 1",
    ),
    "RuntimeError is caught": (
        "while True:\n    try: dist.recv(torch.ones(1), src=1 - rank)\n    except RuntimeError: pass",
        "waited in recv",
    ),
}


# One of each kind: a collective, messages, groups in another order, FSDP, a subprocess, code that catches the error.
_TELLING = {
    "all_reduce on rank 0",
    "recv against recv",
    "two groups crossed",
    "fully_shard",
    "default group",
    "the other in a subprocess",
    "RuntimeError is caught",
}


@pytest.mark.rare_elsewhere
def test_group_that_a_cell_has_made_itself_is_ended_too(two_ranks: Callable[..., Session]) -> None:
    """The session makes no process group itself."""
    with two_ranks(init=False) as session:
        session.run_cell("import time\ncounter = rank")
        hung = f"dist.init_process_group()\nprint('begun')\nif rank == 0: dist.barrier()\nelse:\n    {_NEVER}"
        for _ in range(2):
            stopped = _stop_when_begun(session, hung, ranks=2)
            assert re.search(r"rank 0 waited in barrier.*: freed", stopped.note), stopped.note
            assert "the process groups were ended: call dist.init_process_group() again" in stopped.note
            assert "anew" not in stopped.note
        assert session.pull("counter") == {0: 0, 1: 1}
        assert session.run_cell(f"dist.init_process_group()\n{COLLECTIVE}").values == {0: 2.0, 1: 2.0}


@pytest.mark.rare_elsewhere("all_reduce on rank 0", "recv against recv", "fully_shard", "the other in a subprocess")
@pytest.mark.parametrize(
    ("code", "story"),
    [
        pytest.param(*case, id=name, marks=[] if name in _TELLING else pytest.mark.slow)
        for name, case in _BLOCKED.items()
    ],
)
def test_blocked_rank_is_freed_and_keeps_its_variables(
    equipped: Session, caplog: pytest.LogCaptureFixture, code: str, story: str
) -> None:
    before = _counters(equipped)
    stopped = _stop(equipped, code)
    assert re.search(story, stopped.note), stopped.note
    assert "all ranks stopped and kept their variables" in stopped.note
    assert set(re.findall(r"\w+", stopped.note.partition("recreate")[2])) >= STALE, stopped.note
    assert all(error.interrupted for error in stopped.errors.values())
    assert _counters(equipped) == before
    _assert_freed(caplog, 0, 1)
    assert_works(equipped)


@pytest.mark.rare_elsewhere
def test_rank_that_another_ones_end_has_freed_tells_nothing_of_that(equipped: Session) -> None:
    """Both ranks shut their connection; here the other rank is first, and the error of gloo must not be shown."""
    slow_end = "generation = dist.init_process_group.__self__\nend_now = generation.end"
    slow_end += "\nif rank == 0: generation.end = lambda number: (time.sleep(0.2), end_now(number))[1]"
    slow_end += "\nsys.modules['detrain_nb.node.cell.interpreter']._OWN_END_LIMIT_S = 5"
    equipped.run_cell(slow_end)
    try:
        code = f"print('begun')\nif rank == 0: dist.all_reduce(torch.ones(1))\nelse:\n    {_NEVER}"
        freed = _stop_when_begun(equipped, code, ranks=2).errors[0]
    finally:
        equipped.run_cell("generation.end = end_now", ranks=0)
    assert freed.interrupted
    assert "gloo" not in "\n".join([freed.message, *freed.traceback]), freed.traceback
    assert_works(equipped)


_FREE = {
    "loop": "while True: pass",
    "sleep": "time.sleep(60)",
    "subprocess": "subprocess.run(['sleep', '60'])",
    "command": "!sleep 60",
    "await": "import asyncio\nawait asyncio.sleep(60)",
}


@pytest.mark.rare_elsewhere("loop", "subprocess")
@pytest.mark.parametrize("code", _FREE.values(), ids=list(_FREE))
def test_ranks_that_wait_for_nobody_keep_their_groups(
    equipped: Session, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    stopped = _stop(equipped, code)
    assert stopped.note == "all ranks stopped and kept their variables"
    assert not _freed(caplog)
    assert equipped.run_cell("ddp(x).sum().backward(); sharded(x).sum().item()").ranks == (0, 1), "as before"


_IN_STEP = {
    "collectives": "for _ in range(5): dist.all_reduce(x)",
    "DDP and a mesh": "ddp(x).sum().backward()\ndist.all_reduce(x, group=mesh.get_group())",
    "not waited for": "work = dist.all_reduce(x, async_op=True)",
    "a group of one rank": "alone = [dist.new_group([r]) for r in range(2)]\nif rank: dist.barrier(alone[1])",
}
_OUT_OF_STEP = {
    "begun by one rank alone": "if rank == 0: work = dist.all_reduce(torch.ones(1000), async_op=True)",
    "another group": "work = dist.all_reduce(torch.ones(1000), group=subgroup if rank else None, async_op=True)",
    "messages that nobody took": "work = dist.isend(torch.ones(1000), 1 - rank)",
}


@pytest.mark.rare_elsewhere("DDP and a mesh")
@pytest.mark.parametrize("end", [_NEVER, "1 / 0"], ids=["stopped", "failed"])
@pytest.mark.parametrize("code", _IN_STEP.values(), ids=list(_IN_STEP))
def test_ranks_that_are_in_step_keep_their_groups(
    equipped: Session, caplog: pytest.LogCaptureFixture, code: str, end: str
) -> None:
    error = _stop_or_fail(equipped, f"{code}\n{end}")
    assert "process groups" not in error.note
    assert not _freed(caplog)
    assert equipped.run_cell("ddp(x).sum().backward(); sharded(x).sum().item()").ranks == (0, 1), "as before"


@pytest.mark.rare_elsewhere("begun by one rank alone")
@pytest.mark.parametrize("end", [_NEVER, "1 / 0"], ids=["stopped", "failed"])
@pytest.mark.parametrize("code", _OUT_OF_STEP.values(), ids=list(_OUT_OF_STEP))
def test_collective_that_was_begun_never_meets_the_next_cell(equipped: Session, code: str, end: str) -> None:
    """A stop can arrive between the start of a collective and the wait for it, on one rank only."""
    before = _counters(equipped)
    error = _stop_or_fail(equipped, f"{code}\n{end}")
    assert set(re.findall(r"\w+", error.note.partition("recreate")[2])) >= STALE, error.note
    assert _counters(equipped) == before
    assert_works(equipped)


@pytest.mark.parametrize("end", [_NEVER, "1 / 0"], ids=["stopped", "failed"])
def test_press_while_it_is_looked_who_is_in_step_ends_the_groups_without_asking(
    equipped: Session, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    def press(*args: object, **options: object) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(link_of(equipped), "look", press)
    error = _stop_or_fail(equipped, f"{_OUT_OF_STEP['begun by one rank alone']}\n{end}")
    assert "the process groups are recreated" in error.note
    assert_works(equipped)


@pytest.mark.here_only
@pytest.mark.slow
def test_rank_that_was_left_in_a_stopped_cell_is_looked_at_when_it_has_ended_it(
    equipped: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equipped.settings.limits, "compute_s", 0.2)
    begun = "work = dist.all_reduce(torch.ones(1000), async_op=True)\n    print('begun')"
    stopped = _stop_when_begun(equipped, f"if rank == 1:\n    {begun}\n    y = {_SLOW_C}\n{_NEVER}", ranks=1)
    assert "process groups" not in stopped.note
    watcher = Watcher()
    assert equipped.run_cell(COLLECTIVE, observer=watcher).values == {0: 2.0, 1: 2.0}
    assert "run the cells that create ddp, " in "".join(watcher.notices)


def _stop_or_fail(session: Session, code: str) -> RankError:
    if _NEVER in code:
        return _stop_when_begun(session, code.replace(_NEVER, f"print('begun')\n{_NEVER}"), ranks=2)
    with pytest.raises(RankError) as caught:
        session.run_cell(code)
    return caught.value


@pytest.mark.here_only
def test_rank_that_computes_is_named_and_the_group_is_left_alone(
    equipped: Session, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equipped.settings.limits, "compute_s", 0.5)
    code = f"y = 0\nif rank == 1:\n    y = {_SLOW_C}\n"
    stopped = _stop(equipped, code)
    assert re.search(r"rank 1 is computing at line 3 \(\d+ s\)", stopped.note), stopped.note
    assert "%distributed interrupt --kill 1" in stopped.note
    assert not _freed(caplog)
    assert equipped.run_cell("rank", ranks=0).values == {0: 0}, "the other rank need not wait"
    assert equipped.run_cell(COLLECTIVE).values == {0: 2.0, 1: 2.0}, "the next cell of all waits for it"
    assert equipped.run_cell("ddp(x).sum().item()").ranks == (0, 1), "the groups are the old ones"


@pytest.mark.rare_elsewhere
def test_sharded_tensors_can_be_made_again_after_a_stop(equipped: Session) -> None:
    """torch caches what it derives from a mesh, and an equal mesh finds the cached values again."""
    code = (
        "from torch.distributed.tensor import Replicate, Shard, distribute_tensor\n"
        "mesh = torch.distributed.init_device_mesh(device.type, (2,))\n"
        "d = distribute_tensor(torch.arange(8.0), mesh, [Shard(0)])\n"
        "e = (d * 2).redistribute(mesh, [Replicate()])\n"
        "float(d.full_tensor().sum()), float((d.norm() ** 2).full_tensor()), float(e.to_local().sum())"
    )
    before = equipped.run_cell(code).values
    _stop(equipped, "if rank == 0:\n    dist.all_reduce(torch.ones(1))")
    assert equipped.run_cell(code).values == before


@pytest.mark.slow
@pytest.mark.here_only
def test_backward_on_the_cpu_is_interrupted_when_it_returns(
    equipped: Session, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equipped.settings.limits, "compute_s", 0.3)
    equipped.run_cell("w = torch.randn(1000, 1000, requires_grad=True)", ranks=1)
    code = "if rank == 1:\n    z = w\n    for _ in range(80): z = z @ w / 40\n    print('now'); z.sum().backward()"
    watcher = Watcher(press_at="now")
    with pytest.raises(CellInterrupted) as caught:
        equipped.run_cell(code, observer=watcher)
    assert "rank 1 is computing at line 4" in caught.value.note
    assert "rank 1 is computing at line 4" in "".join(watcher.waited), "said while it is waited for, too"
    assert "press stop again to free it without checking" in "".join(watcher.waited), "the button works then"
    assert "press stop" not in caught.value.note
    assert not _freed(caplog)
    assert equipped.run_cell(COLLECTIVE).values == {0: 2.0, 1: 2.0}


@pytest.mark.here_only
@pytest.mark.slow
def test_waiting_ranks_are_freed_at_once_beside_one_that_computes(
    equipped: Session, caplog: pytest.LogCaptureFixture
) -> None:
    before = _counters(equipped)
    code = f"if rank == 0: dist.all_reduce(torch.ones(1))\nelse:\n    {_SLOW_C}; dist.all_reduce(torch.ones(1))"
    stopped = _stop(equipped, code)
    assert "rank 0 waited in all_reduce" in stopped.note
    assert "rank 1 is computing at line 3" in stopped.note, stopped.note
    _assert_freed(caplog, 0)
    assert 0 in stopped.errors
    assert_works(equipped)  # the computing rank ended its old generation when it returned to Python
    assert {rank: count - 1 for rank, count in _counters(equipped).items()} == before


@pytest.mark.rare_elsewhere
def test_rank_that_computes_can_be_replaced_alone(equipped: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equipped.settings.limits, "compute_s", 0.2)
    _stop(equipped, f"if rank == 1: {_SLOW_C * 1}; {_SLOW_C}; {_SLOW_C}")
    equipped.ranks.replace(1)
    equipped.ranks.wait_until_fresh(1)
    assert equipped.run_cell("'counter' in globals()").values == {0: True, 1: False}
    assert_works(equipped)


def test_second_press_ends_the_generation_without_asking(
    equipped: Session, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank is in a C call that the session cannot identify: here it waits for a key in the store."""
    code = (
        "from torch.distributed.distributed_c10d import _get_default_store\n_get_default_store().get('nobody sets it')"
    )
    before = _counters(equipped)
    stopped = _stop(equipped, code, 0.3, 1.3)
    assert "all ranks stopped and kept their variables" in stopped.note
    assert "the process groups are recreated" in stopped.note
    _assert_freed(caplog, 0, 1)
    assert _counters(equipped) == before
    assert_works(equipped)


def test_third_press_replaces_the_ranks_that_have_not_come_back(
    equipped: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _counters(equipped)
    code = f"if rank == 1:\n    {_SLOW_C}; {_SLOW_C}; {_SLOW_C}"
    press = core_of(equipped).rescue._press

    def press_and_again(number: int, story: Any) -> None:
        if number < 3:  # two presses at the same moment count as one
            threading.Timer(0.2, press_stop).start()
        press(number, story)

    monkeypatch.setattr(core_of(equipped).rescue, "_press", press_and_again)
    stopped = _stop(equipped, code)
    assert "rank 1 did not stop in time and had to be replaced" in stopped.note, stopped.note
    assert equipped.run_cell("globals().get('counter')").values == {0: before[0], 1: None}
    assert_works(equipped)


def test_presses_that_come_all_at_once_replace_no_rank_that_stops(
    equipped: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message of the notebook may take seconds to arrive, and so may the end of the cell."""
    before = _counters(equipped)
    of_stop, press = core_of(equipped).rescue, core_of(equipped).rescue._press

    def press_three_times(number: int, story: Any) -> None:
        of_stop._interrupt(story.cell)
        press(3, story)
        link_of(equipped).send(Replace(list(story.cell.ranks), story.cell.number))  # the cell has ended meanwhile

    monkeypatch.setattr(of_stop, "_press", press_three_times)
    stopped = _stop(equipped, "while True: time.sleep(0.01)")
    assert stopped.note.startswith("all ranks stopped and kept their variables")
    assert _counters(equipped) == before
    assert_works(equipped)


_SWALLOWS = "while True:\n    try: time.sleep(0.1)\n    except BaseException: pass"


class _StillThere(CellObserver):
    """Presses stop when a cell reports that it waits for another, and keeps the report."""

    said = ""

    def waiting(self, text: str) -> None:
        if "still in cell" in text and not self.said:
            self.said = text
            raise KeyboardInterrupt


@pytest.fixture
def impatient(equipped: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session gives up soon on a rank that does not end its cell."""
    for limit in ("compute_s", "freed_s"):
        monkeypatch.setattr(equipped.settings.limits, limit, 0.3)


@pytest.mark.here_only
def test_presses_are_counted_when_the_prompt_has_come_back_too(equipped: Session, impatient: None) -> None:
    stopped = _stop(equipped, f"if rank == 1:\n    {_SWALLOWS.replace(chr(10), chr(10) + ' ' * 4)}")
    may = "may catch KeyboardInterrupt, or wait in C code"
    works = "run %distributed interrupt to free it without checking, "
    assert re.search(rf"^rank 1 is at line \d \(\d+ s\): .* {may}; {works}", stopped.note), stopped.note
    [second] = equipped.stop_cells().values()
    assert "the process groups are recreated" in second
    again = "run %distributed interrupt once more while it runs cell"
    assert re.search(rf"; {again} \d+, or %distributed interrupt --kill 1, to replace it", second), second
    [third] = equipped.stop_cells().values()
    assert "rank 1 did not stop in time and had to be replaced" in third
    assert equipped.run_cell("'counter' in globals()").values == {0: True, 1: False}


@pytest.mark.here_only
def test_cell_that_waits_for_a_stopped_one_says_so_at_once_and_a_stop_counts_on(
    equipped: Session, impatient: None
) -> None:
    first = _stop(equipped, _SWALLOWS)
    assert "ranks 0-1 are at line" in first.note
    for said in ("a second stop ends their process groups", "a third stop replaces them: their variables are lost"):
        watcher = _StillThere()
        with pytest.raises(CellInterrupted) as caught:
            equipped.run_cell("never = True", observer=watcher, timeout_s=60)
        assert re.match(r"waiting for ranks 0-1 \(line \d\), still in cell \d+; ", watcher.said)
        assert said in watcher.said
        line, *advice = "\n".join(caught.value._render_traceback_()).splitlines()
        assert line.startswith("the cell was not run; cell ")
    assert "had to be replaced" in line
    assert advice == [
        "ranks 0-1 were restarted, their variables are lost:",
        "  %distributed replay -r 0-1  runs earlier cells there again",
    ]
    assert equipped.run_cell("'never' in globals()").values == {0: False, 1: False}


@pytest.mark.here_only
def test_stop_while_a_cell_waits_for_one_that_nobody_has_stopped_leaves_that_alone(
    equipped: Session, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    code = f"print('begun')\nwhile not os.path.exists({str(go)!r}): time.sleep(0.01)\nis_done = True"
    begun = threading.Event()

    class Begun(CellObserver):
        def output(self, rank: int, stream: str, text: str) -> None:
            begun.set()

    watcher = _StillThere()
    beside = threading.Thread(target=lambda: equipped.run_cell(code, ranks=1, observer=Begun()))
    beside.start()
    try:
        assert begun.wait(60)
        with pytest.raises(CellInterrupted, match=r"^the cell was not run; rank 1 \(line 2\) still in cell"):
            equipped.run_cell("never = True", observer=watcher)
    finally:
        go.touch()
        beside.join()
    assert re.search(r"stop ends only this wait; %distributed interrupt stops cell \d+", watcher.said)
    assert equipped.pull("is_done", ranks=1) == {1: True}


@pytest.mark.rare_elsewhere
def test_old_wrappers_raise_at_once_and_say_why(equipped: Session) -> None:
    _stop(equipped, "if rank == 0: dist.barrier()")
    equipped.run_cell("old_loss = None")
    for code, name in (
        ("ddp(x).sum().backward()", "ddp"),
        ("sharded(x).sum().backward()", "sharded"),
        ("dist.all_reduce(x, group=subgroup)", "subgroup"),
        ("dist.all_reduce(x, group=mesh.get_group())", "mesh"),
    ):
        with pytest.raises(RankError) as caught:
            equipped.run_cell(code)
        shown = "\n".join(caught.value._render_traceback_())
        assert re.search(rf"\b{name}\b.* uses? a process group that no longer exists", shown), shown
    with pytest.raises(RankError, match="invalid root rank: 7") as caught:  # the error of the new group, which works
        equipped.run_cell("dist.broadcast(torch.ones(1), src=7)")
    assert "no longer exists" not in "\n".join(caught.value._render_traceback_())
    equipped.run_cell("del ddp, sharded, mesh, subgroup")
    with pytest.raises(RankError) as caught:
        equipped.run_cell("1 / 0")
    assert "no longer exists" not in "\n".join(caught.value._render_traceback_())
    assert_works(equipped)


def test_timeout_of_a_cell_frees_as_stop_does(equipped: Session, caplog: pytest.LogCaptureFixture) -> None:
    code = "if rank == 1: raise ValueError('bad batch')\ndist.all_reduce(torch.ones(1))"
    with pytest.raises(CellTimeout) as caught:
        equipped.run_cell(code, timeout_s=2)
    assert "rank 0 waited in all_reduce" in str(caught.value)
    assert "rank 1 failed with ValueError: bad batch" in str(caught.value)
    _assert_freed(caplog, 0, 1)
    assert_works(equipped)


@pytest.mark.here_only
@pytest.mark.slow
def test_next_cell_gives_up_on_a_rank_that_does_not_return(equipped: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equipped.settings.limits, "compute_s", 0.2)
    monkeypatch.setattr(equipped.settings.limits, "idle_s", 0.3)
    _stop(equipped, f"if rank == 1: {_SLOW_C}; {_SLOW_C}")
    with pytest.raises(SessionError, match=r"rank 1( on h1)? \(line 1\) still in cell \d+: .* --kill 1"):
        equipped.run_cell("1")
    monkeypatch.setattr(equipped.settings.limits, "idle_s", 30.0)  # rank 1 would return within this time
    for _ in range(3):  # the rest of "run all" does not wait as long again
        with pytest.raises(SessionError, match="still in cell"):
            equipped.run_cell("1")
    with pytest.raises(SessionError, match="still in cell"):
        equipped.pull("x", ranks=1)
    deadline = time.monotonic() + 30
    while equipped.status().ranks[1].state != "idle":
        assert time.monotonic() < deadline
    assert_works(equipped)


@pytest.mark.rare_elsewhere
def test_garbage_of_the_cells_is_not_collected_where_generations_end(equipped: Session) -> None:
    """An object of a cell may wait in its destructor, as a DataLoader waits for its workers."""
    code = """
import gc, threading
collected_by = set()
class Trap:
    def __init__(self): self.me = self
    def __del__(self): collected_by.add(threading.current_thread().name)
def wait_among_garbage():
    gc.disable()
    before = gc.get_threshold()
    for _ in range(100): Trap()
    gc.set_threshold(1); gc.enable(); time.sleep(1.5)
    gc.set_threshold(*before); gc.collect()
wait_among_garbage()
"""
    looks = [threading.Timer(delay, equipped.ranks.where) for delay in (0.3, 0.6)]
    for look in looks:
        look.start()
    equipped.run_cell(code, ranks=0)
    for look in looks:
        look.join()
    assert equipped.run_cell("collected_by", ranks=0).values[0] == {"MainThread"}


@pytest.mark.parametrize("moment", [("_core.state.history", "begin"), ("_core.state", "pop_losses")])
def test_stop_before_a_cell_is_sent_leaves_nobody_busy(
    equipped: Session, monkeypatch: pytest.MonkeyPatch, moment: tuple[str, str]
) -> None:
    def press(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(operator.attrgetter(moment[0])(equipped), moment[1], press)
        with pytest.raises(KeyboardInterrupt):
            equipped.run_cell("never = True")
    assert equipped.run_cell("'never' in globals()").values == {0: False, 1: False}


def test_stop_in_the_moment_a_cell_is_sent_is_found_out(equipped: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    def press(message: Message) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(link_of(equipped), "send", press)
    with pytest.raises(CellInterrupted, match="KeyboardInterrupt"):
        equipped.run_cell("never = True")
    assert equipped.run_cell("'never' in globals()").values == {0: False, 1: False}


def test_stop_while_it_is_waited_for_the_news_of_a_death_tells_what_was_raised(
    equipped: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(equipped.settings.limits, "loss_s", 600.0)  # longer than a test may take
    with _presses(1.5), pytest.raises(RankError, match="Connection closed by peer"):
        equipped.run_cell("raise RuntimeError('Connection closed by peer')")


@pytest.mark.here_only
def test_stop_while_a_large_picture_is_sent_does_not_cut_it(equipped: Session) -> None:
    """The worker is suspended, so the message waits half sent; the rank interrupts itself as a stop would."""
    worker = psutil.Process(equipped.status().ranks[1].pid).parent()
    assert worker is not None
    code = """
import threading
from IPython.display import display
interrupts = signal.getsignal(signal.SIGINT).__self__
def strike():
    interrupts._sent_for[:] = interrupts._cell.to_bytes(8, "little")
    os.kill(os.getpid(), signal.SIGINT)
threading.Timer(0.4, strike).start()
time.sleep(0.2)
display({"text/plain": "x" * 5_000_000}, raw=True)
time.sleep(600)
"""

    def hold_up() -> None:
        time.sleep(0.1)
        worker.suspend()
        time.sleep(0.7)
        worker.resume()

    holding_up = threading.Thread(target=hold_up)
    holding_up.start()
    with pytest.raises(CellInterrupted):
        equipped.run_cell(code, ranks=1, timeout_s=60)
    holding_up.join()
    assert_works(equipped)


@pytest.mark.here_only
def test_stop_before_the_first_line_of_a_cell_shows_no_line(equipped: Session) -> None:
    strike = "signal.getsignal(signal.SIGINT).__self__._sent_for[:] = ({}).to_bytes(8, 'little')"
    equipped.run_cell(strike.format(equipped.log.next_cell() + 1), ranks=1)
    with pytest.raises(CellInterrupted) as caught:
        equipped.run_cell("went_on = True", ranks=1, timeout_s=10)
    assert caught.value.errors[1].traceback == ()
    assert equipped.run_cell("'went_on' in globals()", ranks=1).values == {1: False}


@pytest.mark.rare_elsewhere
def test_stop_that_strikes_in_a_callback_of_ipython_is_not_lost(equipped: Session) -> None:
    """IPython catches KeyboardInterrupt in its callbacks, prints a line and continues."""
    equipped.run_cell(_STRIKES_IN_A_CALLBACK.format(event="pre_run_cell"), ranks=1)
    with pytest.raises(CellInterrupted):
        equipped.run_cell("went_on = True", ranks=1, timeout_s=10)
    assert equipped.run_cell("'went_on' in globals()", ranks=1).values == {1: False}
    assert_works(equipped)


@pytest.mark.rare_elsewhere
def test_stop_that_strikes_when_the_code_has_failed_says_where_that_was(equipped: Session) -> None:
    """As with torch's error in a freed rank, which may be raised right before the interrupt arrives."""
    equipped.run_cell(f"{_STRIKES_IN_A_CALLBACK.format(event='post_execute')}_skips = 1", ranks=1)
    with pytest.raises(CellInterrupted) as caught:
        equipped.run_cell("x = 1\n1 / 0", ranks=1, timeout_s=10)
    traceback = "\n".join(caught.value.errors[1].traceback)
    assert re.search(r"cell \d+, line 2, in <module>\n    1 / 0\nZeroDivisionError", traceback), traceback


_STRIKES_IN_A_CALLBACK = """
_skips = 0
def strike(*_):
    global _skips
    _skips -= 1
    if _skips >= 0:
        return
    get_ipython().events.unregister("{event}", strike)
    interrupts = signal.getsignal(signal.SIGINT).__self__
    interrupts._sent_for[:] = interrupts._cell.to_bytes(8, "little")
    os.kill(os.getpid(), signal.SIGINT)
get_ipython().events.register("{event}", strike)
"""


# ---- destructors


@pytest.mark.rare_elsewhere
def test_interrupt_that_strikes_in_a_destructor_is_not_lost(equipped: Session) -> None:
    code = (
        "class Slow:\n"
        "    def __del__(self):\n"
        "        print('in')\n"
        "        while True: time.sleep(0.01)\n"
        "def f(): Slow()\n"
        "f(); f()\n"
        "time.sleep(600)"
    )
    watcher = Watcher(press_at="in")
    with pytest.raises(CellInterrupted):
        equipped.run_cell(code, observer=watcher, timeout_s=60)
    assert "Exception ignored" not in watcher.printed
    assert_works(equipped)


_FAILS = {
    **FAILING_CELLS,
    "exit in await": ("async def wait(): fail(SystemExit)\nawait wait()", "SystemExit"),
    "KeyboardInterrupt": ("fail(KeyboardInterrupt)", "KeyboardInterrupt"),
    "magic": ("%time fail()", "ValueError"),
    "out of memory": ("try: fail()\nexcept ValueError: raise MemoryError", "MemoryError"),
    "picture of a value": ("class Shown:\n  def _repr_html_(self): fail()\nShown()", ""),
    "callback": (
        "def call_back(*_):\n"
        "  get_ipython().events.unregister('post_execute', call_back)\n"
        "  fail()\n"
        "get_ipython().events.register('post_execute', call_back)",
        "",
    ),
}


@pytest.fixture
def holding(equipped: Session) -> Iterator[Session]:
    """``fail(ERROR)`` raises while a local variable holds what ``known`` refers to; garbage collection is off."""
    equipped.run_cell(
        "import asyncio, gc, weakref\n"
        "gc.disable()\n"
        "class Big: pass\n"
        "def fail(error=ValueError):\n"
        "    global known\n"
        "    big = Big(); known = weakref.ref(big)\n"
        "    raise error\n"
    )
    try:
        yield equipped
    finally:
        equipped.run_cell("gc.enable()")


@pytest.mark.rare_elsewhere
@pytest.mark.parametrize(("code", "error"), _FAILS.values(), ids=list(_FAILS))
def test_what_a_failed_cell_held_is_let_go_of_at_once(holding: Session, code: str, error: str) -> None:
    holding.run_cell("known = None")
    with pytest.raises((RankError, CellInterrupted), match=error) if error else contextlib.nullcontext():
        holding.run_cell(code)
    assert holding.run_cell("known is not None and known() is None").values == {0: True, 1: True}


_HOLDS = {
    "function": "def hold():\n{big}    time.sleep(60)\nhold()",
    "await": "async def hold():\n{big}    await asyncio.sleep(60)\nawait hold()",
    "function in await": "async def hold():\n{big}    time.sleep(60)\nawait hold()",
}


@pytest.mark.rare_elsewhere
@pytest.mark.parametrize("code", _HOLDS.values(), ids=list(_HOLDS))
def test_what_a_stopped_cell_held_is_let_go_of_at_once(holding: Session, code: str) -> None:
    big = "    global known\n    big = Big(); known = weakref.ref(big)\n"
    _stop(holding, code.format(big=big))
    assert holding.run_cell("known() is None").values == {0: True, 1: True}


@pytest.mark.rare_elsewhere
def test_stopped_cell_that_awaits_does_not_go_on_with_the_next(equipped: Session) -> None:
    code = (
        "import asyncio\n"
        "went_on = has_cleaned_up = False\n"
        "try:\n"
        "    await asyncio.sleep(1)\n"
        "    went_on = True\n"
        "finally:\n"
        "    has_cleaned_up = True"
    )
    stopped = _stop(equipped, code)
    for error in stopped.errors.values():
        assert re.search(r"cell \d+, line 4, in <module>", "\n".join(error.traceback)), "where it waited"
    assert equipped.run_cell("await asyncio.sleep(1.2)\nwent_on, has_cleaned_up").values == dict.fromkeys(
        (0, 1), (False, True)
    )


_WAITS_FOR_A_LOCK = (
    "import threading\n"
    "lock = threading.Lock(); lock.acquire()\n"
    "class Held:\n"
    "    def __del__(self): lock.acquire()\n"
    "def fail():\n"
    "    held = Held(); raise ValueError\n"
    "fail()"
)


@pytest.mark.rare_elsewhere
def test_destructor_that_waits_forever_after_a_failed_cell_can_be_stopped(
    equipped: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(RankError, match="ValueError"):
        equipped.run_cell(_WAITS_FOR_A_LOCK)
    send = link_of(equipped).send
    presses: list[threading.Timer] = []

    def send_and_press(message: Message) -> None:
        send(message)
        if isinstance(message, RunCell):
            presses.append(threading.Timer(0.5, press_stop))
            presses[-1].start()

    monkeypatch.setattr(link_of(equipped), "send", send_and_press)
    with _none_is_left_of(presses), pytest.raises(CellInterrupted):
        equipped.run_cell("1")  # no rank can begin it
    monkeypatch.setattr(link_of(equipped), "send", send)
    assert_works(equipped)


@pytest.mark.here_only
@pytest.mark.slow
def test_destructor_that_waits_forever_is_given_up_after_a_while(equipped: Session) -> None:
    with pytest.raises(RankError, match="ValueError"):
        equipped.run_cell(_WAITS_FOR_A_LOCK)
    assert equipped.run_cell("counter > 100 * rank", timeout_s=60).values == {0: True, 1: True}
    assert_works(equipped)


@pytest.mark.here_only
def test_rank_that_a_signal_has_stopped_is_said_to_be_so(equipped: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equipped.settings.limits, "compute_s", 0.2)
    code = "import os, signal, time\nif rank == 1: os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(30)"
    stopped = _stop(equipped, code).note
    assert "rank 1 is stopped by a signal" in stopped and "kill -CONT PID lets it continue" in stopped
    assert equipped.ranks.where().verdicts[1].kind == "stopped"
    psutil.Process(equipped.status().ranks[1].pid).resume()
    assert_works(equipped)
