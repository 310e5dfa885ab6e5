"""Checks of losses and of targets for torch's own losses, made before a batch is sent."""

from __future__ import annotations

import dis
import functools
import inspect
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves

from ..errors import SpecError
from .undo import contents_of

Loss = Callable[[Any, Any], Tensor]

_OF_CLASSES = {"cross_entropy", "nll_loss", "CrossEntropyLoss", "NLLLoss"}
_CLASS_NUMBERS = (torch.int64, torch.uint8)
_OF_NUMBERS = {
    *("huber_loss", "kl_div", "binary_cross_entropy", "binary_cross_entropy_with_logits"),
    *("HuberLoss", "KLDivLoss", "BCELoss", "BCEWithLogitsLoss"),
}
_SUBTRACTING = {"l1_loss", "L1Loss"}  # takes ints, as mse_loss does, but not bool
_BACKWARD_TAKES_ONE_DTYPE = {"huber_loss", "binary_cross_entropy", "HuberLoss", "BCELoss"}


def require_loss(loss: Any) -> None:
    """Raise SpecError if ``loss`` is not None and not a function of an output and a target."""
    if inspect.isclass(loss):
        raise SpecError(f"loss={loss.__name__} is a class: pass an instance, {loss.__name__}()")
    if loss is not None and not callable(loss):
        raise SpecError(
            f"loss={str(loss)[:40]!r} is a {type(loss).__name__}: pass a function of the output and the target, such "
            "as torch.nn.functional.cross_entropy"
        )


def require_one_number(loss: Any) -> Tensor:
    """Return the result of a loss function. Raises: SpecError when it is not a tensor with one number."""
    if not isinstance(loss, Tensor):
        raise SpecError(
            f"the loss function returned {type(loss).__name__}, not a tensor: return the number to minimize"
        )
    if loss.numel() != 1:
        raise SpecError(
            f"the loss function returned {loss.numel()} numbers (shape {tuple(loss.shape)}), not one: return their "
            ".mean()"
        )
    return loss


def require_no_parameters(loss: Any, model: nn.Module) -> None:
    """Raise SpecError if the loss has trainable parameters outside ``model``, whose gradients are never averaged."""
    own = {id(parameter) for parameter in model.parameters()}
    for name, parameter in _parameters_of(loss):
        if parameter.requires_grad and id(parameter) not in own:
            raise SpecError(
                f"the loss has a trainable parameter that is not in the model, {name}: its gradient would differ "
                "between replicas and exist only on the last stage; move it into the model and have the model return "
                "what the loss needs, or set requires_grad_(False) if it is not trained"
            )


def require_apart(loss: Any, model: nn.Module) -> None:
    """Raise SpecError if the loss refers to layers of ``model``: the last stage holds only its own.

    The loss would read outdated values of the other layers, and they would get no gradient from it.
    """
    names = {id(part): name for name, part in model.named_modules()}
    names |= {id(parameter): name for name, parameter in model.named_parameters()}
    for name, value in _led_to(loss):
        if id(value) in names:
            raise SpecError(
                f"the loss refers to the model itself ({name}: {names[id(value)] or type(model).__name__}), but the "
                "last stage, which computes the loss, holds only part of it: have the model return what the loss "
                "needs, and read plain numbers beforehand"
            )


def _parameters_of(loss: Any) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield the parameters that a loss can reach, through modules and closures, by their names in its code."""
    for name, value in _led_to(loss):
        if isinstance(value, nn.Parameter):
            yield name, value
        elif isinstance(value, nn.Module):
            yield from ((f"{type(value).__name__}.{own}", each) for own, each in value.named_parameters())


def _led_to(loss: Any) -> Iterator[tuple[str, Any]]:
    """Yield the parameters and modules that the code of a loss may use, by their names in that code."""
    waiting, met = [("loss", loss)], set[int]()
    while waiting:
        name, value = waiting.pop()
        if id(value) in met or str(getattr(value, "__module__", "")).startswith("torch.nn.functional"):
            continue
        met.add(id(value))
        if isinstance(value, nn.Parameter):
            yield name, value
        elif isinstance(value, nn.Module):
            yield name, value
            if name == "loss":
                yield from ((f"{name}.{own}", each) for own, each in value.named_modules() if own)
                yield from ((f"{name}.{own}", each) for own, each in value.named_parameters())
        elif isinstance(value, types.MethodType):
            waiting.append((name, value.__self__))
        elif isinstance(value, functools.partial):
            waiting += [(name, each) for each in (value.func, *value.args, *value.keywords.values())]
        elif isinstance(value, types.FunctionType):
            waiting += [(key, each) for key, each in _led_to_by(value)]
        elif isinstance(value, (list, tuple, dict)):
            waiting += [(name, each) for each in (value.values() if isinstance(value, dict) else value)]
        elif callable(value) and not isinstance(value, type) and type(value).__module__ != "builtins":
            waiting += [(f"{name}.{key}", each) for key, each in getattr(value, "__dict__", {}).items()]


def _led_to_by(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    """Yield what ``function`` finds by the names in its code; if it reads attributes of a module, the attribute."""
    cells = dict(zip(function.__code__.co_freevars, map(contents_of, function.__closure__ or ())))
    met: set[str] = set()
    for code in _codes_of(function.__code__):
        steps = [*dis.get_instructions(code), None, None, None]
        for place, step in enumerate(steps):
            known = function.__globals__ if step and step.opname in ("LOAD_GLOBAL", "LOAD_NAME") else cells
            if step is None or not step.opname.startswith(_LOADING) or step.argval not in known:
                continue
            met.add(step.argval)
            yield _attribute_of(step.argval, known[step.argval], steps[place + 1 :])
    yield from ((name, value) for name, value in cells.items() if name not in met)
    yield from (("loss", each) for each in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))


_LOADING = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_CLASSDEREF")


def _codes_of(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function and of all functions defined in it."""
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes_of(each)


