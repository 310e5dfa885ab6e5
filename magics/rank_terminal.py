"""The terminal that a stream of one rank writes to: its last rows, and a cursor that cannot leave them.

It understands what programs draw with: return, backspace, cursor movement, erasing. For any input, positions are
bounded by the rows and columns that the rank is told to have, and time and memory are linear. The library for this,
pyte, is under the LGPL, has no types, and is about a hundred times slower for plain lines.
"""

from __future__ import annotations

import functools
import re
import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, compress, count, groupby, islice
from typing import cast

from ..launch import TERMINAL_COLUMNS, TERMINAL_ROWS

_MAX_COLUMNS = 250_000  # a longer row continues in the next one
_MAX_DRAWN_COLUMNS = 1000  # a longer row cannot be drawn on
_MAX_MARKS = 16  # of one letter
_TOKENS = re.compile(r"\x1b\[([0-9;:]*)([A-Za-z])|[\r\n\x08]|[^\r\n\x08\x1b]+")
_PLAIN = "\x1b[0m"
_STYLES = re.compile(r"(\x1b\[[0-9;:]*m)")  # as stored in a row
_NARROW = re.compile("[\t\x20-\x7e\xa0-\xac\xae-\u02ff\u2010-\u2027\u2190-\u22ff\u2400-\u25fc\u2800-\u28ff]*")


class Drawn(str):
    """A line on which a program has drawn, such as a progress bar."""

    __slots__ = ()


@dataclass(frozen=True)
class Fed:
    """The changes that a text has made."""

    final: list[str]  # lines that cannot be drawn on any more
    new: list[str]  # lines that will probably not change: to show now, final later
    is_taken_back: bool = False  # lines that were new earlier have been drawn on after all
    turns: Sequence[int] = ()  # in which each final line was last written; never decreasing


_NOTHING = Fed([], [])


