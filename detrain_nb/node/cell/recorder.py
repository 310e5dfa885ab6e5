"""The report of a rank on itself while its main thread may wait, mainly from torch's flight recorder of collectives.

Call from any thread; needs the GIL. The recorder stores collectives of gloo and of NCCL, separately, with op, sequence
number, tensors and time. It lacks point-to-point operations on gloo and waits in the store: for those, the stack is
the evidence. Those of NCCL are left out: torch does not record when operations of a batch have ended.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from ..groups.checking import COMPARED
from ..groups.process_groups import GROUP_NAMES, ON_NCCL, count_operations
from .mainthread import read_awaited, read_call, read_stack

_T = TypeVar("_T")
_KEPT = 16  # at most, of pending entries and of ended ones, to compare between ranks
_MAX_CHARS = 200
_DEFAULT = "0"
_OF = "recorder"  # key in an entry: which recorder numbered it
_DUMPS = {"_dump_fr_trace_json": "", "_dump_nccl_trace_json": ON_NCCL}


def look_inside(
    *, since_ns: int, before_cell: Mapping[str, int], comparisons: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """Gather the report for the notebook, as JSON.

    ``entries``: see ``read_collectives``. ``members``: the ranks of each group among them, except the default one.
    ``steps``: how many operations were begun in each group; -1 if the last cell began any but collectives in it, or if
    unknown (``before_cell`` has their numbers at its start). ``operations`` grows with every operation begun with other
    ranks. ``call``, ``awaited`` and ``stack`` are those of the main thread. ``comparisons``, of checking.py, appear
    among entries and steps like collectives of separate groups.
    """
    dumped: list[dict[str, Any]] = _or_nothing(lambda: _dump(since_ns), [])
    recorded = [*dumped, *comparisons]
    groups: dict[str, _Group] | None = _or_nothing(_read_groups, None)
    entries: list[list[Any]] = _or_nothing(lambda: _last_of(recorded), [])
    named = {entry[2] for entry in entries} - {_DEFAULT}
    groups_read = groups or {}
    steps = {
        name + of: _steps(group.name, of, number, recorded, before_cell)
        for name, group in groups_read.items()
        for of, number in group.sequences.items()
    }
    numbers = {_label(each): each["collective_seq_id"] for each in comparisons}
    steps.update({label: number for label, number in numbers.items() if label.partition(COMPARED)[0] in groups_read})
    return {
        "entries": entries,
        "members": {
            label: group.ranks
            for name, group in groups_read.items()
            for label in (name, name + ON_NCCL, name + COMPARED)
            if name != _DEFAULT and label in named
        },
        "steps": steps,
        "operations": -1 if groups is None else sum(1 + sum(group.sequences.values()) for group in groups.values()),
        "call": _or_nothing(read_call, None),
        "awaited": _or_nothing(read_awaited, None),
        "stack": _or_nothing(read_stack, None),
    }


def read_collectives(*, since_ns: int) -> list[list[Any]]:
    """Return the last collectives that were enqueued after ``since_ns`` (Unix time), oldest first.

    Each is ``[op, sequence number, group, its description, tensors, is pending, seconds since it was enqueued]``;
    ``group`` is a number or, if torch derives it from the ranks, a hash; "0" is the default group; NCCL's have
    ``ON_NCCL`` after it. Empty if this torch has no recorder.
    """
    return _last_of(_dump(since_ns))


def describe_last(*, since_ns: int) -> str:
    """Describe the collective that was begun last, as a line; empty if there is none."""
    for op, sequence, _, _, tensors, *_ in read_collectives(since_ns=since_ns)[-1:]:
        return f"the last collective here: {op} #{sequence} {tensors}\n"
    return ""


def _last_of(dumped: list[dict[str, Any]]) -> list[list[Any]]:
    recorded = {
        (_label(entry), entry["collective_seq_id"], entry["time_created_ns"]): entry
        for entry in dumped
        if not entry["is_p2p"]
    }
    last_of_group = {key[0]: key for key in sorted(recorded)}
    newest_first = sorted(recorded, key=lambda key: -key[2])
    pending = [key for key in newest_first if not recorded[key]["retired"]]
    ended = [key for key in newest_first if recorded[key]["retired"]]
    oldest = pending[-_KEPT:]
    kept = {*oldest, *ended[:_KEPT], *last_of_group.values()}
    now_ns = time.time_ns()
    return [_describe(recorded[key], now_ns) for key in reversed(newest_first) if key in kept]


def _or_nothing(read: Callable[[], _T], nothing: _T) -> _T:
    """Catch all errors: the caller's thread also ends generations, and must survive whatever a cell has changed."""
    try:
        return read()
    except Exception:  # noqa: BLE001
        return nothing


def _describe(entry: dict[str, Any], now_ns: int) -> list[Any]:
    description = entry["process_group"][1]
    return [
        entry["profiling_name"].rpartition(":")[2],
        entry["collective_seq_id"],
        _label(entry),
        "" if description in ("undefined", "default_pg") else description,
        _describe_tensors(entry["input_dtypes"], entry["input_sizes"]),
        not entry["retired"],
        (now_ns - entry["time_created_ns"]) / 1e9,
    ]


def _describe_tensors(dtypes: list[str], sizes: list[list[int]]) -> str:
    tensors = [f"{dtype}{size}" for dtype, size in zip(dtypes, sizes)]
    text = ", ".join(tensors)
    return text if len(text) <= _MAX_CHARS else f"{text[:_MAX_CHARS]}... ({len(tensors)} tensors)"


def _dump(since_ns: int) -> list[dict[str, Any]]:
    from torch._C import _distributed_c10d

    entries: list[dict[str, Any]] = []
    for name, of in _DUMPS.items():
        if dump := getattr(_distributed_c10d, name, None):
            found = json.loads(dump(True, False)).get("entries") or []
            known = (each for each in found if each["time_created_ns"] >= since_ns)
            entries += ({**each, _OF: of} for each in known if each["process_group"][0])  # no name: checking.py's own
    return entries


def _label(entry: dict[str, Any]) -> str:
    """Return the group of an entry, by the name that all of its ranks use."""
    return _short(entry["process_group"][0]) + str(entry[_OF])


class _Group(NamedTuple):
    name: str
    ranks: list[int]
    sequences: dict[str, int]  # gloo counts all operations begun in it, NCCL collectives


def _read_groups() -> dict[str, _Group]:
    groups = {}
    world = dist.distributed_c10d._world
    for group in list(world.pg_map):
        ranks = sorted(world.pg_group_ranks.get(group, ()))
        if sequences := count_operations(group):
            groups[_short(group.group_name)] = _Group(group.group_name, ranks, sequences)
    return groups


def _steps(name: str, of: str, number: int, dumped: list[dict[str, Any]], before_cell: Mapping[str, int]) -> int:
    """Return the steps of a group: a gloo ``number`` above the recorder's means point-to-point messages."""
    own = [entry for entry in dumped if entry["process_group"][0] == name and entry[_OF] == of]
    collectives = max((entry["collective_seq_id"] for entry in own), default=0)
    is_known = number in (before_cell.get(name + of, 0), collectives)
    return number if is_known and not any(entry["is_p2p"] for entry in own) else -1


def _short(name: str) -> str:
    """Shorten a name: numbers continue from one default group to the next, and the default group becomes "0"."""
    return str(int(name) % GROUP_NAMES) if name.isdecimal() else name
