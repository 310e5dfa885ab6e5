"""The log of all cells, with notes beside it: lost output, output that no notebook has shown, unfinished lines."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from ...plan import Plan
from ...wire import CellDone, Output, Unfinished
from .log import BEGINNINGS, NEW, SHOWN_PERHAPS, Logged, OutputLog
from .safe_output import clean_text, one_line, without_colours

SAID_BEFORE_PERHAPS = "--- possibly shown before:"
SAID_BEFORE_NEW = "--- not shown before:"
_LONGEST_LINE_BYTES = 1 << 16  # this much of an unfinished line is passed to a later notebook
_MOST_UNFINISHED_BYTES = 32 << 20  # of all of them
_MOST_GAPS = 1000
_PRINTED_BYTES, _LAST_LINE_CHARS = 1 << 11, 200
_MOST_GAP_CHARS = 8 << 20  # of all cells


@dataclass
class LoggedCell:
    """The log of a cell, counted in messages: where notices belong when it is shown again.

    Its parts are those of the log: beginnings of lines, cut where an earlier notebook died; messages which that one
    may have shown; all others.
    """

    counts: list[int] = field(default_factory=lambda: [0, 0, 0])  # by part
    is_missed: bool = False  # no earlier notebook has shown all of it
    gaps: list[tuple[int, int, str]] = field(default_factory=list)  # by part and index there, of the next message
    era: int = 0  # how often ranks had been renumbered when it began

    @property
    def shown_perhaps(self) -> int:
        return self.counts[SHOWN_PERHAPS]

    def words_before(self, index: int) -> list[str]:
        """Return the notices to be shown before message ``index``."""
        begins_at = [sum(self.counts[:part]) for part in range(len(self.counts))]
        words = [text for part, at, text in self.gaps if begins_at[part] + at == index]
        if self.shown_perhaps and index == begins_at[SHOWN_PERHAPS]:
            words.insert(0, SAID_BEFORE_PERHAPS)
        elif self.shown_perhaps and index == begins_at[NEW]:
            words.insert(0, SAID_BEFORE_NEW)
        return words


@dataclass
class _Era:
    """The time from one renumbering of the ranks to the next."""

    plan: Plan  # of the ranks at that time
    now: dict[int, int]  # a rank's present number, by the one at that time


class Logbook:
    """The log of one session, with what is remembered about its cells."""

    def __init__(self) -> None:
        self._eras: list[_Era] = []  # past ones
        self.log = OutputLog()
        self.cells: dict[int, LoggedCell] = {}
        self._gap_chars = 0  # of the gaps that are noted with a cell
        self._with_gaps: dict[int, LoggedCell] = {}  # by cell, oldest note first
        self._gaps: list[str] = []  # notices for the place of the next message
        self._unfinished: dict[tuple[int, int, str], bytes] = {}  # lines by cell, rank and stream, the latest last
        self._unfinished_bytes = 0
        self._printed: dict[int, tuple[str, bytes]] = {}  # the end of a rank's latest output, with its stream

    def add(self, message: Logged, *, is_missed: bool, is_shown_perhaps: bool) -> str:
        """Add a message of a cell; returns a new error of the log, or nothing.

        ``is_missed``: no notebook has shown it; ``is_shown_perhaps``: an earlier one may have.
        """
        words = self._add(message, SHOWN_PERHAPS if is_shown_perhaps else NEW)
        logged = self.cells[message.cell]
        if not isinstance(message, CellDone) or message.body or message.overwritten:
            logged.is_missed |= is_missed
        logged.is_missed |= is_missed and not is_shown_perhaps  # its end is worth one line, not two
        return words

    def add_beginning(self, message: Unfinished) -> str:
        """Add the beginning of a line that an earlier notebook has shown; returns what ``add`` does."""
        return self._add(Output(message.rank, message.cell, message.stream, message.body), BEGINNINGS)

    def cell(self, number: int) -> LoggedCell:
        return self.cells.setdefault(number, LoggedCell(era=len(self._eras)))

    def renumber(self, plan: Plan, number: Mapping[int, int]) -> None:
        """Renumber the idle ranks of ``plan``. The log keeps old numbers: another rank may get them now."""
        for era in self._eras:
            era.now = {then: number[now] for then, now in era.now.items() if now in number}
        self._eras.append(_Era(plan, dict(number)))
        self._printed = {number[rank]: end for rank, end in self._printed.items() if rank in number}
        for source in self.unfinished:
            self._take_line(source)

    def plan_of(self, number: int) -> Plan | None:
        """Return the plan that cell ``number`` ran with, if ranks have been renumbered since; else None."""
        logged = self.cells.get(number)
        return self._eras[logged.era].plan if logged and logged.era < len(self._eras) else None

    def _as_then(self, message: Logged, logged: LoggedCell) -> Logged | None:
        """Give a late message of a cell the rank number that was valid then; None if the rank did not exist then."""
        now_by_then = self._eras[logged.era].now if logged.era < len(self._eras) else {message.rank: message.rank}
        then = next((then for then, now in now_by_then.items() if now == message.rank), None)
        return None if then is None else replace(message, rank=then)

    def _add(self, said: Logged, part: int) -> str:
        logged = self.cell(said.cell)
        message = self._as_then(said, logged)
        if message is None:
            return ""
        had_error = self.log.error
        if self._gaps:
            self._place_gaps(message.cell, logged, part)
        if not isinstance(message, CellDone) or message.body or message.overwritten:
            self.log.append(message, part=part)
            logged.counts[part] += 1
        if isinstance(message, Output):
            self._note_unfinished(message)
            self._note_printed(message, said.rank)
        return self.log.error if self.log.error != had_error else ""

    def _place_gaps(self, cell: int, logged: LoggedCell, part: int) -> None:
        """Note the gaps before the next message of a cell; of too many, those of the oldest cells are dropped."""
        all_here = [*logged.gaps, *((part, logged.counts[part], text) for text in self._gaps)]
        self._gap_chars += _chars_of(all_here[-_MOST_GAPS:]) - _chars_of(logged.gaps)
        logged.gaps = all_here[-_MOST_GAPS:]
        self._gaps.clear()
        self._with_gaps[cell] = logged
        while self._gap_chars > _MOST_GAP_CHARS:
            first = self._with_gaps.pop(next(iter(self._with_gaps)))
            self._gap_chars -= _chars_of(first.gaps)
            first.gaps = []

    def add_gap(self, text: str) -> None:
        """Note that output was lost here."""
        self._gaps = [*self._gaps, text][-_MOST_GAPS:]

    @property
    def unfinished(self) -> list[tuple[int, int, str]]:
        """The cell, rank and stream of every unfinished line."""
        return list(self._unfinished)

    def unfinished_lines(self, running: Collection[int]) -> list[Unfinished]:
        """Return the unfinished lines of running cells; those of ended cells are dropped: they stay as shown."""
        for source in self.unfinished:
            if source[0] not in running:
                self._take_line(source)
        return [Unfinished(rank, cell, stream, line) for (cell, rank, stream), line in self._unfinished.items()]

    def _note_unfinished(self, message: Output) -> None:
        """Keep the line that a rank has begun, as it was last drawn; of too many, the oldest are dropped."""
        source = (message.cell, message.rank, message.stream)
        begun = self._take_line(source)
        _, newline, line = message.body.rpartition(b"\n")
        if not newline:
            line = begun + line
        line = line[line.rfind(b"\r", 0, -1) + 1 :][-_LONGEST_LINE_BYTES:]
        if line:
            self._unfinished[source] = line
            self._unfinished_bytes += len(line)
        while self._unfinished_bytes > _MOST_UNFINISHED_BYTES:
            self._take_line(next(iter(self._unfinished)))

    def _note_printed(self, message: Output, rank: int) -> None:
        stream, end = self._printed.get(rank, (message.stream, b""))
        end = end if stream == message.stream else b""
        self._printed[rank] = message.stream, (end + message.body[-_PRINTED_BYTES:])[-_PRINTED_BYTES:]

    def last_line(self, rank: int) -> str:
        """Return the last line that a rank has printed and that is not blank, as last drawn; short and safe to show."""
        _, end = self._printed.get(rank, ("", b""))
        lines = clean_text(end.decode("utf-8", "replace")).splitlines()
        line = next((line for line in reversed(lines) if line.strip()), "")
        return one_line(without_colours(line).strip(), most_chars=_LAST_LINE_CHARS)

    def _take_line(self, source: tuple[int, int, str]) -> bytes:
        line = self._unfinished.pop(source, b"")
        self._unfinished_bytes -= len(line)
        return line


def _chars_of(gaps: list[tuple[int, int, str]]) -> int:
    return sum(len(text) for _, _, text in gaps)
