"""All ranks, who agree on something: on a gloo group of their own, so that training goes on beside a save."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..errors import DetrainError, SpecError

T = TypeVar("T")


class Ranks:
    """``group`` is None where there is no process group: then this process is all there is."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def gather(self, do: Callable[[], T]) -> list[T]:
        """What ``do`` gives on each rank, by rank. Collective: all ranks.

        Raises: the DetrainError that ``do`` raised here, or one with what else it raised; else a DetrainError, or a
        SpecError, with what it raised on another rank.
        """
        try:
            given = do()
            if self.group is not None:
                pickle.dumps(given)  # as the exchange does: what cannot travel is told before the others wait for it
        except Exception as exc:  # whatever it is: the others would wait for this rank
            self._exchange((type(exc).__name__, str(exc), isinstance(exc, SpecError)), None)
            if isinstance(exc, DetrainError):
                raise
            raise DetrainError(f"{type(exc).__name__}: {exc}") from exc
        failures, values = zip(*self._exchange(None, given))
        for rank, failure in enumerate(failures):
            if failure is not None:
                kind, text, is_spec = failure
                message = f"rank {rank}: {text if text and is_spec else f'{kind}: {text}'}"
                raise SpecError(message) if is_spec else DetrainError(message)
        return list(values)

    def first(self, do: Callable[[], T]) -> T:
        """What ``do`` gives on rank 0, on every rank. Collective: all ranks. Raises: as ``gather``, on every rank."""
        return self.gather(lambda: do() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def _exchange(self, failure: Any, value: Any) -> list[Any]:
        if self.group is None:
            return [(failure, value)]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, (failure, value), group=self.group)
        return found


# Each lives as long as the process group that it was made beside, which takes no attributes; one who makes a group at
# each save would run out.
_beside: WeakKeyDictionary[dist.ProcessGroup, Ranks] = WeakKeyDictionary()


def all_ranks() -> Ranks:
    """Collective: all ranks, the first time under a process group."""
    if not dist.is_available() or not dist.is_initialized():
        return Ranks(None)
    world = dist.group.WORLD
    assert world is not None
    if world not in _beside:
        _beside[world] = Ranks(dist.new_group(backend="gloo"))
    return _beside[world]
