"""The state of the cells, which an agent keeps for a notebook that attaches later."""

from __future__ import annotations

import time

from detrain_nb.node.agent.snapshot import Snapshot
from detrain_nb.session.state.history import History
from detrain_nb.session.state.message_checks import MessageChecks
from detrain_nb.session.state.rank_owners import RankOwners
from detrain_nb.wire import CellDone, RanCell, RankEnded, RankUp, Renumber, RunCell


def _told(memory: Snapshot) -> list[RanCell]:
    return [message for message in memory.told() if isinstance(message, RanCell)]


def _memory_of_two_ranks() -> Snapshot:
    memory = Snapshot()
    for rank in (0, 1):
        memory.take_from_rank(RankUp(rank, 1, rank, 2, 100 + rank, "here", "cpu", "2.13.0"))
    return memory


def test_cell_runs_where_it_has_not_ended() -> None:
    memory = _memory_of_two_ranks()
    memory.take_from_notebook(RunCell([0, 1], [1, 1], 7, "x"))
    memory.take_from_rank(CellDone(0, 7, 0.1, True, False, b""))
    assert [(told.cell, told.running, told.has_failed) for told in _told(memory)] == [(7, [1], False)]


def test_cell_that_crossed_the_end_of_a_rank_does_not_run_there() -> None:
    memory = _memory_of_two_ranks()
    memory.take_from_rank(RankEnded(1, 101, 6, 9, 0, "", "", False, ""))
    memory.take_from_notebook(RunCell([0, 1], [1, 1], 7, "x"))
    memory.take_from_rank(RankUp(1, 2, 1, 2, 201, "here", "cpu", "2.13.0"))
    memory.take_from_notebook(RunCell([1], [1], 8, "x"))
    memory.take_from_notebook(RunCell([0, 1], [1, 2], 9, "x"))
    told = {told.cell: (told.running, told.has_failed) for told in _told(memory)}
    assert told == {7: ([0], True), 8: ([], True), 9: ([0, 1], False)}


def test_a_rank_runs_the_cell_that_it_has_not_ended() -> None:
    memory = _memory_of_two_ranks()
    memory.take_from_notebook(RunCell([0, 1], [1, 1], 7, "x"))
    assert {rank: run.cell for rank, run in memory.runs.items()} == {0: 7, 1: 7}
    assert 0 <= time.monotonic() - memory.runs[0].began_s < 60
    memory.take_from_rank(CellDone(0, 7, 0.1, True, False, b""))
    assert list(memory.runs) == [1]
    memory.take_from_notebook(RunCell([0], [1], 8, "x"))
    memory.take_from_rank(RankEnded(1, 101, 7, 9, 0, "", "", False, ""))
    assert {rank: run.cell for rank, run in memory.runs.items()} == {0: 8}
    memory.take_from_notebook(Renumber([0], 1, [3], 4))
    assert not memory.runs


def test_notebook_takes_what_is_remembered_of_long_cells() -> None:
    memory = _memory_of_two_ranks()
    for cell in range(1, 50):
        memory.take_from_notebook(RunCell([0, 1], [1, 1], cell, "x" * 1_000_000))
        for rank in (0, 1):
            memory.take_from_rank(CellDone(rank, cell, 0.1, True, False, b""))
    memory.take_from_notebook(RunCell([0, 1], [1, 1], 50, "x" * 1_000_000))
    told = _told(memory)
    assert [cell.cell for cell in told] == list(range(told[0].cell, 51)), "the oldest are forgotten"
    assert len(told) > 10
    claims = MessageChecks(History(), RankOwners())
    for cell in told:
        claims.check_time(cell, 0, is_attached=False)


def test_cell_that_still_runs_is_remembered_however_long_the_others_are() -> None:
    memory = _memory_of_two_ranks()
    memory.take_from_notebook(RunCell([0], [1], 1, "x"))
    for cell in range(2, 50):
        memory.take_from_notebook(RunCell([1], [1], cell, "x" * 1_000_000))
        memory.take_from_rank(CellDone(1, cell, 0.1, True, False, b""))
    memory.take_from_notebook(RunCell([1], [1], 49, "x"))
    told = _told(memory)
    assert told[0].cell == 1
    assert len(told) > 10, "a cell that was run again counts once"
