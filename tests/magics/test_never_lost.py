"""How a notebook shows a stop, a hang and a dead rank: in a real kernel, whose manager presses the stop button."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest


@contextlib.contextmanager
def _two_ranks(start_kernel: Any) -> Iterator[Any]:
    started = start_kernel(DETRAIN_NB_LINGER="0")
    assert started.run("%%distributed -n 2\nimport os, time, sys\nkept = rank + 1").status == "ok"
    yield started
    started.run("%distributed stop")


@pytest.fixture
def kernel(start_kernel: Any) -> Iterator[Any]:
    """A kernel for one test: these tests leave ranks that have lost their variables."""
    with _two_ranks(start_kernel) as started:
        yield started


@pytest.fixture(scope="module")
def unharmed_kernel(start_kernel: Any) -> Iterator[Any]:
    """A kernel shared by the tests that leave all ranks and variables intact."""
    with _two_ranks(start_kernel) as started:
        started.run("number = 1")
        yield started


def test_stop_button_frees_a_hung_collective(kernel: Any) -> None:
    kernel.run("%%distributed\nddp = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))")
    stopped = kernel.run(
        "%%distributed\nprint('in')\nif rank == 0:\n    dist.all_reduce(torch.ones(1))", interrupt_when="[0] in"
    )
    assert stopped.status == "error"
    assert re.search(r"rank 0 waited in all_reduce #\d+ \(line 4\): freed", stopped.error)
    assert "run the cell that creates ddp again" in stopped.error
    assert "cell 4, line 4" in stopped.error
    assert "gloo" not in stopped.error, "what torch says of being freed is not the user's business"
    assert kernel.run("%%distributed\nt = torch.ones(1); dist.all_reduce(t); kept, t.item()").rich() == [
        "[0] (1, 2.0)",
        "[1] (2, 2.0)",
    ]
    old = kernel.run("%%distributed\nddp(torch.ones(1, 2)).sum().backward()")
    assert "ddp uses a process group that no longer exists: run the cell that creates ddp again" in old.error


@pytest.mark.slow
def test_hang_is_said_in_the_cell_and_forgotten_when_it_ends(kernel: Any, tmp_path: Path) -> None:
    assert kernel.run("%distributed config hang=1").status == "ok"
    assert "hang=1.0" in kernel.run("%distributed config").text()
    seen = tmp_path / "seen"
    code = f"""%%distributed
def load_data():
    while not __import__("os").path.exists({str(seen)!r}): time.sleep(0.05)
if rank == 1:
    load_data()
