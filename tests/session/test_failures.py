"""Errors of a cell: the explanations added to them, and what is restored for the next cell."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import pytest

from detrain_nb import Session
from detrain_nb.errors import CellTimeout, RankError, RankLost, SessionError

from .soon import assert_soon
from .training import Watcher


def _shown(session: Session, code: str) -> str:
    with pytest.raises(RankError) as caught:
        session.run_cell(code, ranks=0)
    return "\n".join(caught.value._render_traceback_()).replace("\n  | ", "\n")


@pytest.mark.rare_elsewhere
def test_out_of_memory_names_the_largest_variables_and_frees_the_frames(session: Session) -> None:
    session.run_cell(
        "import weakref\n"
        "class Held: pass\n"
        "small, big = torch.zeros(10), torch.zeros(5_000_000)\n"
        "view = big[:10]\n"
        "net = torch.nn.Linear(1000, 1000)\nopt = torch.optim.Adam(net.parameters())\n"
        "net(torch.ones(1, 1000)).sum().backward(); opt.step()\n"
        "def train():\n"
        "    global alive\n"
        "    held = Held(); alive = weakref.ref(held)\n"
        "    torch.zeros(10**15)\n",
        ranks=0,
    )
    shown = _shown(session, "train()")
    largest = shown.partition("the largest variables on rank 0: ")[2].splitlines()[0]
    assert largest.startswith(("big 20.0 MB, view 20.0 MB, opt 8.0 MB, net 8.0 MB", "view 20.0 MB, big 20.0 MB"))
    assert session.run_cell("alive() is None", ranks=0).values == {0: True}


def test_memory_error_of_python_is_explained_too(session: Session) -> None:
    session.run_cell("bigger = torch.zeros(10_000_000)", ranks=0)
    assert "the largest variables on rank 0: bigger 40.0 MB" in _shown(session, "raise MemoryError")


def test_causes_that_form_a_ring_end(session: Session) -> None:
    shown = _shown(session, "try: 1 / 0\nexcept ZeroDivisionError as exc:\n    raise exc from exc")
    assert shown.endswith("ZeroDivisionError: division by zero")
    ring = "a, b = MemoryError('a'), MemoryError('b')\na.__cause__, b.__cause__ = b, a\nraise a"
    assert _shown(session, ring).count("MemoryError") == 2
    deep = "def f(n):\n    try: f(n - 1) if n else 1 / 0\n    except Exception: raise ValueError(n)\nf(100)"
    assert "ValueError: 100" in _shown(session, deep)
    assert session.run_cell("1", ranks=0).values == {0: 1}


def test_variables_that_are_half_made_spoil_nothing(session: Session) -> None:
    half = "class Half(torch.nn.Module):\n    def __init__(self): self.parts = [1]\nhalf = Half()"
    session.run_cell(half)
    assert "MemoryError" in _shown(session, "raise MemoryError")
    for _ in range(2):
        with pytest.raises(CellTimeout):
            session.run_cell("if rank: time.sleep(60)\ndist.barrier()", timeout_s=0.3)
        assert session.run_cell("t = torch.ones(1)\ndist.all_reduce(t)\nt.item()").values == {0: 2.0, 1: 2.0}
    session.run_cell("del half")


_DIFFERENT = {
    "shape": (
        "dist.all_reduce(torch.ones(3 + rank))",
        "all_reduce (SUM) of Float [3]",
        "all_reduce (SUM) of Float [4]",
    ),
    "dtype": (
        "dist.all_reduce(torch.ones(3).int() if rank else torch.ones(3))",
        "all_reduce (SUM) of Float [3]",
        "all_reduce (SUM) of Int [3]",
    ),
    "operation": (
        "x = torch.ones(2, 2)\nif rank: dist.broadcast(x, 0)\nelse: dist.all_reduce(x)",
        "all_reduce (SUM) of Float [2, 2]",
        "broadcast (root 0) of Float [2, 2]",
    ),
    "barrier": (
        "x = torch.ones(1)\nif rank: dist.barrier()\nelse: dist.all_gather([x, x], x)",
        "all_gather of Float [1]",
        "barrier",
    ),
    "reduction": (
        "dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)",
        "all_reduce (SUM) of Float [3]",
        "all_reduce (MAX) of Float [3]",
    ),
    "root": (
        "dist.reduce(torch.ones(1), rank)",
        "reduce (SUM, root 0) of Float [1]",
        "reduce (SUM, root 1) of Float [1]",
    ),
    "group": (
        "both = dist.new_group([0, 1])\ndist.broadcast(torch.ones(1), group=both, group_src=rank)",
        "broadcast (root 0) of Float [1]",
        "broadcast (root 1) of Float [1]",
    ),
    "messages are not compared": ("dist.recv(torch.ones(2), 0) if rank else dist.send(torch.ones(2), 1)", "", ""),
    "the same": (
        "x = torch.ones(2)\ndist.scatter(x, [x, x] if rank == 0 else None, src=0)\n"
        "dist.gather(x, [x, x.clone()] if rank == 1 else None, group_dst=1)\n"
        "dist.all_reduce(x, group=dist.new_group([0, 1]), async_op=True).wait()\n"
        "found = [None, None]\ndist.all_gather_object(found, 'long' * 99 * rank)\n"
        "torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))(x).backward()",
        "",
        "",
    ),
}


@pytest.fixture(scope="module")
def checked(session: Session) -> Iterator[Session]:
    """Yield the session while its ranks compare each collective before starting it."""
    session.run_cell("mine = dist.new_group([0, 1])")
    assert session.settings.check_collectives() == (
        "the process groups are recreated before the next cell: run the cell that creates mine again"
    )
    yield session
    session.settings.check_collectives(False)


@pytest.mark.rare_elsewhere
@pytest.mark.parametrize(("code", "first", "second"), _DIFFERENT.values(), ids=_DIFFERENT)
def test_collectives_that_differ_fail_on_every_rank_before_anything_is_sent(
    checked: Session, code: str, first: str, second: str
) -> None:
    checked.run_cell("last = dist.group.WORLD")
    if first:
        with pytest.raises(RankError) as caught:
            checked.run_cell(code, timeout_s=30)
        words = "ranks called different collectives; this rank called {}; nothing was sent"
        said = {rank: error.message for rank, error in caught.value.errors.items()}
        assert said == {0: words.format(first), 1: words.format(second)}
        assert all("/" not in line for error in caught.value.errors.values() for line in error.traceback)
    else:
        checked.run_cell(code, timeout_s=30)
    code = "t = torch.ones(1)\ndist.all_reduce(t)\nt.item(), last is dist.group.WORLD"
    assert checked.run_cell(code).values == {0: (2.0, True), 1: (2.0, True)}


@pytest.mark.slow
@pytest.mark.here_only
def test_rank_that_waits_for_the_comparison_is_said_and_freed(checked: Session) -> None:
    with pytest.raises(CellTimeout, match=r"rank 0 waited in all_reduce \(line 1\): freed"):
        checked.run_cell("if rank == 0: dist.all_reduce(torch.ones(1))", timeout_s=1.5)
    assert checked.run_cell("dist.barrier()").ranks == (0, 1)


@pytest.mark.here_only
@pytest.mark.parametrize("failing", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_rank_that_waits_for_the_comparison_with_one_that_failed_is_freed(
    checked: Session, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], failing: int
) -> None:
    monkeypatch.setattr(checked.settings, "hang_s", 1000.0)
    number = checked.log.next_cell()
    with pytest.raises(RankError, match="ValueError: a bad batch") as caught:
        checked.run_cell(
            f"if rank == {failing}:\n    raise ValueError('a bad batch')\ndist.all_reduce(torch.ones(1))", timeout_s=30
        )
    assert f"rank {1 - failing} waited in all_reduce (line 3): freed\n" in caught.value.note
    assert set(caught.value.errors) == {0, 1}
    assert [checked.log.text(number, rank, "stderr") for rank in (0, 1)] == ["", ""]
    assert checked.run_cell("dist.barrier()").ranks == (0, 1)


@pytest.mark.slow
@pytest.mark.here_only
def test_ranks_that_time_out_in_different_collectives_are_told_these() -> None:
    with Session.start(ranks=2, device="cpu", group_timeout_s=1) as session, pytest.raises(RankError) as caught:
        session.run_cell("x = torch.ones(3)\ndist.all_reduce(x) if rank else dist.broadcast(x, 1)")
    assert "collective #1 differs: broadcast Float[3] on rank 0, all_reduce Float[3] on rank 1" in (caught.value.note)


_DEBUGGERS = {
    "breakpoint": "breakpoint()",
    "in a function": "def f():\n    breakpoint()\n    return 1\nf()",
    "pdb": "import pdb; pdb.set_trace()",
    "pdb.run": "import pdb; pdb.run('1')",
    "IPython": "from IPython.core.debugger import set_trace; set_trace()",
    "%debug": "%debug",
    "%%debug": "%%debug\n1 + 1",
    "%pdb": "%pdb on",
    "embed": "import IPython; IPython.embed()",
    "interact": "import code; code.interact()",
    "dist.breakpoint": "dist.breakpoint(1)",
}


@pytest.mark.rare_elsewhere
@pytest.mark.parametrize("code", _DEBUGGERS.values(), ids=_DEBUGGERS)
def test_debugger_says_what_to_do_instead(session: Session, code: str) -> None:
    *places, said = _shown(session, code).splitlines()
    assert said.startswith("SessionError: no debugger can run on a rank, which has no terminal: print there; ")
    assert [line for line in places[1:] if ".py" in line] == [], "nothing of what lies between the cell and the refusal"


def test_debugger_with_a_connection_of_its_own_is_left_alone(session: Session) -> None:
    code = (
        "import io, pdb\nsaid = io.StringIO()\npdb.Pdb(stdin=io.StringIO('p 6 * 7\\nc\\n'), stdout=said).set_trace()\n"
    )
    assert "(Pdb) 42" in session.run_cell(f"{code}said.getvalue()", ranks=0).values[0]


@pytest.mark.rare_elsewhere
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("sys.exit(3)", "SystemExit: 3: "),
        ("exit()", "SystemExit: "),
        ("quit(2)", "SystemExit: 2: "),
        ("raise SystemExit('enough')", "SystemExit: enough: "),
        ("import argparse; argparse.ArgumentParser('x').parse_args(['y'])", "SystemExit: 2: "),
    ],
)
def test_exit_ends_the_cell_and_nothing_else(session: Session, code: str, said: str) -> None:
    number = session.log.next_cell()
    shown = _shown(session, f"import sys\n{code}\nprint('not reached')").splitlines()
    assert shown[1:3] == [f"  cell {number}, line 2, in <module>", f"    {code}"]
    assert shown[3] == f"{said}the cell ends here; the rank keeps its variables"
    assert "To exit" not in session.log.text(number, 0, "stderr")
    assert "not reached" not in session.log.text(number, 0)


def test_passwords_are_asked_for_in_the_notebook(session: Session) -> None:
    assert "EOFError: getpass() does not work on a rank" in _shown(session, "import getpass; getpass.getpass()")


@pytest.mark.rare_elsewhere
def test_overwritten_variable_of_the_session_is_said_once(session: Session) -> None:
    session.restart("all")
    own = "import os, torch, torch.distributed as dist\nrank = dist.get_rank() if dist.is_initialized() else rank\n"
    assert session.run_cell(f"{own}device = 'cpu'").stderr == {0: "", 1: ""}, "the same values"
    session.news.pop_notices()
    session.run_cell("if rank == 1: del dist\nfor rank in range(9): pass\ndevice = 'meta'")
    first = "\n".join(session.news.notices).splitlines()
    assert [line.partition(", ")[0] for line in first] == [
        "this cell has overwritten rank on ranks 0-1",
        "this cell has overwritten device on ranks 0-1",
        "this cell has overwritten dist on rank 1",
    ]
    set_back = "\n".join(line.partition("; ")[2].removesuffix("  restores it") for line in first)
    values = session.run_cell(f"rank = 1\n{set_back}\nrank, str(device), dist.is_available()").values
    assert values == {0: (0, "cpu", True), 1: (1, "cpu", True)}
    session.run_cell("rank = 7")
    assert len(session.news.notices) == 1, "it has been said"
    session.restart("all")
    session.news.pop_notices()
    session.run_cell("%reset -f")
    lines = "\n".join(session.news.notices).splitlines()
    set_back = "\n".join(line.partition("; ")[2].removesuffix("  restores it") for line in lines)
    assert session.run_cell(f"{set_back}\nrank, str(device)").values == {0: (0, "cpu"), 1: (1, "cpu")}
    session.restart("all")
    said = Watcher()
    with pytest.raises(RankError):
        session.run_cell("rank = 'mine'\n1 / 0", observer=said)
    assert [line.partition(", ")[0] for line in said.notices] == ["this cell has overwritten rank on ranks 0-1"]
    session.news.pop_notices()
    session.restart("all")


@pytest.mark.rare_elsewhere
def test_handler_of_the_user_is_called_in_cells_alone(session: Session) -> None:
    code = """
