"""The output of each rank in one cell, within limits, and its canonical form: equal for equal runs of a cell.

While a cell runs, lines appear as they arrive, so two runs differ in order. The canonical form has the ranks in order,
the lines of each as it wrote them, and lines that several ranks printed identically once, marked ``[0-3]``; on one node
that has a name, ``[gpu1:0]``. If stdout and stderr alternate very often, all of stdout comes before stderr. A drawing
on stderr is a progress bar, not an error: it is shown like stdout.
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
Nodes = Mapping[int, str]  # the names of the ranks' nodes, if they have names
TAIL_LINES = 200
FURTHER = 1 << 20  # added to a rank for each further node that has had the same rank
_STREAMS = ("stdout", "drawn", "stderr")
_MOST_TURNS = 30  # of stdout and stderr between two rich outputs; JupyterLab hides what comes after 50 outputs
_PREFIX_CHARS = 5  # "[0] " and the newline
# Above either, lines are matched by their position. Steps are counted, not timed: each run of a cell looks the same.
_DIFF_LINES = 2000
_DIFF_STEPS = 1_000_000  # of the diffs of one cell, about 0.1 s
_SHORTEST_BEGINNING = 40  # of a line that is cut off; a shorter one is of no use
_SHORTEST_CUT = 1000  # a shorter line is shown whole or not at all
_PLAIN = "\x1b[0m"
_CUT_COLOUR = re.compile(r"\x1b[^a-zA-Z]*$")
_MOST_RICH, _MOST_RICH_CHARS = 1000, 64 << 20  # of one rank in one cell
_CHARS_OF_A_VALUE = 64  # of JSON
_CHARS_OF_A_COLOUR = 100  # a page has an element for each
_LABEL_CHARS = 20  # about the length of the label before each line
_MOST_INDENTED_CHARS = MOST_TEXT_CHARS + 10_000  # including the labels of its lines


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
    """Count the characters of JSON, with an allowance for each value: values take more memory than characters."""
    text = json.dumps(data).encode()
    return len(text) + count_values(text) * _CHARS_OF_A_VALUE


Item = Text | Rich
Said = tuple[str, str]  # a line with its stream: "stdout", "stderr", or "drawn" for what was drawn on stderr
_Marked = tuple[tuple[int, ...], Said]
_Written = tuple[int, str, str]  # the turn in which it was written, its stream, the line


class Transcript:
    """The output of one rank: its first lines within the limits, its last ``TAIL_LINES``, all rich outputs.

    The last lines take at most a quarter of the characters.
    """

    def __init__(self, *, max_lines: int, max_chars: int) -> None:
        """Create an empty transcript; a limit of 0 means no limit."""
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
        """Return another transcript with the same output so far."""
        copied = copy.copy(self)
        copied._head = [entry if isinstance(entry, Rich) else entry.copy() for entry in self._head]
        copied._tail = self._tail.copy()
        return copied

    def add_lines(self, stream: str, lines: list[str], turns: Sequence[int] = ()) -> None:
        """Add lines of a stream, see ``Said``; ``turns``: the turn in which each was written, if known."""
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
        """Add a rich output; returns False if there is no room for it."""
        self._room_rich -= 1
        self._room_rich_chars -= rich.num_chars
        if self._room_rich < 0 or self._room_rich_chars < 0:
            self._rich_left_out += 1
            return False
        self._head.append(rich)
        return True

    def replace_rich(self, old: Rich, new: Rich) -> bool:
        """Replace a redrawn rich output; returns False if there is no room for the new one."""
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
        """Return the lines before each rich output, in order, with that output; last, the lines after all of them."""
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
        """Return how many of ``lines`` fit in the head, and use up their room."""
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
        """Return the beginning of the first line of ``rest``, which does not fit, if there is room for it."""
        room = (self._room_chars or 0) - _PREFIX_CHARS
        has_room = self._room_lines != 0 and room >= _SHORTEST_BEGINNING
        if not rest or len(rest[0]) < _SHORTEST_CUT or self._left_out or self._cut_chars or not has_room:
            return []
        self._cut_chars = len(rest[0]) - room
        return [beginning_of(rest[0], room)]


def beginning_of(line: str, num_chars: int) -> str:
    """Return the first ``num_chars`` of a line, with its colours reset at the end."""
    beginning = _CUT_COLOUR.sub("", line[:num_chars])
    return f"{beginning}{_PLAIN}" if "\x1b" in beginning and not beginning.endswith(_PLAIN) else beginning


def _in_order(lines: Iterable[_Written]) -> list[Said]:
    return [(stream, line) for _, stream, line in sorted(lines, key=operator.itemgetter(0))]


def counted_more(count: int, what: str) -> str:
    """Return ``1 more line`` or ``2,000 more lines``; empty for none."""
    return f"{count:,} more {what}{'' if count == 1 else 's'}" if count > 0 else ""


def canonical(
    transcripts: dict[int, Transcript],
    *,
    merge: str,
    how_to_read: dict[int, str],
    nodes: Nodes | None = None,
    effort: Effort | None = None,
) -> list[Item]:
    """Return the canonical form of a cell. ``merge``: "same" (identical lines once), "all" or "rank0" (first rank)."""
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
    """Return one text per turn of the streams; one per stream if a front end would hide some of the turns."""

    def by_turn(marked: list[_Marked]) -> list[Item]:
        runs = itertools.groupby(marked, key=lambda each: shown_stream(each[1][0]))
        return [Text(of, "".join(f"{label(ranks, nodes)} {line}\n" for ranks, (_, line) in run)) for of, run in runs]

    texts = by_turn(merged)
    return texts if len(texts) <= _MOST_TURNS else by_turn(sorted(merged, key=lambda each: _STREAMS.index(each[1][0])))


def rich_items(bundles: dict[int, Bundle], *, is_merging: bool, nodes: Nodes | None = None) -> list[Item]:
    """Return rich outputs of the ranks, identical ones once, each with the label of its ranks before it."""
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
    """Return the text indented after ``prefix``; only the beginning, if many short lines become too long."""
    before_line = "\n" + " " * len(prefix)
    indented = prefix + text.replace("\n", before_line, _MOST_INDENTED_CHARS // len(before_line))
    plain = _PLAIN if "\x1b" in text and not text.endswith(_PLAIN) else ""  # the text below has its own colours
    if len(indented) <= _MOST_INDENTED_CHARS:
        return indented + plain
    return f"{_CUT_COLOUR.sub('', indented[:_MOST_INDENTED_CHARS])}{plain}{before_line}... the rest is not shown ..."


class _TooMuch(Exception):
    """A diff would take too long."""


class Effort:
    """The work that is left for diffs."""

    def __init__(self) -> None:
        self._left_steps = _DIFF_STEPS

    def spend(self, steps: int) -> None:
        self._left_steps -= steps
        if self._left_steps < 0:
            raise _TooMuch


class _Matcher(difflib.SequenceMatcher[Said]):
    """A matcher that raises _TooMuch for lines that are slow to match: each match may look at all lines again."""

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
    """Return the lines of several ranks by rank, those in the same place of several ranks' output once."""
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
    """Merge lines that are equal at the same place of every rank's output."""
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
    """Join neighbouring texts of one stream."""
    result: list[Item] = []
    for stream, run in itertools.groupby(items, key=lambda item: item.stream if isinstance(item, Text) else None):
        if stream is None:
            result += run
        else:
            result.append(Text(stream, "".join(item.text for item in run if isinstance(item, Text))))
    return result


def label(ranks: Sequence[int], nodes: Nodes) -> str:
    """Return the label ``[0-3]``, or ``[gpu1:0-1]`` if all ranks are on one node that has a name."""
    names = {nodes.get(rank, "") for rank in ranks}
    name = names.pop() if len(names) == 1 else ""
    numbers = short_ranks(rank % FURTHER for rank in ranks)
    return f"[{name}:{numbers}]" if name else f"[{numbers}]"


def by_stream(stream: str, lines: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the lines of ``stream`` in runs; lines drawn on stderr are a stream of their own."""
    for is_drawn, run in itertools.groupby(lines, key=lambda line: stream == "stderr" and isinstance(line, Drawn)):
        yield "drawn" if is_drawn else stream, list(run)


def shown_stream(stream: str) -> str:
    """Return the stream on which the notebook shows ``stream``."""
    return "stdout" if stream == "drawn" else stream


def prefixed_lines(rank: int, lines: list[str], nodes: Nodes | None = None) -> str:
    """Return finished lines of one rank as they are shown live."""
    prefix = f"{label([rank], nodes or {})} "
    return prefix + f"\n{prefix}".join(lines) + "\n"
