"""What is known of every rank, validated and cleaned: the evidence that diagnosis.py decides on."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from ...wire import Position
from ..output.safe_output import one_line

DEFAULT_GROUP = "0"
_COMPARED = "/compare"  # after a group's name: comparisons of its ranks, numbered separately
_BACKEND = "/"  # in the name of a group whose operations are numbered separately
_BUSY_SHARE = 0.2  # of a processor: a rank that uses more is computing
_FRESH_S = 2.0  # older reports of collectives are not evidence
_STATES = ("starting", "idle", "running", "down")
_MAX_ENTRIES = 200
_MAX_GROUPS = 1000
_MAX_NUMBER = 1 << 53  # an int of JSON may have thousands of digits
_NO_NAME = re.compile(r"[^\w.:/@+<>-]+")  # <lambda> is one
_TENSORS = re.compile(r"(?:[\w:.]+\[[\d, ]*\](?:, )?)*(?:[\w:.\[\d, ]*\.\.\. \(\d+ tensors\))?")
_HASH_CHARS = 8  # of the names that torch derives from a group's ranks
_OF_CELL = re.compile(r"<cell ([0-9]{1,9})>:([0-9]{1,9}) ")


@dataclass(frozen=True)
class Collective:
    """One entry of a rank's flight recorder; ``seconds`` since it was enqueued.

    ``group``: NCCL operations have "/nccl" after its name, comparisons "/compare"; both are numbered separately.
    """

    op: str
    sequence: int
    group: str
    description: str
    tensors: str
    is_pending: bool
    seconds: float

    @property
    def is_of_all(self) -> bool:
        """Whether it belongs to the default group, which has all ranks."""
        return self.group.partition(_BACKEND)[0] == DEFAULT_GROUP

    @property
    def of_group(self) -> str:
        """The group as text, with a space before it; empty for the default group."""
        if self.is_of_all:
            return ""
        name = self.group.partition(_BACKEND)[0]
        name = name if name.isdecimal() else name[:_HASH_CHARS]
        return f" of group {name}" + (f" ({self.description})" if self.description else "")

    def __str__(self) -> str:
        number = "" if self.group.endswith(_COMPARED) else f" #{self.sequence}"
        return f"{self.op}{number}{self.of_group}"


@dataclass(frozen=True)
class Evidence:
    """What is known of one rank.

    ``cpu_share``: the share of a processor that its main thread used, or was ready to use, between two looks.
    ``collectives`` were known ``age_s`` ago (-1: never). ``members``: the ranks of groups other than the default one.
    ``operations``: a count of what it has begun with other ranks (-1: unknown). ``steps``: how many operations it has
    begun in each of its groups (-1: unknown, or not only collectives in the last cell). ``call`` and ``asleep_in``: see
    ``wire.Position``.
    """

    rank: int
    state: str
    cell: int = 0
    line: int = 0
    function: str = ""
    seconds: float = 0.0
    stack: tuple[str, ...] = ()
    call: str = ""
    asleep_in: str = ""
    cpu_share: float | None = None
    collectives: tuple[Collective, ...] = ()
    members: Mapping[str, Collection[int]] = field(default_factory=dict)
    operations: int = -1
    steps: Mapping[str, int] = field(default_factory=dict)
    age_s: float = -1.0
    is_cuda: bool = False

    @property
    def innermost(self) -> str:
        return self.stack[0] if self.stack else ""

    @property
    def last_pending(self) -> tuple[Collective, ...]:
        """What it had enqueued and not finished, oldest first, at its last report."""
        return tuple(collective for collective in self.collectives if collective.is_pending)

    @property
    def pending(self) -> tuple[Collective, ...]:
        """What it has enqueued and not finished, if its report is recent; else empty."""
        return self.last_pending if 0 <= self.age_s <= _FRESH_S else ()

    @property
    def is_known(self) -> bool:
        """Whether its report on its groups is recent."""
        return 0 <= self.age_s <= _FRESH_S and self.operations >= 0

    @property
    def is_busy(self) -> bool:
        return self.cpu_share is not None and self.cpu_share >= _BUSY_SHARE

    @property
    def cell_line(self) -> tuple[int, int]:
        """The cell and line of the innermost frame in any cell: a function may come from an earlier one than runs."""
        inner = next(filter(None, map(_OF_CELL.match, self.stack)), None)
        if inner is None or int(inner[1]) == self.cell:
            return self.cell, self.line  # correct even when %%time runs the cell
        return int(inner[1]), int(inner[2])

    @property
    def line_words(self) -> str:
        """Its line in a cell as text, with the calling line of the present cell; empty if unknown."""
        cell, line = self.cell_line
        if cell == self.cell:
            return f"line {line}" if line else ""
        return f"line {line} of cell {cell}" + (f", called at line {self.line}" if self.line else "")

    @property
    def place(self) -> str:
        """Where it is, as text."""
        line = self.line_words
        if self.function:
            return f"in {self.function} ({line})" if line else f"in {self.function}"
        return f"at {line}" if line else f"in cell {self.cell}"


def gather(position: Position, *, world_size: int, before: Position | None = None, is_cuda: bool = False) -> Evidence:
    """Validate the report of a rank's worker; ``before`` is its report at an earlier look."""
    share = None
    if before is not None and before.pid == position.pid:
        used_s, passed_s = position.cpu_s - before.cpu_s, position.clock_s - before.clock_s
        share = _number(used_s / passed_s) if passed_s > 0 else None
    known = position.collectives if isinstance(position.collectives, dict) else {}
    age_s = _number(position.age_s, otherwise=-1.0)
    return Evidence(
        position.rank,
        position.state if position.state in _STATES else "unknown",
        position.cell,
        position.line,
        _as_name(position.function),
        _number(position.seconds),
        tuple(map(_as_frame, position.stack[:_MAX_ENTRIES])),
        one_line(position.call),
        one_line(position.asleep_in),
        share,
        tuple(_read_collectives(known.get("entries"), age_s=max(0.0, age_s))),
        _read_members(known.get("members"), world_size),
        known["operations"] if type(known.get("operations")) is int else -1,
        _read_steps(known.get("steps")),
        age_s,
        is_cuda,
    )


