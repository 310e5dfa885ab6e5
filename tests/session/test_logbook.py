"""Output kept by several nodes arrives in any order, and is shown again in the order it may have been seen in."""

from __future__ import annotations

import tracemalloc

from detrain_nb.session.output.log import OutputLog
from detrain_nb.session.output.logbook import Logbook
from detrain_nb.session.running.results import CellResult, RankResult
from detrain_nb.session.running.shown_again import ShownAgain
from detrain_nb.session.state.cell import Cell
from detrain_nb.session.state.cell_observer import CellObserver
from detrain_nb.wire import MAX_HEADER_BYTES, CellDone, CellFailed, Display, Output, Unfinished

from ..full_disk import files_end_at

_PERHAPS, _NEW = "--- possibly shown before:", "--- not shown before:"


class Eyes(CellObserver):
    """An observer that keeps all it is shown in one list."""

    def __init__(self) -> None:
        self.shown: list[str] = []

    def output(self, rank: int, stream: str, text: str) -> None:
        self.shown.append(f"{rank}: {text}")

    def notice(self, text: str) -> None:
        self.shown.append(text)


def _add(logbook: Logbook, rank: int, text: str, *, is_shown_perhaps: bool, is_missed: bool = True) -> None:
    message = Output(rank, 1, "stdout", text.encode())
    assert logbook.add(message, is_missed=is_missed, is_shown_perhaps=is_shown_perhaps) == ""


def _show(logbook: Logbook) -> list[str]:
    eyes = Eyes()
    run = Cell(1, (0, 1), eyes, {}, is_at_home=lambda _: True)
    shown = ShownAgain(run, logbook.cells[1])
    for message in logbook.log.read(1):
        shown.give(message)
    shown.end(is_running=True)
    return eyes.shown


def _logbook_of_two_nodes() -> Logbook:
    """Return a logbook in which rank 1's node is slower: it starts when all output kept for rank 0 has arrived."""
    logbook = Logbook()
    logbook.add_beginning(Unfinished(0, 1, "stdout", b"a"))
    _add(logbook, 0, "b\n", is_shown_perhaps=True)
    _add(logbook, 0, "c\n", is_shown_perhaps=False)
    logbook.add_beginning(Unfinished(1, 1, "stdout", b"p"))
    _add(logbook, 1, "q\n", is_shown_perhaps=True)
    _add(logbook, 1, "r\n", is_shown_perhaps=False)
    _add(logbook, 0, "d\n", is_shown_perhaps=False, is_missed=False)
    return logbook


def test_marks_stand_between_what_was_perhaps_shown_and_what_is_new_on_all_nodes() -> None:
    logbook = _logbook_of_two_nodes()
    said = ["0: a", "1: p", _PERHAPS, "0: b\n", "1: q\n", _NEW, "0: c\n", "1: r\n", "0: d\n"]
    assert _show(logbook) == said
    assert logbook.cells[1].shown_perhaps == 2
    assert logbook.log.text(1, 0) == "ab\nc\nd\n"
    assert logbook.log.text(1, 1) == "pq\nr\n"


def test_gap_is_said_where_it_is() -> None:
    logbook = Logbook()
    _add(logbook, 0, "a\n", is_shown_perhaps=True)
    logbook.add_gap("lost by node 0")
    _add(logbook, 0, "b\n", is_shown_perhaps=False)
    _add(logbook, 1, "p\n", is_shown_perhaps=True)
    logbook.add_gap("lost by node 1")
    _add(logbook, 1, "q\n", is_shown_perhaps=True)
    said = [_PERHAPS, "0: a\n", "1: p\n", "lost by node 1", "1: q\n", _NEW, "lost by node 0", "0: b\n"]
    assert _show(logbook) == said


def test_gaps_of_many_cells_take_no_memory_for_each() -> None:
    logbook = Logbook()
    for cell in range(1, 101):
        for number in range(1000):
            logbook.add_gap(f"{number:04}" + "x" * 3996)
        logbook.add(Output(0, cell, "stdout", b"x\n"), is_missed=False, is_shown_perhaps=False)
    kept = [len(logbook.cells[cell].gaps) for cell in range(1, 101)]
    assert kept == [0] * 98 + [1000] * 2
    assert logbook._gap_chars == 2 * 1000 * 4000


