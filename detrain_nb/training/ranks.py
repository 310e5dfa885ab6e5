"""Agreement of all ranks, over a gloo group of its own: training continues while a save communicates."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..errors import DetrainError, SpecError

T = TypeVar("T")


class Ranks:
    """All ranks. ``group`` is None without a process group: this process is then the only rank."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def gather(self, do: Callable[[], T]) -> list[T]:
        """Return what ``do`` returns on each rank, in rank order. Collective: all ranks.

        Raises: when ``do`` failed here, its DetrainError, or a DetrainError made from its other exception; when it
        failed on another rank, a SpecError or DetrainError that names the rank.
        """
        try:
            given = do()
            if self.group is not None:
                pickle.dumps(given)  # as the exchange does: what cannot be pickled fails before the others wait
        except Exception as exc:  # whatever it is: otherwise the others would wait for this rank
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
        """Return rank 0's result of ``do``, everywhere. Collective: all ranks. Raises: as ``gather``, on every rank."""
        return self.gather(lambda: do() if self.rank == 0 else None)[0]  # type: ignore[return-value]

    def _exchange(self, failure: Any, value: Any) -> list[Any]:
        if self.group is None:
            return [(failure, value)]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, (failure, value), group=self.group)
        return found


# One per process group, which takes no attributes itself, for as long as that lives: with a new gloo group at each
# save they would run out.
_beside: WeakKeyDictionary[dist.ProcessGroup, Ranks] = WeakKeyDictionary()


def all_ranks() -> Ranks:
    """Return all ranks of this process group. Collective: all ranks, at the first call under it."""
    if not dist.is_available() or not dist.is_initialized():
        return Ranks(None)
    world = dist.group.WORLD
    assert world is not None
    if world not in _beside:
        _beside[world] = Ranks(dist.new_group(backend="gloo"))
    return _beside[world]
