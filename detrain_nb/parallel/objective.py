"""Losses of parts of a batch, weighted so that they add up to the whole batch's, over microbatches and replicas."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import SpecError
from .costs.profiler import count_rows
from .kept import random_state_kept
from .losses import Loss, name_of_torchs, require_loss, require_one_number, require_target_of, told
from .mesh import replica_number
from .microbatches import joined, plain, rows_of
from .operators import OperatorMode


class Objective:
    """A loss, and the weight of each part of a batch in it: on this rank, and on replicas with different data."""

    def __init__(
        self,
        loss: Loss | None,
        weight_of: Callable[[Any], Tensor | float] | None = None,
        *,
        replicas: Sequence[dist.ProcessGroup] = (),
        device: torch.device | str = "cpu",
        is_in_parts: bool = False,
    ) -> None:
        """Note the loss and its weights.

        ``weight_of(target)``: the weight of a part; by default its rows, or its targets other than ``ignore_index``.
        ``replicas``: this rank's group on each axis of the mesh along which ranks have different data. ``is_in_parts``:
        each rank has only its part of the classes in the model's output.
        Raises: SpecError.
        """
        require_loss(loss)
        self.loss = loss
        self.compute = loss_on_parts(loss) if is_in_parts and loss is not None else told(loss)
        self._weight_of = weight_of or _usual_weight(loss)
        self._has_own_weight = weight_of is not None
        reduction = _option(loss, "reduction") or "mean"
        if reduction == "none":
            raise SpecError(
                "the loss returns one number for each target (reduction='none'): use one that sums or averages"
            )
        self._is_sum = reduction == "sum"
        self._is_known = loss is None or self._is_sum or is_in_parts or bool(name_of_torchs(loss))
        self._one_row: tuple[Any, Any] | None = None  # output and target of the first part, if parts have one row
        self.ignore_index: int | None = _ignored_by(loss)
        self.replicas = replicas
        self.num_replicas = math.prod(dist.get_world_size(group) for group in replicas)
        self.replica = replica_number(replicas)  # this rank's number among them
        self._device = device

    def require_target(self, target: Any) -> None:
        """Raise SpecError if the loss cannot take the target: else only the last stage or the backward would fail."""
        if target is None and self._has_own_weight:
            raise SpecError("loss_weight needs a target, but there is none: pass it with the batch, on every rank")
        if name := name_of_torchs(self.loss):
            require_target_of(name, target)

    def weigh(self, targets: Sequence[Any]) -> list[float]:
        """Return the weight of each part's loss, times the number of replicas, over which gradients are averaged later.

        Collective: the replicas.
        """
        if self._is_sum:
            return [float(self.num_replicas)] * len(targets)
        if not any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves(targets[0])):
            return [1.0 / len(targets)] * len(targets)
        found = (self._weight_of(target) for target in targets)
        place = self._device if self.replicas else None  # None: each count's own device
        counts = torch.stack([torch.as_tensor(each, dtype=torch.double, device=place) for each in found])
        whole = float(self._sum_over_replicas(counts.sum()))
        return [each * self.num_replicas / whole if whole > 0 else 0.0 for each in counts.tolist()]

    def looker(self, num_parts: int) -> Callable[[Any, Any], None] | None:
        """Return a function that checks the loss by outputs and targets, or None if the loss is known, or of one part.

        It calls the loss again, on every replica, as the loss may be collective.
        """
        return None if self._is_known or num_parts * self.num_replicas == 1 else self._look

    def _look(self, output: Any, target: Any) -> None:
        """Warn of a loss that, for a batch, is not the mean of the losses of its parts."""
        given = (output, target)
        if self._is_known or any(isinstance(leaf, DTensor) for leaf in tree_leaves(given)):
            return
        rows = count_rows(target) or count_rows(output)
        if rows == 1 and self._one_row is None:
            self._one_row = given
            return
        if rows == 1:
            given, rows = tree_map(joined, self._one_row, given), 2
        self._is_known, self._one_row = True, None
        halves = slice(0, rows // 2), slice(rows // 2, rows)
        parts = [tree_map(functools.partial(_rows, rows=rows, part=part), given) for part in halves]
        try:
            with torch.no_grad(), random_state_kept(torch.device(self._device)):
                with _Collectives() as collectives:
                    again = require_one_number(self.compute(*given))
                whole = self.sums(*given, rows=rows)
                sums, weights = (torch.stack(each) for each in zip(*(self.sums(*part, rows=rows) for part in parts)))
        except Exception:  # noqa: BLE001 - it cannot be cut there: training shows it, or does not need it
            return
        found, expected = (float(total / weight) for total, weight in (whole, (sums.sum(), weights.sum())))
        rough = (leaf.dtype in _ROUGH for leaf in tree_leaves((again, given)) if isinstance(leaf, Tensor))
        is_rough = torch.is_autocast_enabled(torch.device(self._device).type) or any(rough)
        is_close = math.isclose(found, expected, rel_tol=2e-2 if is_rough else 2e-4, abs_tol=1e-7)
        is_random = not math.isclose(found, float(again), rel_tol=1e-6)
        is_gathered = collectives.are_met  # it covers the rows of all replicas: parts would cover others
        if is_close or is_random or is_gathered or self.replica or not math.isfinite(found - expected):
            return
        warnings.warn(
            f"the loss of a batch is not the mean of the losses of its parts: for {rows} rows it is {found:.5g}, from "
            f"their two halves {expected:.5g}. Each microbatch and each replica computes its own loss, so training "
            "differs from training on one rank: pass loss_weight= if targets have unequal weights; if the loss "
            "compares rows, keep them together (num_microbatches=1, and no dp axis)",
            stacklevel=2,
        )

    def sums(self, output: Any, target: Any, *, rows: int) -> tuple[Tensor, Tensor]:
        """Return the loss of one part as a weighted sum, and its weight; without gradients.

        If the loss is a sum or ignores the target, the weight is the number of rows.
        """
        assert self.compute is not None
        has_rows = any(isinstance(leaf, Tensor) and leaf.dim() for leaf in tree_leaves(target))
        weight = torch.as_tensor(self._weight_of(target) if has_rows else rows).detach().float()
        loss = plain(require_one_number(self.compute(output, target)).detach()).float()
        weight = weight.to(loss.device)
        return torch.where(weight > 0, loss if self._is_sum else loss * weight, 0.0), weight

    def over_replicas(self, loss: Tensor | None) -> Tensor | None:
        """Return the loss of the whole batch from the weighted losses of all replicas. Collective: the replicas."""
        if loss is None or not self.replicas:
            return loss
        return (self._sum_over_replicas(loss) / self.num_replicas).to(loss.dtype)

    def common_rows(self, rows: int) -> int:
        """Return the greatest common divisor of all replicas' rows: unequal numbers of parts would deadlock the shards.

        Collective: the replicas.
        """
        for group in self.replicas:
            mine = torch.tensor([rows], device=self._device)
            every = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
            dist.all_gather(every, mine, group=group)
            rows = math.gcd(*(int(each) for each in every))
        return rows

    def add_up(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over the replicas, in place. Collective: the replicas."""
        for group in self.replicas:
            dist.all_reduce(tensor, group=group)
        return tensor

    def _sum_over_replicas(self, value: Tensor) -> Tensor:
        return self.add_up(value.detach().double().clone()) if self.replicas else value


