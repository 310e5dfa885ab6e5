"""One rank has a Python too old for the notebook, the other has the notebook's Python: ``make test-pythons``."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest

from detrain_nb import Session
from detrain_nb.errors import CellInterrupted, RankError, RankLost

from ..testbed.nodes import ssh_nodes
from ..testbed.testbed import Testbed
from .test_ssh_nodes_that_differ import AS_ELSEWHERE
from .training import Watcher, be_patient

_BIG = (
    "import asyncio, gc, time, weakref\n"
    "class Big: pass\n"
    "def fail():\n"
    "    global known\n"
    "    big = Big(); known = weakref.ref(big)\n"
    "    raise ValueError\n"
    "async def hold():\n"
    "    global known\n"
    "    big = Big(); known = weakref.ref(big)\n"
    "    await asyncio.sleep(60)"
)


@pytest.fixture(scope="module")
def older_python(request: pytest.FixtureRequest) -> str:
    path = str(request.config.getoption("--older-python"))
    code = "import sys; print(*sys.version_info[:2])"
    found = subprocess.run([path, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    assert tuple(map(int, found.split())) < sys.version_info[:2], "it is not older"
    return path


@pytest.fixture(scope="module")
def mixed(testbed_of_two: Testbed, older_python: str) -> Iterator[Session]:
    """Rank 0 on the older Python, rank 1 on the notebook's."""
    nodes = [*ssh_nodes(testbed_of_two, 1, python=older_python), *ssh_nodes(testbed_of_two)[1:]]
    with Session.start(1, sync=False, nodes=nodes, device="cpu") as started:
        yield started


def _plain(text: str) -> str:
    """The text without colours, which differ between versions of IPython."""
    return re.sub(r"\x1b\[[\d;]*m", "", text)


def test_ranks_have_different_pythons(mixed: Session) -> None:
    older, same = mixed.run_cell("import sys\nlist(sys.version_info[:2])").values.values()
    assert older < same == list(sys.version_info[:2])


@pytest.mark.parametrize("code", AS_ELSEWHERE.values(), ids=AS_ELSEWHERE.keys())
def test_cell_shows_there_what_it_shows_elsewhere(mixed: Session, code: str) -> None:
    older, same = (result := mixed.run_cell(code))
    assert older.bundle == same.bundle
    assert _plain(mixed.log.text(result.cell, 0)) == _plain(mixed.log.text(result.cell, 1))


@pytest.mark.parametrize("value", [[1, "a", None, {"b": (2.5, b"c")}], 2**100, {1, 2}], ids=["nested", "large", "set"])
def test_value_goes_there_and_back(mixed: Session, value: Any) -> None:
    mixed.push({"pushed": value})
    assert mixed.pull("pushed") == {0: value, 1: value}


def test_error_there_has_the_lines_of_the_cell(mixed: Session) -> None:
    with pytest.raises(RankError) as caught:
        mixed.run_cell("def half(x):\n    return 1 / x\n\nhalf(0)")
    older, same = caught.value.errors.values()
    assert older.summary == same.summary == "ZeroDivisionError: division by zero"
    assert older.traceback == same.traceback


@pytest.mark.parametrize("code", ["fail()", "async def wait(): fail()\nawait wait()", "%prun fail()"])
def test_what_a_failed_cell_held_is_let_go_of_at_once(mixed: Session, code: str) -> None:
    mixed.run_cell(f"{_BIG}\ngc.disable()")
    try:
        with pytest.raises(RankError, match="ValueError"):
            mixed.run_cell(code)
        assert mixed.run_cell("known() is None").values == {0: True, 1: True}
    finally:
        mixed.run_cell("gc.enable()")


def _stop(session: Session, code: str) -> CellInterrupted:
    watcher = Watcher(press_at="the cell begins", ranks=2, after_s=(0.5,))
    try:
        with pytest.raises(CellInterrupted) as caught:
            session.run_cell(f"print('the cell begins')\n{code}", observer=watcher, timeout_s=60)
    finally:
        watcher.press_no_more()
    return caught.value


def test_rank_that_waits_for_another_is_freed_by_a_stop(mixed: Session) -> None:
    be_patient(mixed)
    mixed.run_cell("import time\nmine = 10 + rank")
    stopped = _stop(mixed, "if rank == 0: dist.all_reduce(torch.ones(1))\ntime.sleep(60)")
    assert "rank 0 waited in all_reduce" in stopped.note
    assert mixed.run_cell("t = torch.ones(1); dist.all_reduce(t); mine, t.item()").values == {
        0: (10, 2.0),
        1: (11, 2.0),
    }


def test_cell_that_awaits_is_stopped_and_let_go_of(mixed: Session) -> None:
    be_patient(mixed)
    mixed.run_cell(f"{_BIG}\ngc.disable()")
    try:
        stopped = _stop(mixed, "await hold()")
        for error in stopped.errors.values():
            assert re.search(r"cell \d+, line 10, in hold", "\n".join(error.traceback))
        assert mixed.run_cell("known() is None").values == {0: True, 1: True}
    finally:
        mixed.run_cell("gc.enable()")


_TRAIN = """
from torch import nn
from detrain_nb import parallel, training
training.set_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
inputs, targets = torch.randn(8, 8), torch.randint(4, (8,))
whole = nn.functional.cross_entropy(model(inputs), targets).item()
pipeline = parallel.parallelize(
    model, parallel.make_mesh(pp=2, device_type="cpu"), example_inputs=torch.zeros(4, 8),
    loss=nn.functional.cross_entropy, schedule="1F1B", num_microbatches=2, device="cpu")
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(inputs, targets), 8)
result = training.Trainer(pipeline, train=loader, steps=20, optimizer="adamw", optimizer_options={"lr": 1e-2}).fit()
abs(result.losses[0] - whole) < 1e-5, result.losses[-1] < result.losses[0]
"""


def test_stages_of_a_model_train_on_ranks_of_different_pythons(mixed: Session) -> None:
    assert mixed.run_cell(_TRAIN, timeout_s=90).values == {0: (True, True), 1: (True, True)}


def test_rank_that_dies_there_is_replaced(mixed: Session) -> None:
    mixed.run_cell("mine = 10 + rank")
    with pytest.raises(RankLost, match="rank 0"):
        mixed.run_cell("import os, signal\nif rank == 0: os.kill(os.getpid(), signal.SIGKILL)")
    code = "import sys\nt = torch.ones(1); dist.all_reduce(t)\nglobals().get('mine'), t.item(), sys.version_info[1]"
    older, same = mixed.run_cell(code).values.values()
    assert (older[:2], same[:2]) == ((None, 2.0), (11, 2.0))
    assert older[2] < same[2]
