"""Queries for the line that a busy rank is running: they are answered, and the rank is not disturbed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from detrain_nb import Session
from detrain_nb.errors import DetrainError

from ..session.soon import assert_soon

_LOOKS = 400
# C code calls Python continuously, as it calls hooks and dispatch modes.
_CALLED_FROM_C = """
import os, time
while not os.path.exists({end!r}):
    sorted(range(100), key=lambda v: -v)
"""
_HOLDS_THE_GIL = """
import ctypes
held = ctypes.PyDLL(None).usleep
for _ in range(30):
    held(500_000)
"""


@pytest.fixture(scope="module")
def session() -> Iterator[Session]:
    with Session.start(1, device="cpu") as started:
        yield started


def begin(session: Session, code: str) -> tuple[threading.Thread, list[BaseException]]:
    """Run a cell in a thread; return the thread, and a list that gets the cell's error."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            session.run_cell(code)
        except DetrainError as exc:
            raised.append(exc)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, raised


def test_rank_that_c_code_calls_is_asked_hundreds_of_times_and_lives(session: Session, tmp_path: Path) -> None:
    pid = session.run_cell("import os; os.getpid()").values[0]
    end = tmp_path / "end"
    thread, raised = begin(session, _CALLED_FROM_C.format(end=str(end)))
    try:
        assert_soon(lambda: session.status().ranks[0].line in (3, 4))
        seen = [session.status().ranks[0].line for _ in range(_LOOKS)]
    finally:
        end.touch()
        thread.join(60)
    assert raised == [] and session.run_cell("os.getpid()").values == {0: pid}
    assert sum(line in (3, 4) for line in seen) > _LOOKS / 2, seen


def test_rank_whose_c_code_holds_the_gil_says_its_line(session: Session) -> None:
    thread, _ = begin(session, _HOLDS_THE_GIL)
    assert_soon(lambda: session.status().ranks[0].line == 5)
    lines = [session.status().ranks[0].line for _ in range(8)]
    session.stop_cells()
    thread.join(60)
    assert not thread.is_alive()
    assert lines.count(5) >= 4, lines