import os, signal, threading, time
def late(number, frame): raise TimeoutError(f"signal {int(number)}")
numbers = signal.SIGALRM, signal.SIGUSR1
for number in numbers: signal.signal(number, late)
def send_when_the_cell_has_ended():
    while not globals().get("has_ended"): time.sleep(0.002)
    for number in numbers: os.kill(os.getpid(), number)
    globals()["is_sent"] = True
kept, is_sent, has_ended = os.getpid(), False, False
threading.Thread(target=send_when_the_cell_has_ended, daemon=True).start()
"""
    session.run_cell(code, ranks=0)
    session.push({"has_ended": True}, ranks=0)
    assert_soon(lambda: session.pull("is_sent", ranks=0)[0])
    shown = [_shown(session, "never = 1") for _ in range(2)]
    said = re.findall(r"TimeoutError: signal (\d+)", "".join(shown))
    assert sorted(map(int, said)) == sorted([signal.SIGALRM, signal.SIGUSR1]), "each in a cell of its own"
    assert all(re.search(r"cell \d+, line 3, in late", text) for text in shown)
    as_before = "signal.getsignal(signal.SIGALRM) is late, 'never' in globals(), os.getpid() == kept"
    assert session.run_cell(as_before, ranks=0).values == {0: (True, False, True)}
    assert "TimeoutError" in _shown(session, "signal.raise_signal(signal.SIGALRM)")
    session.run_cell("for number in numbers: signal.signal(number, signal.SIG_DFL)", ranks=0)
    default = "[signal.getsignal(number) is signal.SIG_DFL for number in numbers]"
    assert session.run_cell(default, ranks=0).values == {0: [True, True]}


def test_name_that_is_not_there_is_not_taken_for_one_of_python(session: Session) -> None:
    session.run_cell("nape = 1", ranks=0)
    with pytest.raises(SessionError, match="no variable 'nope': did you mean 'nape'") as caught:
        session.pull("nope", ranks=0)
    session.run_cell("del nape", ranks=0)
    for name, near in (("nope", ""), ("oepn", ""), ("wrold_size", ": did you mean 'world_size'?")):
        with pytest.raises(SessionError) as caught:
            session.pull(name, ranks=0)
        assert str(caught.value).endswith(f"there is no variable {name!r}{near}")


def test_other_errors_are_left_alone(session: Session) -> None:
    assert "largest" not in _shown(session, "raise RuntimeError('no such thing')")
    shown = _shown(
        session,
        "class Odd(RuntimeError):\n    def __str__(self): raise ValueError\nraise Odd",
    )
    assert "<no text: " in shown
    assert session.run_cell("1", ranks=0).values == {0: 1}


@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_broken_cuda_context_is_told_once_and_the_next_cell_meets_the_fresh_rank(
    session: Session, seconds: float
) -> None:
    """No GPU is needed: the cell raises torch's error after a device-side assert and sets how long the exit takes."""
    code = (
        "import os, time\n"
        "text, end = 'CUDA error: device-side assert triggered\\nCompile with TORCH_USE_CUDA_DSA', os._exit\n"
        "def fail(): raise RuntimeError(text)\n"
        "torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, fail\n"
        f"os._exit = lambda status: (time.sleep({seconds}), end(status))\n"
        "fail()"
    )
    shown = _shown(session, code)
    for words in ("device-side assert", "line 6", "it is replaced", "rank 0 was restarted, its variables are lost"):
        assert words in shown
    assert session.run_cell("'text' in globals()", ranks=0).values == {0: False}
    assert session.news.pop_losses() == "", "it was told"


