"""The scores of an evaluation: sums and sample counts, added over batches and ranks before they are divided."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..errors import SpecError
from ..parallel import ParallelModel

Score = Callable[[Any, Any], dict[str, tuple[Tensor, Tensor]]]


class Scores:
    """The scores of one evaluation, on the ranks of the last stage; ``over_all`` returns them on every rank."""

    def __init__(self, model: ParallelModel) -> None:
        self._model = model
        self._sums: dict[str, Tensor] = {}

    def add(self, output: Any, target: Any, score: Score, *, rows: int) -> None:
        """Count one batch of ``rows`` rows, without gradients."""
        with torch.no_grad(), self._model.surroundings():
            found = _pairs(score(output, target))
            if self._model.objective.loss is not None:
                found = {"loss": self._model.objective.sums(output, target, rows=rows), **found}
            for name, (total, count) in found.items():
                each = (torch.as_tensor(value, device=self._model.device).double() for value in (total, count))
                pair = torch.stack(list(each))
                self._sums[name] = self._sums[name] + pair if name in self._sums else pair

    def over_all(self) -> dict[str, float]:
        """Return sums over counts of all samples. Collective: all ranks of the model. Raises: SpecError without any."""
        group = self._model.pipeline_group
        names = sorted(set().union(*self._model.gather(list(self._sums))))
        if not names:
            raise SpecError("the evaluation has no scores: it had no batches, or no loss and an empty score()")
        table = torch.stack(
            [self._sums.get(name, torch.zeros(2, dtype=torch.float64, device=self._model.device)) for name in names]
        )
        if self._model.is_last:
            self._model.objective.add_up(table)
        if group is not None:
            table = table.to(self._model.link_device)
            dist.all_reduce(table, group=group)
        return {name: float(total / count) for name, (total, count) in zip(names, table)}


def _pairs(found: Any) -> dict[str, tuple[Any, Any]]:
    """Check what ``score`` returned. Raises: SpecError when it is not a dict of (sum, count)."""
    if not isinstance(found, dict):
        raise SpecError(f"score returned a {type(found).__name__}, not a dict of (sum, count) by name")
    for name, pair in found.items():
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise SpecError(f"score returned {pair!r} for {name!r}: return (sum, count), both over the batch")
    return found


def count_right(output: Any, target: Any, *, ignored: int = -100) -> dict[str, tuple[Tensor, Tensor]]:
    """Return the accuracy of ``output``, with a number for each class in its last dimension, for classes ``target``.

    Classes may also be in dimension 1, as for torch's cross entropy. The result is empty when the shapes do not fit.
    """
    if not isinstance(output, Tensor) or not isinstance(target, Tensor) or target.is_floating_point():
        return {}
    if output.dim() < 2 or 1 in (output.shape[-1], output.shape[1]):
        return {}  # no classes to choose from
    scores = output.full_tensor() if isinstance(output, DTensor) else output
    if scores.shape[:-1] == target.shape:
        guessed = scores.argmax(-1)
    elif scores.dim() == target.dim() + 1 and (scores.shape[:1] + scores.shape[2:]) == target.shape:
        guessed = scores.argmax(1)
    else:
        return {}
    counted = target != ignored
    return {"accuracy": (((guessed == target) & counted).sum(), counted.sum())}