class RankTerminal:
    """A terminal: ``feed`` it, show what is new, and below that the ``block`` in which the rank draws."""

    def __init__(self) -> None:
        self._turn = 0
        self._final_turn = 0
        self._begin()

    def _begin(self) -> None:
        self._rows: list[str | _Row] = [""]  # a str where nothing was drawn
        self._turns = [0]  # in which each row was last written
        self._top = 0  # the first row on the terminal: those above have scrolled off
        self._row = 0
        self._column: int | None = None  # None: at the end of the last row
        self._style = ""  # the sequence that sets the present colours
        self._open_style = ""  # still open at the end of the last row, if nothing was drawn there
        self._not_blank = 0  # a row that had letters at the last check
        self._reach = 0  # how far above the last row the rank has drawn
        self._num_shown = 0  # of the rows, from the top: those were reported as new
        self._is_taken_back = False

    def feed(self, text: str, *, turn: int = 0) -> Fed:
        """Take the next output of the rank, which has control sequences only for colours and the cursor.

        ``turn`` counts how often the rank has changed from one stream to the other.
        """
        self._turn = turn
        if self._column is not None or self._style or "\x1b" in text or "\r" in text or "\x08" in text:
            self._take(text)
            return self._scroll()
        first, *more = text.split("\n")
        if len(text) > _MAX_COLUMNS and max(map(len, more), default=0) > _MAX_COLUMNS:
            self._take(text)
            return self._scroll()
        self._write(first)
        if more:
            self._turns[self._row] = turn
            self._turns += [turn] * len(more)
            self._rows += more
            self._row = len(self._rows) - 1
        return self._scroll() if more else _NOTHING

    def settle(self) -> Fed:
        """Make all lines above the drawn ones final, as other output is shown below them."""
        last = len(self._rows) - 1
        in_block = range(self._num_shown, last)
        if self._column is None and isinstance(self._rows[last], str):
            count = last  # nothing is being drawn
        else:
            count = next((index for index in in_block if isinstance(self._rows[index], _Row)), min(self._row, last))
        self._num_shown = 0
        return self._let_go(count, [])

    def _let_go(self, count: int, new: list[str], *, is_taken_back: bool = False) -> Fed:
        """Drop the first ``count`` rows, and return them as final."""
        if not count and not new and not is_taken_back:
            return _NOTHING
        final, turns = self._first(count)
        self._final_turn = turns[-1] if turns else self._final_turn
        del self._rows[:count], self._turns[:count]
        self._row -= count
        return Fed(final, new, is_taken_back, turns)

    def _first(self, count: int) -> tuple[list[str], list[int]]:
        """Return the lines of the first rows, and the turn in which each was written, or a later one."""
        rows, turns = self._rows[:count], self._turns[:count]
        if _Row in map(type, rows):
            turns = [turn for row, turn in zip(rows, turns) if not _is_erased(row)]
        return _lines(rows), list(accumulate(turns, max, initial=self._final_turn))[1:]

    def end(self) -> Fed:
        """End the cell: all rows are final, and those of the block are new."""
        self._close_style()
        last = max((index for index, row in enumerate(self._rows) if not _is_blank(row)), default=-1)
        count = max(last + 1, self._row)
        fed = self._let_go(count, _lines(self._rows[self._num_shown : count]))
        self._begin()
        return fed

    @property
    def shown(self) -> Fed:
        """Lines that were new and are not final yet, as if they were."""
        lines, turns = self._first(self._num_shown)
        return Fed(lines, [], turns=turns)

    @property
    def block(self) -> list[str]:
        """The lines that have not been new so far: drawn ones, and the unfinished one."""
        if not self._rows[-1] and self._num_shown == len(self._rows) - 1:
            return []
        lines = _lines([_shortened(row) for row in self._rows[self._num_shown :]])
        if self._open_style:
            lines[-1] += _PLAIN
        while lines and not lines[-1].strip():
            lines.pop()
        return lines

    @property
    def is_drawn(self) -> bool:
        """The rank has drawn, and may draw again."""
        return self._reach > 0

    def _scroll(self) -> Fed:
        """Drop the rows that the cursor cannot reach again."""
        rows, settled = self._rows, len(self._rows) - 1 - self._reach
        over = max(self._top, len(rows) - TERMINAL_ROWS)
        self._top = 0
        if max(map(len, rows[over:] if over else rows)) > _MAX_DRAWN_COLUMNS:
            fixed = (index for index in range(self._row - 1, over - 1, -1) if len(rows[index]) > _MAX_DRAWN_COLUMNS)
            over = next(fixed, over - 1) + 1
        settled = max(settled, over)
        new = _lines(rows[self._num_shown : settled])
        self._num_shown = max(self._num_shown, settled) - over
        is_taken_back, self._is_taken_back = self._is_taken_back, False
        return self._let_go(over, new, is_taken_back=is_taken_back)

    def _take(self, text: str) -> None:
        gathered: list[str] = []  # text of one style within a row: writing each piece would copy the row
        style = self._style
        for token in _TOKENS.finditer(text):
            whole, command = token[0], token[2]
            if command == "m":
                style = _restyled(style, token[1])
                continue
            if not command and whole not in ("\n", "\r", "\x08"):
                if style != self._style:
                    self._write_all(gathered, style)
                gathered.append(whole)
                continue
            number = int(token[1]) if command and token[1].isdecimal() else 0
            if self._column is None and (command == "J" or command == "K" and number not in (1, 2)):
                continue  # nothing is after the end of the last row
            self._write_all(gathered, style)
            if command:
                self._close_style()
                self._move(command, number)
            elif whole == "\n":
                self._next_row()
            elif whole == "\r":
                self._close_style()
                self._column = 0
            elif whole == "\x08":
                self._close_style()
                self._column = max(0, self._place - 1)
        self._write_all(gathered, style)

    def _write_all(self, gathered: list[str], style: str) -> None:
        """Write the gathered text, then continue in ``style``."""
        self._write("".join(gathered))
        gathered.clear()
        self._style = style
        if not style:
            self._close_style()

    def _close_style(self) -> None:
        if self._open_style:
            self._rows[-1] = f"{self._rows[-1]}{_PLAIN}"
            self._open_style = ""

    def _next_row(self) -> None:
        self._close_style()
        self._row += 1
        self._column = 0
        if self._row == len(self._rows):
            self._turns[-1] = self._turn
            self._turns.append(self._turn)
            self._rows.append("")
            self._top = max(self._top, len(self._rows) - TERMINAL_ROWS)
            self._column = None
        elif self._is_wiped_below():  # all drawings were erased: begin afresh
            self._drop_below()
            if isinstance(row := self._rows[self._row], _Row):
                row.clear()
            else:
                self._rows[self._row] = ""
            self._column = None

    def _is_wiped_below(self) -> bool:
        """Return whether there is nothing in the cursor's row and below it."""
        if self._row <= self._not_blank < len(self._rows) and not _is_wiped(self._rows[self._not_blank]):
            return False
        below = range(self._row, len(self._rows))
        self._not_blank = next((index for index in below if not _is_wiped(self._rows[index])), -1)
        return self._not_blank < 0

    def _drop_below(self) -> None:
        del self._rows[self._row + 1 :], self._turns[self._row + 1 :]
        self._is_taken_back |= self._num_shown > len(self._rows)
        self._num_shown = min(self._num_shown, len(self._rows))

    def _write(self, text: str) -> None:
        while text:
            self._turns[self._row] = self._turn
            row = self._rows[self._row]
            is_other = self._style != self._open_style
            opening = (_PLAIN if self._open_style else "") + self._style if is_other else ""
            is_long = len(row) + len(opening) + len(text) > _MAX_DRAWN_COLUMNS
            if self._column is not None or isinstance(row, _Row) or self._style and is_long:
                room = self._overwrite(text)
            else:
                room = _MAX_COLUMNS - len(row)
                self._open_style = self._style
                self._rows[self._row] = row + opening + text[:room]
            text = text[room:]
            if not room:
                self._next_row()

    def _overwrite(self, text: str) -> int:
        """Write on a row with colours, or a drawn one, as far as there is room; returns the room that there was."""
        row = self._drawn_row() if self._column is not None else self._row_with_cells()
        column, is_last = self._place, self._row == len(self._rows) - 1
        room = max(0, (_MAX_COLUMNS if is_last else _MAX_DRAWN_COLUMNS + 1) - column)
        if room > 1 and not _NARROW.fullmatch(text):
            room //= 2
        end = row.write(column, text[:room], self._style)
        self._column = None if is_last and end == len(row) else end
        return room

    @property
    def _place(self) -> int:
        """The column of the cursor."""
        if self._column is not None:
            return self._column
        return self._count_columns()

    def _count_columns(self) -> int:
        """Count the columns of the cursor's row; approximately if it is too long to draw on."""
        row = self._rows[self._row]
        if isinstance(row, str) and len(row) <= _MAX_DRAWN_COLUMNS and not _NARROW.fullmatch(row):
            row = self._rows[self._row] = _Row.of(row)  # converted once, as each control sequence counts again
        return len(row)

    def _row_with_cells(self) -> _Row:
        """Return the cursor's row as cells, to be changed."""
        self._close_style()
        row = self._rows[self._row]
        if isinstance(row, str):
            row = self._rows[self._row] = _Row.of(row)
        if self._row < self._num_shown:
            self._num_shown = self._row
            self._is_taken_back = True
        row.text = None
        return row

    def _drawn_row(self) -> _Row:
        """Return the cursor's row to draw on; if it is too long for that, a later one."""
        while len(self._rows[self._row]) > _MAX_DRAWN_COLUMNS:
            self._next_row()
        row = self._row_with_cells()
        row.is_drawn = True
        self._reach = max(self._reach, 1)
        return row

    def _move(self, command: str, number: int) -> None:
        place, steps = self._place, max(1, number)
        if command in "JK":
            self._erase(command, number)
        elif command in "AF":
            self._go(up=steps)
        elif command in "BE":
            self._go(down=steps)
        elif command == "D":
            self._column = max(0, place - steps)
        elif command in "CG":
            furthest = max(place, self._count_columns(), TERMINAL_COLUMNS - 1)
            self._column = min(place + steps if command == "C" else steps - 1, furthest)
        if command in "AB":
            self._column = min(place, TERMINAL_COLUMNS - 1)
        elif command in "EF":
            self._column = 0

    def _go(self, *, up: int = 0, down: int = 0) -> None:
        top = max(self._top, len(self._rows) - TERMINAL_ROWS)
        while up and self._row > top and len(self._rows[self._row - 1]) <= _MAX_DRAWN_COLUMNS:
            self._row -= 1
            up -= 1
        self._row = min(self._row + down, len(self._rows) - 1)
        self._reach = max(self._reach, len(self._rows) - 1 - self._row)

    def _erase(self, command: str, number: int) -> None:
        """Erase a part of the row; for J, only what is after and below the cursor."""
        if number > 2 or command == "J" and number:
            return
        place = self._place
        if command == "J":
            self._drop_below()
        if number or place < self._count_columns():
            self._column = place
            self._drawn_row().erase(0 if number else self._place, self._place + 1 if number == 1 else None)