def test_broken_cuda_context_of_one_rank_frees_the_others(session: Session) -> None:
    code = (
        "def fail(): raise RuntimeError('CUDA error: device-side assert triggered')\n"
        "if rank == 0:\n"
        "    torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, fail\n"
        "    fail()\n"
        "kept = rank\n"
        "dist.all_reduce(torch.ones(1))"
    )
    with pytest.raises((RankError, RankLost), match="device-side assert"):
        session.run_cell(code, timeout_s=60)
    code = "t = torch.ones(1); dist.all_reduce(t); globals().get('kept'), t.item()"
    assert session.run_cell(code, timeout_s=60).values == {0: (None, 2.0), 1: (1, 2.0)}


@pytest.mark.parametrize(
    ("code", "named"),
    [
        ("import os; os.close(1); os.close(2)", "descriptor 1 (stdout)"),
        ("import os; fd = os.open(os.devnull, os.O_WRONLY); os.dup2(fd, 1); os.close(fd)", "descriptor 1 (stdout)"),
        ("import sys; sys.stdout = sys.stderr = None", "sys.stdout"),
        ("import sys; sys.stderr.close(); sys.stdin.close(); sys.stdout.detach()", "sys.stdin"),
        ("import sys\nwith open('/dev/null', 'w') as sys.stdout: pass", "sys.stdout"),
        ("import builtins; builtins.print = None", "builtins.print"),
    ],
)
@pytest.mark.here_only
def test_stream_that_a_cell_has_broken_is_put_back(session: Session, code: str, named: str) -> None:
    said = session.run_cell(f"{code}\nNone", ranks=0).stderr[0]
    assert named in said
    assert "it was restored" in said
    result = session.run_cell("import os, sys; print('out'); print('err', file=sys.stderr); sys.stdin.read()", ranks=0)
    assert (result.stdout[0], result.stderr[0]) == ("out\n", "err\n")


