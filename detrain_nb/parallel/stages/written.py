"""Buffers that several stages have, and that a forward writes: what the stage has that writes it last is right."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..operator_graph import TensorLook
from .splitter import Split
from .tied import send_first

__all__ = ["WrittenBuffers"]

Place = tuple[nn.Module, str]


class WrittenBuffers:
    """Behind a training step other stages have what came of zeros in their place, or what was not written at all."""

    def __init__(
        self,
        found: Split,
        modules: Sequence[nn.Module],
        indices: Sequence[int],
        group: dist.ProcessGroup,
        rank_of: Mapping[int, int],
        *,
        link: torch.device,
    ) -> None:
        """``modules``: the stages of this rank, ``indices`` which they are; the rest as of `TiedParameters`."""
        self._modules, self._group, self._link = dict(zip(indices, modules)), group, link
        self._owners, self._rank_of = found.written_buffers(), rank_of

    def share(self) -> None:
        """Give every stage that has one what its own stage has. Collective: all ranks of the pipeline."""
        if not self._owners:
            return
        me, places = dist.get_rank(self._group), self._places()
        mine = {name: TensorLook.of(part._buffers[key]) for name, ((part, key), *_) in places.items()}
        every: list[dict[str, Any]] = [mine] * dist.get_world_size(self._group)
        dist.all_gather_object(every, mine, group=self._group)
        for name, stage in self._owners.items():
            owner = self._rank_of[stage]
            ranks = (owner, *(rank for rank, names in enumerate(every) if name in names and rank != owner))
            if me not in ranks:
                continue
            own = self._modules[stage].get_buffer(name) if me == owner else None
            others = [(part, key) for part, key in places[name] if part._buffers[key] is not own]
            if len(ranks) == 1 and not others:
                continue
            look: TensorLook = every[owner][name]
            made = torch.empty(look.shape, dtype=look.dtype, device=self._link) if own is None else own.detach()
            sent = made.to(self._link)
            if len(ranks) > 1:
                send_first(sent, ranks, self._group, self._link)
            for part, key in others:
                part._buffers[key] = sent.to(part._buffers[key].device, copy=True)  # type: ignore[union-attr]

    def _places(self) -> dict[str, list[Place]]:
        """Where the stages of this rank have them, by name: first where it is written last."""
        places: dict[str, list[Place]] = {}
        for index, module in self._modules.items():
            for path, part in module.named_modules(remove_duplicate=False):
                for key, buffer in part._buffers.items():
                    name = f"{path}.{key}" if path else key
                    if buffer is not None and name in self._owners:
                        at = 0 if self._owners[name] == index else len(places.get(name, ()))
                        places.setdefault(name, []).insert(at, (part, key))
        return places