@dataclass(slots=True)
class _Row:
    """A row that was drawn on: a letter per column, and none in the second column of a wide letter."""

    cells: list[str]
    styles: list[str]  # empty where nothing has a colour
    is_drawn: bool = False
    had_letters: bool = False
    text: str | None = None  # as it is shown, until something changes
    letter_at: int = 0  # a column that had a letter at the last check; -1: the row is still blank

    @classmethod
    def of(cls, text: str) -> _Row:
        row, style = cls([], []), ""
        for part in _STYLES.split(text):
            if part.startswith("\x1b"):
                style = "" if part == _PLAIN else part
            elif part:
                row.write(len(row), part, style)
        return row

    def __len__(self) -> int:
        return len(self.cells)

    def write(self, column: int, text: str, style: str) -> int:
        """Overwrite the cells from ``column`` on; returns the column after the text."""
        cells = self.cells
        cells += " " * (column - len(cells))
        letters = list(text) if _NARROW.fullmatch(text) else self._letters(column, text)
        end = column + len(letters)
        if column < len(cells) and not cells[column]:
            cells[column - 1] = " "
        if end < len(cells) and not cells[end]:
            cells[end] = " "
        cells[column:end] = letters
        if style or self.styles:
            self.styles += [""] * (len(cells) - len(self.styles))
            self.styles[column:end] = [style] * len(letters)
        is_letter = bool(style) or not text.isspace()
        self.had_letters = self.had_letters or is_letter
        if self.letter_at < 0 and is_letter:
            self.letter_at = column
        return end

    def _letters(self, column: int, text: str) -> list[str]:
        """Return the cells of ``text``; marks at its beginning belong to the letter before it."""
        letters: list[str] = []
        for letter in text:
            width = _width(letter)
            if width:
                letters += [letter, ""][:width]
            elif letters:
                _mark(letters, len(letters), letter)
            else:
                _mark(self.cells, column, letter)
        return letters

    def erase(self, start: int, end: int | None) -> None:
        if end is None:
            del self.cells[start:], self.styles[start:]
        else:
            end = min(end, len(self.cells))
            self.cells[start:end] = " " * (end - start)
            self.styles[start:end] = [""] * len(self.styles[start:end])

    def clear(self) -> None:
        """Reset the row to one on which nothing was drawn, but which is not a line while it is empty."""
        self.cells, self.styles, self.is_drawn, self.text = [], [], False, None

    @property
    def is_blank(self) -> bool:
        """Whether no cell has a letter or a colour; read after each change."""
        if self.letter_at >= 0:
            behind = self._find_letter(self.letter_at)
            self.letter_at = behind if behind >= 0 else self._find_letter(0)
        return self.letter_at < 0

    def _find_letter(self, start: int) -> int:
        """Return the first column from ``start`` on with a letter or a colour, or -1."""
        seen: Iterator[str] = map(str.strip, islice(self.cells, start, None))
        if self.styles:
            seen = map(str.__add__, seen, islice(self.styles, start, None))
        return next(compress(count(start), seen), -1)

    def line(self) -> str:
        """Return the row as shown; without blanks at its end if it was drawn on."""
        if self.text is None:
            end = len(self.cells)
            while self.is_drawn and end and self.cells[end - 1] == " " and not (self.styles and self.styles[end - 1]):
                end -= 1
            text = "".join(self.cells[:end])
            if any(self.styles):
                text = self._with_colours(end)
            self.text = Drawn(text) if self.is_drawn else text
        return self.text

    def _with_colours(self, end: int) -> str:
        parts, before = [], ""
        for style, columns in groupby(range(end), key=self.styles.__getitem__):
            parts += [_PLAIN if before else "", style, *map(self.cells.__getitem__, columns)]
            before = style
        return "".join(parts) + (_PLAIN if before else "")