def test_reader_goes_on_where_it_was() -> None:
    logbook = _logbook_of_two_nodes()
    reader = logbook.log.reader(1)
    first = [message.body for message in reader.read() if isinstance(message, Output)]
    assert first == [b"a", b"p", b"b\n", b"q\n", b"c\n", b"r\n", b"d\n"]
    assert not list(reader.read())
    _add(logbook, 1, "s\n", is_shown_perhaps=False, is_missed=False)
    assert [message.body for message in reader.read() if isinstance(message, Output)] == [b"s\n"]


def test_node_that_goes_to_and_fro_between_the_parts_of_a_cell_takes_no_memory() -> None:
    logbook, count = Logbook(), 15_000
    for number in range(count):
        _add(logbook, 0, f"{number}\n", is_shown_perhaps=number % 2 == 0)
    assert len(logbook.log.reader(1)._find_pieces()) <= 10_001
    said = [int(message.body) for message in logbook.log.read(1) if isinstance(message, Output)]
    assert sorted(said) == list(range(count))
    assert said[-5000:] == list(range(count - 5000, count)), "as it came"


def test_message_that_is_longer_when_it_is_written_again_is_read() -> None:
    """A node may omit fields with default values and write numbers with fewer digits."""
    log = OutputLog()
    log.append(Output(0, 1, "stdout", b"honest"))
    log.append(CellFailed(1, 1, 0.1, True, False, "Error", "x" * MAX_HEADER_BYTES, [], False))
    log.append(Output(0, 1, "stdout", b" words"))
    assert log.text(1, 0) == "honest words"


def test_what_cannot_be_read_hides_nothing_else() -> None:
    """Displays and values from before an attach are parsed only when they are shown."""
    logbook = Logbook()
    for message in (
        Output(0, 1, "stdout", b"honest\n"),
        Display(1, 1, "", False, b"no JSON"),
        CellDone(1, 1, 0.1, True, False, b"nor this"),
        Output(0, 1, "stdout", b"words\n"),
    ):
        logbook.add(message, is_missed=True, is_shown_perhaps=False)
    shown = _show(logbook)
    told = "an output of rank 1 is malformed and cannot be shown"
    assert "honest" in str(shown) and "words" in str(shown) and str(shown).count(told) == 2


def test_table_of_a_result_reads_the_beginning_of_what_was_printed() -> None:
    log = OutputLog()
    for _ in range(40):
        log.append(Output(0, 1, "stdout", b"long \n" * (1 << 18)))
    log.append(Output(1, 1, "stdout", b"short"))
    result = CellResult(1, {rank: RankResult(rank, "gpu1", 0.1, None, {}, None, log, 1) for rank in (0, 1)})
    tracemalloc.start()
    try:
        table = result._repr_html_()
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert table.count("long") < 1000
    assert "... more in .stdout" in table
    assert "short</pre>" in table
    assert len(result[0].stdout) == 40 * 6 << 18


def test_full_disk_is_said_once_and_the_log_knows_what_it_lacks_until_there_is_room() -> None:
    logbook = Logbook()
    log = logbook.log

    def add(cell: int, text: str) -> str:
        return logbook.add(Output(0, cell, "stdout", text.encode()), is_missed=False, is_shown_perhaps=False)

    with files_end_at(1000):
        assert add(1, "a" * 500) == ""
        words = add(1, "b" * 500)
        assert "cannot be written (File too large)" in words and "DETRAIN_NB_RUNTIME_DIR" in words
        assert (add(1, "c"), add(2, "d" * 2000)) == ("", "")
    assert add(3, "e") == ""
    assert (log.cells(), log.lacking) == ([1, 3], dict.fromkeys((1, 2), "File too large"))
    assert [log.text(cell, 0) for cell in (1, 2, 3)] == ["a" * 500, "", "e"]
    with files_end_at(1000):
        assert add(4, "f" * 2000) == words, "it was full, had room, and is full again"
