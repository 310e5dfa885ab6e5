"""What each rank said in one cell, within bounds, and its canonical form: the same at every run of the same cell.

While a cell runs, lines appear as they come, so two runs differ in order. The canonical form has the ranks in order,
the lines of each as it wrote them, and what several ranks said identically once, marked ``[0-3]``; on one node that has
a name, ``[gpu1:0]``. Where stdout and stderr take very many turns, all of stdout stands before stderr. What was drawn
on stderr is no error, but a bar: it is shown as stdout is.
"""

from __future__ import annotations

import collections
import copy
import difflib
import itertools
import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from ..errors import short_ranks
from ..session.output.safe_output import MOST_TEXT_CHARS
from ..wire import count_values
from .rank_terminal import Drawn

Bundle = dict[str, Any]
Nodes = Mapping[int, str]  # the names of the ranks' nodes, of those that have one
TAIL_LINES = 200
FURTHER = 1 << 20  # where several nodes have had a rank, it is so much higher for each that came after the first
_STREAMS = ("stdout", "drawn", "stderr")
_MOST_TURNS = 30  # of stdout and stderr between two rich outputs; JupyterLab hides what comes after 50 outputs
_PREFIX_CHARS = 5  # "[0] " and the newline
# Above either, lines are matched by their position. Steps are counted, not timed: each run of a cell looks the same.
_DIFF_LINES = 2000
_DIFF_STEPS = 1_000_000  # of the diffs of one cell, about 0.1 s
_SHORTEST_BEGINNING = 40  # of a line that is cut off; a shorter one says nothing
_SHORTEST_CUT = 1000  # a shorter line is shown whole or not at all
_PLAIN = "\x1b[0m"
_CUT_COLOUR = re.compile(r"\x1b[^a-zA-Z]*$")
_MOST_RICH, _MOST_RICH_CHARS = 1000, 64 << 20  # of one rank in one cell
_CHARS_OF_A_VALUE = 64  # of JSON
_CHARS_OF_A_COLOUR = 100  # a page has an element for each
_LABEL_CHARS = 20  # about that stands before each line of a text
_MOST_INDENTED_CHARS = MOST_TEXT_CHARS + 10_000  # with what stands before its lines


@dataclass(frozen=True)
class Text:
    """Whole lines of one stream, each with its newline."""

    stream: str
    text: str


@dataclass(frozen=True)
class Rich:
    """A rich output, {mime type: data}."""

    bundle: Bundle

    @cached_property
    def num_chars(self) -> int:
        text = self.bundle.get("text/plain", "")
        more: int = text.count("\n") * _LABEL_CHARS + text.count("\x1b") * _CHARS_OF_A_COLOUR
        chars = sum(len(data) if isinstance(data, str) else _count_chars(data) for data in self.bundle.values())
        return chars + more


def _count_chars(data: Any) -> int:
    """JSON takes more memory by its values than by its characters."""
    text = json.dumps(data).encode()
    return len(text) + count_values(text) * _CHARS_OF_A_VALUE


Item = Text | Rich
Said = tuple[str, str]  # a line with its stream: "stdout", "stderr", or "drawn" for what was drawn on stderr
_Marked = tuple[tuple[int, ...], Said]
_Written = tuple[int, str, str]  # the turn in which it was written, its stream, the line


