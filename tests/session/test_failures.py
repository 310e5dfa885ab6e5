"""What an error of a cell says beyond its text."""

from __future__ import annotations

import pytest

from detrain_nb import Session
from detrain_nb.errors import CellTimeout, RankError, RankLost


def _shown(session: Session, code: str) -> str:
    with pytest.raises(RankError) as caught:
        session.run_cell(code, ranks=0)
    return "\n".join(caught.value._render_traceback_())


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


def test_other_errors_are_left_alone(session: Session) -> None:
    assert "largest" not in _shown(session, "raise RuntimeError('no such thing')")
    shown = _shown(
        session,
        "class Odd(RuntimeError):\n    def __str__(self): raise ValueError\nraise Odd",
    )
    assert "its text cannot be made" in shown
    assert session.run_cell("1", ranks=0).values == {0: 1}


@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_broken_cuda_context_is_told_once_and_the_next_cell_meets_the_fresh_rank(
    session: Session, seconds: float
) -> None:
    """No GPU is needed: the rank is told what torch says after an assert on the device, and how long its end takes."""
    code = (
        "import os, time\n"
        "text, end = 'CUDA error: device-side assert triggered\\nCompile with TORCH_USE_CUDA_DSA', os._exit\n"
        "def fail(): raise RuntimeError(text)\n"
        "torch.cuda.is_initialized, torch.cuda.synchronize = lambda: True, fail\n"
        f"os._exit = lambda status: (time.sleep({seconds}), end(status))\n"
        "fail()"
    )
    shown = _shown(session, code)
    for words in ("device-side assert", "line 6", "it is replaced", "rank 0 is fresh, its variables are gone"):
        assert words in shown
    assert session.run_cell("'text' in globals()", ranks=0).values == {0: False}
    assert session.pop_news() == "", "it was told"


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
