"""One batch on its way through a model: its parts, and losses weighed so that they add up to the whole batch's."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from ..errors import SpecError
from .costs.profiler import count_rows
from .mesh import replica_number
from .tensor.apply import loss_on_parts

__all__ = ["Loss", "Objective", "Passage", "cut_batch", "rows_of"]

Loss = Callable[[Any, Any], Tensor]


class Objective:
    """A loss, and how much each part of a batch counts in it: here, and on the replicas that have other data."""

    def __init__(
        self,
        loss: Loss | None,
        weight_of: Callable[[Any], Tensor | float] | None = None,
        *,
        replicas: Sequence[dist.ProcessGroup] = (),
        device: torch.device | str = "cpu",
        is_in_parts: bool = False,
    ) -> None:
        """``weight_of(target)``: how much counts there, by default rows, or targets that are not ``ignore_index``.

        ``replicas``: this rank's group on each axis of the mesh along which ranks have other data. ``is_in_parts``: of
        the model's output each rank has its part of the classes.
        """
        self.loss = loss
        self.compute = loss_on_parts(loss) if is_in_parts and loss is not None else loss
        self._weight_of = weight_of or _usual_weight(loss)
        reduction = _option(loss, "reduction") or "mean"
        if reduction == "none":
            raise SpecError(
                "the loss gives a number for each target (reduction='none'): give one that adds or averages"
            )
        self._is_sum = reduction == "sum"
        self.ignore_index: int | None = _ignored_by(loss)
        self.replicas = replicas
        self.num_replicas = math.prod(dist.get_world_size(group) for group in replicas)
        self._device = device

    @property
    def replica(self) -> int:
        """This rank's number among them."""
        return replica_number(self.replicas)

    def weigh(self, targets: Sequence[Any]) -> list[Tensor | float]:
        """Return what the loss of each part counts. Gradients of replicas are averaged later: hence their number here.

        Collective: the replicas.
        """
        if self._is_sum:
            return [float(self.num_replicas)] * len(targets)
        if not any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves(targets[0])):
            return [1.0 / len(targets)] * len(targets)
        found = [self._weight_of(target) for target in targets]
        numbers = [each for each in found if isinstance(each, float)]
        if len(numbers) == len(found) and not self.replicas:
            whole_number = math.fsum(numbers)
            return [each / whole_number if whole_number > 0 else 0.0 for each in numbers]
        counts = [torch.as_tensor(each, device=self._device).double() for each in found]
        whole = self._sum_over_replicas(torch.stack(counts).sum())
        return [torch.where(whole > 0, each * self.num_replicas / whole, 0.0).float() for each in counts]

    def sums(self, output: Any, target: Any) -> tuple[Tensor, Tensor]:
        """Return the loss of one part, as a sum over what counts in it, and how much that is; without gradients.

        Of a loss that is a sum, rows count.
        """
        assert self.compute is not None
        has_rows = any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves(target))
        weight = torch.as_tensor(self._weight_of(target) if has_rows else 1.0).detach().float()
        loss = self.compute(output, target).detach()
        loss = (loss.full_tensor() if isinstance(loss, DTensor) else loss).float()
        weight = weight.to(loss.device)
        return torch.where(weight > 0, loss if self._is_sum else loss * weight, 0.0), weight

    def over_replicas(self, loss: Tensor | None) -> Tensor | None:
        """Return the loss of the whole batch from that of this rank's part, as it was weighed. Collective: replicas."""
        if loss is None or not self.replicas:
            return loss
        return (self._sum_over_replicas(loss) / self.num_replicas).to(loss.dtype)

    def common_rows(self, rows: int) -> int:
        """Return what divides the rows of every replica: in as many parts all of them are cut, or shards would wait.

        Collective: the replicas.
        """
        for group in self.replicas:
            mine = torch.tensor([rows], device=self._device)
            every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(every, mine, group=group)
            rows = math.gcd(*(int(each) for each in every))
        return rows

    def add_up(self, tensor: Tensor) -> Tensor:
        """Add a tensor up over the replicas, in place. Collective: the replicas."""
        for group in self.replicas:
            dist.all_reduce(tensor, group=group)
        return tensor

    def _sum_over_replicas(self, value: Tensor) -> Tensor:
        return self.add_up(value.detach().double().clone()) if self.replicas else value