def _attribute_of(name: str, value: Any, steps: Sequence[dis.Instruction | None]) -> tuple[str, Any]:
    for step in steps:
        if not isinstance(value, nn.Module) or step is None or step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
            break
        try:
            name, value = f"{name}.{step.argval}", getattr(value, step.argval)
        except Exception:  # noqa: BLE001 - missing so far, or its code fails: the loss may set it
            break
    return name, value


def name_of_torchs(loss: Any) -> str:
    """Return the name of a loss of torch's own, all of which check the target; "" for any other loss."""
    inner = loss.func if isinstance(loss, functools.partial) else loss
    is_torchs = isinstance(inner, nn.Module) and type(inner).__module__.startswith("torch.nn.")
    if not is_torchs and getattr(inner, "__module__", "") != F.__name__:
        return ""
    name: str = getattr(inner, "__name__", type(inner).__name__)
    return name


def require_target_of(name: str, target: Any) -> None:
    """Raise SpecError if the target is missing or its dtype is not accepted by the loss ``name``."""
    if target is None:
        raise SpecError(f"{name} needs a target, but there is none: pass it with the batch, on every rank")
    if not isinstance(target, Tensor):
        return
    dtype = str(target.dtype).removeprefix("torch.")
    is_share = target.is_floating_point() and (target.dim() > 1 or _adds_up_to_one(target))  # class probabilities
    if name in _OF_CLASSES and target.dtype not in _CLASS_NUMBERS and not is_share:
        other = ", or use a loss for numbers, such as mse_loss" if target.is_floating_point() else ""
        raise SpecError(f"{name} takes class indices, but the targets are {dtype}: pass target.long(){other}")
    takes_none_but_float = name in _OF_NUMBERS or name in _SUBTRACTING and target.dtype == torch.bool
    if takes_none_but_float and not (target.is_floating_point() or target.is_complex()):
        raise SpecError(
            f"{name} takes floating-point targets, but these are {dtype}: pass target.float(), or use a loss for "
            "classes, such as cross_entropy"
        )


def _adds_up_to_one(target: Tensor) -> bool:
    """Return whether ``target`` is one unbatched row of class probabilities; float class indices rarely sum to 1."""
    return target.dim() == 1 and not target.is_meta and bool((target >= 0).all() & ((target.sum() - 1).abs() < 1e-3))


def told(loss: Any) -> Any:
    """Return ``loss`` with better errors.

    A loss of torch's own names its inputs when it fails; any other loss reports that it read sharded parameters.
    """
    name = name_of_torchs(loss)
    if not name:
        return None if loss is None else functools.partial(_computed_apart, loss)

    def compute(output: Any, target: Any) -> Any:
        is_double = isinstance(target, Tensor) and target.dtype == torch.float64
        if is_double and name in _BACKWARD_TAKES_ONE_DTYPE and output.dtype != target.dtype:
            raise SpecError(
                f"{name} of an output {_described(output)} and a target {_described(target)}: pass target.float()"
            )
        try:
            return loss(output, target)
        except torch.OutOfMemoryError:
            raise
        except (TypeError, ValueError, IndexError, RuntimeError) as exc:
            if isinstance(output, DTensor):  # perhaps because of lost ranks
                raise
            if isinstance(output, Mapping):
                kind, keys = type(output).__name__, ", ".join(output)
                raise SpecError(
                    f"{name} takes a tensor, but the model returns a {kind} with {keys}: pass loss=lambda output, "
                    f"target: {name}(output[...], target)"
                ) from exc
            reason = str(exc).partition("\n")[0]
            raise SpecError(
                f"{name} of an output {_described(output)} and a target {_described(target)}: {reason}"
            ) from exc

    return compute


def _computed_apart(loss: Any, output: Any, target: Any) -> Any:
    """Compute a loss. Raises: SpecError when it reads sharded parameters: its backward pass would fail."""
    try:
        found = loss(output, target)
    except RuntimeError as exc:
        if "mixed torch.Tensor and DTensor" not in str(exc):
            raise
        raise SpecError(_READS_PARAMETERS) from exc
    if isinstance(found, DTensor) and not any(isinstance(leaf, DTensor) for leaf in tree_leaves((output, target))):
        raise SpecError(_READS_PARAMETERS)
    return found


_READS_PARAMETERS = (
    "the loss reads parameters of the model outside the forward, where each rank holds only a part (a DTensor): have "
    "the model return what the loss needs, such as a weight penalty, or keep the model whole (dp_replicate)"
)


def _described(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
