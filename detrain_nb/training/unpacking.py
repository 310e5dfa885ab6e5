"""What a loader yields, split into the model's input and the loss's target.

Dicts are handled as in transformers: the model is called with keywords, and the target is the entry `labels`, or the
like. The target stays in the call when the model computes the loss itself: from labels or, in models that answer
questions, from `start_positions`.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..errors import SpecError
from ..parallel import ParallelModel
from ..parallel.losses import Loss

TARGETS = ("labels", "label", "targets", "target", "y")
_MADE_OF = ("labels", "start_positions")  # a model of transformers that takes one of these computes its loss from it


def usual_loss(model: nn.Module) -> Loss | None:
    """Return `own_loss` for a model that takes labels or the like, as transformers' with a head do; else None."""
    return own_loss if any(name in _parameters(model) for name in _MADE_OF) else None


def own_loss(output: Any, target: Any) -> Tensor:
    """Return the loss that is in the output. Raises: SpecError when there is none."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise SpecError(
            "no loss was given, and the model's output has none: give loss=, a function of the output and the target, "
            "or a loader of dicts with the labels that the model takes"
        )
    return loss


def unpack(given: Any, model: ParallelModel) -> tuple[Any, Any]:
    """Split a pair or a dict into input and target. Raises: SpecError for another type or an unfit dict."""
    if isinstance(given, Mapping):
        call, target = _unpack_dict(dict(given), model)
        _require_taken(model, call)
        return call, target
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        size = f" of {len(given)}" if isinstance(given, (tuple, list)) else ""
        raise SpecError(
            f"the loader yielded {type(given).__name__}{size}, not a pair of inputs and target, or a dict of the "
            "model's arguments: override Trainer.unpack"
        )
    return given[0], given[1]


def inputs_of(given: Any, model: ParallelModel) -> Any:
    """Return the model's input from inputs alone, or from a dict that may have a target it does not take."""
    if not isinstance(given, Mapping):
        return given
    call, takes = dict(given), _parameters(model.modules[0])
    key = next((name for name in TARGETS if name in call), None)
    if key is not None and key not in takes and key not in (model.called_with or ()):
        del call[key]
    _require_taken(model, call)
    return call


def _unpack_dict(call: dict[str, Any], model: ParallelModel) -> tuple[dict[str, Any], Any]:
    takes = _parameters(model.modules[0])
    key = next((name for name in TARGETS if name in call), None)
    if key is None:
        _require_no_target(model, call)
        return call, None
    target = call.pop(key)
    if model.objective.loss is own_loss:  # as transformers' collators name it
        call["labels" if key == "label" and key not in takes else key] = target
    elif _is_of_call(key, model, takes):
        call[key] = target
    return call, target


def _is_of_call(key: str, model: ParallelModel, takes: Mapping[str, inspect.Parameter]) -> bool:
    """Return whether the model takes the target too: its example had it, or its forward requires it."""
    if model.called_with is not None:
        return key in model.called_with
    return key in takes and takes[key].default is inspect.Parameter.empty


def _require_no_target(model: ParallelModel, call: dict[str, Any]) -> None:
    """Check that the loss needs no target. Raises: SpecError when it does."""
    try:
        model.objective.require_target(None)
    except SpecError as exc:
        raise SpecError(
            f"the loader yielded a dict of {', '.join(call)}, without a target: name it {TARGETS[0]}, or "
            "override Trainer.unpack"
        ) from exc


def _require_taken(model: ParallelModel, call: dict[str, Any]) -> None:
    """Check that the model takes the whole dict. Raises: SpecError; torch's own error would not name the loader."""
    takes = _parameters(model.modules[0])
    is_stage = len(model.modules) > 1 or model.pipeline_group is not None
    if is_stage or not takes or any(each.kind == inspect.Parameter.VAR_KEYWORD for each in takes.values()):
        return
    if strange := [name for name in call if name not in takes]:
        raise SpecError(
            f"the loader yielded a dict with {', '.join(map(repr, strange))}, but the model takes {', '.join(takes)}: "
            "leave the others out in collate_fn, or override Trainer.unpack"
        )


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of its forward; none when they are unknown."""
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return {}
