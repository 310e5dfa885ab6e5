"""A session in plain Python: cells on real ranks, their values, errors and stops, and what remains after its end."""

from __future__ import annotations

import contextlib
import html
import inspect
import os
import pydoc
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from detrain_nb import Session
from detrain_nb.errors import (
    CellInterrupted,
    CellTimeout,
    DetrainError,
    LaunchError,
    NodeLost,
    RankError,
    RankLost,
    SessionError,
    SpecError,
    ValueNotSupported,
)
from detrain_nb.plan import plan_one_node
from detrain_nb.session.running.results import CellResult, TextOnly
from detrain_nb.session.running.start import require_room
from detrain_nb.session.session import end_session
from detrain_nb.session.state.cell_observer import CellObserver
from detrain_nb.session.state.limits import Limits
from detrain_nb.wire import Attached, Display, Interrupt, Message, NewGeneration, RunCell, parse_bundle

from .inside import link_of, state_of
from .soon import assert_soon
from .training import Watcher

# ---- cells and what they find


def test_collective_of_a_cell_meets_all_ranks(session: Session) -> None:
    result = session.run_cell("x = torch.ones(4, device=device) * (rank + 1)\ndist.all_reduce(x)\nx")
    assert result.ranks == (0, 1)
    assert all(torch.equal(value, torch.full((4,), 3.0)) for value in result.values.values())


@pytest.mark.here_only
def test_names_are_ready_and_variables_stay(session: Session) -> None:
    session.run_cell("mine = (rank, local_rank, world_size, str(device), dist.get_rank())")
    assert session.pull("mine") == {0: (0, 0, 2, "cpu", 0), 1: (1, 1, 2, "cpu", 1)}


def test_cell_runs_on_the_chosen_ranks_only(session: Session) -> None:
    assert session.run_cell("rank * 10", ranks="-1").values == {1: 10}
    assert session.run_cell("rank * 10", ranks=[0]).values == {0: 0}


@pytest.mark.here_only
def test_classes_of_cells_travel_between_ranks_and_into_files(session: Session, tmp_path: Path) -> None:
    session.push({"path": str(tmp_path)})
    code = """
class Thing:
    def __init__(self, n): self.n = n
torch.save(Thing(rank), f"{path}/{rank}.pt")
everyone = [None] * world_size
dist.all_gather_object(everyone, Thing(rank))
[t.n for t in everyone], torch.load(f"{path}/{rank}.pt", weights_only=False).n, Thing.__module__
"""
    assert session.run_cell(code).values == {0: ([0, 1], 0, "__main__"), 1: ([0, 1], 1, "__main__")}


def test_data_loader_workers_find_what_cells_define(session: Session) -> None:
    code = """
class Squares(torch.utils.data.Dataset):
    def __len__(self): return 6
    def __getitem__(self, i): return i * i
[batch.tolist() for batch in torch.utils.data.DataLoader(Squares(), batch_size=3, num_workers=2)]
"""
    assert session.run_cell(code).values[1] == [[0, 1, 4], [9, 16, 25]]


def test_ipython_is_there_as_in_any_cell(session: Session, tmp_path: Path) -> None:
    session.run_cell("import os, asyncio")
    assert session.run_cell("await asyncio.sleep(0.01, result=rank)").values == {0: 0, 1: 1}
    assert session.run_cell("%env DETRAIN_NB_TEST=7\nos.environ['DETRAIN_NB_TEST']").values[0] == "7"
    assert session.run_cell("!echo from a command; exit 3\n_exit_code").values == {0: 3, 1: 3}
    assert "from a command" in session.run_cell("!echo from a command").stdout[1]
    assert "Wall time" in session.run_cell("%%time\nsum(range(10))").stdout[0]
    assert "loop" in session.run_cell("%timeit -n1 -r1 1 + 1").stdout[0]
    session.run_cell("%matplotlib inline")
    folder = session.run_cell("os.getcwd()").values[0]
    assert session.run_cell("pwd").values[0] == folder, "automagic"
    assert session.run_cell("x = 1\nx = 7 \\\n  % 4\nfiles = !echo one\nx, list(files)").values[0] == (3, ["one"])


def test_transformations_of_the_user_are_applied_to_every_cell(session: Session) -> None:
    session.run_cell(
        "get_ipython().input_transformers_cleanup.append(lambda lines: [l.replace('$', '1') for l in lines])"
    )
    try:
        assert session.run_cell("a = 1\nb = '$'\nb").values == {0: "1", 1: "1"}
    finally:
        session.run_cell("get_ipython().input_transformers_cleanup.pop();")
    assert session.run_cell("a = 1\nb = '$'\nb").values == {0: "$", 1: "$"}


@pytest.mark.slow
def test_random_numbers_differ_between_ranks_and_repeat_between_sessions() -> None:
    code = "import random, numpy as np\n(random.random(), float(np.random.rand()), float(torch.rand(1)))"
    drawn = []
    for seed in (1, 1, 7):
        with Session.start(ranks=2, device="cpu", seed=seed, init=False) as session:
            drawn.append(session.run_cell(code).values)
    first, again, other = drawn
    assert first == again
    assert all(a != b for a, b in zip(first[0], first[1], strict=True))
    assert all(a != b for a, b in zip(first[0], other[0], strict=True))


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The name of a session in whose folder another user has put modules."""
    folder = tmp_path / "run" / "planted"
    for path in (folder.parent, folder):
        path.mkdir(mode=0o700)
    for name in (*sys.stdlib_module_names, "torch", "IPython", "numpy", "detrain_nb"):
        (folder / f"{name}.py").write_text(f"raise SystemExit({name!r} + ' of another user runs')")
    monkeypatch.setenv("DETRAIN_NB_RUNTIME_DIR", str(folder.parent))
    return folder.name


def test_ranks_start_in_the_folder_with_it_on_the_path(planted: str, tmp_path: Path) -> None:
    (tmp_path / "beside_the_notebook.py").write_text("answer = 42\n")
    with Session.start(ranks=1, device="cpu", init=False, folder=str(tmp_path), name=planted) as session:
        code = "import os, sys, beside_the_notebook as b\n(os.getcwd(), b.answer, sys.path[0], '/' in sys.path)"
        assert session.run_cell(code).values[0] == (str(tmp_path), 42, str(tmp_path), False)
        (tmp_path / "cloned").mkdir()
        (tmp_path / "cloned" / "model_of_it.py").write_text("answer = 43\n")
        went = session.run_cell("%cd -q cloned\nimport model_of_it; model_of_it.answer, model_of_it.__file__")
        assert went.values[0] == (43, str(tmp_path / "cloned" / "model_of_it.py"))


@pytest.mark.here_only
def test_files_of_ranks_get_the_users_mode(session: Session, tmp_path: Path) -> None:
    session.push({"path": str(tmp_path / "saved")})
    session.run_cell("torch.save({}, path)", ranks=0)
    (tmp_path / "mine").write_text("")
    assert (tmp_path / "saved").stat().st_mode == (tmp_path / "mine").stat().st_mode


@pytest.mark.slow
def test_plain_torchrun_can_start_the_ranks(planted: str) -> None:
    with Session.start(ranks=2, device="cpu", start="exec", env={"MINE": "x y"}, name=planted) as session:
        result = session.run_cell("import os\nt = torch.ones(1)\ndist.all_reduce(t)\n(os.environ['MINE'], t.item())")
    assert result.values == {0: ("x y", 2.0), 1: ("x y", 2.0)}


def test_no_socket_of_a_session_listens_beyond_loopback(processes: Callable[[], set[psutil.Process]]) -> None:
    with Session.start(ranks=2, device="cpu") as session:
        session.run_cell("dist.all_reduce(torch.ones(1))\ndist.new_group([0, 1])")
        listening = [c.laddr for p in processes() for c in p.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert listening, "the store and gloo listen somewhere"
    assert {address.ip for address in listening} <= {"127.0.0.1", "::1"}


# ---- process groups


def test_tutorial_code_replaces_the_group(session: Session) -> None:
    code = """