dist.all_reduce(torch.ones(1))
"""
    words = r"rank 0 waits in all_reduce #\d+ \(line 6\); rank 1 is in load_data \(line 3\)"
    outcome = kernel.run(code, touch_when={words: seen})
    assert outcome.status == "ok" and seen.exists()
    assert "waits" not in str(outcome.shown)


def test_death_names_the_rank_and_three_lines_bring_it_back(kernel: Any) -> None:
    kernel.run("%%distributed\nclass Net(torch.nn.Linear): pass")
    kernel.run("%%distributed\nnet = Net(2, 2)\nstep = 41")
    kernel.run("%%distributed\nimport string\ndist.barrier()")
    died = kernel.run("%%distributed\nif rank == 1:\n    os.kill(os.getpid(), 9)\ndist.barrier()")
    assert "RankLost: rank 1 on " in died.error
    assert "ended with signal 9 (SIGKILL)" in died.error
    assert "%distributed replay -r 1" in died.error
    replayed = kernel.run("%distributed replay -r 1").text()
    ran = r"ran cells [\d,-]+ again\nran only imports and definitions of cell \d+, as other ranks are needed: "
    assert re.search(ran + r".* missing\nskipped cells? [\d,-]+, as other ranks are needed \(", replayed)
    assert kernel.run("%broadcast net,step -r 1").status == "ok"
    result = kernel.run(
        "%%distributed\nt = net.weight.detach().clone(); dist.all_reduce(t)\n"
        "bool((t == 2 * net.weight).all()), step, kept, string.digits"
    )
    assert result.rich() == ["[0] (True, 41, 1, '0123456789')", "[1] (True, 41, 2, '0123456789')"]
    assert "was restarted" not in str(result.shown), "it has been said"


@pytest.mark.slow
def test_replay_shows_what_each_cell_prints_and_redraws_nothing_where_output_is_final(kernel: Any) -> None:
    kernel.run("%%distributed\nprint('unfinished', end='', flush=True); time.sleep(2.5); print(' line')")
    kernel.run("%%distributed\nprint('second')")
    live = kernel.run("%distributed replay -r 1")
    assert "[1] unfinished line\n[1] second\nran cells " in live.text()
    assert [kind for kind, _ in live.live if kind == "display_data"], "the unfinished line was drawn"
    kernel.run("%distributed config output=final")
    final = kernel.run("%distributed replay -r 1")
    assert "[1] unfinished line\n[1] second\nran cells " in final.text()
    assert {kind for kind, _ in final.live} == {"stream"}


@pytest.mark.slow
def test_ranks_are_replaced_by_command(kernel: Any) -> None:
    replaced = kernel.run("%distributed interrupt --kill 1")
    assert "rank 1 restarted, the others kept their variables" in replaced.text()
    assert "%distributed replay -r 1  runs earlier cells there again" in replaced.text()
    assert kernel.run("%%distributed\nglobals().get('kept')").rich() == ["[0] 1"]
    assert "ranks 0-1 restarted" in kernel.run("%distributed restart -r all").text()
    shown = kernel.run("%%distributed\ndist.barrier(); 'kept' in globals()")
    assert shown.rich() == ["[0-1] False"]


def test_where_shows_every_rank(unharmed_kernel: Any) -> None:
    html = unharmed_kernel.run("%distributed where").rich("text/html")[0]
    assert "no cell is running" in html
    assert html.count("<tr>") == 3


_PRESS_SOON = "import os, signal, threading; threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("%pull kept", "SessionError: %pull was interrupted: no variable of the notebook was set"),
        ("%push number", "SessionError: %push was interrupted: some ranks may have the new values"),
        ("%distributed where", "SessionError: %distributed where was interrupted"),
        (
            "%broadcast kept --from 1 -r 1",
            "broadcast of kept was interrupted: some ranks may have it; "
            "the process groups are recreated before the next cell",
        ),
    ],
)
def test_stop_while_a_magic_waits_for_ranks_is_one_line(unharmed_kernel: Any, line: str, said: str) -> None:
    code = "from detrain_nb import current_session\nprint(current_session().status().ranks[1].pid)"
    held_up = psutil.Process(int(unharmed_kernel.run(code).text()))
    held_up.suspend()
    try:
        stopped = unharmed_kernel.run(f"{_PRESS_SOON}\n{line}")
    finally:
        held_up.resume()
    assert stopped.status == "error"
    assert stopped.error.strip() == said
    assert unharmed_kernel.run("%%distributed\ndist.barrier(); kept").rich() == ["[0] 1", "[1] 2"]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("%distributed interrupt --kill 7", "rank 7 does not exist"),
        ("%distributed replay", "the following arguments are required: -r/--ranks"),
        ("%distributed replay -r 0 --cells x", "'x' is not a range of cells"),
        ("%distributed replay -r 0 --cells 99", "cell 99 was not run on the ranks"),
        ("%distributed replay -r 0 --cells 5-1", "'5-1' runs backwards: give 1-5"),
        (f"%distributed replay -r 0 --cells 1-{10**12}", f"there is no cell {10**12}"),
        ("%%distributed -r 1-0\nkept", "invalid ranks '1-0': give the smaller number first, 0-1"),
        (f"%%distributed -r 0-{10**12}\nkept", "rank 2 does not exist"),
        ("%distributed restart -r 5", "rank 5 does not exist"),
        ("%distributed attach nosuch", "already holds session"),
        ("%distributed config hang=x", "hang must be a number"),
        ("%broadcast nothing", "no variable 'nothing'"),
        ("%broadcast kept --from 9", "rank 9 does not exist"),
        ("%broadcast", "the following arguments are required"),
        ("%distributed stop nosuch", "no session 'nosuch' is running"),
    ],
)
def test_wrong_lines_are_one_clear_error(unharmed_kernel: Any, line: str, complaint: str) -> None:
    outcome = unharmed_kernel.run(line)
    assert complaint in outcome.error
    assert len(outcome.error.strip().splitlines()) == 1
    assert unharmed_kernel.run("%%distributed\nkept").rich() == ["[0] 1", "[1] 2"]
