"""What a loader gives: what the model is called with, and the loss's target.

Dicts are taken as transformers' users have them: the model is called with keywords, and the target is what is called
`labels`, or the like. It stays in the call where the model makes the loss itself: of labels, or, as those that answer
questions, of `start_positions`.
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
_MADE_OF = ("labels", "start_positions")  # a model of transformers that takes these makes its loss of them


def usual_loss(model: nn.Module) -> Loss | None:
    """`own_loss` of a model that is called with labels or the like, as transformers' with a head are; else None."""
    return own_loss if any(name in _parameters(model) for name in _MADE_OF) else None


def own_loss(output: Any, target: Any) -> Tensor:
    """The loss that is in the output. Raises: SpecError where none is."""
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if not isinstance(loss, Tensor):
        raise SpecError(
            "no loss was given, and the model has made none: give loss=, a function of the output and the target, or a "
            "loader of dicts with the labels that the model takes"
        )
    return loss


def unpack(given: Any, model: ParallelModel) -> tuple[Any, Any]:
    """Raises: SpecError for what is neither a pair nor a dict, or a dict that does not go with the model."""
    if isinstance(given, Mapping):
        call, target = _unpack_dict(dict(given), model)
        _require_taken(model, call)
        return call, target
    if not isinstance(given, (tuple, list)) or len(given) != 2:
        size = f" of {len(given)}" if isinstance(given, (tuple, list)) else ""
        raise SpecError(
            f"the loader gave {type(given).__name__}{size}, and not a pair of inputs and target, nor a dict of what "
            "the model takes: override Trainer.unpack"
        )
    return given[0], given[1]


def inputs_of(given: Any, model: ParallelModel) -> Any:
    """What the model is called with, of inputs alone, or of a dict that may have a target that it does not take."""
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
    if model.objective.loss is own_loss:  # as transformers' collators have it
        call["labels" if key == "label" and key not in takes else key] = target
    elif _is_of_call(key, model, takes):
        call[key] = target
    return call, target


def _is_of_call(key: str, model: ParallelModel, takes: Mapping[str, inspect.Parameter]) -> bool:
    """Whether the model is called with the target too: as in the example that it was laid out with, or it must be."""
    if model.called_with is not None:
        return key in model.called_with
    return key in takes and takes[key].default is inspect.Parameter.empty


def _require_no_target(model: ParallelModel, call: dict[str, Any]) -> None:
    """Raises: SpecError where the loss looks at a target."""
    try:
        model.objective.require_target(None)
    except SpecError as exc:
        raise SpecError(
            f"the loader gave a dict of {', '.join(call)}, and the target is none of them: call it {TARGETS[0]}, or "
            "override Trainer.unpack"
        ) from exc


def _require_taken(model: ParallelModel, call: dict[str, Any]) -> None:
    """Raises: SpecError, which names what the model does not take, before torch names nothing of the loader's."""
    takes = _parameters(model.modules[0])
    is_stage = len(model.modules) > 1 or model.pipeline_group is not None
    if is_stage or not takes or any(each.kind == inspect.Parameter.VAR_KEYWORD for each in takes.values()):
        return
    if strange := [name for name in call if name not in takes]:
        raise SpecError(
            f"the loader gave a dict with {', '.join(map(repr, strange))}, and the model takes {', '.join(takes)}: "
            "leave the others out in collate_fn, or override Trainer.unpack"
        )


def _parameters(module: nn.Module) -> Mapping[str, inspect.Parameter]:
    """Of its forward; none where nobody knows."""
    try:
        return inspect.signature(module.forward).parameters
    except (TypeError, ValueError):
        return {}