os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "localhost", "12355"
dist.init_process_group("gloo", rank=rank, world_size=world_size)
t = torch.ones(1); dist.all_reduce(t); t.item()
"""
    session.run_cell("import os")
    result = session.run_cell(code)
    assert result.values == {0: 2.0, 1: 2.0}
    assert "world_size, rank ignored: the session sets them" in result.stderr[0]


def test_destroyed_group_is_made_again_before_the_next_cell(session: Session) -> None:
    session.run_cell("dist.destroy_process_group()")
    assert session.run_cell("t = torch.ones(1); dist.all_reduce(t); t.item()").values == {0: 2.0, 1: 2.0}
    session.run_cell("dist.destroy_process_group()", ranks=0)  # on one rank only: both must meet to make it again
    assert session.run_cell("t = torch.ones(1); dist.all_reduce(t); t.item()").values == {0: 2.0, 1: 2.0}


_TUTORIAL = """
from torch.nn.parallel import DistributedDataParallel

def demo():
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(10, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
    model(torch.randn(20, 10)).sum().backward()
    optimizer.step()
    dist.destroy_process_group()

for _ in range(10): demo()
"""


def test_model_that_outlives_its_group_does_not_hang(session: Session) -> None:
    """Many tutorials destroy the group in the function in which the model is a local variable."""
    session.run_cell(_TUTORIAL, timeout_s=30)
    session.run_cell("dist.barrier()", timeout_s=30)


def test_spawn_is_refused_with_the_reason(session: Session) -> None:
    with pytest.raises(RankError, match=r"mp\.spawn starts processes of its own"):
        session.run_cell("import torch.multiprocessing as mp\nmp.spawn(print, nprocs=2)")


# ---- values


def test_values_travel_both_ways(session: Session) -> None:
    sent = {
        "number": 2.5, "text": "é", "raw": b"\0\xff", "nested": {"a": [1, (2, None)], 3: {True}},
        "array": np.arange(6, dtype=np.int16).reshape(2, 3), "half": torch.randn(3, 5).to(torch.bfloat16),
    }  # fmt: skip
    session.push(sent, ranks=1)
    back = session.pull(list(sent), ranks=1)[1]
    assert {name: back[name] for name in ("number", "text", "raw", "nested")} == {
        name: sent[name] for name in ("number", "text", "raw", "nested")
    }
    np.testing.assert_array_equal(back["array"], sent["array"])
    assert torch.equal(back["half"], sent["half"])


def test_large_tensor_travels_in_pieces(session: Session) -> None:
    session.run_cell("big = torch.arange(9_000_000, dtype=torch.float32) + rank")
    pulled = session.pull("big")
    assert torch.equal(pulled[1], torch.arange(9_000_000, dtype=torch.float32) + 1)
    session.push({"again": pulled[1]})
    assert session.run_cell("bool((again - 1 == torch.arange(9_000_000)).all())").values == {0: True, 1: True}


def test_unknown_name_is_refused_with_the_nearest_one(session: Session) -> None:
    session.run_cell("losses = [1]")
    with pytest.raises(SessionError, match=r"ranks 0-1: there is no variable 'lossess': did you mean 'losses'\?"):
        session.pull("lossess")


def test_what_cannot_travel_is_refused_by_name_and_type(session: Session) -> None:
    session.run_cell("f = lambda: 1")
    with pytest.raises(SessionError, match="f is a function"):
        session.pull("f")
    with pytest.raises(ValueNotSupported, match="g is a function"):
        session.push({"good": 1, "g": lambda: 1})
    with pytest.raises(SessionError, match="no variable 'good'"):
        session.pull("good")


def test_value_that_cannot_travel_is_there_as_text(session: Session) -> None:
    value = session.run_cell("torch.nn.Linear(2, 3)").values[0]
    assert isinstance(value, TextOnly)
    assert value == "Linear(in_features=2, out_features=3, bias=True)"


# ---- output


def test_everything_printed_is_in_the_result(session: Session) -> None:
    code = """
import os, sys, subprocess, ctypes
print("print", rank); print("err", file=sys.stderr)
subprocess.run(["echo", "child"], check=True)
ctypes.CDLL(None).printf(b"from C\\n")
os.write(1, "é\\n".encode()[:2]); os.write(1, "é\\n".encode()[2:])
print("no newline", end="")
"""
    result = session.run_cell(code)
    assert result.stdout[1] == "print 1\nchild\nfrom C\né\nno newline"
    assert result.stderr == {0: "err\n", 1: "err\n"}


@pytest.mark.slow
def test_flood_of_every_rank_arrives_complete_in_the_log() -> None:
    with Session.start(ranks=4, device="cpu", init=False) as session:
        result = session.run_cell("for i in range(100_000): print(f'{rank} line {i:06d}')")
    for rank in range(4):
        assert result[rank].stdout == "".join(f"{rank} line {i:06d}\n" for i in range(100_000))


def test_c_output_is_seen_while_the_cell_runs(session: Session) -> None:
    code = "import ctypes, time\nctypes.CDLL(None).puts(b'x')\ntime.sleep(600)"
    with pytest.raises(CellInterrupted):  # as soon as the output is seen
        session.run_cell(code, ranks=0, observer=Watcher(press_at="x"), timeout_s=60)


def test_parser_of_a_cell_takes_no_option_of_the_launcher(session: Session) -> None:
    code = """
import argparse, sys
parser = argparse.ArgumentParser()
parser.add_argument("--nnodes", default=7)
parser.add_argument("data", nargs="*")
sys.argv, vars(parser.parse_args())"""
    expected = ([""], {"nnodes": 7, "data": []})
    assert session.run_cell(code).values == {0: expected, 1: expected}


def test_name_that_is_asked_for_twice_is_brought_once(session: Session) -> None:
    session.run_cell("twice = rank")
    assert session.pull(["twice", "twice"]) == {0: {"twice": 0}, 1: {"twice": 1}}
    session.broadcast(["twice", "twice"])
    assert session.pull("twice") == {0: 0, 1: 0}


@pytest.mark.parametrize("name", ["a b", "", "class", "__builtins__"])
def test_name_that_no_cell_can_use_is_not_pushed(session: Session, name: str) -> None:
    with pytest.raises(SpecError, match="give a valid variable name"):
        session.push({"fine": 1, name: 1})
    with pytest.raises(SessionError, match="there is no variable 'fine'"):
        session.pull("fine")
    with pytest.raises(SessionError, match="is not a variable name: first assign"):
        session.pull("rank + 1")


class _Order(CellObserver):
    """Keeps what a cell shows, in order of arrival."""

    def __init__(self) -> None:
        self.said = ""

    def output(self, rank: int, stream: str, text: str) -> None:
        self.said += text

    def display(self, rank: int, bundle: dict[str, Any], display_id: str, is_update: bool) -> None:
        self.said += f"{bundle['text/plain']}\n"

    def clear(self, rank: int, wait: bool) -> None:
        self.said += "clear\n"


def test_rank_is_no_prompt(session: Session) -> None:
    """A rank has no interactive prompt; Lightning refuses to train with DDP where ``sys.ps1`` suggests one."""
    assert session.run_cell("import sys; hasattr(sys, 'ps1'), hasattr(sys, 'ps2')").values == dict.fromkeys(
        range(2), (False, False)
    )


@pytest.mark.timeout(120)
def test_flood_of_a_process_is_not_kept_ahead_of_the_notebook(session: Session) -> None:
    """Such output used to pile up on the node's disk: after a stop, the idle ranks could not be used for minutes."""

    class Slow(Watcher):
        def output(self, rank: int, stream: str, text: str) -> None:
            time.sleep(0.005)

    session.run_cell("kept = rank")
    with pytest.raises(CellTimeout):
        session.run_cell("!yes", timeout_s=1.0, observer=Slow())
    assert session.run_cell("kept").values == {0: 0, 1: 1}


def test_lines_of_a_loop_come_in_few_messages(session: Session) -> None:
    """Each line used to be a message: the notebook fell minutes behind, and a stop seemed to fail."""

    class Counter(Watcher):
        pieces = 0

        def output(self, rank: int, stream: str, text: str) -> None:
            self.pieces += 1
            super().output(rank, stream, text)

    counter = Counter()
    session.run_cell("for number in range(20_000): print(number)", ranks=0, observer=counter)
    assert counter.printed == "".join(f"{number}\n" for number in range(20_000))
    assert counter.pieces < 1000


def test_what_a_rank_prints_logs_and_displays_comes_in_its_order(session: Session) -> None:
    """Each has its own channel to the worker, which used to read the channels in whatever order it noticed them."""
    code = """
        import ctypes, sys
        from IPython.display import clear_output, display
        for step in range(200):
            print("print", step)
            print("error", step, file=sys.stderr)
            display({"text/plain": f"display {step}"}, raw=True)
            ctypes.CDLL(None).puts(f"puts {step}".encode())
            display({"text/plain": f"again {step}"}, raw=True)
            print("beg", end="")
            sys.stderr.write("unfinished\\n")
            print("un")
            clear_output(wait=True)
    """
    order = _Order()
    session.run_cell(textwrap.dedent(code), ranks=0, observer=order)
    words = "print {0}\nerror {0}\ndisplay {0}\nputs {0}\nagain {0}\nbegunfinished\nun\nclear\n"
    assert order.said == "".join(words.format(step) for step in range(200))


def test_rank_whose_worker_does_not_read_prints_all_the_same(session: Session) -> None:
    """The rank gives up the order once, after a wait, and keeps it again when the worker reads again."""
    turns = "for _ in range(100):\n    print('o')\n    print('e', file=sys.stderr)\n"
    stopped = f"""
import os, signal, sys, threading, time
worker = os.getppid()
freed = threading.Timer(30, os.kill, (worker, signal.SIGCONT))
freed.start()
os.kill(worker, signal.SIGSTOP)
{turns}
was_freed = freed.finished.is_set()
freed.cancel()
os.kill(worker, signal.SIGCONT)
was_freed"""
    assert session.run_cell(stopped, ranks=0).values[0] is False
    order = _Order()
    session.run_cell(turns, ranks=0, observer=order)
    assert order.said == "o\ne\n" * 100


# ---- errors


def test_error_names_rank_host_and_the_users_line(session: Session) -> None:
    code = "def train(n):\n    return 1 / n\nif rank == 1: train(0)"
    with pytest.raises(RankError) as caught:
        session.run_cell(code)
    [error] = caught.value.errors.values()
    assert (error.rank, error.name, error.message) == (1, "ZeroDivisionError", "division by zero")
    shown = "\n".join(caught.value._render_traceback_())
    assert "line 3, in <module>\n  |     if rank == 1: train(0)" in shown
    assert "line 2, in train\n  |     return 1 / n" in shown
    assert "1 of 2 ranks: no error" in shown
    assert "IPython" not in shown
    assert "detrain_nb" not in shown


def test_recursion_without_end_is_shown_by_its_ends(session: Session) -> None:
    with pytest.raises(RankError, match="RecursionError") as caught:
        session.run_cell("def again(): return again()\nagain()", ranks=0)
    lines = caught.value._render_traceback_()
    assert len(lines) < 60
    assert any("more" in line for line in lines)


def test_error_without_a_text_leaves_the_rank_alive(session: Session) -> None:
    code = "class Mute(Exception):\n    def __str__(self): return 1 / 0\nraise Mute"
    with pytest.raises(RankError, match="Mute: <no text: ZeroDivisionError in __str__>"):
        session.run_cell(code, ranks=0)
    assert session.run_cell("rank").values == {0: 0, 1: 1}


def test_huge_output_is_named_instead_of_shown(session: Session) -> None:
    result = session.run_cell(
        "class Huge:\n    def _repr_html_(self): return 'x' * (40 << 20)\n    def __repr__(self): return 's'\nHuge()",
        ranks=0,
    )
    assert result[0].bundle == {"text/plain": "<text/html of 40 MB is not shown>"}


def test_too_many_values_for_the_notebook_are_named_instead(session: Session) -> None:
    code = """
class Plot:
    def _repr_mimebundle_(self, **_):
        return {"application/vnd.plotly.v1+json": {"y": list(range(10**6))}, "application/json": [1, {"a": "b"}]}
Plot()
"""
    result = session.run_cell(code)
    assert result[0].bundle["text/plain"].startswith("<") and "Plot" in result[0].bundle["text/plain"]
    result = session.run_cell("get_ipython().display_pub.publish({'application/json': list(range(10**6))})\nrank")
    assert result.values == {0: 0, 1: 1}
    shown = [parse_bundle(message.body) for message in session.log.read(result.cell) if isinstance(message, Display)]
    assert shown == 2 * [{"text/plain": "<application/json of 1,000,000 values is not shown>"}]


def test_completion_that_raises_leaves_the_rank_alive(session: Session) -> None:
    code = "class Evil:\n    def __dir__(self): 1 / 0\n    def __getattr__(self, name): 1 / 0\ne = Evil()"
    session.run_cell(code)
    session.ranks.complete("e.", 2)
    assert session.run_cell("1").values == {0: 1, 1: 1}


def test_same_error_of_several_ranks_is_one_entry(session: Session) -> None:
    with pytest.raises(RankError) as caught:
        session.run_cell("raise KeyError('x')")
    assert str(caught.value).count("KeyError") == 1
    assert str(caught.value).startswith("ranks 0-1 on ")


def test_what_was_defined_before_an_error_stays(session: Session) -> None:
    with pytest.raises(RankError, match="no_such_magic"):
        session.run_cell("before = 1\n%no_such_magic\nafter = 2")
    assert session.pull("before", ranks=0) == {0: 1}
    with pytest.raises(SessionError, match="'after'"):
        session.pull("after", ranks=0)


@pytest.mark.parametrize("code", ["input()", "exit()", "import sys; sys.exit(3)", "raise SystemExit"])
def test_rank_survives_what_would_end_a_script(session: Session, code: str) -> None:
    try:
        session.run_cell(code)
    except RankError as exc:
        assert exc.errors
    assert session.run_cell("rank").values == {0: 0, 1: 1}


def test_number_and_lines_are_those_of_the_notebooks_cell(session: Session) -> None:
    with pytest.raises(RankError) as caught:
        session.run_cell("import inspect\ndef f(): return 1 / 0\nf()", ranks=0, number=1000, first_line=2)
    shown = "\n".join(caught.value._render_traceback_())
    assert "cell 1000, line 4, in <module>\n  |     f()" in shown
    assert "cell 1000, line 3, in f\n  |     def f(): return 1 / 0" in shown
    assert session.run_cell("inspect.getsource(f)", ranks=0).values == {0: "def f(): return 1 / 0\n"}
    assert session.log.next_cell() == 1002
    assert session.log.next_cell(at_least=3) == 1002


@pytest.mark.here_only
def test_ranks_of_this_machine_are_chosen_by_its_name_as_errors_have_it(session: Session) -> None:
    with pytest.raises(RankError) as caught:
        session.run_cell("1 / 0")
    host = caught.value.errors[1].host
    assert host == "this machine" == session.status().ranks[0].host
    assert f"ranks 0-1 on {host} " in "\n".join(caught.value._render_traceback_())
    assert session.ranks.choose(host) == session.ranks.choose(host, plan=session.ranks.plan_of(1)) == (0, 1)
    with pytest.raises(SpecError, match=f"no rank or host is called 'elsewhere': .* or all, or a host: {host}$"):
        session.ranks.choose("elsewhere")


# ---- cells of several threads


_MEETS_THE_OTHERS = """
import pathlib, time
_folder, _until = pathlib.Path({folder!r}), time.monotonic() + 20
(_folder / {name!r}).touch()
while len(list(_folder.iterdir())) < {count} and time.monotonic() < _until: time.sleep(0.01)
{name!r}
"""


@pytest.mark.here_only
def test_cells_that_wait_for_their_ranks_at_the_same_time_are_two_cells(session: Session, tmp_path: Path) -> None:
    (tmp_path / "met").mkdir()
    code = {name: _MEETS_THE_OTHERS.format(folder=str(tmp_path / "met"), name=name, count=2) for name in ("a", "b")}
    found, begun = _run_behind_another(session, {"a": (0, code["a"]), "b": (1, code["b"])}, tmp_path / "gate")
    assert {name: result.values for name, result in found.items()} == {"a": {0: "a"}, "b": {1: "b"}}
    assert len({result.cell for result in found.values()}) == 2
    assert begun == {name: result.cell for name, result in found.items()}, "who shows a cell is told its number"
    assert session.is_alive


@pytest.mark.here_only
def test_cells_of_several_threads_take_turns_and_give_their_own_values(session: Session, tmp_path: Path) -> None:
    cells = {str(number): (None, f"dist.all_reduce(torch.ones(1)); {number}") for number in range(5)}
    found, _ = _run_behind_another(session, cells, tmp_path / "gate")
    assert {name: result.values for name, result in found.items()} == {
        str(number): {0: number, 1: number} for number in range(5)
    }


@pytest.mark.here_only
def test_value_that_a_later_cell_of_another_thread_took_the_place_of_is_its_text(
    session: Session, tmp_path: Path
) -> None:
    code = _MEETS_THE_OTHERS.format(folder=str(tmp_path), name="early", count="2 * rank")
    slow = _in_thread(session, code)
    assert_soon(lambda: set(state_of(session).busy) == {1})
    assert session.run_cell("'later'", ranks=0).values == {0: "later"}
    (tmp_path / "go on").touch()
    values = slow().values
    assert values == {0: "'early'", 1: "early"} and isinstance(values[0], TextOnly)


@pytest.mark.here_only
def test_cell_waits_as_long_for_each_that_is_in_its_way(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session.settings.limits, "idle_s", 4.0)
    holders = [_in_thread(session, _gated(tmp_path / "0"), ranks=0)]
    assert_soon(lambda: set(state_of(session).busy) == {0})
    began, seen = time.monotonic(), _Waiting()
    last = _in_thread(session, "'last'", observer=seen)
    assert seen.waits.wait(60)
    assert_soon(lambda: time.monotonic() > began + 2.2)
    holders.append(_in_thread(session, _gated(tmp_path / "1"), ranks=1))
    assert_soon(lambda: set(state_of(session).busy) == {0, 1})
    (tmp_path / "0").touch()
    assert_soon(lambda: time.monotonic() > began + 4.4)
    (tmp_path / "1").touch()
    assert last().values == {0: "last", 1: "last"}
    for holder in holders:
        holder()


def _gated(gate: Path) -> str:
    return f"import pathlib, time\nwhile not pathlib.Path({str(gate)!r}).exists(): time.sleep(0.01)"


class _Waiting(CellObserver):
    def __init__(self) -> None:
        self.waits, self.number = threading.Event(), 0

    def waiting(self, text: str) -> None:
        self.waits.set()

    def begin(self, number: int) -> None:
        self.number = number


def _run_behind_another(
    session: Session, cells: Mapping[str, tuple[int | None, str]], gate: Path
) -> tuple[dict[str, CellResult], dict[str, int]]:
    """Run each of ``cells`` (ranks and code) in its own thread; all of them first wait for the same earlier cell.

    Returns the results, and the cell numbers that the observers received.
    """
    first = _in_thread(session, _gated(gate))
    assert_soon(lambda: set(state_of(session).busy) == {0, 1})
    seen = {name: _Waiting() for name in cells}
    threads = {
        name: _in_thread(session, code, ranks=ranks, observer=seen[name]) for name, (ranks, code) in cells.items()
    }
    assert all(each.waits.wait(60) for each in seen.values())
    gate.touch()
    first()
    return {name: result() for name, result in threads.items()}, {name: each.number for name, each in seen.items()}


def _in_thread(session: Session, code: str, **options: Any) -> Callable[[], CellResult]:
    """Start a cell in a thread; returns a function that waits for its result."""
    result: Future[CellResult] = Future()

    def run() -> None:
        try:
            result.set_result(session.run_cell(code, **options))
        except BaseException as exc:  # noqa: BLE001
            result.set_exception(exc)

    threading.Thread(target=run, daemon=True).start()
    return lambda: result.result(30)


# ---- stops and deaths


@pytest.mark.parametrize(
    "code",
    [
        "while True: pass",
        "import time\ntime.sleep(60)",
        "import asyncio\nawait asyncio.sleep(60)",
        "import subprocess\nsubprocess.run(['sleep', '60'])",
        "!sleep 60",
    ],
)
def test_stop_interrupts_every_rank_and_keeps_variables(session: Session, code: str) -> None:
    session.run_cell("kept = 'still here'")
    started = time.monotonic()
    with pytest.raises(CellInterrupted) as caught:
        session.run_cell(f"print('begun')\n{code}", observer=Watcher(press_at="begun", ranks=2, after_s=(0.5,)))
    assert time.monotonic() - started < 15
    assert isinstance(caught.value, KeyboardInterrupt)
    assert set(caught.value.errors) <= {0, 1}
    assert session.pull("kept") == {0: "still here", 1: "still here"}


def test_timeout_stops_the_cell(session: Session) -> None:
    """By then each rank has reported its position several times."""
    with pytest.raises(
        CellTimeout, match=r"did not end within 4 s on ranks 0-1.* \(line 1\): all ranks stopped and kept"
    ):
        session.run_cell("while True: pass", timeout_s=4)
    assert session.run_cell("1").values == {0: 1, 1: 1}


def test_interrupt_that_comes_late_does_not_hit_the_next_cell(session: Session) -> None:
    for _ in range(30):
        session.run_cell("pass")
        session.ranks.interrupt()
        session.run_cell("x = sum(range(10_000))")


def test_interrupt_that_comes_before_the_cell_has_begun_is_not_lost(session: Session) -> None:
    class PressStop:
        """Presses stop while the cell is still on its way to the ranks."""

        def __init__(self, send: Callable[[Any], None]) -> None:
            self.send = send

        def __call__(self, message: Any) -> None:
            self.send(message)
            if isinstance(message, RunCell):
                self.send(Interrupt(message.ranks, message.cell))

    for _ in range(20):
        link = link_of(session)
        send = link.send
        link.send = PressStop(send)  # type: ignore[method-assign]
        try:
            with pytest.raises(CellInterrupted):
                session.run_cell("while True: pass", timeout_s=5)
        finally:
            link.send = send  # type: ignore[method-assign]


_CRASH_BESIDE_PYTHON = """
import ctypes, time
c = ctypes.CDLL(None)
c.pthread_create(ctypes.byref(ctypes.c_ulong()), None, ctypes.cast(c.strlen, ctypes.c_void_p), ctypes.c_void_p(1))
time.sleep(60)
"""


def test_crash_in_c_says_where_down_to_the_cells_line() -> None:
    def last_words(code: str) -> list[str]:
        with pytest.raises(RankLost, match="ended with signal 11") as caught:
            session.run_cell(code)
        words = str(caught.value).partition("its last words:\n")[2].partition("\nrank 0 was restarted")[0]
        return [line.removeprefix("  | ") for line in words.splitlines()]

    with Session.start(ranks=1, device="cpu", init=False) as session:
        session.run_cell("import sys, ctypes\nprint('of another cell', file=sys.stderr)")
        words = last_words("def f():\n    ctypes.string_at(0)\nprint('\\r1%\\r2%', file=sys.stderr)\nf()")
        assert words[:2] == ["2%", "Fatal Python error: Segmentation fault"]
        assert words[-1].strip() == 'File "<cell 2>", line 2 in f'
        words = last_words(_CRASH_BESIDE_PYTHON)
        assert words[0] == "Fatal Python error: Segmentation fault" and "a thread that runs no Python" in words[1]


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["agent", "warm process", "launcher", "worker"])
def test_death_of_what_holds_the_ranks_is_told_and_leaves_nothing(
    victim: str, processes: Callable[[], set[psutil.Process]]
) -> None:
    session = Session.start(ranks=2, device="cpu")
    try:
        agent = next(p for p in processes() if "detrain_nb.node.agent.agent" in p.cmdline())
        warm = agent.children()[0]
        launcher = warm.children()[0]
        above = {"agent": agent, "warm process": warm, "launcher": launcher, "worker": launcher.children()[0]}
        threading.Timer(0.5, above[victim].kill).start()
        with pytest.raises((NodeLost, RankLost)):
            session.run_cell("import subprocess\nsubprocess.run(['sleep', '60'])")
    finally:
        session.stop()
    assert_soon(lambda: not processes())