class _Collectives(OperatorMode):
    """Mode that notes whether collectives run."""

    are_met = False

    def on_operator(self, func: Any, types: Sequence[type], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        self.are_met |= "c10d" in func.namespace
        return func(*args, **kwargs)


_ROUGH = (torch.bfloat16, torch.float16)


def _rows(leaf: Any, *, rows: int, part: slice) -> Any:
    return leaf[part] if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == rows else leaf


def _option(loss: Loss | None, name: str) -> Any:
    """Return an option that a loss was made with, as a module or a partial function."""
    return loss.keywords.get(name) if isinstance(loss, functools.partial) else getattr(loss, name, None)


def _ignored_by(loss: Loss | None) -> int | None:
    """Return the ``ignore_index`` of a loss, or None."""
    ignored: int | None = _option(loss, "ignore_index")
    inner = loss.func if isinstance(loss, functools.partial) else loss
    return -100 if ignored is None and inner in (F.cross_entropy, F.nll_loss) else ignored


def _usual_weight(loss: Loss | None) -> Callable[[Any], Tensor | float]:
    """Return the weight function for losses that ignore targets or weight classes; for others, the number of rows."""
    ignored, class_weights = _ignored_by(loss), _option(loss, "weight")
    if ignored is None:
        return lambda target: float(rows_of(target))

    def count(target: Any) -> Tensor:
        targets = next(leaf for leaf in tree_leaves(target) if isinstance(leaf, Tensor) and leaf.dim())
        if targets.is_floating_point():  # class probabilities
            return torch.tensor(float(rows_of(target)))
        if class_weights is None:
            return torch.count_nonzero(targets != ignored)
        counts: Tensor = class_weights[targets[targets != ignored]]
        return counts.sum()

    return count


def loss_on_parts(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap ``loss`` to give a clear error if it cannot use a model's output in parts (``loss_parallel``).

    Run it, and the backward pass, under ``torch.distributed.tensor.parallel.loss_parallel``. Raises: SpecError.
    """

    def run(output: Any, *target: Any) -> Tensor:
        if not isinstance(output, DTensor):
            return loss(output, *target)
        try:
            return loss(output, *target)
        except (RuntimeError, NotImplementedError) as exc:
            parts = f"{output.shape[-1]} classes over {output.device_mesh.size()} ranks"
            said = str(exc).strip().splitlines()[0]
            raise SpecError(
                f"the loss needs the whole output, but each rank has its part ({parts}): use cross entropy, under "
                f"torch's loss_parallel(), or plan without loss_parallel; torch reports: {said}"
            ) from exc

    return run
