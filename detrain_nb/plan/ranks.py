"""Selections of ranks, as users write them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping

from ..errors import SpecError, count_ranks, short_ranks


def parse_ranks(
    text: str | int | Iterable[int] | None, *, world_size: int, hosts: Mapping[str, tuple[int, ...]] | None = None
) -> tuple[int, ...]:
    """Resolve a selection of ranks to the ranks in ascending order, each once.

    A selection is ``"0,2"``, ``"0-3"``, ``"-1"`` (the last), ``"all"``, a number, a list, or None for all. With
    ``hosts``, it can also be the name of a host, for all ranks there.
    Raises: SpecError.
    """
    if text is None:
        return tuple(range(world_size))
    if isinstance(text, int):
        chosen = [_one_rank(text, world_size)]
    elif isinstance(text, str):
        if "" in (parts := [part.strip() for part in text.split(",")]) and len(parts) > 1:
            raise SpecError(f"invalid ranks {text!r}: nothing before or after a comma, give them like 0,2")
        chosen = [rank for part in parts for rank in _part_of_ranks(part, world_size, hosts or {})]
    elif isinstance(text, Iterable):
        chosen = [_one_rank(rank, world_size) for rank in text]
    else:
        raise SpecError(f"invalid ranks {text!r}: give a number, a list of numbers, or text like 0,2 or 0-3")
    if not chosen:
        raise SpecError("no rank is selected: give ranks like 0,2 or 0-3 or all")
    return tuple(sorted(set(chosen)))


def split_names(names: str | Iterable[str]) -> list[str]:
    """Return names given as text with commas, or as a list."""
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def _part_of_ranks(part: str, world_size: int, hosts: Mapping[str, tuple[int, ...]]) -> list[int]:
    if part == "all":
        return list(range(world_size))
    first, dash, last = part.partition("-") if not part.startswith("-") else (part, "", "")
    try:
        start, end = int(first), int(last) if dash else int(first)
    except ValueError:
        if part in hosts:
            return list(hosts[part])
        what, known = f"invalid ranks {part!r}", ""
        if hosts:
            what, known = f"no rank or host is called {part!r}", f", or a host: {', '.join(hosts)}"
        raise SpecError(f"{what}: give ranks like 0,2 or 0-3 or -1 or all{known}") from None
    if not dash:
        return [_one_rank(start, world_size)]
    if end < start:
        raise SpecError(f"invalid ranks {part!r}: give the smaller number first, {end}-{start}")
    return [_one_rank(rank, world_size) for rank in range(start, end + 1)]


def _one_rank(rank: int, world_size: int) -> int:
    try:
        rank = operator.index(rank)
    except TypeError:
        raise SpecError(f"{rank!r} is not a rank: give a whole number") from None
    if not -world_size <= rank < world_size:
        raise SpecError(
            f"rank {rank} does not exist: the session has {count_ranks(world_size)}, {short_ranks(range(world_size))}"
        )
    return rank % world_size