def _mark(cells: list[str], end: int, mark: str) -> None:
    """Add a mark to the letter that ends before column ``end``."""
    at = end - 1 if end == 1 or cells[end - 1 : end] != [""] else end - 2
    if 0 <= at < len(cells) and len(cells[at]) < _MAX_MARKS:
        cells[at] += mark


@functools.lru_cache(4096)
def _width(letter: str) -> int:
    if unicodedata.east_asian_width(letter) in "WF":
        return 2
    return 0 if unicodedata.category(letter) in ("Mn", "Me", "Cf") else 1


def _lines(rows: list[str | _Row]) -> list[str]:
    """Return rows as lines to show; a row from which all was erased is left out."""
    if _Row not in map(type, rows):
        return cast("list[str]", rows)
    return [row if isinstance(row, str) else row.line() for row in rows if not _is_erased(row)]


def _is_erased(row: str | _Row) -> bool:
    return isinstance(row, _Row) and row.had_letters and _is_blank(row)


def _shortened(row: str | _Row) -> str | _Row:
    """Cut a row to the columns that can be drawn on, as it is built again whenever it has grown."""
    if isinstance(row, str) or len(row) <= _MAX_DRAWN_COLUMNS:
        return row
    end = _MAX_DRAWN_COLUMNS
    return _Row(row.cells[:end], row.styles[:end], is_drawn=row.is_drawn, had_letters=row.had_letters)


