"""Ranks that the modules of a room share: starting them and importing on them takes as long as thirty tests.

Each module finds the ranks without the names of the previous module. If that module left them unusable, it gets other
ranks. They are stopped at the end of the room, because tests of other rooms check that no session is left.

A lost rank costs one test: the test in which it was lost fails and reports how the rank died. Before the next test all
ranks are restarted and run again what the fixtures of the module have run on them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from detrain_nb import Session
from detrain_nb.errors import DetrainError, format_ranks

from ..session.inside import state_of

TESTS = Path(__file__).parents[1]
ROOMS = [str(TESTS), str(TESTS / "parallel"), str(TESTS / "training")]
_IMPORTS = f"import sys; sys.path[:0] = {ROOMS!r}"
_KEEP = "_kept = {*globals(), '_kept'}"
_END = "for name in {*globals()} - _kept: del globals()[name]"
_LIMIT_S = 60.0


class _SharedRanks:
    """Ranks of one session, lent to one module after another."""

    def __init__(self, count: int) -> None:
        self.session = Session.start(count, device="cpu")
        self.is_lent = False
        self.is_over = False  # the room is finished: stop them when they are given back
        self._fixtures: dict[str, None] = {}  # the cells that fixtures of the module have run, in order
        try:
            self._begin()
        except BaseException:
            self.session.stop()
            raise

    def _begin(self) -> None:
        for code in (_IMPORTS, _KEEP, *self._fixtures):
            self.session.run_cell(code, timeout_s=_LIMIT_S)
        self._incarnations = state_of(self.session).incarnations
        self.pass_over_cells()

    def pass_over_cells(self) -> None:
        """Note that no cell so far belongs to a fixture."""
        self._num_cells = len(self.session.log.cells)

    def note_fixtures(self) -> None:
        """Note that all cells since ``pass_over_cells`` belong to fixtures."""
        self._fixtures |= dict.fromkeys(cell.code for cell in self.session.log.cells[self._num_cells :])

    def describe_lost(self) -> str:
        """Return which ranks were lost since the start, and how they died; empty if none was."""
        state = state_of(self.session)
        fresh = {rank for rank, number in state.incarnations.items() if number != self._incarnations[rank]}
        if not (lost := sorted({*state.lost, *fresh})):
            return ""
        told = list(filter(None, [*self.session.news.pop_notices(), self.session.news.pop_losses()]))
        how = told or ["its end was the error of a cell"]
        return "\n".join([f"lost of the ranks that modules share: {format_ranks(lost)}", *how])

    def begin_anew_if_lost(self) -> str:
        """Restart the ranks if any was lost; returns ``describe_lost``, and why a restart failed."""
        if not (words := self.describe_lost()):
            return ""
        try:
            self.session.restart()
            self._begin()
        except DetrainError as exc:
            return f"{words}\nthe next tests lack them: {exc}"
        return words

    def give_back(self) -> None:
        """Delete the names of the module. Raises: DetrainError if the ranks are unusable."""
        self.is_lent = False
        self._fixtures.clear()
        self.session.run_cell(_END, timeout_s=_LIMIT_S)


_shared: dict[int, _SharedRanks] = {}  # by the number of ranks


def _lent_now() -> list[_SharedRanks]:
    return [ranks for ranks in _shared.values() if ranks.is_lent]


def _begin_anew_where_lost() -> str:
    return "\n".join(filter(None, [ranks.begin_anew_if_lost() for ranks in _lent_now()]))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None]:
    for ranks in _lent_now():
        ranks.pass_over_cells()
    yield
    for ranks in _lent_now():
        ranks.note_fixtures()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None]:
    """Fail the test in which a rank is lost, or the next test if it was lost between two tests."""
    if lost := _begin_anew_where_lost():
        pytest.fail(f"before this test began: {lost}", pytrace=False)
    try:
        yield
    except (Exception, pytest.fail.Exception) as exc:
        if lost := _begin_anew_where_lost():
            exc.add_note(lost)
        raise
    if lost := _begin_anew_where_lost():
        pytest.fail(lost, pytrace=False)


@pytest.hookimpl(tryfirst=True)  # before a fixture of another room checks what is left
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    if nextitem is None or nextitem.path.parent != item.path.parent:
        for count, ranks in [*_shared.items()]:
            ranks.is_over = True  # fixtures of the test may still use the ranks: `_lent` then stops them
            if not ranks.is_lent:
                _stop(count)


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
    """Start ranks that can import the modules next to the tests."""
    session = Session.start(count, device="cpu")
    session.run_cell(_IMPORTS, timeout_s=_LIMIT_S)
    return session


def _stop(count: int) -> None:
    _shared.pop(count).session.stop()


@contextlib.contextmanager
def _lent(count: int) -> Iterator[Session]:
    ranks = _shared[count] = _shared.get(count) or _SharedRanks(count)
    ranks.is_lent = True
    ranks.pass_over_cells()
    yield ranks.session
    lost = ranks.describe_lost()  # after the last test
    try:
        ranks.give_back()
    except DetrainError:
        ranks.is_over = True
    if ranks.is_over:
        _stop(count)
    if lost:
        pytest.fail(f"after this test: {lost}", pytrace=False)