class Transcript:
    """What one rank said: its first lines within the limits, its last ``TAIL_LINES``, all rich outputs.

    The last lines take at most a quarter of the characters.
    """

    def __init__(self, *, max_lines: int, max_chars: int) -> None:
        """Zero means no limit."""
        tail_lines = min(TAIL_LINES, max_lines * 4 // 5) if max_lines else TAIL_LINES
        self._head_lines = max_lines - tail_lines if max_lines else None
        self._head_chars = max_chars * 3 // 4 if max_chars else None
        self._room_lines, self._room_chars = self._head_lines, self._head_chars
        self._tail_chars = max_chars // 4 if max_chars else None
        self._head: list[list[_Written] | Rich] = []
        self._tail: collections.deque[_Written] = collections.deque(maxlen=tail_lines)
        self._left_out = self._cut_chars = 0  # lines, and characters of the last one that is shown
        self._rich_left_out = 0
        self._room_rich, self._room_rich_chars = _MOST_RICH, _MOST_RICH_CHARS

    def copy(self) -> Transcript:
        """Another one that has said the same so far."""
        copied = copy.copy(self)
        copied._head = [entry if isinstance(entry, Rich) else entry.copy() for entry in self._head]
        copied._tail = self._tail.copy()
        return copied

    def add_lines(self, stream: str, lines: list[str], turns: Sequence[int] = ()) -> None:
        """Lines of a stream, see ``Said``; ``turns``: the turn in which each was written, if that is known."""
        turns = turns or [0] * len(lines)
        fitting = self._fitting(lines)
        if shown := [*lines[:fitting], *self._cut(lines[fitting:])]:
            if not self._head or isinstance(self._head[-1], Rich):
                self._head.append([])
            last = self._head[-1]
            assert not isinstance(last, Rich)
            last += zip(turns, itertools.repeat(stream), shown)
        if rest := lines[len(shown) :]:
            self._left_out += len(rest)
            last_lines = slice(max(len(shown), len(lines) - TAIL_LINES), None)
            self._tail.extend(zip(turns[last_lines], itertools.repeat(stream), lines[last_lines]))

    def add_rich(self, rich: Rich) -> bool:
        """False where there is no room for it any more."""
        self._room_rich -= 1
        self._room_rich_chars -= rich.num_chars
        if self._room_rich < 0 or self._room_rich_chars < 0:
            self._rich_left_out += 1
            return False
        self._head.append(rich)
        return True

    def replace_rich(self, old: Rich, new: Rich) -> bool:
        """A rich output was redrawn under its display id; False where there is no room for the new one."""
        grown_chars = new.num_chars - old.num_chars
        if grown_chars > self._room_rich_chars or not any(entry is old for entry in self._head):
            return False
        self._room_rich_chars -= grown_chars
        self._head = [new if entry is old else entry for entry in self._head]
        return True

    def clear(self) -> None:
        self._head.clear()
        self._tail.clear()
        self._left_out = self._cut_chars = self._rich_left_out = 0
        self._room_rich, self._room_rich_chars = _MOST_RICH, _MOST_RICH_CHARS
        self._room_lines, self._room_chars = self._head_lines, self._head_chars

    def sections(self, how_to_read: str) -> list[tuple[list[Said], Rich | None]]:
        """What was said between two rich outputs, in the order in which it was, and the rich output that ended it."""
        sections: list[tuple[list[Said], Rich | None]] = []
        said: list[Said] = []
        for entry in self._head:
            if isinstance(entry, Rich):
                sections.append((said, entry))
                said = []
            else:
                said += _in_order(entry)
        if self._rich_left_out:
            more = counted_more(self._rich_left_out, "output")
            said.append(("stdout", f"... {more}, see them with {how_to_read} ..."))
        tail = self._fitting_tail()
        hidden = self._left_out - len(tail)
        counted = [counted_more(self._cut_chars, "character"), counted_more(hidden, "line")]
        if more := " and ".join(words for words in counted if words):
            said.append(("stdout", f"... {more}, read them with {how_to_read} ..."))
        sections.append((said + tail, None))
        return sections

    def _fitting_tail(self) -> list[Said]:
        tail = _in_order(self._tail)
        if self._tail_chars is None:
            return tail
        room = self._tail_chars
        for index in range(len(tail) - 1, -1, -1):
            room -= len(tail[index][1]) + _PREFIX_CHARS
            if room < 0:
                return tail[index + 1 :]
        return tail

    def _fitting(self, lines: list[str]) -> int:
        """How many of ``lines`` still fit in the head; the room they take is gone."""
        if self._left_out or self._cut_chars:
            return 0
        count = len(lines) if self._room_lines is None else min(len(lines), self._room_lines)
        if self._room_chars is not None:
            for index in range(count):
                size = len(lines[index]) + _PREFIX_CHARS
                if size > self._room_chars:
                    count = index
                    break
                self._room_chars -= size
        if self._room_lines is not None:
            self._room_lines -= count
        return count

    def _cut(self, rest: list[str]) -> list[str]:
        """Of ``rest``, which does not fit, the beginning of the first line, where there is room for it."""
        room = (self._room_chars or 0) - _PREFIX_CHARS
        has_room = self._room_lines != 0 and room >= _SHORTEST_BEGINNING
        if not rest or len(rest[0]) < _SHORTEST_CUT or self._left_out or self._cut_chars or not has_room:
            return []
        self._cut_chars = len(rest[0]) - room
        return [beginning_of(rest[0], room)]


def beginning_of(line: str, num_chars: int) -> str:
    """As much of a line; its colours end with it."""
    beginning = _CUT_COLOUR.sub("", line[:num_chars])
    return f"{beginning}{_PLAIN}" if "\x1b" in beginning and not beginning.endswith(_PLAIN) else beginning


def _in_order(lines: Iterable[_Written]) -> list[Said]:
    return [(stream, line) for _, stream, line in sorted(lines, key=operator.itemgetter(0))]


def counted_more(count: int, what: str) -> str:
    """``1 more line``, ``2,000 more lines``; empty where there are none."""
    return f"{count:,} more {what}{'' if count == 1 else 's'}" if count > 0 else ""


def canonical(
    transcripts: dict[int, Transcript],
    *,
    merge: str,
    how_to_read: dict[int, str],
    nodes: Nodes | None = None,
    effort: Effort | None = None,
) -> list[Item]:
    """The canonical form of a cell. ``merge`` is "same" (identical lines once), "all", or "rank0" (the first rank)."""
    nodes = nodes or {}
    chosen = sorted(transcripts)[:1] if merge == "rank0" else sorted(transcripts)
    by_rank = {rank: transcripts[rank].sections(how_to_read[rank]) for rank in chosen}
    items: list[Item] = []
    effort = effort or Effort()
    for index in range(max((len(sections) for sections in by_rank.values()), default=0)):
        here = {rank: sections[index] for rank, sections in by_rank.items() if index < len(sections)}
        said = {rank: lines for rank, (lines, _) in here.items() if lines}
        merged = merge_lines(said, is_merging=merge == "same", effort=effort)
        items += _texts(list(merged), nodes)
        riches = {rank: rich.bundle for rank, (_, rich) in here.items() if rich}
        items += rich_items(riches, is_merging=merge == "same", nodes=nodes)
    return joined(items)


def _texts(merged: list[_Marked], nodes: Nodes) -> list[Item]:
    """A text for each turn of the streams, or one for each stream, where a front end would not show so many."""

    def by_turn(marked: list[_Marked]) -> list[Item]:
        runs = itertools.groupby(marked, key=lambda each: shown_stream(each[1][0]))
        return [Text(of, "".join(f"{label(ranks, nodes)} {line}\n" for ranks, (_, line) in run)) for of, run in runs]

    texts = by_turn(merged)
    return texts if len(texts) <= _MOST_TURNS else by_turn(sorted(merged, key=lambda each: _STREAMS.index(each[1][0])))


def rich_items(bundles: dict[int, Bundle], *, is_merging: bool, nodes: Nodes | None = None) -> list[Item]:
    """Rich outputs of the ranks, identical ones once; text goes out with its ranks before it, so does an image's."""
    groups: dict[str, list[int]] = {}
    for rank in sorted(bundles):
        key = json.dumps(bundles[rank], sort_keys=True) if is_merging else str(rank)
        groups.setdefault(key, []).append(rank)
    items: list[Item] = []
    for ranks in groups.values():
        bundle = bundles[ranks[0]]
        prefix = f"{label(ranks, nodes or {})} "
        if set(bundle) == {"text/plain"}:
            items.append(Rich({"text/plain": _indented(prefix, bundle["text/plain"])}))
        else:
            if "application/json" in bundle:  # front ends that do not know it show the text
                bundle = {**bundle, "text/plain": _indented(" " * len(prefix), bundle.get("text/plain", ""))}
            items += [Text("stdout", f"{prefix.rstrip()}\n"), Rich(bundle)]
    return items


def _indented(prefix: str, text: str) -> str:
    """The text behind ``prefix``; where many short lines become very long by it, the beginning."""
    before_line = "\n" + " " * len(prefix)
    indented = prefix + text.replace("\n", before_line, _MOST_INDENTED_CHARS // len(before_line))
    plain = _PLAIN if "\x1b" in text and not text.endswith(_PLAIN) else ""  # what comes below has its own colours
    if len(indented) <= _MOST_INDENTED_CHARS:
        return indented + plain
    return f"{_CUT_COLOUR.sub('', indented[:_MOST_INDENTED_CHARS])}{plain}{before_line}... the rest is not shown ..."


class _TooMuch(Exception):
    """A diff would take too long."""


class Effort:
    """How much work diffs may still be."""

    def __init__(self) -> None:
        self._left_steps = _DIFF_STEPS

    def spend(self, steps: int) -> None:
        self._left_steps -= steps
        if self._left_steps < 0:
            raise _TooMuch


class _Matcher(difflib.SequenceMatcher[Said]):
    """Raises _TooMuch where lines were chosen to be slow to match: each match may look at all lines again."""

    def __init__(self, a: list[Said], b: list[Said], effort: Effort) -> None:
        super().__init__(None, a, b, autojunk=False)
        self._effort = effort
        equal = collections.Counter(b)
        self._steps_before = list(itertools.accumulate((1 + equal[line] for line in a), initial=0))

    def find_longest_match(
        self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None
    ) -> difflib.Match:
        self._effort.spend(self._steps_before[-1 if ahi is None else ahi] - self._steps_before[alo])
        return super().find_longest_match(alo, ahi, blo, bhi)


def merge_lines(lines: dict[int, list[Said]], *, is_merging: bool, effort: Effort | None = None) -> Iterator[_Marked]:
    """The lines of several ranks in order of rank, those that stand in the same place of several ranks' output once."""
    effort = effort or Effort()
    if not is_merging:
        return iter([((rank,), line) for rank in sorted(lines) for line in lines[rank]])
    try:
        if max(map(len, lines.values()), default=0) > _DIFF_LINES:
            raise _TooMuch
        merged: list[_Marked] = []
        for rank in sorted(lines):
            merged = _merge_two(merged, [((rank,), line) for line in lines[rank]], effort)
        return iter(merged)
    except _TooMuch:
        return iter(_merge_by_place(lines))


def _merge_two(first: list[_Marked], second: list[_Marked], effort: Effort) -> list[_Marked]:
    if not first:
        return second
    a, b = [line for _, line in first], [line for _, line in second]
    merged: list[_Marked] = []
    for tag, a_start, a_end, b_start, b_end in _Matcher(a, b, effort).get_opcodes():
        if tag == "equal":
            pairs = zip(first[a_start:a_end], second[b_start:b_end])
            merged += [(mine + theirs, line) for (mine, line), (theirs, _) in pairs]
        else:
            merged += first[a_start:a_end] + second[b_start:b_end]
    return merged


def _merge_by_place(lines: dict[int, list[Said]]) -> list[_Marked]:
    """Lines that stand at the same place of every rank's output once."""
    ranks = tuple(sorted(lines))
    merged: list[_Marked] = []
    places = itertools.zip_longest(*(lines[rank] for rank in ranks))
    for is_same, run in itertools.groupby(places, key=lambda place: len(set(place)) == 1):
        columns = list(zip(*run))
        if is_same:
            merged += [(ranks, line) for line in columns[0]]
        else:
            for rank, column in zip(ranks, columns):
                merged += [((rank,), line) for line in column if line is not None]
    return merged


def joined(items: Iterable[Item]) -> list[Item]:
    """Neighbouring texts of one stream as one."""
    result: list[Item] = []
    for stream, run in itertools.groupby(items, key=lambda item: item.stream if isinstance(item, Text) else None):
        if stream is None:
            result += run
        else:
            result.append(Text(stream, "".join(item.text for item in run if isinstance(item, Text))))
    return result


def label(ranks: Sequence[int], nodes: Nodes) -> str:
    """Who says it: ``[0-3]``, or ``[gpu1:0-1]`` when all of them are on one node that has a name."""
    names = {nodes.get(rank, "") for rank in ranks}
    name = names.pop() if len(names) == 1 else ""
    numbers = short_ranks(rank % FURTHER for rank in ranks)
    return f"[{name}:{numbers}]" if name else f"[{numbers}]"


def by_stream(stream: str, lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Lines that a rank wrote to ``stream``; those of stderr on which it has drawn as a stream of their own."""
    for is_drawn, run in itertools.groupby(lines, key=lambda line: stream == "stderr" and isinstance(line, Drawn)):
        yield "drawn" if is_drawn else stream, list(run)


def shown_stream(stream: str) -> str:
    """Where the notebook shows it."""
    return "stdout" if stream == "drawn" else stream


def prefixed_lines(rank: int, lines: list[str], nodes: Nodes | None = None) -> str:
    """Finished lines of one rank as they are shown live."""
    prefix = f"{label([rank], nodes or {})} "
    return prefix + f"\n{prefix}".join(lines) + "\n"
