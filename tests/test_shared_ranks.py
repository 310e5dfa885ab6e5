"""What tests/checks/shared_ranks.py promises about a lost rank, shown by running pytest on its own modules."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from .checks.small import lay_out_tests

HERE = Path(__file__).parent
SOURCE = """
import contextlib, os, signal, time
import pytest
from detrain_nb.errors import RankLost

@pytest.fixture(scope="module")
def ranks(two_ranks):
    two_ranks.run_cell("import fractions")
    return two_ranks

@pytest.fixture
def kills_at_its_end(ranks):
    yield
    pid, deadline = ranks.status().ranks[1].pid, time.monotonic() + 30
    os.kill(pid, signal.SIGKILL)
    while ranks.status().ranks[1].pid in (0, pid):
        assert time.monotonic() < deadline

def use(ranks):
    assert ranks.run_cell("str(fractions.Fraction(1, 3))").values == {0: "1/3", 1: "1/3"}

def test_first(ranks):
    use(ranks)
    ranks.run_cell("named_by_a_test = 1")

def test_in_which_a_rank_is_lost(ranks):
    ranks.run_cell("import os\\nif rank == 0:\\n    print('gone', file=sys.stderr)\\n    os._exit(7)")

def test_after_it(ranks):
    use(ranks)
    assert ranks.run_cell("'named_by_a_test' in globals()").values == {0: False, 1: False}, "both begin anew"

def test_that_hides_a_loss(ranks):
    with contextlib.suppress(RankLost):
        ranks.run_cell("import os\\nif rank == 0: os.kill(os.getpid(), 9)")

def test_before_a_loss(ranks, kills_at_its_end):
    use(ranks)

def test_before_which_a_rank_was_lost(ranks):
    use(ranks)

def test_last(ranks, kills_at_its_end):
    use(ranks)
"""
NEXT = """
def test_of_the_next_module(two_ranks):
    names = "{'fractions', 'named_by_a_test'} & {*globals()}"
    assert two_ranks.run_cell(names).values == {0: set(), 1: set()}
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The output of pytest for these modules, including a summary with the outcome of each test."""
    folder = tmp_path_factory.mktemp("shared")
    tests = lay_out_tests(folder)
    (tests / "parallel").mkdir()
    (tests / "session").mkdir()
    for name in ("checks/starts.py", "checks/shared_ranks.py", "session/inside.py"):
        shutil.copy(HERE / name, tests / name)
    (tests / "parallel/test_it.py").write_text(SOURCE)
    (tests / "parallel/test_next.py").write_text(NEXT)
    runtime = folder / "run"
    runtime.mkdir(mode=0o700)
    left_out = {"PYTEST_ADDOPTS", "DETRAIN_NB_CI"}
    env = {name: value for name, value in os.environ.items() if name not in left_out}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-rA", "--color=no", "-p", "no:cacheprovider", "tests/parallel"],
        cwd=folder,
        env=env | {"DETRAIN_NB_RUNTIME_DIR": str(runtime), "COLUMNS": "300"},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    return done.stdout


def report_of(said: str, test: str) -> str:
    """Return the report of a failed test."""
    return re.split(r"\n_{3,} ", said.partition(f" {test} _")[2])[0]


def test_each_lost_rank_costs_one_test(said: str) -> None:
    found = dict(reversed(line) for line in re.findall(r"^(PASSED|FAILED|ERROR) \S+::(\w+)", said, re.MULTILINE))
    assert {name for name, outcome in found.items() if outcome == "FAILED"} == {
        "test_in_which_a_rank_is_lost",
        "test_that_hides_a_loss",
        "test_before_which_a_rank_was_lost",
    }
    assert {name for name, outcome in found.items() if outcome == "ERROR"} == {"test_last"}
    assert {"test_first", "test_after_it", "test_before_a_loss", "test_of_the_next_module"} <= found.keys()


@pytest.mark.parametrize(
    "test, words",
    [
        ("test_in_which_a_rank_is_lost", ["rank 0 on", "ended with exit code 7", "its last words", "gone"]),
        ("test_that_hides_a_loss", ["lost of the ranks that modules share: rank 0", "its end was the error of a cell"]),
        ("test_before_which_a_rank_was_lost", ["before this test began", "rank 1 on", "ended with signal 9 (SIGKILL)"]),
        ("test_last", ["after this test", "rank 1 on", "ended with signal 9 (SIGKILL)"]),
    ],
)
def test_report_says_how_the_rank_ended(said: str, test: str, words: list[str]) -> None:
    report = report_of(said, test)
    assert [word for word in words if word not in report] == [], report
