"""What no model in parts can do, and would do in silence."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import SpecError
from .costs.profiler import profile_call
from .kept import State, state_kept
from .recording import device_of, fails_with_inputs, takes_gradients
from .writes import writes_undone

_OTHERWISE = "keep the model whole (dp_replicate in the place of {axis})"


def require_fit(model: nn.Module, *, axis: str) -> None:
    """Raises: SpecError for what a model cannot do in parts, with the name of what does it.

    ``axis``: of the mesh, which cuts it: "tp" or "dp_shard".
    """
    otherwise = _OTHERWISE.format(axis=axis)
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        where = name or "the model"
        if module.max_norm is not None:
            raise SpecError(
                f"{where} writes into its weight (max_norm={module.max_norm}), of which each rank has a part that "
                f"would not see it: {otherwise}"
            )
        if module.sparse and module.weight.requires_grad and axis == "dp_shard":
            raise SpecError(f"{where} has sparse gradients, which FSDP2 cannot send: sparse=False, or {otherwise}")
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            instead = "change gradients behind train_step"
            if axis == "tp":
                instead = "register it on named_parameters() of what parallelize returns, where it sees that of a part"
            raise SpecError(f"{name} has a hook on its gradient, which {axis} would drop: {instead}, or {otherwise}")


class LaterHooks:
    """Hooks on gradients of parameters that are laid out, where they would see nothing, or those of one replica."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], *, axis: str) -> None:
        """``axis``: "dp_shard" or "dp_replicate"."""
        kinds = ("_post_accumulate_grad_hooks", *(("_backward_hooks",) if axis == "dp_shard" else ()))
        self._kinds, self._axis = kinds, axis
        self._at_first = [(name, parameter, self._of(parameter)) for name, parameter in named]

    def _of(self, parameter: nn.Parameter) -> set[int]:
        return {each for kind in self._kinds for each in getattr(parameter, kind, None) or ()}

    def require_none(self) -> None:
        """Raises: SpecError."""
        for name, parameter, at_first in self._at_first:
            if self._of(parameter) - at_first:
                why = "never comes to" if self._axis == "dp_shard" else "is not yet the mean of all replicas for"
                raise SpecError(
                    f"the gradient of {name} {why} the hook that was registered on it under {self._axis}: change "
                    "gradients, and make steps, behind the backward pass"
                )


