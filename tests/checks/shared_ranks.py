"""Ranks that the modules of a worker share: to start them, and to import on them, takes as long as thirty tests do.

Each module finds them without the names of the one before, or others where that one has left them unable to go on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from detrain_nb import Session
from detrain_nb.errors import DetrainError

TESTS = Path(__file__).parents[1]
ROOMS = [str(TESTS), str(TESTS / "parallel"), str(TESTS / "training")]
_IMPORTS = f"import sys; sys.path[:0] = {ROOMS!r}"
_END = "for name in {*globals()} - _kept: del globals()[name]"


@pytest.fixture(scope="session")
def shared_ranks() -> Iterator[dict[int, Session]]:
    """Sessions by how many ranks they have."""
    started: dict[int, Session] = {}
    yield started
    for session in started.values():
        session.stop()


@pytest.fixture(scope="module")
def two_ranks(shared_ranks: dict[int, Session]) -> Iterator[Session]:
    with _lent(shared_ranks, 2) as session:
        yield session


@pytest.fixture(scope="module")
def four_ranks(shared_ranks: dict[int, Session]) -> Iterator[Session]:
    with _lent(shared_ranks, 4) as session:
        yield session


@pytest.fixture
def four_new_ranks() -> Iterator[Session]:
    with _started(4) as session:
        yield session


@pytest.fixture
def eight_ranks() -> Iterator[Session]:
    with _started(8) as session:
        yield session


def _started(count: int) -> Session:
    """Its ranks import what lies beside the tests."""
    session = Session.start(count, device="cpu")
    session.run_cell(_IMPORTS, timeout_s=60)
    return session


@contextlib.contextmanager
def _lent(shared: dict[int, Session], count: int) -> Iterator[Session]:
    if count not in shared:
        shared[count] = _started(count)
        shared[count].run_cell("_kept = {*globals(), '_kept'}")
    yield shared[count]
    try:
        shared[count].run_cell(_END, timeout_s=60)
    except DetrainError:
        shared.pop(count).stop()
