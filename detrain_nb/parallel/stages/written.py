"""Buffers that several stages have, and that a forward writes: what the stage has that computes it is right."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .schedules import Schedule
from .splitter import Split
from .tied import send_first

__all__ = ["WrittenBuffers"]


class WrittenBuffers:
    """Those that are computed: behind a training step other stages have what came of zeros in their place."""

    def __init__(
        self,
        found: Split,
        modules: Sequence[nn.Module],
        indices: Sequence[int],
        group: dist.ProcessGroup,
        schedule: Schedule,
        *,
        link: torch.device,
    ) -> None:
        """``modules``: the stages of this rank, ``indices`` which they are; ``link``: the device from which is sent."""
        self._modules, self._group, self._link = dict(zip(indices, modules)), group, link
        self._owners = {name: stage for name, stage, is_computed in found.written_buffers() if is_computed}
        num_ranks = dist.get_world_size(group)
        self._rank_of = {
            stage: rank
            for rank in range(num_ranks)
            for stage in schedule.stages_of_rank(rank, num_ranks=num_ranks, num_stages=found.num_stages)
        }

    def share(self) -> None:
        """Give every stage that has one what its own stage has. Collective: all ranks of the pipeline."""
        if not self._owners:
            return
        me = dist.get_rank(self._group)
        mine = {name: self._look_of(name) for name in self._owners if any(True for _ in self._places(name))}
        every: list[dict[str, Any]] = [mine] * dist.get_world_size(self._group)
        dist.all_gather_object(every, mine, group=self._group)
        for name, stage in self._owners.items():
            owner = self._rank_of[stage]
            ranks = (owner, *(rank for rank, names in enumerate(every) if name in names and rank != owner))
            if me not in ranks:
                continue
            shape, dtype = every[owner][name]
            own = self._own(name) if me == owner else None
            sent = torch.empty(shape, dtype=dtype, device=self._link) if own is None else own.detach().to(self._link)
            if len(ranks) > 1:
                send_first(sent, ranks, self._group, self._link)
            for part, key in self._places(name):
                if part._buffers[key] is not own:
                    part._buffers[key] = sent.to(part._buffers[key].device, copy=True)  # type: ignore[union-attr]

    def _places(self, name: str) -> Iterator[tuple[nn.Module, str]]:
        """Where the stages of this rank have it."""
        path, _, key = name.rpartition(".")
        for module in self._modules.values():
            part = dict(module.named_modules()).get(path)
            if part is not None and part._buffers.get(key) is not None:
                yield part, key

    def _own(self, name: str) -> Tensor:
        return self._modules[self._owners[name]].get_buffer(name)

    def _look_of(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        is_own = self._owners[name] in self._modules
        tensor = self._own(name) if is_own else next(part._buffers[key] for part, key in self._places(name))
        assert tensor is not None
        return tuple(tensor.shape), tensor.dtype