def _option(loss: Loss | None, name: str) -> Any:
    """What a loss was made with: a module, or a function with some of its arguments."""
    return loss.keywords.get(name) if isinstance(loss, functools.partial) else getattr(loss, name, None)


def _ignored_by(loss: Loss | None) -> int | None:
    """The target that does not count in it, if there is one."""
    ignored: int | None = _option(loss, "ignore_index")
    inner = loss.func if isinstance(loss, functools.partial) else loss
    return -100 if ignored is None and inner in (F.cross_entropy, F.nll_loss) else ignored


def _usual_weight(loss: Loss | None) -> Callable[[Any], Tensor | float]:
    """How much counts in a target, for losses that leave some of it out, or weigh its classes; else its rows."""
    ignored, class_weights = _ignored_by(loss), _option(loss, "weight")
    if ignored is None:
        return lambda target: float(rows_of(target))

    def count(target: Any) -> Tensor:
        targets = next(leaf for leaf in tree_leaves(target) if isinstance(leaf, Tensor) and leaf.dim())
        if targets.is_floating_point():  # a share for each class
            return torch.tensor(float(rows_of(target)))
        counted = targets[targets != ignored]
        counts: Tensor = torch.ones_like(counted) if class_weights is None else class_weights[counted]
        return counts.sum()

    return count


class Passage:
    """One batch on its way: its parts, and what the last stage makes of them."""

    def __init__(
        self, parts: Sequence[Any], targets: Sequence[Any], weights: Sequence[Tensor | float], loss: Loss | None
    ) -> None:
        """Without ``weights`` outputs are kept, and no loss is made of them."""
        self.parts = parts
        self._targets = targets
        self._weights = weights
        self._loss = loss
        self._losses: dict[int, Tensor] = {}
        self._outputs: dict[int, Any] = {}

    @property
    def loss(self) -> Tensor | None:
        """Over all parts; None where no last stage is."""
        return torch.stack([loss.detach() for loss in self._losses.values()]).sum() if self._losses else None

    def output(self) -> Any:
        """Of all parts; None where no last stage is."""
        if not self._outputs:
            return None
        trees = [self._outputs[index] for index in range(len(self.parts))]
        return tree_map(lambda *leaves: torch.cat(leaves) if _has_rows(leaves[0]) else leaves[0], *trees)

    def take(self, index: int, output: Any) -> None:
        """What the model gave for a part; with a target the loss is what stays of it."""
        if not self._weights:
            self._outputs[index] = output
            return
        assert self._loss is not None
        weight = self._weights[index]
        if weight > 0:
            self._losses[index] = self._loss(output, self._targets[index]) * weight
        else:  # a mean of nothing, where all is ignored: its gradient would be no number
            leaves = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
            self._losses[index] = torch.stack([0.0 * leaf.nan_to_num().float().sum() for leaf in leaves]).sum()

    def weighted_loss(self, index: int) -> Tensor:
        return self._losses[index]


def rows_of(tree: Any) -> int:
    """The batch's size: the first dimension of the first tensor that has one. Raises: SpecError."""
    rows = count_rows(tree)
    if not rows:
        raise SpecError("a batch without rows, or without a tensor: there is nothing to cut into microbatches")
    return rows


def cut_batch(tree: Any, *, rows: int, count: int, shared: Collection[str] = ()) -> list[Any]:
    """``count`` equal parts; what does not have the batch's first dimension is in each.

    And so is what stands where ``shared`` says: a mask of (T, T), where T may be the number of rows too.
    """
    leaves, spec = tree_flatten(tree)
    is_of_batch = [isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == rows for leaf in leaves]
    if shared:
        places = [keystr(path) for path, _ in tree_flatten_with_path(tree)[0]]
        is_of_batch = [is_cut and place not in shared for is_cut, place in zip(is_of_batch, places)]
    size = rows // count
    return [
        tree_unflatten(
            [leaf.narrow(0, index * size, size) if is_cut else leaf for leaf, is_cut in zip(leaves, is_of_batch)], spec
        )
        for index in range(count)
    ]


def _has_rows(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.dim() > 0