# ---- the end


@pytest.mark.parametrize(
    ("ending", "why"),
    [
        ("killed", r"the connection to the agent of session '[\w-]+' was closed \(.+\): %distributed restart"),
        ("stopped", r"session '[\w-]+' has ended: start another one"),
        (
            "left",
            r"disconnected from session '[\w-]+', whose ranks keep running: %distributed attach \S+ reconnects to",
        ),
    ],
)
def test_session_that_is_over_says_why_whatever_it_is_asked(
    ending: str, why: str, processes: Callable[[], set[psutil.Process]]
) -> None:
    session = Session.start(ranks=2, device="cpu")
    agent = next(p for p in processes() if "detrain_nb.node.agent.agent" in p.cmdline())
    try:
        session.run_cell("1")
        {"killed": agent.kill, "stopped": session.stop, "left": session.detach}[ending]()
        assert_soon(lambda: not session.is_alive)
        for shown in (session.status(), session.ranks.where()):
            assert re.search(why, repr(shown)) and re.search(why, html.unescape(shown._repr_html_()))
        assert "no cell is running" not in repr(session.ranks.where())
        for ask in (
            session.stop_cells,
            session.ranks.interrupt,
            session.ranks.shrink,
            lambda: session.log.replay(1),
            lambda: session.pull("rank"),
            lambda: session.run_cell("1"),
        ):
            with pytest.raises(DetrainError, match=why):
                ask()
    finally:
        session.stop()
        if ending == "left":
            end_session(session.name)
    assert_soon(lambda: not processes())