def _number(value: float, *, otherwise: float = 0.0) -> float:
    return value if 0 <= value < math.inf else otherwise


def _read_collectives(entries: Any, *, age_s: float) -> Iterable[Collective]:
    """Yield the valid entries; others are dropped."""
    for entry in entries[:_MAX_ENTRIES] if isinstance(entries, list) else []:
        if isinstance(entry, list) and [type(part) for part in entry[:6]] == [str, int, str, str, str, bool]:
            op, sequence, group, description, tensors, is_pending, *rest = entry
            sequence = max(-_MAX_NUMBER, min(sequence, _MAX_NUMBER))
            seconds = _number(min(rest[0], _MAX_NUMBER)) if rest and type(rest[0]) in (int, float) else 0.0
            op, group, description = map(_as_name, (op, group, description))
            tensors = one_line(tensors)
            tensors = tensors if _TENSORS.fullmatch(tensors) else _as_name(tensors)
            yield Collective(op, sequence, group, description, tensors, is_pending, seconds + age_s)


def _as_name(text: str) -> str:
    """Reduce a text to one word: it appears in our sentences, and must not read as one."""
    return _NO_NAME.sub("_", one_line(text))


def _as_frame(text: str) -> str:
    """Clean a frame, whose last word is a function name; a truncated frame has none."""
    place, blank, function = one_line(text).rpartition(" ")
    return f"{place} {_as_name(function)}" if blank else function


def _read_steps(steps: Any) -> dict[str, int]:
    """Read the steps per group; with too many groups all are unknown, as ranks could differ in a dropped one."""
    if not isinstance(steps, dict):
        return {}
    is_all, some = len(steps) <= _MAX_GROUPS, islice(steps.items(), _MAX_GROUPS)
    return {_as_name(name): number if is_all and type(number) is int else -1 for name, number in some}


def _read_members(members: Any, world_size: int) -> dict[str, frozenset[int]]:
    """Read the members of groups, each existing rank once, however many a node lists: each costs time later."""
    return {
        _as_name(name): frozenset(rank for rank in ranks if 0 <= rank < world_size)
        for name, ranks in islice(members.items() if isinstance(members, dict) else (), _MAX_GROUPS)
        if isinstance(ranks, list) and all(type(rank) is int for rank in ranks)
    }
