"""Optimizers and learning rate schedulers by name; a user's own object is used as it is."""

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
from ..plan.choices import SCHEDULERS
from .arguments import number_of, whole_number


def make_optimizer(
    optimizer: str | Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer],
    parameters: Iterable[nn.Parameter],
    **options: Any,
) -> Optimizer:
    """Return an optimizer over ``parameters``: one of torch.optim by its name ("adamw"), or the result of a function.

    ``options``: torch's own, such as ``lr`` and ``weight_decay``. Raises: SpecError for an unknown name or option, for
    an optimizer of other parameters, and for LBFGS.
    """
    parameters = list(parameters)
    if isinstance(optimizer, torch.optim.LBFGS):
        raise SpecError(_NO_LBFGS)
    if isinstance(optimizer, Optimizer):
        known = set(map(id, parameters))
        if any(id(parameter) not in known for group in optimizer.param_groups for parameter in group["params"]):
            raise SpecError(
                "the optimizer has parameters of another model: create it after parallelize, from its result"
            )
        if options:
            raise SpecError(f"{', '.join(options)} do not apply to an existing optimizer: set them where it is created")
        return optimizer
    if not isinstance(optimizer, str) and not callable(optimizer):
        raise SpecError(
            f"optimizer={str(optimizer)[:60]!r} is a {type(optimizer).__name__}: give a name, such as 'adamw', or a "
            "function of the parameters, such as torch.optim.AdamW"
        )
    given: Any = parameters or [{"params": []}]  # a stage without parameters has an optimizer too
    if not isinstance(optimizer, str):
        return _made_by_function(optimizer, given, options)
    kinds = {
        name.lower(): kind
        for name, kind in vars(torch.optim).items()
        if inspect.isclass(kind) and issubclass(kind, Optimizer) and kind is not Optimizer
    }
    if optimizer.lower() not in kinds:
        near = difflib.get_close_matches(optimizer.lower(), kinds, n=1, cutoff=0.3)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise SpecError(f"there is no optimizer {optimizer!r} in torch.optim{hint}")
    if optimizer.lower() == "lbfgs":
        raise SpecError(_NO_LBFGS)
    try:
        return kinds[optimizer.lower()](given, **options)
    except (TypeError, ValueError) as exc:
        raise SpecError(f"optimizer {optimizer!r} with {options}: {exc}") from exc


def _made_by_function(make: Callable[..., Any], parameters: Any, options: dict[str, Any]) -> Optimizer:
    is_class = inspect.isclass(make) and issubclass(make, Optimizer)
    try:
        made = make(parameters, **options)
    except (TypeError, ValueError) as exc:
        if not is_class:  # an error of the user's own
            raise
        raise SpecError(f"optimizer {make.__name__} with {options}: {exc}") from exc
    if not isinstance(made, Optimizer):
        name = getattr(make, "__name__", type(make).__name__)
        raise SpecError(f"optimizer: {name} returned a {type(made).__name__}, not a torch.optim.Optimizer")
    if isinstance(made, torch.optim.LBFGS):
        raise SpecError(_NO_LBFGS)
    return made


_NO_LBFGS = "LBFGS evaluates the loss again within its step, which a Trainer does not support: use another optimizer"


def make_scheduler(
    scheduler: str | Any | None,
    optimizer: Optimizer,
    *,
    steps: int,
    warmup_steps: int = 0,
    decay_steps: int | None = None,
    min_ratio: float = 0.0,
    **others: Any,
) -> Any:
    """Return a learning rate scheduler that steps once per optimizer step, or None.

    ``scheduler``: a name, an object, or a function of the optimizer. The named ones rise over ``warmup_steps``; then
    "constant" stays, "linear" and "cosine" fall to ``min_ratio`` of the rate at ``steps``, and "wsd" stays and falls
    linearly over the last ``decay_steps``, by default a fifth of ``steps``. Raises: SpecError for an
    unknown name or option, and when the phases do not fit into ``steps``.
    """
    if others:
        raise SpecError(
            f"unknown scheduler options {', '.join(others)}: choose from warmup_steps, decay_steps, min_ratio; for a "
            "scheduler of torch give an object, or a function of the optimizer"
        )
    warmup_steps, min_ratio = whole_number("warmup_steps", warmup_steps, least=0), _ratio(min_ratio)
    decay_steps = None if decay_steps is None else whole_number("decay_steps", decay_steps, least=0)
    is_named = scheduler is None or isinstance(scheduler, str)
    if not is_named and (warmup_steps or decay_steps is not None or min_ratio):
        raise SpecError("scheduler options apply only to a scheduler given by name: set them where yours is created")
    if not is_named:
        return _made_scheduler(scheduler, optimizer)
    name = (scheduler or "constant").lower()
    if name not in SCHEDULERS:
        there = ", ".join(SCHEDULERS)
        raise SpecError(f"there is no scheduler {scheduler!r}: choose one of {there}, or give an object")
    if decay_steps is not None and name != "wsd":
        raise SpecError(f"decay_steps={decay_steps} applies only to 'wsd', but the scheduler is {scheduler!r}")
    if scheduler is None and warmup_steps == 0:
        return None
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


def _ratio(value: Any) -> float:
    """Return ``value`` as a float. Raises: SpecError unless it is from 0 to 1."""
    number = number_of(value)
    if number is None or not 0 <= number <= 1:
        raise SpecError(f"min_ratio={value!r}: give a fraction of the rate, from 0 to 1")
    return number


def _made_scheduler(scheduler: Any, optimizer: Optimizer) -> Any:
    """Return an object as it is, or the result of a class or function of the optimizer. Raises: SpecError."""
    made = scheduler
    name = getattr(scheduler, "__name__", type(scheduler).__name__)
    if inspect.isclass(scheduler) or not hasattr(scheduler, "step"):
        if not callable(scheduler):
            raise SpecError(
                f"scheduler={str(scheduler)[:60]!r} is a {name}: choose one of {', '.join(SCHEDULERS)}, or give a "
                "function of the optimizer"
            )
        try:
            made = scheduler(optimizer)
        except TypeError as exc:
            if not inspect.isclass(scheduler):  # an error of the user's own
                raise
            raise SpecError(f"{exc}: give a function, scheduler=lambda optimizer: {name}(optimizer, ...)") from exc
    if not hasattr(made, "step") or not hasattr(made, "state_dict"):
        raise SpecError(f"scheduler: {name} returned a {type(made).__name__}, not a scheduler with step and state_dict")
    if isinstance(made, ReduceLROnPlateau):
        raise SpecError("ReduceLROnPlateau steps per evaluation, not per optimizer step: step it in your own Callback")
    if getattr(made, "optimizer", optimizer) is not optimizer:
        raise SpecError(
            "the scheduler belongs to another optimizer: pass that one as optimizer= too, or give a function of it"
        )
    return made