def test_end_leaves_no_file_in_the_folder_for_temporary_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with Session.start(ranks=2, device="cpu") as session:
        session.run_cell("1")
    assert not list(tmp_path.iterdir())


def test_end_leaves_no_process_that_the_cells_started(processes: Callable[[], set[psutil.Process]]) -> None:
    session = Session.start(ranks=2, device="cpu")
    session.run_cell(
        "import subprocess, os\n"
        "subprocess.Popen(['sleep', '600'])\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "if os.fork() == 0:\n    os.setsid(); os.execvp('sleep', ['sleep', '600'])\n"
        "loader = iter(torch.utils.data.DataLoader(list(range(100)), num_workers=2)); next(loader)"
    )
    assert_soon(lambda: [process.name() for process in processes()].count("sleep") == 6)
    names = [process.name() for process in processes()]
    assert len(names) >= 1 + 1 + 1 + 2 + 2 + 6 + 4, (
        "agent, warm process, launcher, workers, interpreters, sleeps, loader workers"
    )
    session.stop()
    assert_soon(lambda: not processes())


def test_kill_of_the_notebooks_process_ends_the_ranks(
    processes: Callable[[], set[psutil.Process]], tmp_path: Path
) -> None:
    code = (
        "from detrain_nb import Session\n"
        "s = Session.start(ranks=2, device='cpu', linger_s=0)\n"
        "print('up', flush=True)\n"
        's.run_cell(\'import subprocess; subprocess.run(["sleep", "600"])\')\n'
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as notebook:
        assert notebook.stdout is not None
        assert notebook.stdout.readline() == b"up\n"
        assert len(processes()) >= 1 + 1 + 1 + 2 + 2
        notebook.kill()
    assert_soon(lambda: not processes())


def test_atexit_functions_of_an_idle_rank_run(tmp_path: Path) -> None:
    with Session.start(ranks=1, device="cpu", init=False) as session:
        session.push({"path": str(tmp_path / "left")})
        session.run_cell("import atexit, pathlib\natexit.register(lambda: pathlib.Path(path).write_text('x'))")
    assert (tmp_path / "left").read_text() == "x"


def test_ended_session_says_so_and_its_results_stay() -> None:
    session = Session.start(ranks=1, device="cpu", init=False)
    result = session.run_cell("print('printed')")
    session.stop()
    session.stop()
    for ask in (
        lambda: session.run_cell("1"),
        session.settings.check_collectives,
        lambda: session.files.put(__file__, "/tmp/detrain_nb_never"),
        lambda: session.files.check_data("/tmp"),
        session.restart,
    ):
        with pytest.raises(SessionError, match="has ended"):
            ask()
    assert not session.is_alive
    assert result[0].stdout == "printed\n"


def test_log_of_a_killed_process_is_removed_by_the_next_session(runtime_folder: Path) -> None:
    """The PID in its name proves nothing: a process of another PID namespace, in a container, may share the folder."""
    program = "from detrain_nb.session.output.log import OutputLog; log = OutputLog(); print(log._folder, flush=True)"
    with subprocess.Popen(
        [sys.executable, "-c", f"{program}; input()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout
        log = Path(owner.stdout.readline().strip())
        elsewhere = log.rename(log.with_name(".log-999999999-x"))
        Session.start(ranks=1, device="cpu", init=False).stop()
        assert elsewhere.is_dir()
        owner.kill()
    Session.start(ranks=1, device="cpu", init=False).stop()
    assert not elsewhere.exists()


def test_folder_that_ipython_makes_on_a_node_is_no_other_users_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        Session.start(ranks=1, device="cpu", init=False, env={"IPYTHONDIR": str(tmp_path / "ipython")}).stop()
    finally:
        os.umask(before)
    assert (tmp_path / "ipython").stat().st_mode & 0o777 == 0o700


# ---- bad input: nothing starts, nothing is left


@pytest.mark.parametrize(
    ("options", "kind", "complaint"),
    [
        ({"ranks": 0}, SpecError, "0 ranks"),
        ({"device": "tpu"}, SpecError, "choose from auto, cpu, cuda"),
        ({"start": "spawn"}, SpecError, "neither fork nor exec"),
        ({"name": "a/b"}, SpecError, "session name 'a/b'"),
        ({"name": ".."}, SpecError, "session name"),
        ({"name": "x" * 200}, SpecError, "use up to 80"),
        ({"env": {"A=B": "1"}}, SpecError, "not a valid environment variable"),
        ({"backend": "nosuch"}, LaunchError, "nosuch"),
        ({"folder": "/nonexistent/folder"}, SpecError, "/nonexistent/folder"),
        ({"ranks": 2000, "device": "cuda"}, SpecError, "GPU"),
    ],
)
def test_bad_start_is_one_clear_error_and_leaves_nothing(
    options: dict[str, Any],
    kind: type[Exception],
    complaint: str,
    processes: Callable[[], set[psutil.Process]],
    runtime_folder: Path,
) -> None:
    if options.get("device") == "cuda" and _gpus():
        pytest.skip("needs a machine without a GPU")
    before = set(runtime_folder.iterdir())
    with pytest.raises(kind, match=complaint):
        Session.start(**{"ranks": 1, "device": "cpu", **options})
    assert not processes()
    assert {path for path in runtime_folder.iterdir() if not path.name.startswith(".log-")} <= before


@pytest.mark.parametrize("code", ["", "  \n"])
def test_empty_cell_is_refused(session: Session, code: str) -> None:
    with pytest.raises(SpecError, match="the cell is empty"):
        session.run_cell(code)


@pytest.mark.slow
def test_second_session_of_the_same_name_is_refused() -> None:
    with (
        Session.start(ranks=1, device="cpu", init=False, name="mine") as session,
        pytest.raises(SessionError, match=r"'mine' is already running \(agent pid \d+\)"),
    ):
        Session.start(ranks=1, device="cpu", init=False, name="mine")
    assert not session.is_alive
    Session.start(ranks=1, device="cpu", init=False, name="mine").stop()


def test_run_directory_that_is_open_or_not_ours_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.chmod(0o755)
    monkeypatch.setenv("DETRAIN_NB_RUNTIME_DIR", str(tmp_path))
    with pytest.raises(LaunchError, match=r"open to others \(mode 0755\): chmod 700"):
        Session.start(ranks=1)
    file = tmp_path / "file"
    file.write_text("")
    monkeypatch.setenv("DETRAIN_NB_RUNTIME_DIR", str(file))
    with pytest.raises(LaunchError, match="run directory"):
        Session.start(ranks=1)
    if os.getuid() == 0:
        theirs = tmp_path / "theirs"
        theirs.mkdir(mode=0o700)
        os.chown(theirs, 12345, 12345)
        monkeypatch.setenv("DETRAIN_NB_RUNTIME_DIR", str(theirs))
        with pytest.raises(LaunchError, match="belongs to uid 12345"):
            Session.start(ranks=1)


@pytest.mark.parametrize(
    ("version", "complaint"),
    [(None, "torch is missing in"), ("2.4.0", r"torch 2\.4\.0 in .* is too old: torch>=2\.9\.1")],
)
def test_torch_that_is_missing_or_too_old_is_named(tmp_path: Path, version: str | None, complaint: str) -> None:
    module = "raise ModuleNotFoundError('no torch')" if version is None else f"__version__ = {version!r}"
    (tmp_path / "torch.py").write_text(module)
    with pytest.raises(LaunchError, match=complaint):
        Session.start(ranks=1, device="cpu", env={"PYTHONPATH": str(tmp_path)})


@pytest.mark.parametrize("platform", ["win32", "darwin"])
def test_local_ranks_need_linux(monkeypatch: pytest.MonkeyPatch, platform: str) -> None:
    monkeypatch.setattr("detrain_nb.agents.sys.platform", platform)
    with pytest.raises(LaunchError, match=f"ranks on this machine need Linux: {platform} can drive nodes"):
        Session.start(ranks=1)


def test_initialised_torch_distributed_of_this_process_is_refused(tmp_path: Path) -> None:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(SessionError, match="destroy_process_group"):
            Session.start(ranks=1)
    finally:
        dist.destroy_process_group()


def test_runtime_folder_with_a_long_path_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("long" * 20) / ("longer" * 15)
    folder.mkdir(parents=True)
    folder.chmod(0o700)
    monkeypatch.setenv("DETRAIN_NB_RUNTIME_DIR", str(folder))
    with Session.start(ranks=1, device="cpu", init=False) as session:
        assert session.run_cell("rank").values == {0: 0}


def _gpus() -> int:
    from detrain_nb.node.agent.agent import count_gpus

    return count_gpus()


@pytest.mark.slow
def test_threads_of_a_rank_are_what_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    with Session.start(1, device="cpu", init=False) as session:
        assert session.run_cell("import os\ntorch.get_num_threads(), os.environ['OMP_NUM_THREADS']").values == {
            0: (3, "3")
        }
    with Session.start(1, device="cpu", init=False, env={"OMP_NUM_THREADS": "2"}) as session:
        assert session.run_cell("torch.get_num_threads()").values == {0: 2}


# ---- more ranks than there is room for


@pytest.mark.parametrize(
    ("ranks", "cpus", "free_gb", "most"),
    [
        pytest.param(8, 1, 0.5, None, id="eight start anywhere"),
        pytest.param(9, 2, 64.0, 8, id="too few processors"),
        pytest.param(64, 16, 64.0, None, id="four for each"),
        pytest.param(65, 16, 64.0, 64, id="more than four for each"),
        pytest.param(64, 64, 4.0, 16, id="too little memory"),
        pytest.param(64, 64, 0.0, None, id="memory is not known"),
    ],
)
def test_far_more_ranks_than_there_is_room_for_need_force(ranks: int, cpus: int, free_gb: float, most: int) -> None:
    has = Attached("a", 1, "here", 0, cpus, 0, 0, 0, [], [], 0, None, free_bytes=int(free_gb * 1e9))
    plan = plan_one_node(ranks=ranks, device="cpu", backend=None, gpus=0)
    if most is None:
        require_room(plan, {0: has})
        return
    with pytest.raises(SpecError, match=rf"^{ranks} ranks on this machine, .* at most {most}, .*force=True"):
        require_room(plan, {0: has})


@pytest.mark.parametrize(
    "options",
    [
        {"linger_s": 1e300},
        {"linger_s": -5},
        {"group_timeout_s": float("nan")},
        {"group_timeout_s": -1},
        {"group_timeout_s": 0},
        {"seed": 1 << 70},
        {"warm_s": "x"},
    ],
)
def test_start_with_a_number_that_no_clock_or_generator_takes_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=": give a number "):
        Session.start(1, device="cpu", **options)


@pytest.mark.parametrize(
    "options",
    [
        {"nodes": [1]},
        {"nodes": 5},
        {"name": 5},
        {"name": ""},
        {"spool_limit_bytes": -1},
        {"device": 5},
        {"folder": 5},
        {"env": {"A": 1}},
        {"env": ["A"]},
        {"seed": "x"},
        {"linger_s": "x"},
        {"group_timeout_s": [1]},
        {"spool_limit_bytes": 1.5},
    ],
)
def test_start_with_what_is_of_another_type_is_refused_in_words(
    options: dict[str, Any], processes: Callable[[], set[psutil.Process]]
) -> None:
    with pytest.raises(SpecError, match=r"[a-z]"):
        Session.start(**options)
    assert not processes()


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda s: s.run_cell(None), "the cell None: give a str"),
        (lambda s: s.run_cell("1", timeout_s="x"), "timeout_s 'x': give a number"),
        (
            lambda s: s.run_cell("1", observer=print),
            "observer <.*print>: give .*; this one lacks output, display",
        ),
        (lambda s: s.run_cell("1", observer=Watcher), "observer .*: give an instance of .*; this is a class"),
        (lambda s: s.log.show_again(1, 5), "observer 5: give an instance"),
        (lambda s: s.log.follow(1, None), "observer None: give an instance"),
        (lambda s: s.log.replay(0, observer=lambda number: 5), "observer 5: give an instance"),
        (lambda s: s.run_cell("1", number="x"), "number 'x': give a whole number"),
        (lambda s: s.run_cell("1", number=-5), "number -5: give a whole number, 1 or more"),
        (lambda s: s.run_cell("1", first_line="x"), "first_line 'x': give a whole number"),
        (
            lambda s: s.run_cell("1", number=1 << 60),
            r"RunCell cannot be sent: RunCell\.cell has an invalid value \(type int\)",
        ),
        (lambda s: s.run_cell("#" * (17 << 20)), "RunCell cannot be sent: it has 17,8.* bytes, more than 16,777,216"),
        (lambda s: s.run_cell("1", ranks=1.5), r"invalid ranks 1\.5"),
        (lambda s: s.run_cell("1", ranks=["x"]), "'x' is not a rank: give a whole number"),
        (lambda s: s.run_cell("1", ranks="0,,1"), "nothing before or after a comma"),
        (lambda s: s.push("name"), r"variables: give a dict .* not str"),
        (lambda s: s.push(["x"]), r"variables: give a dict .* not list"),
        (lambda s: s.push(None), r"variables: give a dict .* not NoneType"),
        (lambda s: s.push({1: 2}), "variables: give a dict {name: value} with str keys"),
        (lambda s: s.pull(5), "names 5: give a name"),
        (lambda s: s.pull([None]), "give a name"),
        (lambda s: s.broadcast(None), "names None: give a name"),
        (lambda s: s.broadcast("x", source="first"), "source 'first': give a whole number"),
        (lambda s: s.log.replay(0, cells=["x"]), "cell 'x': give a whole number"),
        (lambda s: s.log.show_again("x", None), "cell 'x': give a whole number"),
        (lambda s: s.restart(1.5), "invalid ranks"),
        (lambda s: s.files.put(5), "paths 5: give a path"),
        (lambda s: s.files.get([5]), "give a path"),
        (lambda s: s.files.put("x", nodes=5), "nodes 5: give a name"),
        (lambda s: s.files.check_data(None), "path None: give a str"),
        (lambda s: s.status(limit_s="x"), "limit_s 'x': give a number"),
        (lambda s: s.ranks.complete(None, 0), "code None: give a str"),
        (lambda s: s.ranks.inspect("x", "y"), "detail 'y': give a whole number"),
        (lambda s: setattr(s.settings, "hang_s", "abc"), "hang_s 'abc': give a number"),
        (lambda s: setattr(s.settings, "hang_s", None), "hang_s None: give a number"),
        (lambda s: setattr(s.settings, "hang_s", -1), "hang_s -1: give a number of seconds, 0 or more"),
        (lambda s: setattr(s.settings, "warm_s", "abc"), "warm_s abc: give a number of seconds, 0 to 86400"),
        (lambda s: setattr(s.settings, "warm_s", -3), "warm_s -3: give a number of seconds"),
        (lambda s: setattr(s.settings, "stop_gap_s", "x"), "stop_gap_s 'x': give a number"),
        (lambda s: s.log.text("a", 0), "cell 'a': give a whole number"),
        (lambda s: s.log.text(999, 1), "no cell 999 has run in this session: known cells: 1-"),
        (lambda s: s.log.read(999), "no cell 999 has run"),
        (lambda s: s.log.text(1, 77), "77"),
        (lambda s: s.log.text(1, "x"), "rank 'x': give a whole number"),
        (lambda s: s.log.text(1, 0, "foo"), "stream 'foo' is neither stdout nor stderr"),
        (lambda s: s.settings.check_collectives(1), "is_on 1: give True or False"),
        (lambda s: s.settings.check_collectives("on"), "is_on 'on': give True or False"),
        (lambda s: s.ranks.inspect(5), "name 5: give a str"),
        (lambda s: s.attach("x", limits=5), r"limits 5: give Limits\(...\)"),
        (lambda s: s.start(ranks=1, limits={"idle_s": 1}), r"give Limits\(...\)"),
        (lambda s: Limits(idle_s="x"), "limit idle_s 'x': give a number from 0 to 4,294,967,296"),
        (lambda s: Limits(idle_s=float("inf")), "limit idle_s inf: give a number"),
        (lambda s: setattr(s.settings.limits, "idle_s", -1), "limit idle_s -1: give a number"),
        (lambda s: setattr(s.settings.limits, "idel_s", 1), "unknown limit 'idel_s': give one of start_s, "),
        (lambda s: s.attach(None), "session name None"),
        (lambda s: s.attach(5), "session name 5"),
        (lambda s: s.attach("x", holder=5), "holder 5: give a str"),
    ],
)
def test_what_is_of_another_type_is_one_error_in_words(session: Session, call: Callable[[Any], Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        call(session)
    assert session.run_cell("rank").values == {0: 0, 1: 1}


@pytest.mark.parametrize("order", [NewGeneration([0, 1], 9, "on"), Interrupt(["0"], 1)])  # type: ignore[arg-type,list-item]
def test_order_that_no_node_could_read_is_not_sent(session: Session, order: Message) -> None:
    with pytest.raises(SpecError, match=r"cannot be sent: \w+\.\w+ has an invalid value"):
        link_of(session).node_links[0].send(order)
    assert session.run_cell("rank").values == {0: 0, 1: 1}


class Failing(CellObserver):
    """Fails in one of its methods."""

    def __init__(self, method: str) -> None:
        self.method = method

    def __getattribute__(self, name: str) -> Any:
        if name == object.__getattribute__(self, "method"):
            return lambda *args: 1 / 0
        return super().__getattribute__(name)


_SHOWS = "import IPython\nprint(1)\ndisplay(IPython.display.HTML('1'))\nIPython.display.clear_output()\nrank"


@pytest.mark.parametrize("method", ["begin", "output", "display", "clear", "shown_so_far"])
def test_observer_that_fails_costs_its_cell_alone(session: Session, method: str) -> None:
    """An observer is the user's code; an exception in it used to be reported as the loss of the node."""
    is_asked_later = method == "shown_so_far"  # may be called only after the cell has ended
    with contextlib.suppress(ZeroDivisionError) if is_asked_later else pytest.raises(ZeroDivisionError):
        session.run_cell(_SHOWS, observer=Failing(method))
    with pytest.raises(RankError) as told:
        session.run_cell(f"{_SHOWS}\nraise KeyError", observer=Failing("output"))
    assert isinstance(told.value.__cause__, ZeroDivisionError)
    assert session.run_cell("rank").values == {0: 0, 1: 1}


def test_follower_that_fails_leaves_the_cell_alone(session: Session, caplog: pytest.LogCaptureFixture) -> None:
    follower, ended = Failing("output"), threading.Event()

    def end(cell: object) -> None:
        ended.set()
        raise KeyError

    running = _in_thread(session, "import time\ntime.sleep(1)\nprint(1)\nrank")
    assert_soon(lambda: bool(session.log.running_cells))
    (number,) = session.log.running_cells
    session.log.follow(number, follower, on_end=end)
    assert running().values == {0: 0, 1: 1}
    assert ended.wait(60)
    assert "which follows a cell, has failed" in caplog.text
    with pytest.raises(ZeroDivisionError):
        session.log.show_again(number, follower)


@pytest.mark.parametrize("part", ["", "files", "log", "news", "ranks", "settings"])
def test_setting_that_is_none_is_an_error_that_says_where_they_stand(session: Session, part: str) -> None:
    """``session.hang_s = 1`` and ``session.settings.hang = 1`` would otherwise add an attribute without effect."""
    of = getattr(session, part) if part else session
    for name in ("hang", "idle_s") if part == "settings" else ("hang_s", "hosts"):
        words = rf"\.{name} cannot be set: set hang_s, warm_s of session\.settings, or a field of"
        with pytest.raises(AttributeError, match=words):
            setattr(of, name, 1)
        assert not hasattr(of, name)


@pytest.mark.parametrize(
    ("name", "where"),
    [("where", "ranks"), ("put", "files"), ("replay", "log"), ("notices", "news"), ("hang_s", "settings")],
)
def test_name_that_stands_in_a_group_is_said_with_it(session: Session, name: str, where: str) -> None:
    with pytest.raises(AttributeError, match=rf": it is session\.{where}\.{name}$"):
        getattr(session, name)
    with pytest.raises(AttributeError, match=r"no attribute 'nothing'$"):
        _ = session.nothing


def test_help_and_tab_show_what_is_for_the_user(session: Session) -> None:
    assert list(session.ranks) == [0, 1]
    assert repr(session.ranks) == f"<ranks 0-1 of session {session.name!r}>"
    said = pydoc.plain(pydoc.render_doc(type(session)))
    assert "lambda" not in said and "The files of the nodes: copied there" in said
    for group in (session.files, session.log, session.news, session.ranks, session.settings):
        for name in (name for name in dir(group) if name[0] != "_"):
            text = inspect.getdoc(getattr(type(group), name))
            assert text and not text.startswith(("Of ", "Their ", "Those ", "The same")), f"{name}: {text}"
    assert "complete" not in dir(session.ranks)
    assert "stop_gap_s" not in dir(session.settings)


@pytest.mark.parametrize("timeout_s", [float("nan"), 0, -1])
def test_time_for_a_cell_is_more_than_none(session: Session, timeout_s: float) -> None:
    with pytest.raises(SpecError, match="give a number of seconds, more than 0"):
        session.run_cell("1", timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("ranks", "said"),
    [(1000, r"1,000 ranks .* \(in Python force=True\)"), (10**12, "at most 65,536"), (2.5, "give a whole number")],
)
def test_start_of_absurdly_many_ranks_is_refused(ranks: Any, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        Session.start(ranks=ranks, device="cpu")
