"""A rank that dies: the cell names it and the cause, the others keep their variables, the next cell runs on all.

As in test_stop.py, a DDP model, a fully sharded one, a mesh and a subgroup are alive when the rank dies.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from detrain_nb import Session
from detrain_nb.errors import CellInterrupted, RankError, RankLost, SessionError
from detrain_nb.wire import Message, NewGeneration, Pull, RunCell

from ..node.cgroups import can_make_cgroups, memory_cgroup
from .inside import core_of, link_of, state_of
from .soon import assert_soon
from .training import COLLECTIVE, STALE, Watcher, assert_works, be_patient, equip


@pytest.fixture(scope="module")
def equipped(two_ranks: Callable[[], Session]) -> Iterator[Session]:
    with two_ranks() as session:
        yield session


@pytest.fixture(autouse=True)
def training(equipped: Session) -> None:
    be_patient(equipped)
    equip(equipped)


_DEATHS = {
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", "signal 9 (SIGKILL)"),
    "segmentation fault": ("import ctypes; ctypes.string_at(0)", "signal 11 (SIGSEGV)"),
    "_exit": ("os._exit(7)", "exit code 7"),
    "abort": ("os.abort()", "signal 6 (SIGABRT)"),
    "abort in C++": (
        "dist.all_reduce(torch.ones(8)) if rank else dist.all_reduce(torch.ones(4)); time.sleep(60)",
        "signal 6 (SIGABRT)",
    ),
}
# A death by a signal, and one by a library whose last output names the cause. The other deaths are slow tests.
_TELLING_DEATHS = {("SIGKILL", 0), ("abort in C++", 1)}


@pytest.mark.rare_elsewhere("SIGKILL-0", "_exit")
@pytest.mark.parametrize(
    ("name", "victim"),
    [
        pytest.param(name, victim, marks=[] if (name, victim) in _TELLING_DEATHS else pytest.mark.slow)
        for name in _DEATHS
        for victim in ((0, 1) if name == "SIGKILL" else (1,))
    ],
)
def test_death_is_told_and_healed(equipped: Session, name: str, victim: int) -> None:
    death, how = _DEATHS[name]
    code = death
    if "all_reduce" not in death:
        code = f"if rank == {victim}:\n    print('last words', file=sys.stderr)\n    {death}\ndist.all_reduce(x)"
    before = equipped.pull("counter")
    pids = {rank.rank: rank.pid for rank in equipped.status().ranks}
    hosts = {rank.rank: rank.host for rank in equipped.status().ranks}
    with pytest.raises(RankLost) as caught:
        equipped.run_cell(code)
    [lost] = caught.value.ranks
    said = str(caught.value)
    assert f"rank {lost} on {hosts[lost]} (pid {pids[lost]}) ended with {how}" in said
    assert f"rank {lost} was restarted, its variables are lost" in said
    assert f"rank {1 - lost} kept its variables" in said
    assert f"-r {lost}  brings variables from rank {1 - lost}" in said
    assert set(re.findall(r"\w+", said.partition("recreate")[2])) >= STALE
    if "all_reduce" not in death:
        assert lost == victim
        assert "last words" in said
    else:
        assert "collective mismatch" in said, "gloo's own words, from stderr"
        own, others = re.findall(r"all_reduce #\d+ Float\[(\d)\]", said)
        assert "the last collective here: all_reduce #" in said
        assert (
            f"Float[{others}] on rank {1 - lost}: ranks used tensors of different sizes in one collective or message"
            in said
        )
        assert {own, others} == {"4", "8"}
        assert "/detrain_nb/" not in said
    assert equipped.run_cell(COLLECTIVE).values == {0: 2.0, 1: 2.0}
    assert equipped.run_cell("globals().get('counter')").values == {lost: None, 1 - lost: before[1 - lost]}
    assert_works(equipped)


_MEANWHILE = {
    "Python": "while True: time.sleep(0.01)",
    "sleep": "time.sleep(60)",
    "subprocess": "subprocess.run(['sleep', '60'])",
    "await": "import asyncio\nawait asyncio.sleep(60)",
    "all_reduce": "dist.all_reduce(x)",
    "store": "dist.new_group([0, 1])",
    "DDP": "ddp(x).sum().backward()",
    "fully_shard": "sharded(x).sum().backward()",
    "recv": "dist.recv(x, src=1)",
}
# In no collective, in one, in one of a library, and in a message from the dead rank. The others are slow tests.
_TELLING_WORK = {"subprocess", "all_reduce", "DDP", "recv"}


@pytest.mark.rare_elsewhere("all_reduce", "subprocess", "recv")
@pytest.mark.parametrize(
    "what",
    [
        pytest.param(what, id=name, marks=[] if name in _TELLING_WORK else pytest.mark.slow)
        for name, what in _MEANWHILE.items()
    ],
)
def test_others_are_freed_whatever_they_do(equipped: Session, what: str) -> None:
    code = f"if rank == 1:\n    time.sleep(0.3); os.kill(os.getpid(), 9)\n{what}"
    with pytest.raises(RankLost, match="rank 0 kept its variables"):
        equipped.run_cell(code)
    assert equipped.run_cell(COLLECTIVE).values == {0: 2.0, 1: 2.0}
    assert equipped.run_cell("'counter' in globals()").values == {0: True, 1: False}


@pytest.mark.rare_elsewhere("all_reduce")
@pytest.mark.parametrize("others", ["dist.all_reduce(x)", "time.sleep(60)"])
def test_rank_that_has_ended_the_cell_dies_while_the_others_run_it(
    equipped: Session, monkeypatch: pytest.MonkeyPatch, others: str
) -> None:
    monkeypatch.setattr(equipped.settings.limits, "loss_s", 20.0)
    code = f"threading.Timer(0.3, os.kill, (os.getpid(), 9)).start() if rank == 1 else None\nif rank == 0: {others}"
    equipped.run_cell("import threading")
    with pytest.raises(RankLost, match=r"rank 1 .*SIGKILL[\s\S]*rank 0 kept its variables") as caught:
        equipped.run_cell(code)
    assert set(caught.value.ranks) == {1}
    watcher = Watcher()
    assert equipped.run_cell(COLLECTIVE, observer=watcher).values == {0: 2.0, 1: 2.0}
    assert not watcher.notices, "the loss was told once"


@pytest.mark.here_only
def test_what_a_dead_rank_had_started_ends_with_it(
    equipped: Session, processes: Callable[[], set[psutil.Process]]
) -> None:
    code = (
        "children = [subprocess.Popen(['sleep', '600'], start_new_session=True)]\n"
        "loader = iter(torch.utils.data.DataLoader(list(range(64)), num_workers=2)); next(loader)\n"
        "mine = [p.pid for p in children] + [w.pid for w in loader._workers]"
    )
    equipped.run_cell(code)
    started = equipped.pull("mine")
    with pytest.raises(RankLost):
        equipped.run_cell("if rank == 1: os.kill(os.getpid(), 9)\ndist.barrier()")
    assert_soon(lambda: not any(_runs(pid) for pid in started[1]))
    assert all(_runs(pid) for pid in started[0]), "the other rank's go on"
    equipped.run_cell("children[0].kill(); del loader", ranks=0)


@pytest.mark.here_only
def test_death_between_cells_is_told_by_the_next_one(equipped: Session) -> None:
    pid = equipped.status().ranks[1].pid
    os.kill(pid, signal.SIGKILL)
    assert_soon(lambda: equipped.status().ranks[1].pid != pid)
    watcher = Watcher()
    assert equipped.run_cell(COLLECTIVE, observer=watcher).values == {0: 2.0, 1: 2.0}
    [notice] = watcher.notices
    assert f"(pid {pid}) ended with signal 9 (SIGKILL)" in notice
    assert "rank 1 was restarted, its variables are lost" in notice
    equipped.run_cell("1", observer=watcher)
    assert len(watcher.notices) == 1, "once"


@pytest.mark.here_only
def test_death_between_cells_is_told_by_the_error_of_the_next_one_where_nobody_shows_it(equipped: Session) -> None:
    """This happens in a script, where a NameError alone would not explain why the variable is missing."""
    equipped.run_cell("kept = 1")
    pid = equipped.status().ranks[1].pid
    os.kill(pid, signal.SIGKILL)
    assert_soon(lambda: equipped.status().ranks[1].pid != pid)
    with pytest.raises(RankError, match=r"rank 1 on .*: NameError: name 'kept' is not defined") as caught:
        equipped.run_cell("kept")
    for said in (str(caught.value), "\n".join(caught.value._render_traceback_())):
        assert re.search(rf"before this cell rank 1 on .* \(pid {pid}\) ended with signal 9 \(SIGKILL\)", said)
        assert "rank 1 was restarted, its variables are lost:\n  %distributed replay -r 1" in said
    with pytest.raises(RankError) as caught:
        equipped.run_cell("kept")
    assert "before this cell" not in str(caught.value), "once"


@pytest.mark.slow
@pytest.mark.here_only
def test_death_in_a_pull_is_the_pulls_error(equipped: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    equipped.run_cell("class Deadly:\n    def __len__(self): return 1\nbig = torch.zeros(40_000_000)")
    pid = equipped.status().ranks[1].pid
    _after_the_first(Pull, equipped, monkeypatch, lambda: os.kill(pid, signal.SIGKILL))
    with pytest.raises(RankLost, match=rf"rank 1 .*\(pid {pid}\) ended with signal 9"):
        equipped.pull("big", ranks=1)
    assert_works(equipped)


@pytest.mark.rare_elsewhere
def test_cell_on_the_survivors_alone_does_not_wait(equipped: Session) -> None:
    with pytest.raises(RankLost):
        equipped.run_cell("os._exit(1)", ranks=1)
    assert equipped.run_cell("counter > 0", ranks=0).values == {0: True}
    assert equipped.run_cell(COLLECTIVE).values == {0: 2.0, 1: 2.0}


@pytest.mark.slow
def test_both_ranks_at_once(equipped: Session) -> None:
    with pytest.raises(RankLost) as caught:
        equipped.run_cell("os.kill(os.getpid(), 9)")
    assert caught.value.ranks == (0, 1)
    assert "ranks 0-1 were restarted, their variables are lost" in str(caught.value)
    assert "%distributed replay -r 0-1" in str(caught.value)
    assert "%broadcast" not in str(caught.value), "nobody has the variables"
    assert_works(equipped)


@pytest.mark.rare_elsewhere
@pytest.mark.slow
def test_two_of_three_at_once() -> None:
    with Session.start(ranks=3, device="cpu") as session:
        session.run_cell("import os; kept = rank")
        with pytest.raises(RankLost) as caught:
            session.run_cell("if rank != 1: os.kill(os.getpid(), 9)\ndist.barrier()")
        assert caught.value.ranks == (0, 2)
        assert session.run_cell("dist.barrier(); globals().get('kept')").values == {0: None, 1: 1, 2: None}


@pytest.mark.here_only
def test_cell_that_was_meant_for_a_dead_rank_does_not_run_on_the_fresh_one(
    equipped: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent is suspended, so the report of the death and the cell cross at the agent."""
    pid = equipped.status().ranks[1].pid
    agent = psutil.Process(pid).parents()[3]  # above worker, launcher and warm process
    assert "detrain_nb.node.agent.agent" in agent.cmdline()
    worker = psutil.Process(pid).parent()
    assert worker is not None
    agent.suspend()
    os.kill(pid, signal.SIGKILL)
    assert_soon(lambda: any(child.pid != pid for child in worker.children()), limit_s=60)
    time.sleep(0.5)  # the fresh rank is up by now
    _after_the_first(RunCell, equipped, monkeypatch, agent.resume)
    with pytest.raises(RankLost, match="rank 1"):
        equipped.run_cell("was_here = True\ntime.sleep(2)")
    assert equipped.run_cell("'was_here' in globals()").values == {0: True, 1: False}


