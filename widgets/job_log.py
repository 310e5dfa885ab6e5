"""The log lines of a job as its view shows them: cleaned, each with its level; a window of them is kept in memory."""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from ..jobs.watched_node import LogPart
from ..session.output.safe_output import clean_words

DEBUG, INFO, WARNING, ERROR = range(4)
_MOST_CHARS = 2000  # of a shown line
_KEPT_CHARS, _LEAST_KEPT_CHARS = 2_000_000, 20_000  # of all logs; of each
_NEWS_CHARS = 500_000  # of one message to the pages
_TOLD_CHARS = 300  # of a line, searched for its level
_LINE_TAKES_CHARS = 50
_COLOUR = re.compile(r"\x1b\[[0-9;:]*m")
_TRACEBACK = "Traceback (most recent call last)"
_ERROR = re.compile(r"\b(?:ERROR|CRITICAL|FATAL)\b|^(?:\[rank\d+\]: ?)?[\w.]*(?:Error|Exception|Interrupt)(?::|$)")
_WARNING = re.compile(r"\bWARN(?:ING)?\b|Warning:|^warning\b", re.IGNORECASE)
_DEBUG = re.compile(r"\bDEBUG\b")

Item = dict[str, Any]  # a LogPart for pages


class Levels:
    """The levels of the lines of one log, judged by their words; all lines of a traceback are errors."""

    def __init__(self) -> None:
        self._is_in_traceback = False

    def of(self, line: str) -> int:
        line = line[:_TOLD_CHARS]
        if _TRACEBACK in line:
            self._is_in_traceback = True
            return ERROR
        text = re.sub(r"^\[rank\d+\]: ?", "", line)
        if self._is_in_traceback:
            self._is_in_traceback = text.startswith((" ", "\t")) or not text
            return ERROR
        if _ERROR.search(line):
            return ERROR
        if _WARNING.search(line):
            return WARNING
        return DEBUG if _DEBUG.search(line) else INFO


class LogWindow:
    """The last lines of each log, as numbered items: a page that gets an item twice ignores the second."""

    def __init__(self) -> None:
        self._number = 0
        self._changing = threading.Lock()
        self._items: dict[tuple[str, str], deque[Item]] = {}
        self._levels: dict[tuple[str, str], Levels] = {}
        self.num_lines = self.num_warnings = 0

    def add(self, parts: Iterable[LogPart]) -> list[Item]:
        """Keep the parts; returns the items for pages: of very many, the last ones."""
        made = [self._make(part) for part in parts]
        told: list[Item] = []
        room = _NEWS_CHARS
        for _, item in reversed(made):
            room -= _size_of(item)
            if room < 0 and told:
                told[-1] = {**told[-1], "is_cut": True}  # earlier lines are in the log
                break
            told.append(item)
        with self._changing:
            for part, item in made:
                self._keep((part.node, part.source), item)
        return [*reversed(told)]

    def _make(self, part: LogPart) -> tuple[LogPart, Item]:
        levels = self._levels.setdefault((part.node, part.source), Levels())
        self._number += 1
        item = make_item(part, levels, number=self._number)
        self.num_lines += len(part.lines)
        self.num_warnings += sum(level >= WARNING for level, _ in item["lines"])
        return part, item

    def _keep(self, whose: tuple[str, str], item: Item) -> None:
        kept = self._items.setdefault(whose, deque())
        kept.append(item)
        most = max(_LEAST_KEPT_CHARS, _KEPT_CHARS // len(self._items))
        while sum(map(_size_of, kept)) > most and len(kept) > 1:
            kept.popleft()

    def items(self) -> list[Item]:
        """Return all kept items in the order of their arrival."""
        with self._changing:
            items = [item for kept in self._items.values() for item in kept]
        return sorted(items, key=lambda item: int(item["number"]))


def make_item(part: LogPart, levels: Levels, *, number: int = 0) -> Item:
    """Return a part for pages: its lines with their levels, and the local times at which they were printed."""
    lines = [clean_line(line) for line in part.lines]
    return {
        "number": number,
        "node": part.node,
        "source": part.source,
        "begin": part.begin,
        "skipped": part.skipped,
        "lines": [[levels.of(line), line] for line in lines],
        "times": [at and time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at)) for at in part.times],
    }


def make_begun(begun: Mapping[tuple[str, str], str]) -> list[Item]:
    """Return the unfinished lines for pages."""
    lines = {whose: clean_line(line) for whose, line in begun.items()}
    return [{"node": node, "source": source, "lines": [[INFO, line]]} for (node, source), line in lines.items() if line]


def clean_line(line: str) -> str:
    """Return one line without colours and control characters, cut after 2,000 characters."""
    text = _COLOUR.sub("", clean_words(line)).replace("\n", " ")
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}... {len(text) - _MOST_CHARS:,} more characters"


def _size_of(item: Item) -> int:
    return sum(len(text) + _LINE_TAKES_CHARS for _, text in item["lines"])