def require_own_memory(model: nn.Module, *, axis: str) -> None:
    """Raises: SpecError for tensors of a model that are on the memory of a parameter, and no longer would be.

    As a parameter that was made of a part of another one, or what a module has kept of a ``weight.data``.
    """
    names = {id(buffer): name for name, buffer in model.named_buffers()}
    names |= {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = {id(parameter): parameter for parameter in model.parameters()}
    on_storage: dict[int, list[nn.Parameter]] = {}
    for parameter in parameters.values():
        if _has_memory(parameter):
            on_storage.setdefault(parameter.untyped_storage()._cdata, []).append(parameter)
    for tensor in State(model).tensors if on_storage else ():
        if not _has_memory(tensor):
            continue
        for parameter in on_storage.get(tensor.untyped_storage()._cdata, ()):
            if tensor is not parameter and _overlap(tensor, parameter):
                kind = "parameter" if id(tensor) in parameters else "tensor"
                name = names.get(id(tensor), f"of {tuple(tensor.shape)}, which the model keeps,")
                raise SpecError(
                    f"the {kind} {name} is on the memory of the parameter {names[id(parameter)]}, and would not follow "
                    f"it any more under {axis}: tie them as one (b.weight = a.weight), make it of the parameter in the "
                    f"forward, or clone it; or {_OTHERWISE.format(axis=axis)}"
                )


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and bool(tensor.numel())


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Whether they may have an element in common; weights of recurrent layers lie side by side on a GPU."""
    (begin, end), (first, last) = _extent(one), _extent(other)
    return begin < last and first < end


def _extent(tensor: Tensor) -> tuple[int, int]:
    """In bytes, on its storage."""
    most = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride()))
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return begin, begin + (most + 1) * tensor.element_size()


@dataclass(frozen=True)
class ParameterUse:
    """Parameters, by name: written by a forward, read past their modules, and those whose ``_version`` it reads.

    ``is_transformed``: it takes gradients by torch.func.
    """

    written: frozenset[str] = frozenset()
    read_past: frozenset[str] = frozenset()
    versions_asked: frozenset[str] = frozenset()
    is_transformed: bool = False


def find_parameter_use(model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> ParameterUse:
    """What the forward does with them, as the model is and evaluating; nothing is told where nobody can look."""
    args, kwargs = call
    try:
        with fails_with_inputs(args, kwargs), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch tells of this look is told when the model runs
            profiles = [profile_call(model, args, kwargs)]
            if model.training:
                place = device_of([*model.parameters(), *model.buffers()])
                with state_kept(model, device=place) as tensors, writes_undone(tensors):
                    model.eval()
                    profiles.append(profile_call(model, args, kwargs))
    except (SpecError, NotImplementedError) as exc:
        return ParameterUse(is_transformed=isinstance(exc, SpecError) and takes_gradients(exc, by_transform=True))
    keys = ("written_parameters", "read_past", "versions_asked")
    written, read_past, asked = (frozenset().union(*(getattr(each, key) for each in profiles)) for key in keys)
    return ParameterUse(written, read_past, asked)


def require_read_as_attributes(read_past: Collection[str], *, axis: str, kind: str = "parameter") -> None:
    """Raises: SpecError for a tensor that the code of the model has elsewhere too, where it would stay as it was."""
    if read_past:
        raise SpecError(
            f"the model's code reads its {kind} {_first_of(read_past)} from a list, a function or another object, "
            f"where {axis} would leave the tensor that it was: read it as an attribute of its module, or "
            f"{_OTHERWISE.format(axis=axis)}"
        )


def require_made_before(made: Collection[str], *, axis: str) -> None:
    """Raises: SpecError for parameters and buffers that the first forward makes: nobody has laid them out."""
    if made:
        raise SpecError(
            f"the model makes {_first_of(made)} in its first forward, which {axis} would not know of: make it with the "
            f"model, or call the model once before; or {_OTHERWISE.format(axis=axis)}"
        )


def require_untransformed(use: ParameterUse) -> None:
    """Raises: SpecError for a forward under a transform of torch.func, which parameters in parts cannot take."""
    if use.is_transformed:
        raise SpecError(
            "the model's forward takes gradients by torch.func, which cannot look into the parameters that tp lays "
            f"out: take them by torch.autograd.grad, or {_OTHERWISE.format(axis='tp')}"
        )


def require_unwritten(written: Collection[str], model: nn.Module, *, axis: str, cut: Collection[str] = ()) -> None:
    """Raises: SpecError for a parameter that the model's forward writes into, and of which each rank has a part.

    ``cut``: those, by name; under "dp_shard" all that have a dimension.
    """
    named = dict(model.named_parameters())
    lost = {
        name for name in written if (named[name].dim() and named[name].numel() if axis == "dp_shard" else name in cut)
    }
    if lost:
        raise SpecError(
            f"the model's forward writes into its parameter {_first_of(lost)}, of which {axis} would lose it: write "
            f"into parameters after the optimizer's step, or {_OTHERWISE.format(axis=axis)}"
        )


def require_unasked(versions: Collection[str], *, axis: str) -> None:
    """Raises: SpecError for a parameter whose ``_version`` a forward reads.

    What it gets for one that is laid out has the version that it had in the pass before, whatever the optimizer has
    written.
    """
    if versions:
        raise SpecError(
            f"the model's forward reads _version of its parameter {_first_of(versions)}, which stays as it is under "
            f"{axis} when the optimizer writes: what is kept by it would be old; compute it in each pass, or "
            f"{_OTHERWISE.format(axis=axis)}"
        )


def _first_of(names: Collection[str]) -> str:
    """Of names their first, and how many more there are."""
    name, *others = sorted(names)
    return f"{name} and {len(others)} more" if others else name