@pytest.mark.here_only
def test_recursion_limit_that_lets_no_cell_run_is_put_back(session: Session) -> None:
    said = session.run_cell("import sys; sys.setrecursionlimit(200)", ranks=0).stderr[0]
    assert "recursion limit to 200" in said
    assert session.run_cell("sys.getrecursionlimit()", ranks=0).values[0] == 1000
    assert session.run_cell("sys.setrecursionlimit(5000)\n1", ranks=0).stderr[0] == ""
    assert session.run_cell("sys.getrecursionlimit()", ranks=0).values[0] == 5000


@pytest.mark.here_only
def test_stream_that_a_cell_has_deleted_is_put_back(session: Session) -> None:
    with pytest.raises(RankError, match="has no attribute 'stdout'"):  # IPython reads sys.stdout after a cell
        session.run_cell("import sys; del sys.stdout, sys.stderr, sys.stdin", ranks=0)
    assert session.run_cell("print('out')", ranks=0).stdout[0] == "out\n"


@pytest.mark.parametrize(
    ("end", "status", "printed"),
    [
        ("pass", 0, ""),
        ("raise ValueError('of the child')", 1, "ValueError: of the child"),
        ("sys.exit(7)", 7, ""),
        ("sys.exit('words')", 1, ""),
    ],
)
@pytest.mark.here_only
def test_process_that_a_cell_forks_ends_with_the_cell(session: Session, end: str, status: int, printed: str) -> None:
    fork = f"import os, sys\npid = os.fork()\nif pid == 0:\n    print('child')\n    {end}\n"
    code = "else:\n    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\nNone if pid == 0 else status"
    result = session.run_cell(fork + code, timeout_s=20)
    assert result.values == dict.fromkeys((0, 1), status)
    assert session.run_cell("rank", timeout_s=20).values == {0: 0, 1: 1}
    assert printed in "".join(result.stderr.values()) or not printed


