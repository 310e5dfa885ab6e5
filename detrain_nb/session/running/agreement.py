"""Whether a variable is the same on all ranks: one of six states, and a description of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

from ...errors import short_ranks
from .variable_facts import Layout, RankVariable

__all__ = ["SIGNS", "Agreement", "agree", "spread"]

# same: equal on all ranks. differ: several values. own: another value on every rank. shards: a DTensor with the same
# layout on all ranks. partly: only some ranks have it. other: not compared.
SIGNS = {"same": "=", "differ": "≠", "own": "≠", "shards": "▦", "partly": "•", "other": "?"}

Agreement = tuple[str, str]


def agree(on: Mapping[int, RankVariable], ranks: Sequence[int]) -> Agreement:
    """Return the state of a variable and its description; ``on`` has it by rank, ``ranks`` are all that answered."""
    if len(on) < len(ranks) or len(ranks) == 1:
        return "partly", f"{'only ' if len(on) < len(ranks) else ''}on {_named(on)}"
    if all(each.layout for each in on.values()):
        return _agree_of_layouts(on)
    kinds = {rank: (each.type.partition(",")[0], each.dtype, each.shape) for rank, each in on.items()}
    if len(set(kinds.values())) > 1:
        return _differ(kinds)
    if not all(each.digest for each in on.values()):
        return "other", "not compared"
    digests = {rank: (each.digest, each.is_sample) for rank, each in on.items()}
    if len(set(digests.values())) > 1:
        return _differ(digests)
    is_sample = any(each.is_sample for each in on.values())
    return "same", f"same on {len(on)}{' (sampled)' if is_sample else ''}"


def _differ(values: Mapping[int, Hashable]) -> Agreement:
    """Describe values that are not all equal; when more than half are, name the other ranks."""
    counts = Counter(values.values())
    if len(counts) == len(values):
        return "own", "differs on every rank"
    most_common, count = counts.most_common(1)[0]
    if 2 * count > len(values):
        return "differ", f"differs on {_named(rank for rank, value in values.items() if value != most_common)}"
    return "differ", f"{len(counts)} values on {len(values)}"


def _agree_of_layouts(on: Mapping[int, RankVariable]) -> Agreement:
    layouts = {rank: each.layout for rank, each in on.items() if each.layout}
    ways = {rank: (each.mesh, each.placements, on[rank].shape, on[rank].dtype) for rank, each in layouts.items()}
    if len(set(ways.values())) > 1:
        return _differ(ways)
    layout = next(iter(layouts.values()))
    if wrong := _wrong_copies(on, layouts):
        return "differ", f"copies differ on {_named(wrong)}"
    return "shards", describe_layout(layout)


def describe_layout(layout: Layout) -> str:
    """Describe how many shards, copies and partial sums a DTensor has."""
    numbers = {
        kind: math.prod(size for size, is_of in zip(layout.mesh, layout.kinds) if is_of == kind)
        for kind in ("shard", "copy", "partial")
    }
    parts = [f"{numbers['shard']} shards"] if numbers["shard"] > 1 else []
    parts += [f"{numbers['copy']} copies"] if numbers["copy"] > 1 else []
    parts += [f"{numbers['partial']} partial sums"] if numbers["partial"] > 1 else []
    return ", ".join(parts) or "1 shard"


def _wrong_copies(on: Mapping[int, RankVariable], layouts: Mapping[int, Layout]) -> list[int]:
    """Return the ranks whose copy of a shard differs from most copies of that shard."""
    copies: dict[Hashable, dict[int, str]] = {}
    for rank, layout in layouts.items():
        if layout.at is not None and on[rank].digest:
            part = tuple(at for at, kind in zip(layout.at, layout.kinds) if kind != "copy")
            copies.setdefault(part, {})[rank] = on[rank].digest
    wrong = []
    for digests in copies.values():
        common, count = Counter(digests.values()).most_common(1)[0]
        is_most = 2 * count > len(digests)
        if count < len(digests):
            wrong += [rank for rank, digest in digests.items() if digest != common or not is_most]
    return sorted(wrong)


def spread(texts: Iterable[str]) -> str:
    """Join the first and the last of the distinct ``texts``."""
    found = list(dict.fromkeys(texts))
    return found[0] if len(found) == 1 else f"{found[0]} … {found[-1]}"


def _named(ranks: Iterable[int]) -> str:
    return short_ranks(ranks, separator=", ")
