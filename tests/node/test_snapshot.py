"""What an agent remembers of the cells for a later notebook."""

from __future__ import annotations

from detrain_nb.node.agent.snapshot import Snapshot
from detrain_nb.session.state.history import History
from detrain_nb.session.state.message_checks import MessageChecks
from detrain_nb.session.state.rank_owners import RankOwners
from detrain_nb.wire import CellDone, Message, RanCell, RankEnded, RankUp, RunCell, to_frame


def _up(memory: Snapshot, message: Message) -> None:
    memory.note_up(to_frame(message))


def _told(memory: Snapshot) -> list[RanCell]:
    messages = [frame.message() for frame in memory.told()]
    return [message for message in messages if isinstance(message, RanCell)]


def _memory_of_two_ranks() -> Snapshot:
    memory = Snapshot()
    for rank in (0, 1):
        _up(memory, RankUp(rank, 1, rank, 2, 100 + rank, "here", "cpu", "2.13.0"))
    return memory


def test_cell_runs_where_it_has_not_ended() -> None:
    memory = _memory_of_two_ranks()
    memory.note_down(RunCell([0, 1], [1, 1], 7, "x"))
    _up(memory, CellDone(0, 7, 0.1, True, False, b""))
    assert [(told.cell, told.running, told.has_failed) for told in _told(memory)] == [(7, [1], False)]


def test_cell_that_crossed_the_end_of_a_rank_does_not_run_there() -> None:
    memory = _memory_of_two_ranks()
    _up(memory, RankEnded(1, 101, 6, 9, 0, "", "", False, ""))
    memory.note_down(RunCell([0, 1], [1, 1], 7, "x"))
    _up(memory, RankUp(1, 2, 1, 2, 201, "here", "cpu", "2.13.0"))
    memory.note_down(RunCell([1], [1], 8, "x"))
    memory.note_down(RunCell([0, 1], [1, 2], 9, "x"))
    told = {told.cell: (told.running, told.has_failed) for told in _told(memory)}
    assert told == {7: ([0], True), 8: ([], True), 9: ([0, 1], False)}


def test_notebook_takes_what_is_remembered_of_long_cells() -> None:
    memory = _memory_of_two_ranks()
    for cell in range(1, 50):
        memory.note_down(RunCell([0, 1], [1, 1], cell, "x" * 1_000_000))
        for rank in (0, 1):
            _up(memory, CellDone(rank, cell, 0.1, True, False, b""))
    memory.note_down(RunCell([0, 1], [1, 1], 50, "x" * 1_000_000))
    told = _told(memory)
    assert [cell.cell for cell in told] == list(range(told[0].cell, 51)), "the oldest are forgotten"
    assert len(told) > 10
    claims = MessageChecks(History(), RankOwners())
    for cell in told:
        claims.check_time(cell, 0, is_attached=False)


def test_cell_that_still_runs_is_remembered_however_long_the_others_are() -> None:
    memory = _memory_of_two_ranks()
    memory.note_down(RunCell([0], [1], 1, "x"))
    for cell in range(2, 50):
        memory.note_down(RunCell([1], [1], cell, "x" * 1_000_000))
        _up(memory, CellDone(1, cell, 0.1, True, False, b""))
    memory.note_down(RunCell([1], [1], 49, "x"))
    told = _told(memory)
    assert told[0].cell == 1
    assert len(told) > 10, "a cell that was run again counts once"
