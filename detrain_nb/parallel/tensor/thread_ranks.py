"""Threads that act as the ranks of a mesh: where ranks communicate over the network, threads meet."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

_MEETING_S = 60.0


class Meeting:
    """Meeting point to which each thread brings a tensor, and from which it takes those of all."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=_MEETING_S)
        self._brought: list[tuple[str, Tensor]] = [("", torch.zeros(()))] * size

    def leave(self) -> None:
        """Release all waiting threads with a BrokenBarrierError."""
        self._barrier.abort()

    def exchange(self, rank: int, what: str, tensor: Tensor) -> list[Tensor]:
        """Exchange tensors with all threads. Raises: ValueError if the others came for something else."""
        self._brought[rank] = what, tensor.detach()
        self._barrier.wait()
        brought = list(self._brought)
        self._barrier.wait()
        if len({(each, tuple(tensor.shape)) for each, tensor in brought}) > 1:
            raise ValueError("its ranks run different operations")
        return [tensor for _, tensor in brought]


class ThreadRanks:
    """One rank of a proof."""

    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, size

    def add_up(self, tensor: Tensor) -> Tensor:
        return torch.stack(self._meeting.exchange(self.rank, "sum", tensor)).sum(0)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return self._meeting.exchange(self.rank, "gather", tensor)

    def local(self, parameter: Tensor, dim: int | None) -> Tensor | None:
        return parameter

    def as_shard(self, tensor: Tensor, *, total: int) -> Tensor:
        raise AssertionError("a proof needs whole outputs")