def _is_wiped(row: str | _Row) -> bool:
    return len(row) <= _MAX_DRAWN_COLUMNS and _is_blank(row)


def _is_blank(row: str | _Row) -> bool:
    return not row.strip() if isinstance(row, str) else row.is_blank


@functools.lru_cache(4096)
def _restyled(style: str, parameters: str) -> str:
    """Return the colours ``style`` after a sequence with these parameters, as one sequence; empty for none."""
    attributes: dict[str, str] = {}  # one per kind, which limits the length of a style
    codes = iter(f"{style[2:-1]};{parameters or '0'}".split(";"))
    for code in codes:
        if code.startswith(("38:", "48:")):
            attributes[code[:2]] = code
        elif code in ("38", "48"):
            mode = next(codes, "")
            attributes[code] = ";".join([code, mode, *islice(codes, {"5": 1, "2": 3}.get(mode, 0))])
        elif code and not code.strip("0"):
            attributes.clear()
        elif code.isdecimal():
            _set_attribute(attributes, int(code))
    return f"\x1b[{';'.join(attributes.values())}m" if attributes else ""


def _set_attribute(attributes: dict[str, str], number: int) -> None:
    if number in _KINDS:
        attributes[_KINDS[number]] = str(number)
    for kind in _ENDED.get(number, ()):
        attributes.pop(kind, None)


# kinds are named by a code: 38 for the colour of letters, 48 for the background
_KINDS = {
    **{number: str(number) for number in range(1, 10)},
    **dict.fromkeys((*range(30, 38), *range(90, 98)), "38"),
    **dict.fromkeys((*range(40, 48), *range(100, 108)), "48"),
}
_ENDED = {number: (str(number - 20),) for number in range(23, 30)} | {
    22: ("1", "2"), 25: ("5", "6"), 39: ("38",), 49: ("48",),
}  # fmt: skip
