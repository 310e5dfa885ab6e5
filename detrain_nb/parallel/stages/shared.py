"""State that several stages share: tied parameters, with one value and the sum of all their gradients; and buffers.

Their ranks exchange it by messages within the pipeline's group. A group of only these ranks would have to be created by
all ranks of the job: torch names groups by a counter, which would differ between ranks, so they would hang.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...errors import SpecError
from ..operator_graph import TensorLook
from ..replicated import local_part
from .splitter import Split

Place = tuple[nn.Module, str]


@dataclass
class _Tied:
    """One tied parameter: the ranks of ``group`` that have it, of which this is one, and the copies on this rank."""

    name: str
    ranks: tuple[int, ...]
    copies: list[nn.Parameter]

    def add_up(self, earlier: Sequence[Tensor | None], group: dist.ProcessGroup, link: torch.device) -> None:
        """Add the sum of all gradients to what every copy had before. Collective: ``ranks``."""
        made = [copy.grad for copy in self.copies if copy.grad is not None]
        total = made[0].clone() if made else torch.zeros_like(self.copies[0])
        for grad in made[1:]:
            total.add_(grad)
        _sum_over(local_part(total), self.ranks, group, link)
        for copy, before in zip(self.copies, earlier):
            copy.grad = total.clone() if before is None else before.add_(total)


class TiedParameters:
    """Parameters of this rank's stages that other stages have too; sharding also copies them within a rank."""

    def __init__(
        self,
        found: Split,
        modules: Sequence[nn.Module],
        group: dist.ProcessGroup,
        rank_of: Mapping[int, int],
        *,
        link: torch.device,
    ) -> None:
        """Give the parameters the values that the lowest of their ranks has. Collective: all ranks of ``group``.

        ``rank_of``: the rank that runs each stage; ``link``: the device from which tensors are sent.
        """
        self._group, self._link = group, link
        self._aliases = {name: found.aliases(name) for name in found.shared}
        self._ranks_of = {
            name: tuple(sorted({rank_of[stage] for stage in stages})) for name, stages in sorted(found.shared.items())
        }
        self._find(modules)
        for tied in self._tied:
            _send_first(tied.copies[0].detach(), tied.ranks, group, link)

    def find_again(self, modules: Sequence[nn.Module]) -> None:
        """Take the parameters that ``modules`` have now, as sharding replaces them. Collective: all ranks of ``group``.

        Raises: SpecError if stages lay out a parameter differently.
        """
        self._find(modules)
        mine = [
            (tied.name, str(copy.placements) if isinstance(copy, DTensor) else "whole")
            for tied in self._tied
            for copy in tied.copies
        ]
        every = [mine] * dist.get_world_size(self._group)
        dist.all_gather_object(every, mine, group=self._group)
        for name in self._ranks_of:
            layouts = sorted({layout for pairs in every for other, layout in pairs if other == name})
            if len(layouts) > 1:
                raise SpecError(
                    f"{name!r} is used by several stages with different layouts ({', '.join(layouts)}): replicate it "
                    "in the tensor plan, or cut the model so that only one stage has it"
                )

    def _find(self, modules: Sequence[nn.Module]) -> None:
        me = dist.get_rank(self._group)
        own = [(name, parameter) for module in modules for name, parameter in module.named_parameters()]
        self._tied: list[_Tied] = []
        self._of_earlier: set[int] = set()
        for name, ranks in self._ranks_of.items():
            if me in ranks:
                copies = list({id(p): p for alias, p in own if alias in self._aliases[name]}.values())
                self._tied.append(_Tied(name, ranks, copies))
                self._of_earlier.update(map(id, copies[1:] if me == ranks[0] else copies))

    def is_of_earlier(self, parameter: nn.Parameter) -> bool:
        """Return whether an earlier stage or rank has the parameter too."""
        return id(parameter) in self._of_earlier

    @contextlib.contextmanager
    def added_up(self) -> Iterator[None]:
        """Sum gradients made in the block over all stages, when it is left; earlier gradients are added once."""
        trained = [tied for tied in self._tied if tied.copies[0].requires_grad]
        before = [[copy.grad for copy in tied.copies] for tied in trained]
        for tied in trained:
            for copy in tied.copies:
                copy.grad = None
        try:
            yield
        except BaseException:  # keep the earlier gradients if the block fails
            for tied, earlier in zip(trained, before):
                for copy, grad in zip(tied.copies, earlier):
                    copy.grad = grad
            raise
        for tied, earlier in zip(trained, before):
            tied.add_up(earlier, self._group, self._link)


class WrittenBuffers:
    """Buffers that several stages have and a forward writes: the copy of the stage that writes it last is right.

    After a training step, other stages have values computed from zeros, or unwritten values.
    """

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
        """Take ``modules``, the stages ``indices`` of this rank; for the rest see `TiedParameters`."""
        self._modules, self._group, self._link = dict(zip(indices, modules)), group, link
        self._owners, self._rank_of = found.written_buffers(), rank_of

    def share(self) -> None:
        """Give every stage that has such a buffer the owner stage's values. Collective: all ranks of the pipeline."""
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
                _send_first(sent, ranks, self._group, self._link)
            for part, key in others:
                part._buffers[key] = sent.to(part._buffers[key].device, copy=True)  # type: ignore[union-attr]

    def _places(self) -> dict[str, list[Place]]:
        """Return where this rank's stages have the buffers, by name: the stage that writes it last first."""
        places: dict[str, list[Place]] = {}
        for index, module in self._modules.items():
            for path, part in module.named_modules(remove_duplicate=False):
                for key, buffer in part._buffers.items():
                    name = f"{path}.{key}" if path else key
                    if buffer is not None and name in self._owners:
                        at = 0 if self._owners[name] == index else len(places.get(name, ()))
                        places.setdefault(name, []).insert(at, (part, key))
        return places


def _send_first(tensor: Tensor, ranks: Sequence[int], group: dist.ProcessGroup, link: torch.device) -> None:
    """Give ``tensor`` on all ``ranks`` the value of the first of them. Collective: ``ranks``."""
    first, *others = ranks
    sent = tensor.to(link)
    if dist.get_rank(group) == first:
        for other in others:
            dist.send(sent, group=group, group_dst=other)
    else:
        dist.recv(sent, group=group, group_src=first)
        tensor.copy_(sent)


def _sum_over(tensor: Tensor, ranks: Sequence[int], group: dist.ProcessGroup, link: torch.device) -> None:
    """Replace ``tensor`` by the sum over ``ranks``, bit for bit equal on all of them. Collective: ``ranks``."""
    first, *others = ranks
    if dist.get_rank(group) == first:
        received = torch.empty_like(tensor, device=link)
        for other in others:
            dist.recv(received, group=group, group_src=other)
            tensor.add_(received.to(tensor.device))
    else:
        dist.send(tensor.to(link), group=group, group_dst=first)
    _send_first(tensor, ranks, group, link)
