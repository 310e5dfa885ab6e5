"""Optimizers and learning rates by name; an object of the user's own is taken as it is."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from ..errors import SpecError

__all__ = ["SCHEDULES", "make_optimizer", "make_scheduler"]

SCHEDULES = ("constant", "linear", "cosine", "wsd")


def make_optimizer(
    optimizer: str | Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer],
    parameters: Iterable[nn.Parameter],
    **options: Any,
) -> Optimizer:
    """Return an optimizer over ``parameters``: one of torch.optim by its name ("adamw"), or what a function makes.

    ``options``: torch's own, such as ``lr`` and ``weight_decay``. Raises: SpecError.
    """
    parameters = list(parameters)
    if isinstance(optimizer, Optimizer):
        known = set(map(id, parameters))
        if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
            raise SpecError("the optimizer has parameters of another model: make it of those that the laid out one has")
        if options:
            raise SpecError(f"{', '.join(options)} were given beside an optimizer that is made already: set them there")
        return optimizer
    given: Any = parameters or [{"params": []}]  # a stage without parameters has an optimizer too
    if not isinstance(optimizer, str):
        return optimizer(given, **options)
    kinds = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    if optimizer.lower() not in kinds:
        near = difflib.get_close_matches(optimizer.lower(), kinds, n=1, cutoff=0.3)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise SpecError(f"there is no optimizer {optimizer!r} in torch.optim{hint}")
    try:
        if optimizer.lower() == "lbfgs":
            raise SpecError("LBFGS asks for the loss again within its step, which a Trainer does not give: use another")
        return kinds[optimizer.lower()](given, **options)
    except SpecError:
        raise
    except (TypeError, ValueError) as exc:
        raise SpecError(f"optimizer {optimizer!r} with {options}: {exc}") from exc


def make_scheduler(
    scheduler: str | Any | None,
    optimizer: Optimizer,
    *,
    steps: int,
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    min_ratio: float = 0.0,
) -> Any:
    """Return a scheduler of the learning rate, one step for each of the optimizer's, or None.

    ``scheduler``: a name, an object, or a function of the optimizer. The named ones rise over ``warmup_steps``; then
    "constant" stays, "linear" and "cosine" fall to ``min_ratio`` of the rate at ``steps``, and "wsd" stays and falls
    linearly over the last ``decay_steps``, by default a fifth of ``steps``. Raises: SpecError.
    """
    if scheduler is None and warmup_steps == 0:
        return None
    if scheduler is not None and not isinstance(scheduler, str):
        made = scheduler(optimizer) if inspect.isclass(scheduler) or not hasattr(scheduler, "step") else scheduler
        if isinstance(made, ReduceLROnPlateau):
            raise SpecError("ReduceLROnPlateau goes by evaluations, and ours by steps: step it in a Callback of yours")
        if getattr(made, "optimizer", optimizer) is not optimizer:
            raise SpecError("the scheduler is of another optimizer: give a function of it, or the optimizer itself too")
        return made
    name = (scheduler or "constant").lower()
    if name not in SCHEDULES:
        raise SpecError(f"there is no scheduler {scheduler!r}: choose one of {', '.join(SCHEDULES)}, or give an object")
    falling = steps - warmup_steps if name in ("linear", "cosine") else 0
    if name == "wsd":
        falling = steps // 5 if decay_steps is None else decay_steps
    if warmup_steps < 0 or falling < 0 or warmup_steps + falling > steps:
        raise SpecError(f"{warmup_steps} steps of warm-up and {falling} of decay do not fit into {steps} steps")

    def ratio(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if not falling or step < steps - falling:
            return 1.0
        done = min(1.0, (step - (steps - falling)) / falling)
        left = 0.5 * (1 + math.cos(math.pi * done)) if name == "cosine" else 1 - done
        return min_ratio + (1 - min_ratio) * left

    return LambdaLR(optimizer, ratio)
