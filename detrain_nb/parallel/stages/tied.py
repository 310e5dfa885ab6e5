"""Parameters that several stages of a model have: one value everywhere, and the sum of all their gradients.

Their ranks say it to each other by messages within the pipeline's group. A group of these ranks alone would have to be
made by all ranks of the job: torch names those that are not by a count in which ranks differ, and then they hang.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...errors import SpecError
from ..replicated import local_part
from .splitter import Split

__all__ = ["TiedParameters", "send_first"]


@dataclass
class _Tied:
    """One of them: the ranks of ``group`` that have it, and what this one has, which is one of them."""

    name: str
    ranks: tuple[int, ...]
    copies: list[nn.Parameter]

    def add_up(self, earlier: Sequence[Tensor | None], group: dist.ProcessGroup, link: torch.device) -> None:
        """Give every copy the sum of all gradients, and what it had before. Collective: ``ranks``."""
        made = [copy.grad for copy in self.copies if copy.grad is not None]
        total = made[0].clone() if made else torch.zeros_like(self.copies[0])
        for grad in made[1:]:
            total.add_(grad)
        _sum_over(local_part(total), self.ranks, group, link)
        for copy, before in zip(self.copies, earlier):
            copy.grad = total.clone() if before is None else before.add_(total)


class TiedParameters:
    """Those of this rank's stages that other stages have too; sharding makes copies of them within a rank as well."""

    def __init__(
        self,
        found: Split,
        modules: Sequence[nn.Module],
        group: dist.ProcessGroup,
        rank_of: Mapping[int, int],
        *,
        link: torch.device,
    ) -> None:
        """Give them the values that the lowest of their ranks has. Collective: all ranks of ``group``.

        ``rank_of``: by stage, which rank runs it; ``link``: the device from which they are sent.
        """
        self._group, self._link = group, link
        self._aliases = {name: found.aliases(name) for name in found.shared}
        self._ranks_of = {
            name: tuple(sorted({rank_of[stage] for stage in stages})) for name, stages in sorted(found.shared.items())
        }
        self._find(modules)
        for tied in self._tied:
            send_first(tied.copies[0].detach(), tied.ranks, group, link)

    def find_again(self, modules: Sequence[nn.Module]) -> None:
        """Take the parameters that ``modules`` have now: sharding has made others. Collective: all ranks of ``group``.

        Raises: SpecError where stages have laid one of them out differently.
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
                    f"{name!r} is used by several stages, which lay it out as {', '.join(layouts)}: replicate it in "
                    "the tensor plan, or cut the model so that one stage has it"
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
        """Whether an earlier stage or rank has it too."""
        return id(parameter) in self._of_earlier

    @contextlib.contextmanager
    def added_up(self) -> Iterator[None]:
        """Gradients that are made in the block are the sums over all stages behind it; earlier ones are added once."""
        trained = [tied for tied in self._tied if tied.copies[0].requires_grad]
        before = [[copy.grad for copy in tied.copies] for tied in trained]
        for tied in trained:
            for copy in tied.copies:
                copy.grad = None
        try:
            yield
        except BaseException:  # what there was before is not lost with what failed
            for tied, earlier in zip(trained, before):
                for copy, grad in zip(tied.copies, earlier):
                    copy.grad = grad
            raise
        for tied, earlier in zip(trained, before):
            tied.add_up(earlier, self._group, self._link)


def send_first(tensor: Tensor, ranks: Sequence[int], group: dist.ProcessGroup, link: torch.device) -> None:
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
    """Make ``tensor`` the sum over ``ranks``, which is bit for bit the same on all of them."""
    first, *others = ranks
    if dist.get_rank(group) == first:
        received = torch.empty_like(tensor, device=link)
        for other in others:
            dist.recv(received, group=group, group_src=other)
            tensor.add_(received.to(tensor.device))
    else:
        dist.send(tensor.to(link), group=group, group_dst=first)
    send_first(tensor, ranks, group, link)
