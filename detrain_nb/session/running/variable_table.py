"""The variables of all ranks as one table, with the agreement between ranks."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from ...errors import count_ranks, format_ranks
from ...text import format_size, html_cells, html_table, name_some, table_lines
from ..output.safe_output import one_line
from .agreement import SIGNS, agree, spread
from .variable_facts import RankVariable

__all__ = ["Variable", "Variables", "describe_silent", "gather_variables"]

_COLUMNS = ("name", "type", "shape or value", "dtype", "device", "bytes", "ranks")
_STATES = {"same": "same", "differ": "differ", "own": "own", "shards": "sharded", "partly": "partly", "other": "other"}
_MOST_SHOWN = 200  # rows; all of them are in ``rows``
_VALUE_CHARS = 40  # in a table, to leave room for the next columns; all of it is in ``value``


@dataclass(frozen=True)
class Variable:
    """A variable over all ranks; ``on`` has it by rank, as reported by each rank that has it.

    ``state`` is one of same, differ, own, shards, partly, other (not compared), and ``words`` describes it.
    ``bytes`` is the largest size on one rank, None if unknown.
    """

    name: str
    type: str
    value: str
    dtype: str
    device: str
    bytes: int | None
    state: str
    words: str
    on: Mapping[int, RankVariable]

    def cells(self) -> tuple[str, ...]:
        size = "" if self.bytes is None else format_size(self.bytes)
        value = self.value if len(self.value) <= _VALUE_CHARS else f"{self.value[: _VALUE_CHARS - 1]}…"
        return (self.name, self.type, value, self.dtype, self.device, size, f"{SIGNS[self.state]} {self.words}")


@dataclass(frozen=True)
class Variables:
    """The variables of a session at ``read_at``, a ``time.time()``, sorted by name.

    ``ranks`` have answered; ``silent`` has the reason why each other rank did not. ``left_out`` is the number of names
    that have no row, as there are too many. ``missing`` has requested names and patterns that match no variable.
    ``v["x"]`` is the row of one variable.
    """

    rows: tuple[Variable, ...]
    ranks: tuple[int, ...]
    silent: Mapping[int, str]
    left_out: int
    read_at: float
    missing: tuple[str, ...] = ()

    def __getitem__(self, name: str) -> Variable:
        for row in self.rows:
            if row.name == name:
                return row
        raise KeyError(name)

    def __len__(self) -> int:
        return len(self.rows)

    def filter(self, text: str = "", *, state: str = "") -> Variables:
        """Keep only rows whose name or type contains ``text``, ignoring case, and whose state is ``state``."""
        wanted = text.casefold()
        kept = (
            row
            for row in self.rows
            if (wanted in row.name.casefold() or wanted in row.type.casefold()) and state in ("", row.state)
        )
        return replace(self, rows=tuple(kept))

    @property
    def title(self) -> str:
        """The number of names and ranks, the memory on GPUs, and the time."""
        names = "1 name" if len(self.rows) == 1 else f"{len(self.rows):,} names"
        parts = [f"{names} on {count_ranks(len(self.ranks))}"]
        if on_gpus := sum(each.bytes or 0 for row in self.rows for each in row.on.values() if "cuda" in each.device):
            parts.append(f"{format_size(on_gpus)} on GPUs")
        parts.append(f"read at {time.strftime('%H:%M:%S', time.localtime(self.read_at))}")
        return " · ".join(parts)

    @property
    def notes(self) -> list[str]:
        """Lines about ranks that did not answer, with the reasons, and about names without a row."""
        by_reason: dict[str, list[int]] = {}
        for rank, why in self.silent.items():
            by_reason.setdefault(why, []).append(rank)
        notes = [describe_silent(ranks, why) for why, ranks in by_reason.items()]
        if self.left_out:
            notes.append(f"{self.left_out:,} more names: select some by name or pattern, such as x*")
        if self.missing:
            shown = [f"'{one_line(name)}'" for name in self.missing]
            notes.append(f"no variable matches {name_some(shown)}")
        return notes

    def counts(self) -> dict[str, int]:
        """Return the number of rows in each state that occurs."""
        found = Counter(row.state for row in self.rows)
        return {state: found[state] for state in _STATES if found[state]}

    def __repr__(self) -> str:
        table = table_lines([_COLUMNS, *(row.cells() for row in self.rows[:_MOST_SHOWN])])
        return "\n".join([self.title, *self.notes, *(table if self.rows else []), *self._rest()])

    def _repr_html_(self) -> str:
        head = html_cells(_COLUMNS, tag="th", style="text-align:left")
        rows = "".join(
            f"<tr>{html_cells(row.cells(), style='text-align:left')}</tr>" for row in self.rows[:_MOST_SHOWN]
        )
        return html_table(head, rows, caption=[self.title, *self.notes, *self._rest()])

    def _rest(self) -> list[str]:
        more = len(self.rows) - _MOST_SHOWN
        return [f"... {more:,} more not shown: filter them"] if more > 0 else []


def describe_silent(ranks: Sequence[int], why: str) -> str:
    """Describe ranks that did not answer: ``why`` is their state, or after a colon what they answered instead."""
    verb = "" if why.startswith(":") else " is " if len(ranks) == 1 else " are "
    return f"{format_ranks(ranks)}{verb}{why}"


def gather_variables(
    said: Mapping[int, Mapping[str, RankVariable]],
    silent: Mapping[int, str],
    *,
    left_out: int,
    most: int,
    patterns: Sequence[str] = (),
) -> Variables:
    """Gather the reports of all ranks in one table of at most ``most`` names; ``patterns`` were requested."""
    names = sorted({name for of_rank in said.values() for name in of_rank})
    ranks = tuple(sorted(said))
    rows = []
    for name in names[:most]:
        on = {rank: said[rank][name] for rank in ranks if name in said[rank]}
        rows.append(_row(name, on, ranks))
    is_all_known = bool(ranks) and not left_out
    missing = [each for each in patterns if is_all_known and not any(fnmatchcase(name, each) for name in names)]
    more = left_out + len(names) - len(rows)
    return Variables(tuple(rows), ranks, dict(silent), more, time.time(), tuple(missing))


def _row(name: str, on: Mapping[int, RankVariable], ranks: Sequence[int]) -> Variable:
    state, words = agree(on, ranks)
    sizes = [each.bytes for each in on.values() if each.bytes is not None]
    return Variable(
        name,
        spread(each.type for each in on.values()),
        spread(each.text for each in on.values()),
        spread(each.dtype for each in on.values()),
        _devices(each.device for each in on.values()),
        max(sizes, default=None),
        state,
        words,
        on,
    )


def _devices(devices: Iterable[str]) -> str:
    """Return the kind of device if ranks have several of one kind, else the devices."""
    found = list(dict.fromkeys(devices))
    kinds = {device.partition(":")[0] for device in found}
    if len(found) > 1 and len(kinds) == 1:
        return kinds.pop()
    return name_some(found)