@pytest.mark.here_only
def test_rank_is_killed_and_used_at_the_same_moment(equipped: Session) -> None:
    for turn in range(12):
        os.kill(equipped.status().ranks[1].pid, signal.SIGKILL)
        time.sleep(turn * 0.0005)
        with contextlib.suppress(RankLost):
            assert equipped.run_cell("rank").values == {0: 0, 1: 1}
        assert equipped.run_cell(COLLECTIVE).values == {0: 2.0, 1: 2.0}


def test_stop_pressed_after_a_death_still_interrupts_the_others(
    equipped: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stop is pressed while the generation is being ended, before the other ranks were interrupted."""

    def press(**options: object) -> list[str]:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(core_of(equipped).process_groups, "end", press)
    with pytest.raises(RankLost, match="rank 0 kept its variables"):
        equipped.run_cell("if rank == 1: os.kill(os.getpid(), 9)\ntime.sleep(600)")
    assert equipped.run_cell(COLLECTIVE).values == {0: 2.0, 1: 2.0}


@pytest.mark.slow
@pytest.mark.here_only
def test_death_while_the_group_is_made(equipped: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fresh rank is killed as soon as it is up: the others wait for it in the store, and are freed again."""
    equipped.run_cell("1")
    with pytest.raises(RankLost):
        equipped.run_cell("if rank == 1: os._exit(1)\ndist.barrier()")
    _after_the_first(
        NewGeneration, equipped, monkeypatch, lambda: os.kill(state_of(equipped).up[1].pid, signal.SIGKILL)
    )
    assert equipped.run_cell("1").ranks == (0, 1)
    assert_works(equipped)


@pytest.mark.rare_elsewhere
@pytest.mark.slow
def test_rank_that_dies_again_and_again_is_left_down() -> None:
    with Session.start(ranks=2, device="cpu") as session:
        session.run_cell("import os; kept = rank")
        for _ in range(2):
            with pytest.raises(RankLost, match="rank 1 was restarted"):
                session.run_cell("import os\nif rank == 1: os._exit(1)\ndist.barrier()", ranks=1)
        with pytest.raises(RankLost, match="rank 1 is not restarted, it died 3 times within 60 s") as caught:
            session.run_cell("import os\nos._exit(1)", ranks=1)
        assert "%distributed restart -r 1 tries again" in str(caught.value)
        assert [rank.state for rank in session.status().ranks] == ["idle", "down"]
        with pytest.raises(SessionError, match=r"rank 1 is not restarted.*restart -r 1"):
            session.run_cell("1")
        assert session.run_cell("kept", ranks=0).values == {0: 0}
        session.restart(1)
        assert session.run_cell(COLLECTIVE).values == {0: 2.0, 1: 2.0}
        assert session.pull("kept", ranks=0) == {0: 0}


@pytest.mark.rare_elsewhere
@pytest.mark.slow
def test_finished_cells_make_deaths_forgotten() -> None:
    with Session.start(ranks=1, device="cpu", init=False) as session:
        for _ in range(5):
            with pytest.raises(RankLost, match="rank 0 was restarted"):
                session.run_cell("import os; os._exit(1)")
            session.run_cell("1")


if can_make_cgroups():  # without cgroups, only tests/node/test_oom.py covers this, with counters read from files

    @pytest.mark.here_only
    def test_out_of_memory_is_said(equipped: Session) -> None:
        pid = equipped.status().ranks[1].pid
        with memory_cgroup(200 << 20) as group:
            group.add(pid)
            equipped.status()
            with pytest.raises(
                RankLost, match=r"rank 1 .* ended with signal 9 \(SIGKILL\), out of memory: the limit of"
            ):
                equipped.run_cell("if rank == 1: hog = [torch.ones(10_000_000) for _ in range(50)]\ndist.barrier()")
        assert_works(equipped)


# ---- restoring the variables of a restarted rank


def test_broadcast_brings_variables_to_the_fresh_rank(equipped: Session) -> None:
    equipped.run_cell(
        "class Net(nn.Linear): pass\nnet = Net(4, 4)\nopt = torch.optim.Adam(net.parameters())\n"
        "net(x).sum().backward(); opt.step()\nhistory = {'losses': [1.0, 2.0], 'step': 7}"
    )
    with pytest.raises(RankLost):
        equipped.run_cell("if rank == 1: os._exit(1)\ndist.barrier()")
    with pytest.raises(SessionError, match=r"rank 1: .*Net.*first run the cell that defines it on this rank"):
        equipped.broadcast("net", ranks=1)
    equipped.run_cell("from torch import nn\nclass Net(nn.Linear): pass", ranks=1)
    equipped.broadcast(["net", "opt", "history"], ranks=1)
    result = equipped.run_cell(
        "opt.param_groups[0]['params'][0] is net.weight, history, len(opt.state), net.weight.sum().item()"
    )
    assert result.values[0] == result.values[1]
    assert result.values[1][:3] == (True, {"losses": [1.0, 2.0], "step": 7}, 2)


@pytest.mark.parametrize("name", ["part", "state", "mesh", "sharded", "opt"])
def test_what_is_another_on_each_rank_is_not_broadcast(equipped: Session, name: str) -> None:
    """Otherwise the part of rank 0 would silently appear twice in the whole."""
    equipped.run_cell(
        "from torch import nn\nfrom torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh\n"
        "from torch.distributed.fsdp import fully_shard\nmesh = init_device_mesh('cpu', (2,))\n"
        "part = distribute_tensor(torch.arange(8.), mesh, [Shard(0)])\nsharded = nn.Linear(4, 4)\n"
        "fully_shard(sharded, mesh=mesh)\nstate = {'model': sharded.state_dict(), 'step': 3}\n"
        "opt = torch.optim.Adam(sharded.parameters())"
    )
    with pytest.raises(
        SessionError, match=rf"{name} (is|holds) a \w+, which differs on each rank: .*Run the cell .*full_tensor\(\)"
    ):
        equipped.broadcast(name)
    assert equipped.run_cell("part.full_tensor().tolist()").values[1] == [float(number) for number in range(8)]


@pytest.mark.rare_elsewhere
def test_optimizer_that_is_broadcast_without_its_model_is_told(equipped: Session) -> None:
    equipped.run_cell(
        "from torch import nn\nnet = nn.Linear(4, 4)\nopt = torch.optim.SGD(net.parameters(), lr=0.1)\n"
        "w = torch.zeros(2, requires_grad=True)\nof_w = torch.optim.SGD([w], lr=0.1)"
    )
    said = "on rank 1 opt trains parameters that are in no model there: .* %broadcast MODEL,opt -r 1"

    def told(names: list[str]) -> str:
        equipped.news.pop_notices()
        equipped.broadcast(names, ranks=1)
        return "\n".join(equipped.news.notices)

    for name in ("net", "opt"):
        assert re.fullmatch(said, told([name]))
        assert told(["net", "opt", "of_w", "w"]) == ""
    code = "class Own: pass\nown = Own(); own.net = nn.Linear(2, 2)\nhidden = torch.optim.SGD(own.net.parameters())"
    equipped.run_cell(code)
    assert told(["own", "hidden"]) == ""


@pytest.mark.rare_elsewhere
def test_copy_of_ddp_is_refused_with_what_to_do(equipped: Session) -> None:
    equipped.run_cell("wrapped = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))")
    with pytest.raises(
        SessionError,
        match=r"wrapped is a DDP model, .* net = wrapped\.module in a %%rank 0 cell, then %broadcast net,counter,",
    ):
        equipped.broadcast(["counter", "wrapped"])
    equipped.run_cell("del wrapped", ranks=1)
    equipped.run_cell("net = wrapped.module; sgd = torch.optim.SGD(net.parameters(), 0.1)", ranks=0)
    equipped.broadcast(["net", "sgd"])
    code = "wrapped = torch.nn.parallel.DistributedDataParallel(net); wrapped(torch.ones(1, 2)).sum().backward()"
    equipped.run_cell(f"{code}; sgd.step()")
    same = equipped.run_cell(
        "float(sum(p.sum() for p in net.parameters())), sgd.param_groups[0]['params'][0] is net.weight"
    )
    assert same.values[0] == same.values[1] and same.values[1][1]
    assert_works(equipped)


@pytest.mark.rare_elsewhere
def test_broadcast_from_any_rank_to_all(equipped: Session) -> None:
    equipped.run_cell("value = torch.full((30_000_000,), float(rank))")
    equipped.broadcast("value", source=1)
    assert equipped.run_cell("float(value.min()), float(value.max())").values == {0: (1.0, 1.0), 1: (1.0, 1.0)}


_PLAIN = """
plain = {"step": 7, "losses": [1.5, float("nan")], "name": "net", "at": (1, None)}
plain["x"] = torch.arange(6).view(2, 3) + rank
weights = torch.ones(3, 2, dtype=torch.bfloat16) * rank
"""
_ALIKE = """
step = plain["step"], plain["name"], plain["at"], str(plain["losses"])
(*step, plain["x"].tolist(), weights.dtype == torch.bfloat16, weights.sum().item())
"""


@pytest.mark.rare_elsewhere
def test_plain_values_are_broadcast_without_a_pickle(equipped: Session) -> None:
    equipped.run_cell(f"{_PLAIN}load = torch.load\ntorch.load = None")
    equipped.broadcast(["plain", "weights"], source=1)
    equipped.run_cell("layer = torch.nn.Linear(1, 1)")
    with pytest.raises(SessionError, match="rank 0: TypeError"):
        equipped.broadcast("layer", source=1)
    equipped.run_cell("torch.load = load")
    expected = (7, "net", (1, None), "[1.5, nan]", [[1, 2, 3], [4, 5, 6]], True, 6.0)
    assert equipped.run_cell(_ALIKE).values == {0: expected, 1: expected}


@pytest.mark.rare_elsewhere
def test_broadcast_keeps_gradients_parameters_and_what_is_shared(equipped: Session) -> None:
    equipped.run_cell(
        "leaf = torch.ones(2, requires_grad=True)\nwhole = torch.zeros(4)\npart = whole[:2]\n"
        "weight = torch.nn.Parameter(torch.ones(1))\nitems = []\nboth = [items, items]"
    )
    equipped.broadcast(["leaf", "whole", "part", "weight", "both"])
    code = "part += 1\nleaf.requires_grad, type(weight).__name__, whole.tolist(), both[0] is both[1]"
    expected = (True, "Parameter", [1.0, 1.0, 0.0, 0.0], True)
    assert equipped.run_cell(code).values == {0: expected, 1: expected}


@pytest.mark.rare_elsewhere
def test_broadcast_refusals_leave_nobody_waiting(equipped: Session) -> None:
    with pytest.raises(SessionError, match=r"no variable 'nothing'"):
        equipped.broadcast("nothing")
    equipped.run_cell("f = lambda: 1\ndeep = []\nfor _ in range(5000): deep = [deep]")
    with pytest.raises(SessionError, match=r"deep cannot be pickled \(nested too deeply\)"):
        equipped.broadcast(["counter", "deep"])
    with pytest.raises(SessionError, match="f cannot be pickled"):
        equipped.broadcast(["counter", "f"])
    equipped.run_cell("class Deadly:\n    def __reduce__(self): os._exit(3)\nd = Deadly()")
    with pytest.raises(RankLost):
        equipped.broadcast("d")
    assert_works(equipped)


@pytest.mark.here_only  # the test releases the rank with a local file
def test_broadcast_that_a_stop_has_left_is_waited_for_by_name(
    equipped: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Unpacking a value may take long; no other rank may wait for it in a process group."""
    equipped.run_cell(
        "import os, time\nclass Slow:\n    def __setstate__(self, state):\n"
        "        while not os.path.exists(state['until']): time.sleep(0.01)\n"
        f"slow = Slow(); slow.until = {str(tmp_path / 'let_go')!r}"
    )
    threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(CellInterrupted, match="broadcast of slow was interrupted"):
        equipped.broadcast("slow")
    shown = Watcher()
    with monkeypatch.context() as patch:
        patch.setattr(equipped.settings.limits, "idle_s", 1.5)
        with pytest.raises(SessionError, match=r"^rank 1 still in the broadcast of slow: .* interrupt --kill 1$"):
            equipped.run_cell("rank", observer=shown)
    assert "waiting for rank 1, still in the broadcast of slow" in shown.waited
    assert equipped.run_cell("rank", ranks=0).values == {0: 0}
    (tmp_path / "let_go").touch()
    assert equipped.run_cell("dist.barrier(); type(slow).__name__").values == {0: "Slow", 1: "Slow"}


def test_replay_runs_earlier_cells_on_the_fresh_rank_alone() -> None:
    with Session.start(ranks=2, device="cpu") as session:
        session.run_cell("import os\nruns = globals().get('runs', 0) + 1")
        session.run_cell("def f(): return 40 + rank\n")
        session.run_cell(COLLECTIVE)
        session.run_cell("later = t.item()")
        session.run_cell("def g(): return f()")
        session.run_cell(f"from math import tau\n{COLLECTIVE}\ndef h(): return tau")
        with pytest.raises(RankLost):
            session.run_cell("if rank == 1: os._exit(1)\ndist.barrier()")
        replayed = session.log.replay(1)
        assert list(replayed) == [1, 2, 4, 5, 6], "not the one with a collective alone, nor the one that failed"
        assert [cell for cell, error in replayed.items() if error] == [4], "it needs what a cell makes that is left out"
        assert "NameError" in str(replayed[4])
        assert [number for number in range(8, 13) if session.log.has_failed(number)] == [10], "as it was run again"
        assert session.log.collective_cells == {3, 6, 7}
        assert session.run_cell("runs, g(), round(h())").values == {0: (1, 40, 6), 1: (1, 41, 6)}
        assert session.log.replay(1, cells=[1]) == {1: None}
        assert session.pull("runs") == {0: 1, 1: 2}


@pytest.mark.slow
@pytest.mark.here_only
def test_definition_that_waits_for_other_ranks_is_stopped_and_said(equipped: Session) -> None:
    equipped.settings.hang_s = 0.5
    waits = "def wait(function):\n    dist.barrier()\n    return function\n@wait\ndef f(): return 7"
    number = equipped.log.next_cell()
    equipped.run_cell(waits)
    equipped.run_cell("import string\ndist.barrier()")
    equipped.restart(1)
    replayed = equipped.log.replay(1)
    assert "the cell waited for ranks that do not run it: rank 1 waited in barrier #1 (line 2): freed" in str(
        replayed[number]
    )
    assert replayed[number + 1] is None, "the next ones are run all the same"
    assert_works(equipped)


def _after_the_first(
    kind: type[Message], session: Session, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]
) -> None:
    """Call ``act`` once, after the session has sent the first message of type ``kind`` to its ranks."""
    send = link_of(session).send

    def send_and_act(message: Message) -> None:
        send(message)
        if isinstance(message, kind):
            monkeypatch.undo()
            act()

    monkeypatch.setattr(link_of(session), "send", send_and_act)


def _runs(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.here_only
@pytest.mark.parametrize("module", ["dist", "dist.device_mesh"])
def test_cell_that_splits_a_group_needs_the_others(module: str) -> None:
    """A mesh on NCCL splits a group without any other operation; gloo refuses the call, which counts all the same."""
    with Session.start(1, device="cpu") as session:
        session.run_cell("alone = 1")
        code = f"try:\n    {module}.split_group(split_ranks=[[0]])\nexcept Exception as exc:\n    print(exc)"
        assert session.run_cell(code).stdout[0]
        session.restart(0)
        assert list(session.log.replay(0).values()) == [None]
        assert session.run_cell("alone").values == {0: 1}