@pytest.mark.here_only
def test_errors_of_a_group_and_notes_are_told(session: Session) -> None:
    code = (
        "def part(number):\n    raise ValueError(f'part {number}')\n"
        "errors = []\n"
        "for number in range(2):\n    try: part(number)\n    except ValueError as exc: errors.append(exc)\n"
        "error = ExceptionGroup('outer', [ExceptionGroup('inner', errors), KeyError('k')])\n"
        "error.add_note('look there')\n"
        "raise error"
    )
    with pytest.raises(RankError) as caught:
        session.run_cell(code, ranks=0)
    words = "\n".join(caught.value._render_traceback_())
    for expected in ("line 2, in part", "ValueError: part 1\n", "2 of 3 in a group", "KeyError: 'k'", "look there"):
        assert expected in words


@pytest.mark.here_only
def test_stream_that_works_is_the_users_to_keep(session: Session) -> None:
    tee = "class Tee:\n    def write(self, text): return sys.__stdout__.write(text.upper())\nsys.stdout = Tee()"
    assert session.run_cell(f"import sys\n{tee}", ranks=0).stderr[0] == ""
    assert session.run_cell("print('out')\nsys.stdout = sys.__stdout__", ranks=0).stdout[0] == "OUT\n"


@pytest.mark.here_only
def test_display_hook_lasts_as_long_as_its_cell(session: Session) -> None:
    session.run_cell("import sys; sys.displayhook = None", ranks=0)
    assert session.run_cell("42", ranks=0).values == {0: 42}


@pytest.mark.parametrize("code", ["signal.raise_signal(signal.SIGINT)", "os.kill(os.getpid(), signal.SIGINT)"])
@pytest.mark.here_only
def test_sigint_that_a_cell_sends_itself_is_an_interrupt(session: Session, code: str) -> None:
    session.run_cell("import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)", ranks=0)
    with pytest.raises(RankError, match="KeyboardInterrupt"):
        session.run_cell(f"import os, signal\n{code}\nos.write(1, b'not reached')", ranks=0)
