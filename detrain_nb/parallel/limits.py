"""Checks for what a model cut into parts cannot do and would otherwise do silently wrong."""

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

_OTHERWISE = "keep the model whole (dp_replicate instead of {axis})"


def require_fit(model: nn.Module, *, axis: str) -> None:
    """Raise SpecError if a module or parameter of the model cannot be cut; the error names it.

    ``axis``: the mesh axis that cuts the model, "tp" or "dp_shard".
    """
    otherwise = _OTHERWISE.format(axis=axis)
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            continue
        where = name or "the model"
        if module.max_norm is not None:
            raise SpecError(
                f"{where} renormalizes its weight in the forward (max_norm={module.max_norm}), which would not reach "
                f"the parts of the weight on other ranks: {otherwise}"
            )
        if module.sparse and module.weight.requires_grad and axis == "dp_shard":
            raise SpecError(f"{where} has sparse gradients, which FSDP2 cannot send: set sparse=False, or {otherwise}")
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            instead = "change gradients after train_step"
            if axis == "tp":
                instead = (
                    "register it on named_parameters() of what parallelize returns, where it sees the gradient of "
                    "this rank's part"
                )
            raise SpecError(f"{name} has a hook on its gradient, which {axis} would drop: {instead}, or {otherwise}")


class LaterHooks:
    """Gradient hooks registered after the layout, which would see no gradient, or only that of one replica."""

    def __init__(self, named: Iterable[tuple[str, nn.Parameter]], *, axis: str) -> None:
        """``axis``: "dp_shard" or "dp_replicate"."""
        kinds = ("_post_accumulate_grad_hooks", *(("_backward_hooks",) if axis == "dp_shard" else ()))
        self._kinds, self._axis = kinds, axis
        self._at_first = [(name, parameter, self._of(parameter)) for name, parameter in named]

    def _of(self, parameter: nn.Parameter) -> set[int]:
        return {each for kind in self._kinds for each in getattr(parameter, kind, None) or ()}

    def require_none(self) -> None:
        """Raise SpecError if a hook was registered since the layout."""
        for name, parameter, at_first in self._at_first:
            if self._of(parameter) - at_first:
                why = (
                    "never sees its gradient"
                    if self._axis == "dp_shard"
                    else "sees its gradient before it is averaged over the replicas"
                )
                raise SpecError(
                    f"a hook registered on {name} after {self._axis} was applied {why}: change gradients, and step "
                    "the optimizer, after the backward pass"
                )


def require_own_memory(model: nn.Module, *, axis: str) -> None:
    """Raise SpecError if a tensor of the model shares memory with a parameter, which the layout would separate.

    Examples: a parameter made from a part of another one, or a ``weight.data`` that a module keeps.
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
                name = names.get(id(tensor), f"of shape {tuple(tensor.shape)} that the model keeps")
                raise SpecError(
                    f"the {kind} {name} shares memory with the parameter {names[id(parameter)]}, and would no longer "
                    f"follow it under {axis}: tie them as one (b.weight = a.weight), compute it from the parameter in "
                    f"the forward, or clone it; or {_OTHERWISE.format(axis=axis)}"
                )


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_meta and bool(tensor.numel())


def _overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors may share an element; weights of recurrent layers share a storage on a GPU."""
    (begin, end), (first, last) = _extent(one), _extent(other)
    return begin < last and first < end


def _extent(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte and the end of a tensor in its storage."""
    most = sum((int(size) - 1) * int(stride) for size, stride in zip(tensor.shape, tensor.stride()))
    begin = int(tensor.storage_offset()) * tensor.element_size()
    return begin, begin + (most + 1) * tensor.element_size()


@dataclass(frozen=True)
class ParameterUse:
    """Parameters, by name: written by a forward, read past their modules, or queried for ``_version`` by the forward.

    ``is_transformed``: the forward takes gradients by torch.func.
    """

    written: frozenset[str] = frozenset()
    read_past: frozenset[str] = frozenset()
    versions_asked: frozenset[str] = frozenset()
    is_transformed: bool = False


def find_parameter_use(model: nn.Module, call: tuple[tuple[Any, ...], dict[str, Any]]) -> ParameterUse:
    """Return how the forward uses parameters, in the current and in evaluation mode; empty if it cannot be profiled."""
    args, kwargs = call
    try:
        with fails_with_inputs(args, kwargs), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch repeats these warnings when the model runs
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
    """Raise SpecError if the model's code also holds a tensor elsewhere, where it would stay as it was."""
    if read_past:
        raise SpecError(
            f"the model's code reads its {kind} {_first_of(read_past)} from a list, a function or another object, "
            f"where {axis} would leave the old tensor: read it as an attribute of its module, or "
            f"{_OTHERWISE.format(axis=axis)}"
        )


def require_made_before(made: Collection[str], *, axis: str) -> None:
    """Raise SpecError if the first forward creates parameters or buffers, which would not be laid out."""
    if made:
        raise SpecError(
            f"the model creates {_first_of(made)} in its first forward, which {axis} would miss: create it with the "
            f"model, or call the model once beforehand; or {_OTHERWISE.format(axis=axis)}"
        )


def require_untransformed(use: ParameterUse) -> None:
    """Raise SpecError if the forward runs under a transform of torch.func, which cannot handle parameters in parts."""
    if use.is_transformed:
        raise SpecError(
            "the model's forward takes gradients by torch.func, which cannot handle the parameters that tp lays out: "
            f"take them by torch.autograd.grad, or {_OTHERWISE.format(axis='tp')}"
        )


def require_unwritten(written: Collection[str], model: nn.Module, *, axis: str, cut: Collection[str] = ()) -> None:
    """Raise SpecError if the forward writes into a parameter of which each rank has a part.

    ``cut``: names of the parameters that are cut; under "dp_shard", every parameter with a dimension is.
    """
    named = dict(model.named_parameters())
    lost = {
        name for name in written if (named[name].dim() and named[name].numel() if axis == "dp_shard" else name in cut)
    }
    if lost:
        raise SpecError(
            f"the model's forward writes into its parameter {_first_of(lost)}, and {axis} would lose the change: "
            f"write into parameters after the optimizer's step, or {_OTHERWISE.format(axis=axis)}"
        )


def require_unasked(versions: Collection[str], *, axis: str) -> None:
    """Raise SpecError if the forward reads ``_version`` of a parameter.

    Under a layout the forward sees a tensor whose version does not change when the optimizer writes.
    """
    if versions:
        raise SpecError(
            f"the model's forward reads _version of its parameter {_first_of(versions)}, which does not change under "
            f"{axis} when the optimizer writes, so what is cached by it would be outdated: compute it in each pass, "
            f"or {_OTHERWISE.format(axis=axis)}"
        )


def _first_of(names: Collection[str]) -> str:
    """Return the first of some names and how many more there are."""
    name, *others = sorted(names)
    return f"{name} and {len(others)} more" if others else name
