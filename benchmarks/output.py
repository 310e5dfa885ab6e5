"""Cells that print on one rank, and their output as it arrived: when, how much, and whether anything is missing."""

from __future__ import annotations

import itertools
import re
from collections import Counter

from kernel import Cell

LINE_BYTES = 60
_DIGITS = LINE_BYTES - 1  # without the newline
_WHOLE_LINE = re.compile(rf"^(?:\[[^]\n]*\] |\s*)(\d{{{_DIGITS}}})$", re.MULTILINE)  # preceded by the name of its rank
_ANY_PIECE = re.compile(r"^.*\d{10}.*$", re.MULTILINE)


def lone_prints(count: int) -> str:
    """Return a cell that prints the time ``count`` times, one every 100 ms."""
    return f"import time\nfor _ in range({count}):\n    print(f'@{{time.time():.6f}}@')\n    time.sleep(0.1)"


def print_latencies_ms(cell: Cell) -> list[float]:
    """Return the time from each ``print`` to the first arrival of its text, by the shared clock of this host."""
    arrived: dict[str, float] = {}
    for arrival in cell.arrivals:
        for printed_at in re.findall(r"@([\d.]+)@", arrival.text):
            arrived.setdefault(printed_at, arrival.at)
    return [1e3 * (at - float(printed_at)) for printed_at, at in arrived.items()]


def flood(count: int) -> str:
    """Return a cell that prints ``count`` numbered lines of ``LINE_BYTES`` bytes."""
    return f"for i in range({count}):\n    print(f'{{i:0{_DIGITS}d}}')"


def seconds_until_all_there(cell: Cell) -> float:
    """Return the time from sending the cell until the last of its lines first arrived."""
    seen: set[str] = set()
    last_at = cell.sent_at
    for text, at in cell.text_by_arrival():
        before = len(seen)
        seen.update(_WHOLE_LINE.findall(text))
        if len(seen) > before:
            last_at = at
    return last_at - cell.sent_at


def count_lost(cell: Cell, count: int) -> int:
    """Count the lines that are not shown whole, once and in order at the end, and the pieces that are no whole line."""
    shown = cell.shown()
    numbers = [int(number) for number in _WHOLE_LINE.findall(shown)]
    times = Counter(numbers)
    lost_or_repeated = sum(times[number] != 1 for number in range(count))
    moved = sum(before > after for before, after in itertools.pairwise(numbers))
    return lost_or_repeated + moved + len(_ANY_PIECE.findall(shown)) - len(numbers)
