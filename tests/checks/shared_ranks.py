"""Ranks that the modules of a room share: to start them, and to import on them, takes as long as thirty tests do.

Each module finds them without the names of the one before, or others where that one has left them unable to go on.
They end with the room: tests of other rooms look whether a session is left.
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
_shared: dict[int, Session] = {}  # by how many ranks they have
_lent_now: set[int] = set()


@pytest.hookimpl(tryfirst=True)  # a fixture of another room may look at what is left when it ends
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path.parent != item.path.parent:
        for count in [*_shared]:
            if count in _lent_now:  # fixtures of the test may use it to their end: then `_lent` stops it
                _lent_now.remove(count)
            else:
                _shared.pop(count).stop()


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Session]:
    with _lent(2) as session:
        yield session


@pytest.fixture(scope="module")
def four_ranks() -> Iterator[Session]:
    with _lent(4) as session:
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
def _lent(count: int) -> Iterator[Session]:
    if count not in _shared:
        _shared[count] = _started(count)
        _shared[count].run_cell("_kept = {*globals(), '_kept'}")
    session = _shared[count]
    _lent_now.add(count)
    yield session
    if count not in _lent_now:
        _shared.pop(count).stop()
        return
    _lent_now.remove(count)
    try:
        session.run_cell(_END, timeout_s=60)
    except DetrainError:
        _shared.pop(count).stop()
